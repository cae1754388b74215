"""Loss scaling: the scale over any history of steps, its bounds, its state."""

import copy
import json
import pickle
import warnings
from itertools import groupby

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastopt
from fastopt.amp import LossScaler
from helpers.refusals import check_refused
from helpers.refusals import each as rows

histories = st.lists(st.sampled_from([False, False, False, True]), max_size=60)
intervals = st.integers(1, 6)
factors = {"growth_factor": st.floats(1, 8), "backoff_factor": st.floats(0, 0.99)}


@st.composite
def scalers(draw):
    """Any dynamic scaler; bounds that are soon reached are as likely as others."""
    settings = {name: draw(values) for name, values in factors.items()}
    least = draw(st.floats(2.0**-126, 1e4))
    most = draw(st.floats(least, 1e6))
    init = draw(st.floats(least, most))
    bounds = {"min_scale": least, "max_scale": most}
    return LossScaler(init, growth_interval=draw(intervals), **bounds, **settings)


def run(scaler, history):
    """Scales after each step."""
    scales = []
    for overflow in history:
        scaler.update(overflow)
        scales.append(scaler.scale)
    return scales


@given(histories, intervals)
def test_it_grows_after_good_steps_in_a_row_and_backs_off_on_each_overflow(history, interval):
    scaler = LossScaler(1.0, growth_interval=interval, min_scale=2.0**-100, max_scale=2.0**100)
    run(scaler, history)
    exponent = 0
    for overflow, steps in groupby(history):
        count = len(list(steps))
        exponent += -count if overflow else count // interval
    assert scaler.scale == 2.0**exponent


@pytest.mark.parametrize(
    ("steps", "warned"), [([True] * 99, 0), ([True] * 300, 1), (([True] * 99 + [False]) * 2, 0)]
)
def test_overflow_that_no_smaller_scale_can_end_is_warned_of_once(steps, warned):
    updater = fastopt.Updater("sgd", loss_scaler=LossScaler(1.0, growth_interval=1000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for overflow in steps:
            updater("w", np.full(2, np.nan if overflow else 1.0), np.ones(2))
    assert len(caught) == warned
    for each in caught:
        assert "at the least loss scale, 1, and were skipped" in str(each.message)
        assert each.filename == __file__


@given(scalers(), histories)
def test_each_step_keeps_the_scale_or_changes_it_by_a_factor_up_to_a_bound(scaler, history):
    low, high = scaler.min_scale, scaler.max_scale
    before = scaler.scale
    for overflow, after in zip(history, run(scaler, history), strict=True):
        factor = scaler.backoff_factor if overflow else scaler.growth_factor
        changed = min(max(before * factor, low), high)
        assert after == changed or (after == before and not overflow)
        before = after


@given(scalers(), histories, histories)
def test_a_resumed_scaler_continues_as_if_never_stopped(scaler, before, after):
    run(scaler, before)
    resumed = LossScaler()
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    copies = [resumed, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))]
    expected = run(scaler, after)
    for other in copies:
        assert run(other, after) == expected
        assert other.state_dict() == scaler.state_dict()


def test_a_static_scale_is_changed_by_an_assignment_alone():
    scaler = LossScaler(128, growth_interval=1, dynamic=False)
    assert {*run(scaler, [False, np.bool_(True), False])} == {128.0}
    scaler.scale = 8
    assert (scaler.scale, scaler.good_steps) == (8.0, 0)


def test_defaults_are_those_of_the_field():
    *scales, dynamic, least, most = LossScaler().state_dict().values()
    assert (scales, dynamic, least, most) == ([65536, 0, 2, 0.5, 2000], True, 1, 2**24)


def test_the_state_is_plain_numbers_and_the_repr_shows_it():
    scaler = LossScaler(np.float32(4), growth_interval=np.int64(3), dynamic=np.False_)
    assert {type(value) for value in scaler.state_dict().values()} == {float, int, bool}
    assert repr(scaler) == (
        "LossScaler(scale=4.0, good_steps=0, growth_factor=2.0, backoff_factor=0.5, "
        "growth_interval=3, dynamic=False, min_scale=1.0, max_scale=16777216.0)"
    )


@pytest.mark.parametrize("real", [float, np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_a_scaled_loss_has_a_place_in_its_type(real):
    for loss in (real(3), *([np.full((2, 2), 3, real)] if real is not float else [])):
        scaled = LossScaler(65000.5).scale_loss(loss)
        np.testing.assert_array_equal(scaled, np.full(np.shape(loss), 195001.5))
        wide = real if np.dtype(real).itemsize == 8 else np.float32
        assert scaled.dtype == wide if real is not float else type(scaled) is float


WRONG = {
    "LossScaler(init_scale='64')": "TypeError: init_scale must be a number, got '64'",
    "LossScaler(init_scale=0)": r"ValueError: init_scale must be .*at least 1\.0.*got 0",
    "LossScaler(growth_factor=0.5)": "ValueError: growth_factor must be .*at least 1, got",
    "LossScaler(backoff_factor=1)": "ValueError: backoff_factor must be .*below 1, got 1",
    "LossScaler(growth_interval=0)": "ValueError: growth_interval must be at least 1, got 0",
    "LossScaler(dynamic=1)": "TypeError: dynamic must be True or False, got 1",
    "LossScaler(min_scale=2.0**25)": "ValueError: max_scale must be .*got",
    "setattr(scaler, 'backoff_factor', 2)": "ValueError: backoff_factor must be .*below 1, got 2",
    "setattr(scaler, 'max_scale', 1024)": "ValueError: scale must be .*, got 32768.0: assign",
    "setattr(scaler, 'min_scale', 2.0**16)": "ValueError: scale must be from min_scale=65536.0",
    "load(scale=0.5)": "ValueError: ^scale must be a finite number, at least 1.0",
    "load(good_steps=-1)": "ValueError: ^good_steps must be at least 0, got -1",
    "load(max_scale=2.0)": "ValueError: ^scale must be .*at most 2.0, got 512",
    "load(surplus=1)": "ValueError: ^state must have the names .*surplus",
    "load(**{'1': 1})": "ValueError: ^state must have the names .*'1'",
    "LossScaler().load_state_dict([])": r"TypeError: ^state must be a mapping, got",
    **{f"load(without={name!r})": f"ValueError: ^state must have the names .*'{name}'.*got"
       for name in LossScaler().state_dict()},
    **rows("setattr(scaler, 'scale', {})", r"ValueError: ^scale must be .*1\.0.*16777216\.0, got",
           0, 0.5, 2.0**25, "float('nan')", "float('inf')"),
    "scaler.update(1)": "TypeError: ^overflow must be True or False, got",
}  # fmt: skip


@pytest.mark.parametrize("code", WRONG)
def test_what_is_wrong_is_named_and_changes_nothing(code):
    scaler = LossScaler()
    run(scaler, [True, False])
    before = scaler.state_dict()

    def load(without=None, **changes):
        state = {**LossScaler(512).state_dict(), **changes}
        scaler.load_state_dict({name: state[name] for name in state if name != without})

    check_refused(code, WRONG[code], {**globals(), "load": load, "scaler": scaler})
    assert scaler.state_dict() == before
