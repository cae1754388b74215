"""``fastopt bench`` and what it measures with."""

import re
import sys
import time
from functools import partial

import numba
import numpy as np
import pytest

import fastopt
from fastopt import optimizer, warmup
from fastopt.__main__ import main
from fastopt._console import progress, table
from fastopt.bench import measurements, report
from fastopt.bench.advice import on_layer, on_threads
from fastopt.bench.clock import interleaved, seconds
from fastopt.bench.steps import Step, momentum_of
from fastopt.reference import FORMULAS
from helpers.cases import kept

RANDOM = {"sgld"}


def both(name, steps, shape=(6, 7)):
    """Weights before, after steps of fastopt, and after steps in plain NumPy."""
    rng = np.random.default_rng(0)
    before = rng.standard_normal(shape, np.float32)
    ours, theirs = before.copy(), before.copy()
    updater = optimizer.get_updater(optimizer.create(name, **momentum_of(name)))
    update = FORMULAS[name](optimizer.create(name, **momentum_of(name)))
    for _ in range(steps):
        grad = rng.standard_normal(shape, np.float32)
        updater(0, grad, ours)
        update(0, grad, theirs)
    return before, ours, theirs


def test_formulas_are_those_of_optimizers():
    assert set(FORMULAS) <= set(warmup.names())


@pytest.mark.parametrize("name", kept(sorted(set(FORMULAS) - RANDOM), "adam", "sgd"))
def test_plain_numpy_does_the_same_as_the_kernel(name):
    before, ours, theirs = both(name, steps=12)
    assert ours.dtype == theirs.dtype == np.float32
    moved = abs(ours - before).max()
    assert moved > 1e-4
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5 * max(moved, 1))


@pytest.mark.further
def test_noise_in_plain_numpy_has_the_same_spread():
    before, ours, theirs = both("sgld", steps=1, shape=(300, 100))
    assert (ours - before).std() == pytest.approx((theirs - before).std(), rel=0.02)


@pytest.fixture
def bench(monkeypatch, capsys):
    """What the command prints with as few measurements as possible."""
    monkeypatch.setattr(measurements, "ROUNDS", 1)
    monkeypatch.setattr(measurements, "sampler", lambda call: partial(seconds, call, 1))

    def printed(*arguments, code=0):
        assert main(["bench", *arguments]) == code
        return capsys.readouterr().out

    return printed


@pytest.mark.exhaustive
def test_report_has_the_memory_the_threads_the_standings_and_advice(bench):
    arguments = ["--sizes", "1000", "70000", "--optimizers", "Adam", "groupadagrad"]
    out = bench(*arguments)
    assert out.startswith(f"fastopt {fastopt.__version__}, ")
    assert re.search(r"^arrays +1,000 elements +70,000 elements$", out, re.MULTILINE)
    assert re.search(r"^4 read, 3 written( +[\d.]+ GB/s){2}$", out, re.MULTILINE)
    for name in ("adam", "groupadagrad"):
        row = rf"^{name} +[\d.]+ s( +[\d.]+ [um]s +[\d.]+ +[\d.]+){{2}}$"
        assert re.search(row, out, re.MULTILINE)
    assert "\nsgd" not in out
    assert "\nthreads: " in out
    assert "\nTBB: " in out


@pytest.mark.further
def test_report_of_small_weights_has_no_threads_to_compare(monkeypatch, bench):
    out = bench("--sizes", "64", "100", "--optimizers", "adam", "sgd")
    assert re.search(
        r"^optimizer +compile +64 +limit +NumPy +100 +limit +NumPy$", out, re.MULTILINE
    )
    assert "threads: updates of these sizes use 1\n" in out


@pytest.mark.further
def test_optimizer_without_a_formula_has_a_dash(monkeypatch, bench):
    monkeypatch.delitem(FORMULAS, "sgd")
    out = bench("--sizes", "100", "--optimizers", "sgd", "adam")
    assert re.search(r"^sgd +[\d.]+ s +[\d.]+ [a-z]+ +[\d.]+ +-$", out, re.MULTILINE)
    assert re.search(r"^adam +[\d.]+ s +[\d.]+ [a-z]+ +[\d.]+ +[\d.]+$", out, re.MULTILINE)


def test_report_ends_when_time_is_over_and_names_what_is_missing(bench):
    """With 1 as the exit code, as nothing was measured, and nothing compiled for another run."""
    out = bench("--seconds", "0", code=1)
    (line,) = (line for line in out.splitlines() if line.startswith("not measured within 0 s: "))
    assert line.startswith("not measured within 0 s: adam, sgd, adamw, ")
    assert line.endswith("; give more --seconds")


@pytest.mark.further
def test_time_to_compile_counts(monkeypatch, bench):
    """The clock says an hour after the first optimizer has been compiled."""
    hour = iter([0.0])

    def slow(name, sizes):
        monkeypatch.setattr(time, "perf_counter", lambda at=time.perf_counter: at() + 3600)
        return next(hour) + 3600.0

    monkeypatch.setattr(report, "prepare", slow)
    out = bench("--sizes", "100", "--optimizers", "sgd", "adam", "lion", "--seconds", "3000")
    assert "\nsgd  " in out
    assert "3600 s of them to compile" in out
    missing = "adam, lion; give more --seconds, or run it again, now that kernels are cached"
    assert f"\nnot measured within 3000 s: {missing}\n" in out


def test_rows_are_printed_when_they_are_measured(monkeypatch, bench, capsys):
    printed, whole = [], measurements.standings

    def standings(*arguments):
        printed.append(capsys.readouterr().out)
        return whole(*arguments)

    monkeypatch.setattr(report, "standings", standings)
    bench("--sizes", "100", "--optimizers", "sgd", "adam")
    assert "5 read, 4 written" in printed[0]
    assert "\nsgd  " in printed[1]


@pytest.mark.parametrize("load", [0.1, 12.0])
def test_report_says_that_a_machine_is_busy(load, monkeypatch, bench):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    said = "this machine is busy (load 12.0 on 2 CPUs): timings mean little" in bench(
        "--seconds", "0", code=1
    )
    assert said == (load == 12.0)


@pytest.mark.exhaustive
def test_report_uses_the_requested_threads_and_then_all_again(bench):
    before = numba.get_num_threads()
    out = bench("--sizes", "70000", "--optimizers", "sgd", "--threads", "1")
    assert ", threads: 1 on " in out
    assert "threads: 1 is used" in out
    assert numba.get_num_threads() == before


@pytest.mark.exhaustive
@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="has no threads to compare")
def test_threads_are_compared_where_updates_use_them(bench):
    out = bench("--sizes", "70000", "500", "--optimizers", "sgd")
    assert re.search(r"^threads +adam, 70,000$", out, re.MULTILINE)
    assert re.search(r"^1 +[\d.]+ [um]s$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "0"], "--sizes: must be an integer of at least 1, got '0'"),
        (["--sizes", "many"], "--sizes: must be an integer"),
        (["--sizes", str(10**15)], "no memory for 1,000,000,000,000,000 elements: give smaller"),
        (["--threads", "0"], "--threads: must be an integer of at least 1"),
        (["--threads", "100000"], "--threads is at most "),
        (["--seconds", "nan"], "--seconds: must be a finite number of at least 0"),
        (
            ["--optimizers", "adm"],
            "no 'adm'; did you mean 'adam'? The names are adabelief, adadelta",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused_in_a_line(arguments, words, capsys):
    assert main(["bench", "--optimizers", "sgd", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.splitlines()[-1]  # a progress bar may come before it
    assert line.split("\r")[-1].startswith("fastopt bench: ")
    assert words in line


def test_report_goes_without_a_progress_bar_where_tqdm_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(progress([1, 2], "thing")) == [1, 2]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({}, "updates of these sizes use 1"),
        ({10**6: {1: 1.0}}, "1 is used, --threads, NUMBA_NUM_THREADS and the CPUs allowed"),
        ({10**6: {1: 2.0, 2: 1.0}}, "all 2 pay off"),
        ({10**6: {1: 1.0, 2: 0.99}}, "1 of 2 is enough for these sizes: set NUMBA_NUM_THREADS=1"),
        ({1: {1: 2.0, 2: 1.0, 4: 1.2}, 2: {1: 1.0, 2: 1.0, 4: 1.0}}, "2 of 4 are enough"),
        (
            {10**6: {1: 2.0, 2: 1.0}, 10**7: {1: 121.0, 2: 132.0}},
            "how many pay off depends on the elements of a weight: 2 at 1,000,000, 1 at 10,",
        ),
    ],
    ids=["small", "one", "all", "memory", "largest", "contradiction"],
)
def test_advice_on_threads_follows_from_what_was_measured(times, words):
    assert on_threads(times).startswith(f"threads: {words}")


@pytest.mark.parametrize(
    ("layer", "machine", "library", "bound", "words"),
    [
        ("tbb", "x86_64", True, None, "TBB: threads run on it, it survives forks"),
        ("omp", "x86_64", False, "true", "several threads: pip install tbb"),
        ("omp", "x86_64", False, None, "; OMP_PROC_BIND=true keeps threads of OpenMP from"),
        ("workqueue", "arm64", False, None, "but it has no wheel for arm64"),
        ("omp", "AMD64", True, "true", "`fastopt info` says why it is not used"),
    ],
)
def test_advice_on_tbb_follows_from_the_layer(layer, machine, library, bound, words, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("fastopt.bench.advice.load_tbb", lambda: library)
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    if bound:
        monkeypatch.setenv("OMP_PROC_BIND", bound)
    line = on_layer(layer)
    assert words in line
    assert ("OMP_PROC_BIND" in line) == (layer == "omp" and not bound)


def test_rounds_end_with_the_budget_but_not_before_the_third():
    calls = []
    assert len(interleaved([lambda: calls.append(1) or 1.0], 31, budget=0)) == 3
    assert len(interleaved([lambda: 1.0], 5)) == 5


@pytest.mark.further
def test_limit_moves_the_memory_and_leaves_the_numbers_alone():
    step = Step("lamb", (30, 30))
    before = [array.copy() for array in (step.weight, step.grad, *step.updater.states[0])]
    step.limit()
    after = (step.weight, step.grad, *step.updater.states[0])
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_table_is_aligned_and_markdown_on_demand():
    lines = [["adam", "1.0"], ["sgd", "22.5"]]
    assert table(["name", "time"], lines).splitlines()[2:] == ["adam   1.0", "sgd   22.5"]
    head, rule, *_ = table(["name", "time"], lines, markdown=True).splitlines()
    assert (head, rule) == ("| name | time |", "| ---- | ---: |")
