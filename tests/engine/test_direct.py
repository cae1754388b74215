"""Updates without an updater, ``Optimizer.update``: they run on records, whatever the states."""

import copy

import numpy as np
import pytest

from fastopt import optimizer
from helpers.plans import LAYOUTS
from helpers.tensor_lists import as_list, frozen, one_by_one

F32 = np.float32


MAKES = {
    "adam": lambda: optimizer.Adam(wd=0.1, lr_scheduler=lambda update: 0.1 / (1 + update)),
    "sgd": lambda: optimizer.SGD(momentum=0.9, multi_precision=True),
    "prodigy": optimizer.Prodigy,
    "test": optimizer.Test,
}


@pytest.mark.slow
@pytest.mark.parametrize("lay", [np.copy, np.asfortranarray, LAYOUTS["strided"], np.float64])
@pytest.mark.parametrize("way", [as_list, one_by_one])
@pytest.mark.parametrize("name", MAKES)
def test_updates_have_the_bits_of_an_updater_and_records(name, way, lay, rng, unrecorded):
    dtypes = [F32, np.float16 if name == "sgd" else F32]
    own = [rng.standard_normal((3, 4)).astype(dtype) for dtype in dtypes]
    direct, updater, others = MAKES[name](), optimizer.Updater(MAKES[name]()), copy.deepcopy(own)
    states = [direct.create_state_multi_precision(k, own[k]) for k in range(2)]
    for _ in range(4):
        grads = [lay(rng.standard_normal((3, 4)).astype(F32)) for _ in range(2)]
        way(updater, [0, 1], grads, others)
        calls = [*zip(range(2), own, grads, states, strict=True)]
        if way is as_list:
            direct.update_all(calls)
        else:
            for call in calls:
                direct.update_multi_precision(*call)
    np.testing.assert_equal([own, states], [others, list(updater.states.values())])
    assert direct._index_update_count == updater.optimizer._index_update_count
    assert not unrecorded


@pytest.mark.parametrize("masters", [False, True], ids=["update", "update_multi_precision"])
def test_a_half_precision_weight_is_updated_with_its_master_or_alone(masters):
    made = optimizer.SGD(learning_rate=1.0, multi_precision=True)
    weight, grad = np.ones(2, np.float16), np.full(2, 2**-12, np.float16)
    state = made.create_state_multi_precision(0, weight) if masters else None
    for _ in range(8):
        (made.update_multi_precision if masters else made.update)(0, weight, grad, state)
    np.testing.assert_array_equal(weight, 1 - 8 * 2**-12 if masters else 1)


@pytest.mark.parametrize("copies", [copy.deepcopy, tuple], ids=["copied", "another tuple"])
def test_models_that_share_an_optimizer_keep_their_states_under_one_index(copies):
    made, alone, weights = optimizer.Adam(), optimizer.Adam(), np.ones((3, 3), F32)
    states = [made.create_state(0, weight) for weight in weights]
    for step in range(6):
        grad = np.full(3, 1 + step, F32)
        for k in range(2):
            made._index_update_count[0] = step
            made.update(0, weights[k], grad, states[k])
            states[k] = copies(states[k])
        alone.update(0, weights[2], grad, states[2])
    for values in zip((weights[0], *states[0]), (weights[1], *states[1]), strict=True):
        np.testing.assert_array_equal(*values)
    np.testing.assert_array_equal(weights[0], weights[2])


@pytest.mark.parametrize("again", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("listed", [0, 1, 2], ids=["single", "list", "an index twice"])
def test_a_refused_update_changes_nothing(again, listed):
    made, weight, other = optimizer.Adam(), np.ones(3), np.ones(2)
    states = [made.create_state(0, weight), made.create_state(1, other)]
    if again:
        made.update_all([(0, weight, np.ones(3), states[0]), (1, other, np.ones(2), states[1])])
    before = frozen([weight, other, states, dict(made._index_update_count)])
    calls = [(1, other, np.ones(2), states[1])] * listed + [(0, weight, np.ones(2), states[0])]
    with pytest.raises(ValueError, match=r"index 0: gradient must have shape \(3,\), got \(2,\)"):
        made.update_all(calls) if listed else made.update(*calls[0])
    assert frozen([weight, other, states, dict(made._index_update_count)]) == before
    made.update(0, weight, np.ones(3), states[0])
    assert made._index_update_count[0] == 1 + again


class Name(str):
    """A string of another class."""


@pytest.mark.parametrize("index", [("layer", 0), 1.0, np.int64(1), Name("w"), None, b"w"], ids=repr)
def test_an_index_may_be_any_key(index):
    """One that equals an int or a string is that parameter."""
    made, weights = optimizer.Adam(), np.ones((2, 2, 3))
    states = [made.create_state(0, weight) for weight in weights]
    for step in range(4):
        equal = {1: 1, "w": "w"}.get(index, index) if step == 3 else index
        for key, weight, state in zip((equal, "other"), weights, states, strict=True):
            made.update(key, weight, np.full((2, 3), 1.0 + step), state)
    assert weights[0].tobytes() == weights[1].tobytes()
    assert made._index_update_count == {index: 4, "other": 4}


def test_a_class_that_calls_the_update_of_its_base_has_records(unrecorded):
    class Halved(optimizer.Adam):
        def update(self, index, weight, grad, state):
            super().update(index, weight, grad / 2, state)

    weights = np.ones((2, 2, 3))
    updaters = optimizer.Updater(Halved()), optimizer.Updater(optimizer.Adam())
    for step in range(4):
        for updater, weight, factor in zip(updaters, weights, (2, 1), strict=True):
            updater(0, np.full((2, 3), factor * (1.0 + step)), weight)
    np.testing.assert_array_equal(*weights)
    assert not unrecorded


@pytest.mark.parametrize("kind", [optimizer.Adam, optimizer.Muon])
@pytest.mark.parametrize("index", [[0], np.array([0]), {0: 0}], ids=str)
def test_a_list_of_indices_is_refused_with_the_cure(kind, index):
    made, weight = kind(), np.ones((2, 3))
    state = made.create_state(0, weight)
    for update in (made.update, made.update_multi_precision):
        with pytest.raises(TypeError, match=r"index must be .* takes lists$"):
            update(index, weight, np.ones((2, 3)), state)
