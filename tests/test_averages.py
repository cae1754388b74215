"""Averages of weights: EMA, SWA and Lookahead, in the pass of the update."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import EMA, SWA, Lookahead, optimizer
from fastopt.checkpoint import CheckpointError
from helpers.cases import CASES, Case, kept
from helpers.refusals import check_refused
from helpers.resuming import WAYS, resumed

SPECS = [
    EMA(decay=0.9),
    EMA(decay=0.9, bias_correction=True),
    EMA(decay=0.9, warmup=True),
    SWA(start=2, every=2),
    Lookahead(k=2, alpha=0.3),
]
REFUSED = ("lbsgd", "groupadagrad", "test")
AVERAGED = [case for case in CASES if case.name not in REFUSED] + [
    Case("adam", {"state_dtype": "bfloat16"}),
    Case("adam", {"state_dtype": "int8", "state_min_size": 1}, (5, 40)),
]


def adam(average, **kwargs):
    return optimizer.Updater(optimizer.Adam(learning_rate=0.1, **kwargs), average=average)


def oracle(average, history):
    """Average in float64 of the weights before the first update and after each."""
    weights = [np.asarray(weight, np.float64) for weight in history]
    if isinstance(average, EMA):
        kept = weights[0]
        for t, weight in enumerate(weights[1:], 1):
            decay = average.decay
            if average.warmup:
                decay = min(decay, (1 + t) / (10 + t))
            kept = decay * kept + (1 - decay) * weight
        if average.bias_correction:
            powers = average.decay ** np.arange(len(weights) - 2, -1, -1)
            kept = sum(p * w for p, w in zip(powers, weights[1:], strict=True)) / powers.sum()
        return kept
    chosen = weights[average.start :: average.every]
    return np.mean(chosen, axis=0) if chosen else weights[0]


def run(updater, weight, grads):
    """Weights before the first update and after each."""
    history = [weight.copy()]
    for grad in grads:
        updater(0, grad, weight)
        history.append(weight.copy())
    return history


@given(
    average=st.one_of(
        st.builds(EMA, decay=st.floats(0, 0.999), bias_correction=st.booleans()),
        st.builds(EMA, decay=st.floats(0, 0.999), warmup=st.booleans()),
        st.builds(SWA, start=st.integers(1, 4), every=st.integers(1, 4)),
    ),
    shape=st.sampled_from([(), (1,), (0,), (5,), (3, 4)]),
    dtype=st.sampled_from([np.float32, np.float64]),
    state_dtype=st.sampled_from([None, "bfloat16"]),
    steps=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_averages_are_those_of_the_history(average, shape, dtype, state_dtype, steps, seed):
    rng, updater = np.random.default_rng(seed), adam(average, state_dtype=state_dtype)
    weight, *grads = [np.asarray(rng.normal(size=shape), dtype) for _ in range(1 + steps)]
    history = run(updater, weight, grads)
    found = updater.averages[0]
    assert found.dtype == dtype
    rtol = 1e-4 if dtype == np.float32 else 1e-11
    np.testing.assert_allclose(found, oracle(average, history), rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("case", kept(AVERAGED, "adam", *map(str, AVERAGED[-2:])), ids=str)
@pytest.mark.parametrize("average", kept(SPECS[:4], str(SPECS[3])), ids=str)
def test_every_rule_updates_as_without_an_average(case, average, rng):
    weight, *grads = rng.normal(size=(6, *case.shape)).astype(np.float32)
    averaging = optimizer.Updater(case.make(wd=case.wd), average=average)
    plain = run(optimizer.Updater(case.make(wd=case.wd)), weight.copy(), grads)
    history = run(averaging, weight, grads)
    np.testing.assert_array_equal(history, plain)
    expected = oracle(average, history)
    np.testing.assert_allclose(averaging.averages[0], expected, rtol=1e-4, atol=1e-5)


class Own(optimizer.SGD):
    """It returns a field that averages need."""

    def hyper(self, t, lr, wd):
        return {**super().hyper(t, lr, wd), "average_rate": 0.5}


class Plain(optimizer.Optimizer):
    """It has no rule."""

    def update(self, index, weight, grad, state):
        weight -= grad


def updated(made, average):
    """Average of what cannot be averaged."""
    updater, weight = optimizer.Updater(made, average=average), np.ones((2, 2))
    try:
        updater(0, np.ones((2, 2)), weight)
    finally:
        assert (weight == 1).all()
        counts = len(updater.states), len(updater.averages), updater.optimizer.num_update
        assert counts == (0, 0, 0)


def swapped(weights, average=EMA()):  # noqa: B008
    """Swap in loaded averages of vectors of 2 and 3 elements."""
    made, new = adam(EMA()), adam(average)
    made([0, 1], [np.ones(2), np.ones(3)], [np.ones(2), np.ones(3)])
    if average:
        new.load_states_dict(made.states_dict())
    try:
        new.averaged(weights).__enter__()
    finally:
        assert not any(weight.any() for weight in (weights or {}).values())


WRONG = {
    "updated(Own(), EMA())": "ValueError: Own returns 'average_rate'",
    "updated(optimizer.GroupAdaGrad(), EMA())":
        "TypeError: index 0: rule .* keeps one state number for each row",
    "updated(Plain(), EMA())": "TypeError: Plain overrides update",
    "updated(optimizer.LBSGD(), EMA())": "TypeError: LBSGD counts calls that update nothing",
    "updated(optimizer.Test(), SWA())":
        "TypeError: depends on the number of updates, and Test counts them",
    "swapped(None, None)": "RuntimeError: the updater has no average",
    "swapped(None)": "ValueError: index 0: its weight was not updated yet",
    "swapped({0: np.zeros(2), 1: np.zeros(2)})": "ValueError: index 1: weight must have shape",
    "swapped({7: np.zeros(2)})": "ValueError: index 7: the updater has no average of it",
    **{f"adam({each})": "ValueError: must be|cannot both" for each in (
        "EMA(decay=1.0)", "EMA(decay=-0.1)", "EMA(bias_correction=True, warmup=True)",
        "SWA(start=0)", "SWA(every=0)", "Lookahead(k=0)", "Lookahead(alpha=0)",
        "Lookahead(alpha=1.1)")},
    **{f"adam({each})": "TypeError: must be" for each in (
        "EMA(decay='a')", "EMA(warmup=1)", "SWA(every=1.5)", "0.999")},
    **{f"adam(EMA()).averages.{each}": r"TypeError: averages\[index\]\[...\] = values" for each in (
        "__setitem__(1, np.zeros(3))", "pop(1)", "clear()", "update({1: 2})")},
    "adam([EMA(), SWA()])": r"TypeError: must be one EMA, SWA or Lookahead, got \[EMA",
    "adam(EMA)": r"TypeError: EMA, SWA or Lookahead, got .* call it, EMA\(\)",
    "adam(EMA()).averages['w']": "KeyError: 'w' has no average: .* begins with the first update",
    "adam(None).averages['w']": "KeyError: 'w' has no average: .* begins with the first update",
}  # fmt: skip


@pytest.mark.parametrize("code", WRONG)
def test_mistakes_are_refused_and_change_nothing(code):
    check_refused(code, WRONG[code], globals())


def test_without_its_state_a_parameter_begins_again_with_a_weight_of_another_shape():
    made, first = adam(EMA(0.5)), {"head": np.ones(2)}
    with made.averaged(first):  # is its own until the first update
        np.testing.assert_equal(first, {"head": np.ones(2)})
    made.step({"head": np.ones(2)}, first)
    weight, fresh = np.zeros(3), np.zeros(3)
    with pytest.raises(ValueError, match=r"must have shape .3,.* delete the old state"):
        made.step({"head": np.ones(3)}, {"head": weight})
    for _ in range(2):  # without another shape the average stays
        del made.states["head"]
        average = made.averages["head"].copy()
        made.step({"head": np.zeros(2)}, {"head": average.copy()})
        np.testing.assert_array_equal(made.averages["head"], average)
    del made.states["head"]
    for updater, array in ((made, weight), (new := adam(EMA(0.5)), fresh)):
        updater.step({"head": np.ones(3)}, {"head": array})
    np.testing.assert_equal((weight, made.averages), (fresh, new.averages))


@given(k=st.integers(1, 4), alpha=st.floats(0.1, 1), steps=st.integers(1, 9))
def test_lookahead_returns_to_the_slow_weights(k, alpha, steps):
    rng = np.random.default_rng(steps)
    weight = rng.normal(size=6)
    made = optimizer.Updater(optimizer.SGD(learning_rate=0.1), average=Lookahead(k, alpha))
    fast = slow = weight.copy()
    for t in range(1, 1 + steps):
        made(0, grad := rng.normal(size=6), weight)
        fast = fast - 0.1 * grad
        if t % k == 0:
            fast = slow = slow + alpha * (fast - slow)
        np.testing.assert_allclose(weight, fast, rtol=1e-12)
        np.testing.assert_allclose(made.averages[0], slow, rtol=1e-12)


# Row-sparse gradients


def test_a_lazy_ema_is_that_of_the_updates_of_each_row(rng):
    weight, made = rng.normal(size=(5, 2)).astype(np.float32), adam(EMA(decay=0.5))
    histories = {row: [weight[row].copy()] for row in range(5)}
    for rows in ([1, 3], [3], [3, 0], [1]):
        made(0, (np.ones((len(rows), 2), np.float32), np.array(rows)), weight)
        for row in rows:
            histories[row].append(weight[row].copy())
    for row, history in histories.items():
        expected = oracle(made.average, history)
        np.testing.assert_allclose(made.averages[0][row], expected, rtol=1e-5)


# averaged()


@pytest.mark.parametrize("average", SPECS, ids=str)
def test_weights_and_copies_hold_their_averages_inside(average, rng, half):
    made, copy = adam(average, multi_precision=True), np.ones((3, 2), half)
    weights = {
        0: rng.normal(size=(3, 2)).astype(np.float32),
        "b": np.asfortranarray(np.ones((2, 2))),
        "half": np.ones(3, half),
    }
    made.set_copy(0, copy)
    for _ in range(3):
        grads = [rng.normal(size=w.shape).astype(w.dtype) for w in weights.values()]
        made([*weights], grads, [*weights.values()])
    weights["copy"], averages = copy, {**made.averages, "copy": made.averages[0]}
    before = {index: weight.copy() for index, weight in weights.items()}
    with made.averaged():
        for index, weight in weights.items():
            np.testing.assert_array_equal(weight, averages[index].astype(weight.dtype))
    np.testing.assert_equal(weights, before)


@pytest.mark.parametrize("free", [False, True], ids=["EMA", "schedule-free"])
def test_nothing_updates_weights_that_hold_averages_and_an_error_restores_them(free, tmp_path):
    made, weight = schedule_free() if free else adam(EMA()), np.ones(2)
    for _ in range(3):
        made(0, np.ones(2), weight)
    before = weight.copy()
    attempts = [
        lambda: made([0], [np.ones(2)], [weight]),
        lambda: made.averaged().__enter__(),
        lambda: made.flush(0),
        lambda: made.load_states_dict(made.states_dict()),
        lambda: made.set_states(made.get_states()),
        lambda: setattr(made, "average", None),
    ][: 2 if free else 6]

    def fail():
        with made.averaged():
            kept = weight.copy()
            assert not np.array_equal(kept, before)
            for attempt in attempts:
                with pytest.raises(RuntimeError, match="the weights hold their averages"):
                    attempt()
                np.testing.assert_array_equal(weight, kept)
            if free:
                with pytest.raises(RuntimeError, match=r"save outside of averaged\(\)"):
                    made.save(tmp_path / "run.safetensors")
            weight[:] = 7
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    np.testing.assert_array_equal(weight, before)
    made(0, np.ones(2), weight)
    assert made.optimizer.num_update == 4


# Checkpoints


@pytest.mark.parametrize("kind", WAYS)
def test_what_is_saved_inside_restores_the_weights(kind, tmp_path, rng):
    made, weight = adam(EMA(0.5)), rng.normal(size=5)
    run(made, weight, [rng.normal(size=5) for _ in range(3)])
    with made.averaged():
        new, saved = resumed(kind, made, adam(made.average), tmp_path), weight.copy()
    with pytest.raises(RuntimeError, match="restore_weights"):
        new(0, np.ones(5), saved)
    with pytest.raises(ValueError, match="index 0: its weight was not updated yet"):
        new.restore_weights({})
    new.restore_weights({0: saved})
    np.testing.assert_array_equal(saved, weight)
    new(0, np.ones(5), saved)
    made(0, np.ones(5), weight)
    np.testing.assert_array_equal(saved, weight)
    with pytest.raises(RuntimeError, match="saved inside of averaged"):
        new.restore_weights({0: saved})


@pytest.mark.parametrize("calls", [1, 3], ids=["no average", "an average of another weight"])
def test_a_restore_leaves_weights_alone_that_had_no_average(calls):
    """The second weight waits for its first update."""
    made, new = (optimizer.Updater("sgd", average=EMA(0.5), accumulate=3) for _ in range(2))
    weights = {0: np.ones(2), 1: np.ones(2)}
    run(made, weights[0], [np.ones(2)] * calls)
    made(1, np.ones(2), weights[1])
    with made.averaged():
        new.load_states_dict(made.states_dict())
        loaded = {index: weight.copy() for index, weight in weights.items()}
    new.restore_weights(loaded)
    np.testing.assert_equal(loaded, weights)
    new(1, np.ones(2), loaded[1])


def test_a_load_takes_the_weights_nested_as_in_a_step():
    """What has no average, such as statistics or names, is left alone."""

    def model():
        return {"layers": [{"w": np.ones(2)}], "means": np.zeros(1), "activation": "relu"}

    made, new, weights = adam(EMA(0.5)), adam(EMA(0.5)), model()
    made.step({"layers": [{"w": np.ones(2)}], "means": None, "activation": None}, weights)
    average = made.averages["layers.0.w"].copy()
    with made.averaged():
        new.load_states_dict(made.states_dict())
    new.restore_weights(other := model())
    np.testing.assert_equal(other, weights)
    with new.averaged(other):
        np.testing.assert_equal(other, {**weights, "layers": [{"w": average}]})


def test_checkpoints_of_other_settings():
    made, plain = adam(EMA(0.5)), adam(None)
    for updater in (made, plain):
        updater(0, np.ones(2), np.ones(2))
    with pytest.raises(CheckpointError, match="averages of EMA"):
        adam(SWA()).load_states_dict(made.states_dict())
    with pytest.warns(UserWarning, match="the updater has no average to take them"):
        adam(None).load_states_dict(made.states_dict())
    new = adam(EMA(0.9))
    with pytest.warns(UserWarning, match="those of the updater start again"):
        new.load_states_dict(plain.states_dict())
    assert not new.averages
    new.load_states_dict(made.states_dict())
    assert new.average == EMA(0.5)


@pytest.mark.parametrize("damage", [
    {"average": {"kind": "EMA", "decay": 2.0}}, {"average": {"kind": "Mean"}}, {"average": 3},
    {"arrays": {0: np.ones(2, np.int64)}}, {"arrays": {5: np.ones(2)}}, {"arrays": [1]},
    {"weights": {0: np.ones(3)}}, {"weights": {0: "a"}},
])  # fmt: skip
def test_damaged_averages_are_refused(damage):
    made, new = adam(EMA()), adam(EMA())
    made(0, np.ones(2), np.ones(2))
    saved = made.states_dict()
    saved["averages"] |= damage
    with pytest.raises(CheckpointError):
        new.load_states_dict(saved)
    assert not new.averages


def test_no_average_forgets_the_old_one():
    made, weight = adam(EMA(0.5)), np.ones(2)
    for average, count in ((EMA(0.9), 1), (None, 0)):
        made(0, np.ones(2), weight)
        made.average = average
        assert len(made.averages) == count
    made.load_states_dict(made.states_dict())


# Averages in an optimizer's own state


def schedule_free(**kwargs):
    return optimizer.Updater(optimizer.ScheduleFreeSGD(learning_rate=0.1, **kwargs))


def test_weights_of_schedule_free_optimizers_are_evaluated_as_averages_of_fast_weights(rng):
    """By the sequences z, x and w of the paper."""
    updater, weight = schedule_free(momentum=0.8), rng.normal(size=6).astype(np.float32)
    fast = slow = weight.astype(np.float64)
    for t in range(1, 6):
        grad = rng.normal(size=6).astype(np.float32)
        updater(0, grad, weight)
        fast = fast - 0.1 * grad
        slow = slow + (fast - slow) / t
        np.testing.assert_allclose(weight, 0.8 * slow + 0.2 * fast, rtol=1e-5, atol=1e-6)
        before = weight.copy()
        with updater.averaged():
            np.testing.assert_allclose(weight, slow, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(weight, before)
