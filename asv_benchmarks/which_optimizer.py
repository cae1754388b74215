"""Steps and seconds that optimizers need to reach a loss of AdamW, on four small models.

Each optimizer has the same number of random-search trials on each model; the best arguments are
run with other seeds. The target for all is the loss that AdamW reaches in three quarters of its
steps. ``--write`` writes the results to ``docs/which-optimizer.json``, from which the
documentation draws its pictures, and the tables to ``docs/which-optimizer.md``.
"""

import argparse
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

if __name__ == "__main__":  # before NumPy and numba are imported
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[variable] = "1"

import numba
import numpy as np
from workloads import WORKLOADS, Workload

import fastopt
from fastopt import optimizer
from fastopt._console import Refused, progress, table
from fastopt.info import processor

DOCS = Path(__file__).parents[1] / "docs"
NAME = "which-optimizer"
BASELINE = "AdamW"
EVERY = 5
"""Steps between evaluations."""

FIRST = 0.75
"""Share of the steps after which the loss of AdamW is the target."""

LARGEST = 4.0
"""Ratio to the best optimizer at which profiles and scores are cut off."""

Results = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """An optimizer, the range of its learning rate, and choices of other arguments."""

    name: str
    rates: tuple[float, float] = (1e-4, 1e-1)
    choices: Mapping[str, Sequence[float]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rate: str = "learning_rate"
    averages: bool = False
    """Whether it is evaluated at the averaged weights."""

    def arguments(self, trial: int, trials: int) -> dict[str, float]:
        """Draw the arguments of a trial.

        The learning rate is drawn from the trial's part of the range, which is split into `trials`
        parts of equal logarithmic length. All contenders have the same draws.
        """
        rng = np.random.default_rng(trial)
        low, high = self.rates
        rate = low * (high / low) ** ((trial + rng.random()) / trials)
        draws = {name: each[rng.integers(len(each))] for name, each in self.choices.items()}
        return {self.rate: float(f"{rate:.3g}"), **draws}

    def make(self, arguments: Mapping[str, float], names: Sequence[str]) -> fastopt.Updater:
        """Return an updater of weights with these names."""
        fixed = dict(self.fixed)
        if "fallback" in fixed:
            patterns = [each for each in ("embed", "output") if any(each in n for n in names)]
            fixed["fallback_for"] = patterns or None
        return optimizer.get_updater(optimizer.create(self.name, **fixed, **arguments))


BETA1 = {"beta1": (0.9, 0.8, 0.95)}
DECAY = {"wd": (0.0, 0.01, 0.1)}
SMALL_DECAY = {"wd": (0.0, 1e-4, 1e-3)}
"""Weight decay that is added to the gradient."""

BOTH = {**BETA1, **DECAY}
MOMENTUM = {"momentum": (0.95, 0.9, 0.8), **DECAY}
LESS_MOMENTUM = {"momentum": (0.9, 0.8, 0.95), **DECAY}
TORCH = {"formula": "torch", "epsilon": 1e-8}
FALLBACK = {"fallback": "adamw"}
IN_BLOCKS = {**FALLBACK, "max_precond_dim": 256}
UNIT, LARGE = (0.1, 10.0), (1e-3, 1.0)
CONTENDERS = {
    "SGD with momentum": Contender("sgd", LARGE, {"momentum": (0.9, 0.8, 0.95), **SMALL_DECAY}),
    "AdaGrad": Contender("adagrad", LARGE, SMALL_DECAY),
    "RMSProp": Contender("rmsprop", choices={"gamma1": (0.9, 0.95, 0.99), **SMALL_DECAY}),
    "Adam": Contender("adam", choices={**BETA1, **SMALL_DECAY}),
    BASELINE: Contender("adamw", choices=BOTH, fixed=TORCH),
    "AMSGrad": Contender("adamw", choices=BOTH, fixed={**TORCH, "amsgrad": True}),
    "NAdamW": Contender("nadamw", choices=BOTH),
    "AdaBelief": Contender("adabelief", choices={**BETA1, **SMALL_DECAY}),
    "Adan": Contender("adan", choices={"beta1": (0.98, 0.9, 0.95), **DECAY}),
    "AdEMAMix": Contender(
        "ademamix", choices={"alpha": (5.0, 2.0, 1.0), "beta3": (0.99, 0.999), **DECAY}
    ),
    "LaProp": Contender("laprop", choices=BOTH),
    "MARS": Contender("mars", choices=BOTH),
    "Stable-SPAM": Contender("stablespam", choices=BOTH),
    "Lion": Contender("lion", (3e-5, 3e-2), {**BETA1, "wd": (0.0, 0.1, 1.0)}),
    "LAMB": Contender("lamb", LARGE, BOTH),
    "Adafactor": Contender("adafactor", LARGE, {"decay_rate": (0.8, 0.6, 0.9), **DECAY}),
    "CAME": Contender("came", choices=BOTH),
    "Adam-mini": Contender("adammini", choices=BOTH),
    "Prodigy": Contender("prodigy", UNIT, BOTH, rate="d_coef"),
    "D-Adaptation": Contender("dadaptadam", UNIT, BOTH),
    "Schedule-Free AdamW": Contender("schedulefreeadamw", choices=BOTH, averages=True),
    "Schedule-Free Prodigy": Contender(
        "schedulefreeprodigy", UNIT, BOTH, rate="d_coef", averages=True
    ),
    "Muon": Contender("muon", choices=MOMENTUM, fixed=FALLBACK),
    "SOAP": Contender("soap", choices={"beta1": (0.95, 0.9, 0.8), **DECAY}, fixed=IN_BLOCKS),
    "NorMuon": Contender("normuon", choices=MOMENTUM, fixed=FALLBACK),
    "Scion": Contender("scion", (1e-5, 1e-2), LESS_MOMENTUM),
    "Shampoo": Contender("shampoo", choices=BOTH, fixed=IN_BLOCKS),
    "Kron": Contender("kron", choices=LESS_MOMENTUM, fixed=IN_BLOCKS),
}
"""Compared optimizers by name in the table."""


def losses(
    contender: Contender, arguments: Mapping[str, float], workload: Workload, seed: int, steps: int
) -> list[float]:
    """Return the held-out loss every few steps; infinite from the first non-finite one on."""
    model = workload.start(seed)
    updater = contender.make(arguments, model.names)
    indices, found = list(model.names), []
    batches = model.steps()
    for step in range(1, steps + 1):
        updater(indices, next(batches), model.weights)
        if step % EVERY == 0:
            with updater.averaged() if contender.averages else nullcontext():
                found.append(model.held_out())
            if not math.isfinite(found[-1]):
                return [*found[:-1], *[math.inf] * (steps // EVERY - len(found) + 1)]
    return found


def until(found: Sequence[float], target: float) -> int | None:
    """Return the number of steps to the first loss that is at most `target`, or None."""
    return next((EVERY * k for k, loss in enumerate(found, 1) if loss <= target), None)


def best(found: Sequence[float]) -> float:
    """Return the smallest loss in the first steps, the criterion for trials."""
    return min(found[: max(1, int(FIRST * len(found)))])


def compare(
    names: Sequence[str], models: Sequence[str], trials: int, seeds: Sequence[int], most: int
) -> Results:
    """Tune, run and compare optimizers."""
    tuned: dict[str, Any] = {name: {} for name in names}
    curves: dict[str, Any] = {name: {} for name in names}
    targets, budgets = {}, {}
    tasks = [(model, name) for model in models for name in names]
    for model, name in progress(tasks, "case"):
        workload, contender = WORKLOADS[model], CONTENDERS[name]
        budgets[model] = steps = min(workload.steps, most)
        drawn = [contender.arguments(k, trials) for k in range(trials)]
        scores = [best(losses(contender, each, workload, 0, steps)) for each in drawn]
        chosen = drawn[int(np.argmin(scores))]
        tuned[name][model] = {"arguments": chosen}
        curves[name][model] = [losses(contender, chosen, workload, s, steps) for s in seeds]
    for model in models:
        targets[model] = median(map(best, curves[BASELINE][model]))
        for name in names:
            runs = curves[name][model]
            tuned[name][model]["steps"] = [until(run, targets[model]) for run in runs]
    return {
        "trials": trials,
        "seeds": list(seeds),
        "every": EVERY,
        "models": {
            model: {
                "words": WORKLOADS[model].words,
                "steps": budgets[model],
                "target": _short(targets[model]),
            }
            for model in models
        },
        "optimizers": tuned,
        "curves": {
            model: {
                name: [[_short(f(each)) for each in zip(*curves[name][model], strict=True)]
                       for f in (min, median, max)]
                for name in names
                if name in SHOWN
            }
            for model in models
        },
    }  # fmt: skip


SHOWN = (BASELINE, "Muon", "SOAP")
"""Optimizers whose losses are plotted."""


def _short(number: float) -> float | None:
    return float(f"{number:.4g}") if math.isfinite(number) else None


def measure(results: Results, rounds: int = 5) -> None:
    """Add the times of the gradient and of the update of each optimizer, measured in turn."""
    for model, facts in results["models"].items():
        runs = {name: _Timed(name, model, each) for name, each in results["optimizers"].items()}
        gradients = [runs[BASELINE].gradient(10) for _ in range(rounds)]
        times = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(run.update(10))
        facts["gradient_ms"] = _short(1e3 * median(gradients))
        for name, each in results["optimizers"].items():
            each[model]["update_ms"] = _short(1e3 * median(times[name]))


class _Timed:
    """An updater and a model at its initial weights, with one gradient."""

    def __init__(self, name: str, model: str, each: Results) -> None:
        self.model = WORKLOADS[model].start(0)
        self.updater = CONTENDERS[name].make(each[model]["arguments"], self.model.names)
        self.batches, self.names = self.model.steps(), list(self.model.names)
        self.grads = next(self.batches)
        self.update(2)

    def update(self, steps: int) -> float:
        begin = perf_counter()
        for _ in range(steps):
            self.updater(self.names, self.grads, self.model.weights)
        return (perf_counter() - begin) / steps

    def gradient(self, steps: int) -> float:
        begin = perf_counter()
        for _ in range(steps):
            next(self.batches)
        return (perf_counter() - begin) / steps


def conclude(results: Results) -> None:
    """Add performance profiles and scores, from the ratios to the best optimizer."""
    for measure_ in ("steps", "seconds"):
        ratios = _ratios(results, measure_)
        bounds = np.geomspace(1, LARGEST, 61)
        results[measure_] = {
            "bounds": [_short(bound) for bound in bounds],
            "profiles": {
                name: [round(float(np.mean(each <= bound * (1 + 1e-9))), 3) for bound in bounds]
                for name, each in ratios.items()
            },
            "scores": {
                # Mean height of the profile over ratios from 1 to LARGEST.
                name: round(float((LARGEST - np.minimum(each, LARGEST)).mean() / (LARGEST - 1)), 3)
                for name, each in ratios.items()
            },
        }  # fmt: skip


def _ratios(results: Results, measure_: str) -> dict[str, Any]:
    """Return each optimizer's ratios to the best one, for each model and seed."""
    costs = {
        name: [
            cost * (step_ms(results, name, model) if measure_ == "seconds" else 1)
            for model in results["models"]
            for cost in (math.inf if n is None else n for n in each[model]["steps"])
        ]
        for name, each in results["optimizers"].items()
    }
    least = np.min([*costs.values()], axis=0)
    with np.errstate(invalid="ignore"):
        ratios = {name: np.array(each) / least for name, each in costs.items()}
    return {name: np.where(np.isnan(each), np.inf, each) for name, each in ratios.items()}


def step_ms(results: Results, name: str, model: str) -> float:
    """Return the milliseconds of a step, gradient and update."""
    each = results["models"][model], results["optimizers"][name][model]
    return float(each[0]["gradient_ms"] + each[1]["update_ms"])


# Text


def middle(steps: Sequence[int | None]) -> float:
    """Return the median, infinite if most seeds did not reach the target."""
    return median(math.inf if n is None else n for n in steps)


def ordered(results: Results) -> list[str]:
    """Return the names by descending score of steps."""
    scores = results["steps"]["scores"]
    return sorted(scores, key=lambda name: -scores[name])


def tables(results: Results) -> str:
    """Format the tables of the page, in Markdown."""
    models, seeds = results["models"], len(results["seeds"])
    steps, times = [], []
    for name in ordered(results):
        each = results["optimizers"][name]
        cells = [_steps(each[model]["steps"], seeds) for model in models]
        steps.append([name, *cells, f"{results['steps']['scores'][name]:.2f}"])
        seconds = [_seconds(results, name, model) for model in models]
        times.append([name, *seconds, f"{results['seconds']['scores'][name]:.2f}"])
    head = [f"{model}, loss {facts['target']}" for model, facts in models.items()]
    chosen = [
        [name, *(_words(results["optimizers"][name][model]["arguments"]) for model in models)]
        for name in ordered(results)
    ]
    return "\n\n".join(
        [
            statement(results),
            "### Steps to the target\n\nMedian of the seeds, and their range; in parentheses how "
            "many seeds got there if not all did.",
            table(["optimizer", *head, "score"], steps, markdown=True),
            "### Time to the target\n\nMilliseconds of an update / seconds to the target: median "
            "steps times the time of gradient and update.",
            table(["optimizer", *models, "score"], times, markdown=True),
            "### Arguments that were found",
            table(["optimizer", *models], chosen, markdown=True),
            conditions(results),
        ]
    )


def _steps(found: Sequence[int | None], seeds: int) -> str:
    there = [n for n in found if n is not None]
    if not there:
        return "not reached"
    spread = f"{min(there)} to {max(there)}" if min(there) < max(there) else f"{there[0]}"
    missing = f" ({len(there)} of {seeds})" if len(there) < seeds else ""
    typical = middle(found)
    return f"{spread}{missing}" if math.isinf(typical) else f"**{typical:g}**, {spread}{missing}"


def _seconds(results: Results, name: str, model: str) -> str:
    each = results["optimizers"][name][model]
    seconds = middle(each["steps"]) * step_ms(results, name, model) / 1e3
    return f"{each['update_ms']:.2g} / {seconds:.2g}" if math.isfinite(seconds) else (
        f"{each['update_ms']:.2g} / not reached"
    )  # fmt: skip


def _words(arguments: Mapping[str, float]) -> str:
    renamed = {"lr" if name == "learning_rate" else name: n for name, n in arguments.items()}
    return ", ".join(f"{name} {n:g}" for name, n in renamed.items())


def statement(results: Results) -> str:
    """Summarize the steps of Muon and SOAP as shares of AdamW's, in a sentence."""
    parts = []
    for name in (each for each in SHOWN[1:] if each in results["optimizers"]):
        shares = []
        for model in results["models"]:
            theirs, own = (
                middle(results["optimizers"][each][model]["steps"]) for each in (BASELINE, name)
            )
            reached = math.isfinite(own) and math.isfinite(theirs)
            share = f"{100 * own / theirs:.0f}%" if reached else "not reached"
            shares.append(f"{model} {share}")
        parts.append(f"{name}: {', '.join(shares)}")
    if not parts:
        return f"The target is that of {BASELINE}."
    return f"Steps to the target over those of {BASELINE}: {'; '.join(parts)}."


def conditions(results: Results) -> str:
    """Describe the settings and the machine behind the numbers."""
    budgets = ", ".join(f"{model} {facts['steps']}" for model, facts in results["models"].items())
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    seeds = ", ".join(map(str, results["seeds"]))
    return (
        f"Trials for each optimizer and model: {results['trials']}, with seed 0. Seeds of the "
        f"runs: {seeds}. Steps: {budgets}; the loss is evaluated every "
        f"{results['every']}. {results['machine']}, one thread; {versions}; {results['date']}."
    )


def describe(results: Results) -> None:
    """Add machine, date and versions to the results."""
    results["machine"] = processor()
    results["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
    results["versions"] = {
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "numba": numba.__version__,
        "fastopt": fastopt.__version__,
    }


BORDERS = "<!-- tables -->", "<!-- end of tables -->"


def with_tables(page: str, results: Results) -> str:
    """Return a page with its tables replaced by those of the results."""
    first, last = map(re.escape, BORDERS)
    made = f"{BORDERS[0]}\n\n{tables(results)}\n\n{BORDERS[1]}"
    return re.sub(f"{first}.*{last}", lambda _: made, page, flags=re.DOTALL)


def as_text(results: Results) -> str:
    """Format the results as JSON, with each list of numbers on one line."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: re.sub(r"\s+", " ", m[0]), text) + "\n"


def run(options: argparse.Namespace) -> None:
    names = [name for name in CONTENDERS if re.search(options.only, name) or name == BASELINE]
    models = [model for model in WORKLOADS if re.search(options.models, model)]
    if not models:
        raise Refused(
            f"--models: none matches {options.models!r}; there are {', '.join(WORKLOADS)}"
        )
    kept = options.directory / f"{NAME}.json"
    with np.errstate(all="ignore"):
        if options.times or options.tables:
            results = json.loads(kept.read_text(encoding="utf-8"))
        else:
            seeds = range(1, options.seeds + 1)
            results = compare(names, models, options.trials, seeds, options.steps)
            describe(results)
        if not options.tables:
            measure(results)
    conclude(results)
    print(tables(results))
    if options.write:
        page = options.directory / f"{NAME}.md"
        text = with_tables(page.read_text(encoding="utf-8"), results)
        kept.write_text(as_text(results), encoding="utf-8")
        page.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write results and tables of the page")
    parser.add_argument("--directory", type=Path, default=DOCS, help="where these are")
    parser.add_argument("--times", action="store_true", help="measure the times of kept results")
    parser.add_argument("--tables", action="store_true", help="print the tables of kept results")
    parser.add_argument("--trials", type=int, default=24, help="trials of each search")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the chosen arguments")
    parser.add_argument("--steps", type=int, default=10_000, help="most steps of a run")
    parser.add_argument("--only", default="", metavar="REGEX", help="optimizers besides AdamW")
    parser.add_argument("--models", default="", metavar="REGEX", help="models")
    try:
        run(parser.parse_args())
    except Refused as error:
        print(f"which_optimizer.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
