"""The updater and arrays on devices: states, copies, checkpoints, refusals."""

import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._kernels.devices import header
from fastopt.device import cuda as cuda_device
from helpers.device_arrays import Foreign, host, leaves, on_device
from helpers.pages import blocks, printed
from helpers.paths import ROOT
from helpers.tensor_lists import dtype_of

pytestmark = pytest.mark.gpu


def step(updater, weight, value=1.0, index=0):
    updater(index, on_device(np.full(weight.shape, value, np.float32)), weight)


def test_state_is_made_where_the_weight_is():
    weight, updater = on_device(np.ones(4, np.float32)), optimizer.get_updater(optimizer.Adam())
    step(updater, weight)
    assert all(header(leaf).place == cuda_device(0) for leaf in leaves(updater.states[0]))
    assert updater.states_synced == {0: True}


def test_bfloat16_passes_the_interface_as_two_bytes(bfloat16, rng):
    weight = on_device(rng.normal(size=8).astype(bfloat16))
    expected = host(weight)
    updater, twin = (optimizer.get_updater(optimizer.SGD(multi_precision=True)) for _ in range(2))
    grad = rng.normal(size=8).astype(bfloat16)
    updater(0, Foreign(on_device(grad), typestr="<V2"), Foreign(weight, typestr="<V2"))
    twin(0, grad, expected)
    np.testing.assert_array_equal(host(weight), expected)


def read_only(array):
    pointer = Foreign(array).__cuda_array_interface__["data"][0]
    return Foreign(array, data=(pointer, True))


def ones(*shape, dtype=np.float32):
    return on_device(np.ones(shape, dtype))


class Elsewhere(Foreign):
    class device:
        id = 1


def interface(**changes):
    return Foreign(ones(2, 3), **changes)


INTERFACES = [{"data": None}, {"typestr": "<i9"}, {"typestr": "|O"}, {"shape": 3}]
INTERFACES += [{"strides": (4,)}, {"mask": ()}]
HERE, WIDE = np.ones((2, 3), np.float32), np.float64
WRONG = [
    (ValueError, "weight is read-only", lambda w: (ones(2, 3), read_only(w))),
    (ValueError, r"weight is on cuda\(0\), gradient on the host", lambda w: (HERE, w)),
    (ValueError, r"cuda\(0\), gradient on cuda\(1\)", lambda w: (Elsewhere(ones(2, 3)), w)),
    (ValueError, r"cuda\(0\)", lambda w: (w, HERE.copy())),
    (TypeError, "gradient must be", lambda w: (None, w)),
    (ValueError, r"gradient must have shape \(2, 3\), got \(3, 2\)", lambda w: (ones(3, 2), w)),
    (ValueError, "shape", lambda w: (ones(2, 3), ones(4))),
    (TypeError, "the weight's dtype float32", lambda w: (ones(2, 3, dtype=WIDE), w)),
    (TypeError, r"float32.*got int64", lambda w: (ones(2, 3), ones(2, 3, dtype=np.int64))),
    (ValueError, "share memory", lambda w: (w, w)),
    (ValueError, "share memory", lambda w: (w.view(w.dtype), w)),
    *((TypeError, "gradient", lambda w, of=of: (interface(**of), w)) for of in INTERFACES),
    *((TypeError, "weight", lambda w, of=of: (ones(2, 3), interface(**of))) for of in INTERFACES),
]
"""Errors, and gradients and weights that have them."""


@pytest.mark.parametrize("calls", [0, 6], ids=["new", "warm"])
@pytest.mark.parametrize("many", [False, True], ids=["single", "list"])
@pytest.mark.parametrize(("error", "words", "change"), WRONG)
def test_what_is_refused_changes_nothing(error, words, change, many, calls):
    updater, weights = optimizer.get_updater(optimizer.Adam()), [ones(2, 3), ones(2, 3)]
    for _ in range(calls):
        updater(["a", "b"], [ones(2, 3), ones(2, 3)], weights)
    before, (grad, weight) = host(weights), change(weights[1])
    call = (["a", "b"], [ones(2, 3), grad], [weights[0], weight]) if many else ("b", grad, weight)
    for _ in range(2):
        with pytest.raises(error, match=f"index 'b': .*{words}"):
            updater(*call)
    np.testing.assert_array_equal(host(weights), before)
    assert (len(updater.states), updater.optimizer.num_update) == (2 * bool(calls), calls)


INT8 = {"state_dtype": "int8", "state_min_size": 1}
ON_HOST = [
    ("clip_adaptive works on arrays on the host", {"clip_adaptive": 0.1}),
    ("Muon computes with NumPy", {"optimizer": optimizer.Muon()}),
    ("SOAP computes with NumPy", {"optimizer": optimizer.SOAP()}),
    ("index '[ab]': .*sums over tensors, is for weights", {"optimizer": optimizer.LAMB(**INT8)}),
    ("sums over", {"optimizer": optimizer.LARS(momentum=0.9, **INT8)}),
]


@pytest.mark.parametrize("many", [False, True], ids=["single", "list"])
@pytest.mark.parametrize(("words", "settings"), ON_HOST)
def test_what_is_computed_on_the_host_alone_is_refused(words, settings, many):
    updater = optimizer.Updater(**{"optimizer": "adam", "groups": {"b": {}}, **settings})
    weights, grads = [ones(2, 3), ones(2, 3)], [ones(2, 3), ones(2, 3)]
    call = (["a", "b"], grads, weights) if many else ("b", grads[1], weights[1])
    for _ in range(2):
        with pytest.raises(TypeError, match=words):
            updater(*call)
    np.testing.assert_array_equal(host(weights), np.ones((2, 2, 3)))
    assert (updater.states, updater.optimizer.num_update) == ({}, 0)


@pytest.mark.parametrize("grad", [np.full((2, 3), 1e40), (np.full((1, 3), 1e40), [1])])
def test_a_gradient_on_the_host_is_measured_as_its_arithmetic_reads_it(grad):
    updater = optimizer.Updater("sgd", clip_global_norm=1.0)
    weights = [HERE.copy(), on_device(HERE)]
    for _ in range(2):
        updater([0, 1], [grad, on_device(HERE)], weights)
    assert updater.info.non_finite == ("0",)
    np.testing.assert_array_equal([weights[0], host(weights[1])], [HERE, HERE])


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


def test_a_state_stays_with_its_weight():
    updater = optimizer.get_updater(optimizer.Adam())
    numpy = np.ones(3, np.float32)
    updater(0, numpy, numpy.copy())
    with pytest.raises(ValueError, match=r"index 0: weight is on cuda\(0\), .* on the host"):
        step(updater, on_device(numpy))
    assert updater.optimizer.num_update == 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_flush_may_be_the_first_call_after_states_were_restored(dtype):
    old, new = (
        optimizer.get_updater(
            optimizer.AdamW(lr=0.1, wd=0.5, sparse_decay="catch_up", multi_precision=True)
        )
        for _ in range(2)
    )
    weight = ones(4, 2, dtype=dtype)
    old(0, (ones(1, 2, dtype=dtype), on_device(np.array([2]))), weight)
    new.set_states(old.get_states(dump_optimizer=True))
    twin = on_device(host(weight))
    old.flush(0)
    new.flush(0, twin)
    np.testing.assert_array_equal(host(twin), host(weight))
    assert new.states_synced[0]


HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@HALVES
def test_a_copy_follows_its_weight(dtype, rng):
    weight = on_device(rng.normal(size=20).astype(np.float32))
    copy = on_device(np.zeros(20, dtype_of(dtype)))
    updater = optimizer.get_updater(optimizer.Adam())
    updater.set_copy(0, copy)
    step(updater, weight)
    np.testing.assert_array_equal(host(copy), host(weight).astype(copy.dtype))


@HALVES
def test_a_master_can_be_given_before_and_after_the_first_step(dtype):
    exact = np.full(3, 0.1, np.float32)
    weight = on_device(exact.astype(dtype_of(dtype)))
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0, multi_precision=True))
    updater.set_master(0, exact)
    updater(0, on_device(np.zeros(3, weight.dtype)), weight)
    np.testing.assert_array_equal(host(updater.states[0][1]), exact)
    updater.set_master(0, on_device(2 * exact))
    np.testing.assert_array_equal(host(updater.states[0][1]), 2 * exact)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_spoils_its_block_of_codes_only(value):
    grad = np.ones((2, 256), np.float32)
    grad[1, 130] = value
    updater = optimizer.Updater(optimizer.Adam(**INT8))
    updater(0, on_device(grad), ones(2, 256))
    (_, scales), _ = host(updater.states[0])
    np.testing.assert_array_equal(np.isfinite(scales), [[True, True], [True, False]])


def test_gradients_are_not_kept_alive():
    weight, updater = on_device(np.ones(3, np.float32)), optimizer.get_updater(optimizer.Adam())
    step(updater, weight)
    grad = on_device(np.ones(3, np.float32))
    seen = weakref.ref(grad)
    updater(0, grad, weight)
    del grad
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("touch", [np.negative, np.sum, np.copy, list, lambda a: a.tolist()])
def test_headers_refuse_what_would_touch_elements(touch):
    array = ones(3)
    assert header(array) is header(array)
    assert repr(header(array)) == "<array of shape (3,), float32, on cuda(0)>"
    with pytest.raises(TypeError):
        touch(header(array))


def test_an_update_in_python_gets_the_arrays_themselves():
    class Plain(optimizer.Optimizer):
        def update(self, index, *arrays_and_state):
            self._update_count(index)
            seen.extend(arrays_and_state)

    seen, weight, grad = [], ones(3), ones(3)
    optimizer.get_updater(Plain())(0, grad, weight)
    assert seen[0] is weight
    assert seen[1] is grad
    halves = ones(3, dtype=np.float16), ones(3, dtype=np.float16)
    with pytest.raises(TypeError, match="index 0: an update"):
        optimizer.get_updater(Plain(multi_precision=True))(0, *halves)


@pytest.mark.parametrize("place", [np.array, on_device])
def test_named_tuples_stay_named_tuples(place):
    class State(NamedTuple):
        mean: Any
        var: Any

    class Named(optimizer.Adam):
        def create_state(self, index, weight):
            return State(*super().create_state(index, weight))

    updater, weight = optimizer.get_updater(Named()), place(np.ones(3, np.float32))
    updater(0, place(np.ones(3, np.float32)), weight)
    state = updater.states_dict()["states"][0]
    assert isinstance(state, State)
    np.testing.assert_allclose(state.mean, 0.1)


def test_the_page_about_cuda_prints_what_it_says(capsys):
    namespace = {"__name__": "__main__"}
    expected = []
    for _, code in blocks(ROOT / "docs" / "cuda.md", "python"):
        exec(code, namespace)
        expected += printed(code)
    assert capsys.readouterr().out.splitlines() == expected
    assert expected


def test_a_copy_at_the_address_of_a_freed_one_is_another_one():
    """A list call remembers copies by the ids of their objects."""
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    weight = on_device(np.zeros(3, np.float32))
    grads = [on_device(np.ones(3, np.float32))]
    copies = [on_device(np.zeros(3, np.float16))]
    updater.set_copy(0, copies[0])
    updater([0], grads, [weight])
    updater.set_copy(0, None)
    updater(0, grads[0], weight)
    freed = id(copies.pop())
    while len(copies) < 1000 and freed not in map(id, copies[-1:]):
        copies.append(on_device(np.zeros(3, np.float16)))
    updater.set_copy(0, copies[-1])
    updater([0], grads, [weight])
    np.testing.assert_array_equal(host(copies[-1]), [-3, -3, -3])


def test_new_indices_of_one_optimizer_do_not_lose_the_counts_of_another():
    made = optimizer.Adam()
    updater = optimizer.Updater(made, groups={"^b": {"learning_rate": 0.5}})
    indices = ["a", *(f"b{k}" for k in range(12))]
    arrays = [on_device(np.ones(2, np.float32)) for _ in range(2 * len(indices))]
    for calls in (1, 2):
        updater(indices, arrays[: len(indices)], arrays[len(indices) :])
        assert dict(made._index_update_count) == dict.fromkeys(indices, calls)
