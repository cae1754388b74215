import inspect
import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import lr_scheduler as lr
from fastopt.checkpoint import dumps, loads
from helpers.paths import GOLDEN
from helpers.refusals import check_refused
from helpers.schedules import EXAMPLES

CASES = json.loads((GOLDEN / "manifest.json").read_text())["lr_scheduler_cases"]

counts = st.integers(1, 30)
shares = st.floats(0, 1)
rates = st.floats(1e-6, 10)
updates = st.integers(0, 300)


@st.composite
def schedules(draw, *classes):
    """Any schedule of the given classes; the rates it ends at are at most its base_lr."""
    cls = draw(st.sampled_from(classes))
    base_lr = draw(rates)
    lower = shares.map(lambda share: share * base_lr)
    warmup = {
        "warmup_steps": draw(st.integers(0, 20)),
        "warmup_begin_lr": draw(lower),
        "warmup_mode": draw(st.sampled_from(["linear", "constant"])),
    }
    own = {
        "Factor": {"step": counts, "factor": shares, "stop_factor_lr": lower},
        "Exponential": {"step": counts, "factor": shares, "stop_factor_lr": lower},
        "MultiFactor": {"step": st.sets(counts, min_size=1).map(sorted), "factor": shares},
        "Plateau": {"factor": shares, "patience": counts, "stop_factor_lr": lower},
        "Poly": {"max_update": st.integers(21, 200), "pwr": st.floats(0, 4), "final_lr": lower},
        "Cosine": {"max_update": st.integers(21, 200), "final_lr": lower},
        "WSD": {
            "max_update": st.integers(40, 200),
            "cooldown_steps": st.integers(1, 20),
            "cooldown": st.sampled_from(["linear", "cosine", "1-sqrt"]),
            "final_lr": lower,
        },
        "InverseRoot": {"timescale": st.none() | st.integers(20, 90)},
        "CosineRestarts": {"period": counts, "period_mult": st.integers(1, 3), "final_lr": lower},
        "OneCycle": {
            "max_update": counts,
            "pct_start": shares,
            "div_factor": st.floats(1, 100),
            "final_div_factor": st.floats(1, 1e6),
        },
    }[cls.__name__.removesuffix("Scheduler")]
    arguments = {name: draw(values) for name, values in own.items()}
    return cls(base_lr=base_lr, **arguments, **({} if cls is lr.OneCycleScheduler else warmup))


@st.composite
def joined(draw, pieces):
    boundaries = sorted(draw(st.sets(counts, max_size=3)))
    count = len(boundaries) + 1
    return lr.JoinedScheduler(draw(st.lists(pieces, min_size=count, max_size=count)), boundaries)


BY_FACTOR = lr.FactorScheduler, lr.ExponentialScheduler, lr.MultiFactorScheduler
BY_FACTOR += (lr.InverseRootScheduler,)
ANNEALING = lr.PolyScheduler, lr.CosineScheduler, lr.WSDScheduler
FALLING = *BY_FACTOR, *ANNEALING
SINGLE = schedules(*FALLING, lr.PlateauScheduler, lr.CosineRestartsScheduler, lr.OneCycleScheduler)
ANY = SINGLE | joined(SINGLE)


def falls(rates):
    """Whether no rate is above the one before, rounding aside."""
    return all(after <= before * (1 + 1e-12) for before, after in pairwise(rates))


# Recorded behaviour


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_rates_are_the_recorded_or_recommended_ones(case):
    """What once failed late or early is refused at once."""
    if "error" in case:
        with pytest.raises((TypeError, ValueError)):
            lr.scheduler_registry[case["name"]](**case["kwargs"])
        return
    schedule = lr.scheduler_registry[case["name"]](**case["kwargs"])
    if case["set_base_lr"] is not None:
        schedule.base_lr = case["set_base_lr"]
    got = [schedule(n) for n in case["calls"]]
    assert got == pytest.approx(case.get("alt_lrs", case["lrs"]), rel=1e-9, abs=1e-21)


WARMUP = 5, 0.1, "constant"
POSITIONAL = [
    (lr.LRScheduler(0.2, *WARMUP), "base_lr"),
    (lr.FactorScheduler(3, 0.5, 1e-4, 0.2, *WARMUP), "step factor stop_factor_lr base_lr"),
    (lr.MultiFactorScheduler([3], 0.5, 0.2, *WARMUP), "step factor base_lr"),
    (lr.PolyScheduler(9, 0.2, 3, 0.01, *WARMUP), "max_update base_lr pwr final_lr"),
    (lr.CosineScheduler(9, 0.2, 0.01, *WARMUP), "max_update base_lr final_lr"),
    (lr.WSDScheduler(9, 3, 0.2, "cosine", 0.01, *WARMUP),
     "max_update cooldown_steps base_lr cooldown final_lr"),
    (lr.InverseRootScheduler(0.2, 7, *WARMUP), "base_lr timescale"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "names"), POSITIONAL, ids=lambda value: type(value).__name__)
def test_arguments_keep_their_names_and_order(made, names):
    names = [*names.split(), "warmup_steps", "warmup_begin_lr", "warmup_mode"]
    assert [*inspect.signature(type(made)).parameters] == names
    assert vars(made) == vars(type(made)(**{name: getattr(made, name) for name in names}))


# All schedules


@given(ANY, st.permutations(range(40)))
def test_a_rate_depends_on_the_update_alone(schedule, order):
    ascending = [schedule(n) for n in range(40)]
    shuffled = {n: schedule(n) for n in order}
    assert [shuffled[n] for n in range(40)] == ascending


@given(SINGLE, updates)
def test_rates_are_floats_from_0_to_base_lr_for_integers_of_any_kind(schedule, n):
    rate = schedule(np.int64(n))
    assert type(rate) is float
    assert 0 <= rate <= schedule.base_lr * (1 + 1e-12)
    assert rate == schedule(n)


@given(ANY)
def test_plain_attributes_are_the_whole_schedule(schedule):
    again = loads(dumps(schedule))
    assert dumps(again) == dumps(schedule)
    assert [again(n) for n in range(60)] == [schedule(n) for n in range(60)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_a_class_has_its_name_a_repr_and_refuses_numbers_that_are_none(example):
    assert lr.scheduler_registry[type(example).__name__] is type(example)
    values = ", ".join(f"{name}={value!r}" for name, value in vars(example).items())
    assert repr(example) == f"{type(example).__name__}({values})"
    with pytest.raises(ValueError, match="num_update must be at least 0, got -1"):
        example(-1)
    before = example.base_lr
    for bad in (math.nan, -0.1, math.inf):
        with pytest.raises(ValueError, match="base_lr must be a finite number, at least 0"):
            example.base_lr = bad
    assert example.base_lr == before


# Warm-up


@given(schedules(*FALLING, lr.CosineRestartsScheduler))
def test_a_warmup_rises_evenly_to_the_constructors_base_lr_or_waits(schedule):
    first, last, steps = schedule.warmup_begin_lr, schedule.base_lr, schedule.warmup_steps
    schedule.base_lr = 2 * last
    rises = schedule.warmup_mode == "linear"
    expected = np.linspace(first, last if rises else first, steps, endpoint=False)
    assert [schedule(n) for n in range(steps)] == pytest.approx(expected)
    assert [*map(schedule.get_warmup_lr, range(steps))] == [*map(schedule, range(steps))]


SMOOTH = lr.CosineRestartsScheduler, lr.ExponentialScheduler, lr.InverseRootScheduler


@given(schedules(*ANNEALING, *SMOOTH))
def test_nothing_jumps_at_the_end_of_warmup(schedule):
    assert schedule(schedule.warmup_steps) == pytest.approx(schedule.base_lr)


def test_reductions_due_in_warmup_are_made_when_it_ends():
    assert lr.FactorScheduler(2, 0.5, base_lr=0.4, warmup_steps=5)(5) == 0.1
    assert lr.MultiFactorScheduler([1, 3, 9], 0.5, base_lr=0.4, warmup_steps=5)(5) == 0.1


# Shapes


@given(schedules(*FALLING))
def test_rates_never_rise_after_warmup(schedule):
    after = [schedule(n) for n in range(schedule.warmup_steps, 250)]
    assert falls(after)


@given(schedules(*ANNEALING), st.integers(0, 10**9))
def test_the_rate_past_the_end_is_final_lr(schedule, beyond):
    assert schedule(schedule.max_update + beyond) == schedule.final_lr


@given(schedules(lr.FactorScheduler, lr.ExponentialScheduler))
def test_reductions_stop_at_stop_factor_lr(schedule):
    schedule.factor = 0.5
    schedule.stop_factor_lr = 1e-3 * schedule.base_lr
    assert schedule(10**6) == schedule.stop_factor_lr


@given(counts, shares, updates)
def test_exponential_passes_through_the_steps_of_factor(step, factor, n):
    smooth = lr.ExponentialScheduler(step, factor, base_lr=0.3)
    steps = lr.FactorScheduler(step, factor, base_lr=0.3)
    assert smooth(n * step) == pytest.approx(steps(n * step + 1))


@given(schedules(lr.WSDScheduler), st.integers(0, 20))
def test_a_cooldown_is_that_form_of_its_last_updates(schedule, n):
    first = schedule.max_update - schedule.cooldown_steps
    x = min(1, n / schedule.cooldown_steps)
    forms = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "1-sqrt": 1 - x**0.5}
    share = forms[schedule.cooldown]
    wanted = schedule.final_lr + (schedule.base_lr - schedule.final_lr) * share
    assert schedule(first + n) == pytest.approx(wanted, abs=1e-12)
    assert schedule(first) == schedule(schedule.warmup_steps) == schedule.base_lr


def test_a_loaded_schedule_goes_on_to_a_later_cooldown():
    schedule = loads(dumps(lr.WSDScheduler(4, 2, base_lr=0.5)))
    schedule.max_update = 8
    assert [schedule(n) for n in range(9)] == [*map(lr.WSDScheduler(8, 2, base_lr=0.5), range(9))]


@given(st.integers(1, 20), st.integers(1, 1000))
def test_the_inverse_root_is_the_schedule_of_transformers_without_their_dimension(warmup, n):
    schedule = lr.InverseRootScheduler(base_lr=warmup**-0.5, warmup_steps=warmup)
    assert schedule(n) == pytest.approx(min(n**-0.5, n * warmup**-1.5))
    of_t5 = lr.InverseRootScheduler(base_lr=warmup**-0.5, timescale=warmup)
    assert of_t5(n) == pytest.approx(max(n, warmup) ** -0.5)


@given(counts, st.integers(1, 3), st.integers(0, 3), st.data())
def test_restarts_are_cosines_one_after_the_other(period, mult, restarts, data):
    begin = sum(period * mult**i for i in range(restarts))
    length = period * mult**restarts
    n = data.draw(st.integers(0, length - 1))
    restarting = lr.CosineRestartsScheduler(period, 0.3, 0.01, mult, warmup_steps=7)
    assert restarting(7 + begin + n) == lr.CosineScheduler(length, 0.3, 0.01)(n)


@given(schedules(lr.OneCycleScheduler))
def test_one_cycle_rises_once_and_falls_once(schedule):
    rates = [schedule(n) for n in range(schedule.max_update + 2)]
    top = math.ceil(schedule.pct_start * schedule.max_update)
    assert falls(reversed(rates[:top]))
    assert falls(rates[top:])
    first = schedule.base_lr / schedule.div_factor
    assert rates[-1] == rates[-2] == first / schedule.final_div_factor
    assert rates[0] == pytest.approx(first if schedule.pct_start else schedule.base_lr)


@given(joined(SINGLE), updates)
def test_joined_schedules_are_their_pieces_counted_from_their_boundaries(schedule, n):
    begin, piece = 0, schedule.schedules[0]
    for boundary, later in zip(schedule.boundaries, schedule.schedules[1:], strict=True):
        if boundary <= n:
            begin, piece = boundary, later
    assert schedule(n) == piece(n - begin)


# The base rate, which optimizers assign


@given(schedules(*BY_FACTOR), updates)
def test_schedules_with_a_factor_follow_an_assigned_base_lr(schedule, n):
    if hasattr(schedule, "stop_factor_lr"):
        schedule.stop_factor_lr = 0.0
    n += schedule.warmup_steps
    before = schedule(n)
    schedule.base_lr *= 4
    assert schedule(n) == pytest.approx(4 * before)


@given(schedules(*ANNEALING, lr.CosineRestartsScheduler, lr.OneCycleScheduler) | joined(SINGLE))
def test_schedules_between_given_rates_ignore_an_assigned_base_lr(schedule):
    before = [schedule(n) for n in range(60)]
    schedule.base_lr = 123.0
    assert [schedule(n) for n in range(60)] == before


def test_numbers_of_any_type_become_plain():
    schedule = lr.MultiFactorScheduler(
        np.array([2, 4]), np.float32(0.5), np.float64(0.5), warmup_steps=np.int64(1)
    )
    schedule.base_lr = np.float32(0.25)
    assert json.loads(json.dumps(vars(schedule))) == vars(schedule)
    assert type(schedule(0)) is type(schedule(9)) is float


# Plateau


METRICS = [5, 4, 4, 3, 3, 3, 3, 3, 2, 9]
RATES = [0.8, 0.8, 0.8, 0.8, 0.8, 0.4, 0.4, 0.2, 0.2, 0.2]
PLATEAUS = {
    "after patience steps without a smaller metric": ((0.5, 2), {"mode": "min"}, METRICS, RATES),
    "or a larger one": ((0.5, 2), {"mode": "max"}, [-each for each in METRICS], RATES),
    "of more than min_delta": ((0.5, 1), {"min_delta": 0.25}, [1.0, 0.5, 0.25], [0.8, 0.8, 0.4]),
    "not below": ((0.1, 1), {"stop_factor_lr": 0.05}, [1.0] * 4, [0.8, 0.8 * 0.1, 0.05, 0.05]),
}


@pytest.mark.parametrize("case", PLATEAUS.values(), ids=PLATEAUS)
def test_plateau_reduces_the_rate(case):
    (factor, patience), settings, metrics, rates = case
    schedule, found = lr.PlateauScheduler(factor, patience=patience, base_lr=0.8, **settings), []
    for metric in metrics:
        schedule = loads(dumps(schedule))
        schedule.step(metric)
        found.append(schedule(0))
    assert found == rates


def test_plateau_reduces_when_patience_is_lowered_during_a_run():
    schedule, rates = lr.PlateauScheduler(0.5, patience=5, base_lr=0.8), []
    for step in range(9):
        schedule.patience = 5 if step < 5 else 2
        schedule.step(np.float32(1.0))
        rates.append(schedule(1))
    assert rates == [0.8] * 5 + [0.4, 0.4, 0.2, 0.2]


def test_plateau_warms_up_and_follows_an_assigned_base_lr():
    schedule = lr.PlateauScheduler(0.5, patience=1, base_lr=0.8, warmup_steps=2)
    schedule.step(1.0)
    schedule.step(1.0)
    assert [schedule(n) for n in range(4)] == [0.0, 0.4, 0.4, 0.4]
    schedule.base_lr = 0.2
    assert schedule(2) == 0.1


# Wrong arguments


WRONG = {
    "LRScheduler('0.1')": "TypeError: base_lr must be a number, got '0.1'",
    "LRScheduler(math.nan)": "ValueError: base_lr must be .* at least 0, got nan",
    "LRScheduler(warmup_steps=1.0)": "TypeError: warmup_steps must be an integer",
    "LRScheduler(warmup_steps=-1)": "ValueError: warmup_steps must be at least 0",
    "LRScheduler(warmup_begin_lr=-1)": "ValueError: warmup_begin_lr must be .* at least 0",
    "LRScheduler(0.1, warmup_begin_lr=0.2)": "ValueError: must be at most base_lr=0.1, got 0.2",
    "LRScheduler(0.4, warmup_steps=4)(4)": "NotImplementedError: LRScheduler must define _rate",
    "LRScheduler(warmup_mode='exp')": r"ValueError: one of \('linear', 'constant'\), got 'exp'",
    "FactorScheduler(0)": "ValueError: step must be at least 1, got 0",
    "FactorScheduler(3, 1.1)": "ValueError: factor must be .* at least 0, at most 1, got 1.1",
    "FactorScheduler(3, 1, math.inf)": "ValueError: stop_factor_lr must be a finite",
    "MultiFactorScheduler(5)": "TypeError: step must be a list, got 5",
    "MultiFactorScheduler([])": "ValueError: step must hold at least one",
    "MultiFactorScheduler([5, 5])": "ValueError: step must be strictly increasing",
    "MultiFactorScheduler([0, 3])": r"ValueError: step\[0\] must be at least 1, got 0",
    "MultiFactorScheduler([1, 2.0])": r"TypeError: step\[1\] must be an integer",
    "PlateauScheduler(patience=0)": "ValueError: patience must be at least 1",
    "PlateauScheduler(min_delta=-1)": "ValueError: min_delta must be .* at least 0",
    "PlateauScheduler(mode='low')": "ValueError: mode must be one of .* got 'low'",
    "PolyScheduler(0)": "ValueError: max_update must be at least 1, got 0",
    "PolyScheduler(9, pwr=-1)": "ValueError: pwr must be .* at least 0",
    "PolyScheduler(5, warmup_steps=5)": "ValueError: must be less than max_update=5, got 5",
    "WSDScheduler(9, 5, warmup_steps=5)": "ValueError: at most max_update - warmup_steps = 4",
    "WSDScheduler(9, 0)": "ValueError: cooldown_steps must be at least 1, got 0",
    "WSDScheduler(9, 5, cooldown='sqrt')": r"ValueError: must be .* '1-sqrt'\), got",
    "InverseRootScheduler(timescale=4, warmup_steps=5)": "ValueError: at least warmup_steps=5",
    "CosineRestartsScheduler(0)": "ValueError: period must be at least 1",
    "CosineRestartsScheduler(5, period_mult=1.5)": "TypeError: period_mult must be an integer",
    "OneCycleScheduler(5, pct_start=30)": "ValueError: pct_start must be .* at least 0, at most 1",
    "OneCycleScheduler(5, div_factor=0)": "ValueError: div_factor must be .* at least 1",
    "OneCycleScheduler(5, final_div_factor=0.5)": "ValueError: final_div_factor must",
    "JoinedScheduler(5, [])": "TypeError: schedules must be a list, got 5",
    "JoinedScheduler([abs], [])": r"TypeError: schedules\[0\] must be an LRScheduler",
    "JoinedScheduler([], [])": "ValueError: one more than boundaries, got 0 and 0",
    "JoinedScheduler([CosineScheduler(5)] * 3, [5, 2])": "ValueError: strictly increasing",
    "PlateauScheduler().step(math.nan)": "ValueError: metric must be a finite number",
    "PlateauScheduler().step('low')": "TypeError: metric must be a number",
    "register(dict)": "TypeError: only subclasses of LRScheduler",
}


@pytest.mark.parametrize("code", WRONG)
def test_wrong_arguments_are_named_with_what_was_expected(code):
    check_refused(code, WRONG[code], {"math": math, **vars(lr)})


# Registry


def test_a_users_schedule_registers_in_place_of_one_and_joins_the_others(registries):
    @lr.register
    class InverseTime(lr.LRScheduler):
        def _rate(self, num_update):
            return self.base_lr / (1 + num_update)

    schedule = lr.JoinedScheduler([InverseTime(0.4, warmup_steps=1), lr.CosineScheduler(9)], [3])
    assert lr.scheduler_registry["InverseTime"] is InverseTime
    with pytest.warns(UserWarning, match="replaces .* in scheduler_registry"):
        own = lr.register(type("CosineScheduler", (InverseTime,), {}))
    assert lr.scheduler_registry["CosineScheduler"] is own
    assert [schedule(n) for n in range(4)] == [0.0, 0.2, 0.4 / 3, 0.01]
