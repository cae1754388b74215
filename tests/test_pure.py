"""fastopt.functional: updates as pure functions."""

import pickle

import numpy as np
import pytest

import fastopt
from helpers.refusals import check_refused

FORMS = [(name, {}) for name in ("adam", "prodigy", "dcasgd", "adafactor", "schedulefreesgd")] + [
    ("signum", {}),
    ("signum", {"clip_global_norm": 0.5}),
    ("signum", {"accumulate": 2}),
    ("signum", {"average": fastopt.EMA(decay=0.5)}),
    ("signum", {"groups": {"bias": {"frozen": True}}}),
]


def values(rng):
    return {"layers": [rng.normal(size=(3, 4))], "bias": rng.normal(size=2)}


@pytest.mark.parametrize(("name", "settings"), FORMS, ids=str)
def test_updates_are_pure_and_those_of_an_updater(name, settings):
    optimizer = fastopt.optimizer.create(name)
    init, update = fastopt.functional(optimizer, **settings)
    rng = np.random.default_rng(0)
    params = values(rng)
    state, own = init(params), pickle.loads(pickle.dumps(params))
    updater = fastopt.Updater(name, **settings)
    for _ in range(4):
        grads = values(rng)
        before = pickle.dumps((grads, state, params))
        later = [update(grads, state, params) for _ in range(2)]
        copied = pickle.loads(pickle.dumps((update, state)))
        later.append(copied[0](grads, copied[1], params))
        assert pickle.dumps((grads, state, params)) == before
        for each in later[1:]:
            np.testing.assert_equal(each, later[0])
        params, state = later[0]
        updater.step(grads, own)
        np.testing.assert_equal(params, own)
    assert optimizer.num_update == 0
    resumed = fastopt.Updater(name, **settings)
    resumed.load_states_dict(state)
    assert resumed.optimizer.num_update == updater.optimizer.num_update


def test_two_models_share_a_pair_of_functions():
    init, update = fastopt.functional("sgd", clip_global_norm=None)
    models = [{"a": np.ones(2)}, {"b": np.ones(3), "c": np.ones(1)}]
    states = [init(params) for params in models]
    for _ in range(2):
        for k, params in enumerate(models):
            grads = {name: np.ones_like(array) for name, array in params.items()}
            models[k], states[k] = update(grads, states[k], params)
    assert [list(state["states"]) for state in states] == [["a"], ["b", "c"]]
    np.testing.assert_allclose(models[1]["b"], 1 - 2 * 0.01)


def test_a_model_may_gain_params_or_lose_some():
    init, update = fastopt.functional("sgd")
    more = {"a": 1.0, "b": np.ones(2)}
    after, state = update(more, init({"a": 1.0}), more)
    np.testing.assert_equal(after, {"a": 0.99, "b": np.full(2, 0.99)})
    assert update({"a": 1.0}, state, {"a": 1.0})[0] == {"a": 0.99}


def test_arrays_of_a_state_are_read_only_and_params_may_be():
    init, update = fastopt.functional(fastopt.SGD(momentum=0.9))
    params = {"a": np.broadcast_to(np.float64(1), 3)}
    after, state = update({"a": np.ones(3)}, init(params), params)
    assert after["a"].tolist() == [0.99] * 3
    for each in (init(params), state):
        with pytest.raises(ValueError, match="read-only"):
            each["states"]["a"][:] = 1


MISTAKES = {
    "init({'a': 1})": r"TypeError: 'a': .* store np.array\(x\)",
    "update(p, (1, 2), p)": r"TypeError: update\(grads, state, params\)",
    "update(p, None, p)": "TypeError: state must be .* got None",
    "update(p, p, init(p))": "TypeError: state must be what init",
    "update({}, init(p), p)": "ValueError: 'a' has no gradient",
    "update(p, init({'b': p['a']}), p)": r"ValueError: .* of \['a'\], .* of \['b'\]: .* init",
}


@pytest.mark.parametrize("code", MISTAKES)
def test_mistakes_are_refused_and_change_nothing(code):
    init, update = fastopt.functional("sgd")
    params = {"a": np.ones(2)}
    check_refused(code, MISTAKES[code], {"init": init, "update": update, "p": params})
    assert update(params, init(params), params)[0]["a"].tolist() == [0.99, 0.99]
