"""What the updater promises: state on first sight, clear refusals, any layout, lists."""

from types import SimpleNamespace

import numpy as np
import pytest

from fastopt import EMA, optimizer
from fastopt._engine.validate import leaves
from helpers.refusals import check_refused
from helpers.tensor_lists import everything


def adam(**kwargs):
    return optimizer.get_updater(optimizer.Adam(learning_rate=0.1, **kwargs))


def f32(*shape):
    return np.ones(shape, np.float32)


def readonly(array):
    array.flags.writeable = False
    return array


def broadcast(array, shape):
    view = np.broadcast_to(array, shape)
    view.flags.writeable = True
    return view


SHARED = np.ones(8, np.float32)
WEIGHT = f32(3, 4)
SWAPPED = np.ones(2, ">f4")

BAD_CALLS = {
    "gradient of another shape": (0, f32(3), f32(2), ValueError, r"index 0 .*\(2,\).*\(3,\)"),
    "gradient of integers": (0, np.ones(2, int), f32(2), TypeError, "float32.*int64: .*astype"),
    "number as gradient": (0, 1.0, f32(2, 3), TypeError, r"float; pass np.full\(\(2, 3\), float"),
    **{f"{value!r} as gradient": (0, value, np.ones(1), TypeError, "gradient must")
       for value in (1, True, 1j, np.int32(1), "1")},
    "scalar as gradient": (0, np.float32(1), f32(2), ValueError, r"\(\); pass np.full\(\(2,\), x"),
    "swapped bytes": (0, SWAPPED, SWAPPED, TypeError, "float32 or float64, got"),
    "read-only weight": (0, f32(2), readonly(f32(2)), ValueError, "read-only"),
    "list as gradient": (0, [1.0, 1.0], f32(2), TypeError, r"or row-sparse: .* got list; convert "
                         r"it with np.array\(x\)"),
    "integers as weight": (0, f32(2), np.ones(2, int), TypeError, r"store x.astype\('float32'\)"),
    "records as weight": (0, f32(2), np.ones(2, "f4,f4"), TypeError, "; pass its fields, "),
    "objects as weight": (0, f32(2), np.array([f32(2)] * 2, object), TypeError, r"list\(x\)"),
    "list as weight": (0, f32(2), [1.0, 1.0], TypeError, "NumPy array, got list"),
    "None as gradient": (0, None, f32(2), TypeError, "got None; omit the index"),
    "broadcast weight": (0, f32(2, 3), broadcast(f32(3), (2, 3)), ValueError,
                         r"elements of weight share an address \(strides \(0, 4\)\)"),
    "the same memory": (0, SHARED, SHARED, ValueError, "share memory; pass a copy of the grad"),
    "overlapping memory": (0, SHARED[1:], SHARED[:-1], ValueError, "share memory"),
    "masked weight": (0, f32(2), np.ma.ones(2, "f4"), TypeError, "MaskedArray"),
    "one bad entry of a list": ([1, 0], [f32(2), f32(3)], [f32(2)] * 2, ValueError, "index 0"),
    **{
        f"{given!r} as index{' in a list' * listed}": (
            *([[given], [f32(2)], [f32(2)]] if listed else [given, f32(2), f32(2)]),
            error, f"^index must be .*got {got}",
        )
        for given, error, got in (
            (0.5, TypeError, "float"), (True, TypeError, "bool"), (None, TypeError, "None"),
            (np.True_, TypeError, "bool"), (b"\xff", ValueError, r"b'\\xff'"),
            (np.timedelta64(1, "s"), TypeError, "timedelta64"),
            (np.datetime64(1, "s"), TypeError, "datetime64"),
        )
        for listed in (False, True)
    },
}  # fmt: skip


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("case", BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls_name_the_fault_and_change_nothing(case, seen):
    index, grad, weight, error, words = case
    updater = adam(param_idx2name={0: "fc_weight"})
    if seen:
        updater(0, f32(2), f32(2))
    before = everything(updater, weight)
    with pytest.raises(error, match=words) as raised:
        updater(index, grad, weight)
    if type(index) is int:
        assert "index 0 (fc_weight)" in str(raised.value)
    assert everything(updater, weight) == before


@pytest.mark.parametrize("name", ["nadam", "lars", "lbsgd", "prodigy"])
def test_a_failed_call_rolls_every_counter_back(name):
    made, weight = optimizer.create(name, learning_rate=0.1), np.ones(3)
    updater = optimizer.get_updater(made)
    updater(0, np.ones(3), weight)
    before = everything(updater, weight)
    made.restore({"clip_gradient": "short"})  # past the check of an assignment
    with pytest.raises(TypeError, match="clip_gradient must be a number"):
        updater(0, np.ones(3), weight)
    made.clip_gradient = None
    assert everything(updater, weight) == before


def test_a_scalar_gradient_is_read_before_its_memory_is_used_again():
    """The schedule runs between the checks and the update, and fills freed memory."""
    kept, weight = [], np.array(1.0)
    schedule = lambda n: kept.extend(np.full((), 1e6) for _ in range(50)) or 0.1  # noqa: E731
    updater = optimizer.get_updater(optimizer.SGD(lr_scheduler=schedule))
    for _ in range(3):
        updater(0, np.float64(2.0), weight)
    np.testing.assert_allclose(weight, 0.4)


@pytest.mark.parametrize("settings", [{}, {"average": EMA()}, {"clip_global_norm": 1.0}], ids=str)
def test_slots_that_share_memory_are_named(settings):
    for dtype, more, state, words in (
        ("f4", {}, lambda mean, var: (mean, mean), "state 'mean' and state 'var' share memory; "),
        ("f4", {}, lambda mean, var: (mean, WEIGHT), "weight and state 'var' share memory; "),
        ("f2", {"multi_precision": True}, lambda w, s: (w, (w, s[1])), "weight and state 'mean'"),
    ):
        updater = optimizer.get_updater(optimizer.Adam(**more), **settings)
        weight = WEIGHT if dtype == "f4" else np.ones((3, 4), dtype)
        for _ in range(2):
            updater("p", np.ones((3, 4), dtype), weight)
        with pytest.raises(ValueError, match="'p': gradient and state 'mean' share memory"):
            updater("p", leaves(updater.states["p"])[-2], weight)
        updater.states["p"] = state(*updater.states["p"])
        with pytest.raises(ValueError, match=f"index 'p': {words}"):
            updater("p", np.ones((3, 4), dtype), weight)


def test_state_is_made_once_for_each_index():
    updater = adam()
    updater(0, f32(2), f32(2))
    state = updater.states[0]
    updater([0, "fc"], [f32(2), f32(3)], [f32(2), f32(3)])
    assert updater.states[0] is state
    assert updater.states_synced == dict.fromkeys(updater.states, True) == {0: True, "fc": True}
    with pytest.warns(UserWarning, match="a state of '0', and 0 has another"):
        updater.step([f32(2)], [f32(2)])


def test_states_alone_restart_the_counts():
    old, new, weight = adam(), adam(), f32(3)
    for _ in range(3):
        old(0, f32(3), weight)
    new.set_states(old.get_states())
    np.testing.assert_array_equal(new.states[0][0], old.states[0][0])
    assert new.states_synced == {0: False}
    new(0, f32(3), weight)
    assert new.optimizer._index_update_count == {0: 1}
    assert new.states_synced == {0: True}


def test_states_with_the_optimizer_restore_all_but_param_dict():
    old = adam(
        param_dict={0: SimpleNamespace(lr_mult=0.5, wd_mult=0.5)},
        param_idx2name={0: "a_weight"},
        wd=0.1,
    )
    old(0, f32(3), f32(3))
    new = optimizer.Updater("sgd")
    new.set_states(old.get_states(dump_optimizer=True))
    assert type(new.optimizer) is optimizer.Adam
    assert new.optimizer.param_dict == {}
    assert new.optimizer.__getstate__() == old.optimizer.__getstate__()


def test_states_are_kept_of_what_was_updated_before_code_of_the_user_failed():
    class Fragile(optimizer.Optimizer):
        def create_state(self, index, weight):
            return np.zeros_like(weight)

        def update(self, index, weight, grad, state):
            if index == 1:
                raise ArithmeticError("the second")
            state += grad
            weight -= state

    updater, weights = optimizer.get_updater(Fragile()), [np.zeros(2), np.zeros(2)]
    for total in (1, 3):
        with pytest.raises(ArithmeticError, match="the second"):
            updater([0, 1], [np.ones(2), np.ones(2)], weights)
        np.testing.assert_array_equal(weights[0], [-total, -total])
    assert list(updater.states) == [0]


@pytest.mark.parametrize("shape", [(1, 3), (0, 3)])
def test_one_element_or_none_at_stride_0_is_an_array_like_any_other(shape):
    weight = np.lib.stride_tricks.as_strided(f32(3), shape, (0, 4))
    adam()(0, f32(*shape), weight)
    assert (weight < 1).all()


@pytest.mark.parametrize(("state", "error"), [
    (None, r"ValueError: needs 2 state arrays .*, got 0; .*: delete it from updater.states"),
    ((f32(2), f32(3)), r"ValueError: 'var' must have shape \(2,\), got \(3,\)"),
    ((f32(2), np.ones(2)), "TypeError: 'var' must have dtype float32 or bfloat16, got float64"),
    ((f32(2), readonly(f32(2))), "ValueError: 'var' is read-only"),
    ((f32(2), "x"), "TypeError: 'var' must be a NumPy array"),
])  # fmt: skip
def test_a_state_that_does_not_fit_is_refused(state, error):
    updater = adam()
    updater(0, f32(2), f32(2))
    updater.states[0] = state
    check_refused("updater(0, f32(2), f32(2))", error, {"updater": updater, "f32": f32})
    assert updater.optimizer._index_update_count == {0: 1}
