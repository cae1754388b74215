"""The updater and arrays on devices: states, checkpoints, refusals."""

import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastopt import Lookahead, optimizer
from fastopt._kernels.devices import header
from fastopt.device import cuda as cuda_device
from helpers.device_arrays import Foreign, check_close, host, leaves, on_device

pytestmark = pytest.mark.gpu


def step(updater, weight, value=1.0, index=0):
    updater(index, on_device(np.full(weight.shape, value, np.float32)), weight)


def test_state_is_made_where_the_weight_is():
    weight, updater = on_device(np.ones(4, np.float32)), optimizer.get_updater(optimizer.Adam())
    step(updater, weight)
    assert all(header(leaf).place == cuda_device(0) for leaf in leaves(updater.states[0]))
    assert updater.states_synced == {0: True}


def test_arrays_of_other_libraries_pass_by_the_interface(rng):
    start = rng.normal(size=(3, 4)).astype(np.float32)
    grad = rng.normal(size=(3, 4)).astype(np.float32)
    weight, expected = on_device(start), start.copy()
    updater, twin = (optimizer.get_updater(optimizer.Adam()) for _ in range(2))
    foreign = Foreign(weight)
    for _ in range(3):
        updater(0, Foreign(on_device(grad)), foreign)
        twin(0, grad, expected)
    check_close(weight, expected)


def test_bfloat16_passes_the_interface_as_two_bytes(bfloat16, rng):
    weight = on_device(rng.normal(size=8).astype(bfloat16))
    expected = host(weight)
    updater, twin = (optimizer.get_updater(optimizer.SGD(multi_precision=True)) for _ in range(2))
    grad = rng.normal(size=8).astype(bfloat16)
    updater(0, Foreign(on_device(grad), typestr="<V2"), Foreign(weight, typestr="<V2"))
    twin(0, grad, expected)
    np.testing.assert_array_equal(host(weight), expected)


def test_a_read_only_weight_is_refused():
    weight = on_device(np.ones(3, np.float32))
    pointer = Foreign(weight).__cuda_array_interface__["data"][0]
    with pytest.raises(ValueError, match="index 0: weight is read-only"):
        step(optimizer.get_updater(optimizer.SGD()), Foreign(weight, data=(pointer, True)))


@pytest.mark.parametrize("settings", [{}, {"clip_global_norm": 0.5}, {"accumulate": 2}], ids=str)
def test_any_list_of_known_weights_at_any_address_is_updated(settings, rng):
    here, there = (
        optimizer.Updater(optimizer.Adam(learning_rate=0.1, wd=0.1), **settings) for _ in range(2)
    )
    shapes = [(3,), (2, 2), (3,), (5,), (1,)]
    weights = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    for count in (5, 3, 1, 5, 4, 2, 3):
        chosen = rng.permutation(5)[:count].tolist() if "accumulate" not in settings else range(5)
        grads = [rng.normal(size=shapes[k]).astype(np.float32) for k in chosen]
        moved = [Foreign(on_device(weights[k])) for k in chosen]
        own = [weights[k] for k in chosen]
        there(list(chosen), [on_device(grad) for grad in grads], moved)
        here(list(chosen), grads, own)
        check_close([each.array for each in moved], own)
    assert there.optimizer._index_update_count == here.optimizer._index_update_count


def test_another_weight_of_a_known_parameter_is_verified():
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    weights = [on_device(np.ones(3, np.float32)) for _ in range(2)]
    grads = [on_device(np.ones(3, np.float32)) for _ in range(2)]
    for _ in range(2):
        updater([0, 1], grads, weights)
    pointer = Foreign(weights[0]).__cuda_array_interface__["data"][0]
    wrong = {
        "weight is read-only": Foreign(weights[0], data=(pointer, True)),
        "shape": on_device(np.ones(4, np.float32)),
        "share memory": grads[1],
    }
    for words, weight in wrong.items():
        with pytest.raises(ValueError, match=f"index 1: .*{words}"):
            updater([0, 1], grads, [weights[0], weight])
    np.testing.assert_array_equal(host(weights), -1)
    assert updater.optimizer.num_update == 2
    updater([0, 1], grads, [weights[1], weights[1]])  # tied: one after the other
    np.testing.assert_array_equal(host(weights), [[-1] * 3, [-3] * 3])


def test_a_weight_that_moves_is_followed(rng):
    first, second = (on_device(rng.normal(size=5).astype(np.float32)) for _ in range(2))
    before = host(first)
    weight, updater = Foreign(first), optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    step(updater, weight, 0.0)
    weight.array = second
    expected = host(second) - 1
    step(updater, weight)
    np.testing.assert_array_equal(host(second), expected)
    np.testing.assert_array_equal(host(first), before)


@pytest.mark.parametrize("wrong", ["gradient", "weight"])
def test_mixed_devices_are_refused(wrong):
    numpy, device = np.ones(3, np.float32), on_device(np.ones(3, np.float32))
    grad, weight = (numpy, device) if wrong == "gradient" else (device, numpy)
    updater = optimizer.get_updater(optimizer.Adam())
    with pytest.raises(ValueError, match=r"index 0: weight is .*cuda\(0\)|gradient on cuda\(0\)"):
        updater(0, grad, weight)
    assert updater.optimizer.num_update == 0
    assert not updater.states


def test_a_state_stays_with_its_weight():
    updater = optimizer.get_updater(optimizer.Adam())
    numpy = np.ones(3, np.float32)
    updater(0, numpy, numpy.copy())
    with pytest.raises(ValueError, match=r"index 0: weight is on cuda\(0\), .* on the host"):
        step(updater, on_device(numpy))
    assert updater.optimizer.num_update == 1


def test_shapes_and_dtypes_are_checked():
    updater, weight = optimizer.get_updater(optimizer.Adam()), on_device(np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"index 0: gradient must have shape \(3,\), got \(4,\)"):
        updater(0, on_device(np.ones(4, np.float32)), weight)
    with pytest.raises(TypeError, match="index 0: gradient must have the weight's dtype float32"):
        updater(0, on_device(np.ones(3)), weight)
    with pytest.raises(TypeError, match=r"weight must be .*float32.*got int64"):
        updater(0, on_device(np.ones(3)), on_device(np.ones(3, np.int64)))
    with pytest.raises(ValueError, match="share memory"):
        updater(0, weight, weight)


@pytest.mark.parametrize("name", ["adam", "lbsgd", "dcasgd", "groupadagrad"])
@pytest.mark.parametrize("way", ["save", "get_states", "states_dict"])
def test_a_checkpoint_goes_from_device_to_cpu_and_back(name, way, tmp_path, rng):
    extra = {"batch_scale": 2, "momentum": 0.9} if name == "lbsgd" else {}
    make = lambda: optimizer.get_updater(optimizer.create(name, **extra))  # noqa: E731

    def carry(old):
        new = make()
        if way == "save":
            old.save(tmp_path / "state.safetensors")
            new.load(tmp_path / "state.safetensors", strict=False)
        elif way == "get_states":
            new.set_states(old.get_states(dump_optimizer=True))
        else:
            new.load_states_dict(old.states_dict(), strict=False)
        return new

    weight = on_device(rng.normal(size=(4, 3)).astype(np.float32))
    updater = make()
    for value in (1.0, 0.5, 0.25):
        step(updater, weight, value)
    on_cpu = carry(updater)
    for one, other in zip(leaves(on_cpu.states[0]), leaves(host(updater.states[0])), strict=True):
        assert isinstance(one, np.ndarray)
        np.testing.assert_array_equal(one, other)
    there = carry(on_cpu)
    again = on_device(host(weight))
    step(there, again, 2.0)
    assert there.states_synced == {0: True}
    moved = host(weight)
    on_cpu(0, np.full((4, 3), 2.0, np.float32), moved)
    step(updater, weight, 2.0)
    np.testing.assert_array_equal(host(again), host(weight))
    np.testing.assert_allclose(moved, host(weight), rtol=1e-6)


def test_decay_by_row_survives_a_checkpoint(tmp_path, rng):
    make = lambda: optimizer.get_updater(  # noqa: E731
        optimizer.AdamW(learning_rate=0.1, wd=0.5, sparse_decay="catch_up")
    )
    weight, old, new = on_device(np.ones((4, 2), np.float32)), make(), make()
    pair = on_device(np.ones((1, 2), np.float32)), on_device(np.array([2]))
    old(0, pair, weight)
    old(0, pair, weight)
    old.save(tmp_path / "rows.safetensors")
    new.load(tmp_path / "rows.safetensors", strict=False)
    twin = on_device(host(weight))
    old(0, pair, weight)
    new(0, pair, twin)
    old.flush(0)
    new.flush(0)
    np.testing.assert_array_equal(host(twin), host(weight))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_flush_may_be_the_first_call_after_states_were_restored(dtype):
    make = lambda: optimizer.get_updater(  # noqa: E731
        optimizer.AdamW(learning_rate=0.1, wd=0.5, sparse_decay="catch_up", multi_precision=True)
    )
    weight, old, new = on_device(np.ones((4, 2), dtype)), make(), make()
    pair = on_device(np.ones((1, 2), dtype)), on_device(np.array([2]))
    old(0, pair, weight)
    new.set_states(old.get_states(dump_optimizer=True))
    twin = on_device(host(weight))
    old.flush(0)
    for _ in range(2):  # the second time nothing is missed
        new.flush(0, twin)
        np.testing.assert_array_equal(host(twin), host(weight))
    assert new.states_synced[0]
    for one, table in ((old, weight), (new, twin)):
        one(0, pair, table)
        one.flush(0)
    np.testing.assert_array_equal(host(twin), host(weight))


def test_gradients_are_not_kept_alive():
    weight, updater = on_device(np.ones(3, np.float32)), optimizer.get_updater(optimizer.Adam())
    step(updater, weight)
    grad = on_device(np.ones(3, np.float32))
    seen = weakref.ref(grad)
    updater(0, grad, weight)
    del grad
    gc.collect()
    assert seen() is None


def test_headers_refuse_what_would_touch_elements():
    array = on_device(np.ones(3, np.float32))
    told = header(array)
    assert told is header(array)
    assert repr(told) == "<array of shape (3,), float32, on cuda(0)>"
    for touch in (
        lambda: told + 1,
        lambda: told[0],
        lambda: told.copy(),
        lambda: np.sum(told),
        lambda: list(told),
        lambda: told.tolist(),
    ):
        with pytest.raises(TypeError):
            touch()


def test_an_update_in_python_gets_the_arrays_themselves():
    class Plain(optimizer.Optimizer):
        def update(self, index, weight, grad, state):
            self._update_count(index)
            seen.append((weight, grad))

    seen = []
    weight, grad = on_device(np.ones(3, np.float32)), on_device(np.ones(3, np.float32))
    optimizer.get_updater(Plain())(0, grad, weight)
    assert seen[0][0] is weight
    assert seen[0][1] is grad
    half = on_device(np.ones(3, np.float16))
    with pytest.raises(TypeError, match="index 0: an update"):
        optimizer.get_updater(Plain(multi_precision=True))(
            0, on_device(np.ones(3, np.float16)), half
        )


def test_named_tuples_stay_named_tuples():
    class State(NamedTuple):
        mean: Any
        var: Any

    class Named(optimizer.Adam):
        def create_state(self, index, weight):
            return State(*super().create_state(index, weight))

    for make in (np.ones, lambda *arguments: on_device(np.ones(*arguments))):
        updater, weight = optimizer.get_updater(Named()), make(3, np.float32)
        updater(0, make(3, np.float32), weight)
        state = updater.states_dict()["states"][0]
        assert isinstance(state, State)
        np.testing.assert_allclose(state.mean, 0.1)


RAISES = []
"""Whether the schedule raises."""


def scheduled(update):
    """A schedule that may fail."""
    if RAISES:
        raise RuntimeError("no rate")
    return 0.1 / update


@pytest.mark.parametrize("settings", [{}, {"clip_global_norm": 1.0}], ids=str)
def test_a_failed_call_leaves_no_record_and_no_weight_behind(settings):
    """Neither a first call, whose state is not kept, nor a later one with another weight."""
    updater = optimizer.Updater(optimizer.Adam(), **settings)
    updater.optimizer.lr_scheduler = scheduled
    for calls in (1, 3):
        weight = on_device(np.ones(3, np.float32))
        RAISES.append(True)
        with pytest.raises(RuntimeError, match="no rate"):
            step(updater, weight)
        RAISES.clear()
        assert updater.optimizer._index_update_count.get(0, 0) == (0 if calls == 1 else 1)
        for _ in range(calls):
            step(updater, weight)
        assert list(updater.states) == [0]
        assert updater.parameters.weight_of(0) is weight


def test_new_indices_of_one_optimizer_do_not_lose_the_counts_of_another():
    made = optimizer.Adam()
    updater = optimizer.Updater(made, groups={"^b": {"learning_rate": 0.5}})
    indices = ["a", *(f"b{k}" for k in range(12))]
    arrays = [on_device(np.ones(2, np.float32)) for _ in range(2 * len(indices))]
    for calls in (1, 2):
        updater(indices, arrays[: len(indices)], arrays[len(indices) :])
        assert dict(made._index_update_count) == dict.fromkeys(indices, calls)


@pytest.mark.parametrize(
    ("name", "kwargs", "settings"),
    [
        ("adam", {}, {}),
        ("adam", {}, {"clip_global_norm": 0.5}),
        ("adam", {}, {"accumulate": 2}),
        ("adam", {}, {"average": Lookahead(k=2)}),
        ("adam", {"lr_scheduler": lambda update: 0.1 / update}, {}),
        ("lbsgd", {"batch_scale": 2, "warmup_epochs": 0}, {}),
        ("prodigy", {}, {}),
        ("adamw", {"sparse_decay": "catch_up"}, {}),
    ],
    ids=str,
)
def test_a_list_may_have_weights_on_both_sides(name, kwargs, settings, rng):
    here, there = (
        optimizer.Updater(
            optimizer.create(name, **{"learning_rate": 0.1, "wd": 0.1, **kwargs}), **settings
        )
        for _ in range(2)
    )
    weights = [rng.normal(size=(3, 2)).astype(np.float32) for _ in range(4)]
    mixed = [on_device(weight) if k % 2 else weight.copy() for k, weight in enumerate(weights)]
    lists = [[0, 1, 2, 3], [1, 2], [3], [0, 1, 2, 3], [3, 0, 1], [0, 1, 2, 3], [1, 2]]
    if "lr_scheduler" in kwargs:  # those on the device count first
        lists = [[0, 1, 2, 3]] * 5
    for indices in lists:
        grads = [rng.normal(size=(3, 2)).astype(np.float32) for _ in indices]
        here(indices, grads, [weights[k] for k in indices])
        moved = [on_device(g) if k % 2 else g for k, g in zip(indices, grads, strict=True)]
        there(indices, moved, [mixed[k] for k in indices])
    for k, weight in enumerate(weights):
        np.testing.assert_allclose(host(mixed[k]) if k % 2 else mixed[k], weight, rtol=2e-5)
    assert there.optimizer._index_update_count == here.optimizer._index_update_count
