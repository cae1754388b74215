"""Arrays of other libraries are updated in place, without a copy, as NumPy arrays are."""

import array
import copy
import gc
import weakref
from itertools import cycle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastopt import _foreign as foreign
from fastopt import optimizer
from fastopt.averages import EMA
from fastopt.sparse import RowSparse
from helpers.plans import ASIDE, WAYS_TO_CALL, Forms, World, follow, plans
from helpers.settings import TABLE


class Exported:
    """An array that is known by DLPack alone."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **kwargs):
        return self.values.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class Older(Exported):
    """DLPack before version 1, which cannot say that an array may be written to."""

    def __dlpack__(self, stream=None):
        return self.values.__dlpack__()


class Converted(Exported):
    """An array whose dtype DLPack lacks, but that converts itself."""

    def __dlpack__(self, **kwargs):
        raise BufferError("no such dtype")

    def __array__(self, dtype=None, copy=None):
        return self.values


class Labelled:
    """An array with labels, as those of pandas and xarray."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values

    def to_numpy(self):
        return self.values


class Computed(Labelled):
    def __array__(self, dtype=None, copy=None):
        return self.values.copy()


def floats(*values):
    return array.array("f", values)


OLD = not np.from_dlpack(Exported(np.zeros(1))).flags.writeable
versioned = pytest.mark.skipif(OLD, reason="early NumPy takes all arrays of DLPack as read-only")


def adam(**kwargs):
    return optimizer.Updater(optimizer.Adam(learning_rate=0.1), **kwargs)


def tensor(array):
    return pytest.importorskip("torch").from_numpy(array)


def rows_of_torch(values, rows, shape):
    parts = tensor(rows[np.newaxis]), tensor(values)
    return pytest.importorskip("torch").sparse_coo_tensor(*parts, shape, check_invariants=True)


WRAPS = {"DLPack": Exported, "labels": Labelled, "memoryview": memoryview, "torch": tensor}
"""Arrays of other libraries in the memory of an array."""
FORMS = Forms(
    {"plain": np.array},
    {"plain": np.array, **WRAPS},
    {
        "rows": RowSparse,
        "pair": lambda values, rows, shape: (Exported(values), Exported(rows)),
        "pair of torch": lambda values, rows, shape: (tensor(values), tensor(rows)),
        "torch": rows_of_torch,
    },
    {name: ASIDE[name] for name in ("nothing", "copies of the weights", "averages, and back")},
    ("nothing",),
    WAYS_TO_CALL,
)
SETTINGS = "EMA", "clip_global_norm", "all", "masters", "lazy rows", "deferred decay", "groups"


class Foreigners(World):
    """A world whose calls are given arrays of other libraries in the memory of its weights."""

    def is_plain(self, name):
        return False

    def call(self, way, names, grads):
        own, wraps = self.weights, cycle(WRAPS.values())
        self.weights = {name: next(wraps)(weight) for name, weight in own.items()}
        super().call(way, names, grads)
        self.weights = own


@versioned
@pytest.mark.filterwarnings("ignore:.* has no effect", "ignore:.*arguments swapped")
@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_results_are_those_of_numpy(name, data):
    plan = data.draw(plans(TABLE[name], of=FORMS))
    found = follow(TABLE[name], plan, forms=FORMS, kind=Foreigners)
    assert found.results() == follow(TABLE[name], plan, plain=True, forms=FORMS).results()


@versioned
def test_an_array_whose_memory_has_moved_is_looked_at_again():
    updater = optimizer.Updater(optimizer.SGD(learning_rate=1.0))
    weight, first = Exported(np.ones(2)), None
    for _ in range(3):
        updater(0, np.ones(2), weight)
        first, weight.values = weight.values, weight.values.copy()
    assert weight.values.tolist() == [-2, -2]
    assert first.tolist() == [-2, -2]
    weight.values = np.ones(3)
    updater(0, np.ones(3), weight)
    assert weight.values.tolist() == [0, 0, 0]


@versioned
def test_views_do_not_outlive_their_use():
    updater, weight, grad = adam(), Exported(np.ones(2)), Exported(np.ones(2))
    updater(0, grad, weight)
    updater(0, grad, weight)
    alive, gone = weakref.ref(weight), weakref.ref(grad)
    del weight, grad
    gc.collect()
    assert alive() is not None  # as one of NumPy, for averages
    assert gone() is None
    known = len(foreign._known)
    del updater
    gc.collect()
    assert alive() is None
    assert len(foreign._known) < known


def test_a_buffer_is_released_with_the_plan():
    updater, weight = adam(), floats(1.0)
    updater(0, floats(1.0), weight)
    with pytest.raises(BufferError):
        weight.append(2.0)
    del updater
    gc.collect()
    weight.append(2.0)
    assert len(weight) == 2


READ_ONLY = {
    "bytes as floats": memoryview(np.ones(2, np.float32).tobytes()).cast("f"),
    **({} if OLD else {"DLPack that is read-only": Exported(np.broadcast_to(np.float32(1), 2))}),
    "DLPack without a version": Older(np.ones(2, np.float32)),
    "converted": Converted(np.ones(2, np.float32)),
    "NumPy's": np.broadcast_to(np.float32(1), (2,)),
    "labels of computed numbers": Computed(np.ones(2, np.float32)),
}


@pytest.mark.parametrize("made", READ_ONLY.values(), ids=READ_ONLY)
def test_immutable_arrays_are_gradients_but_no_weights(made):
    updater, weight = optimizer.Updater(optimizer.SGD(learning_rate=1.0)), np.ones(2, np.float32)
    for _ in range(2):
        updater(0, made, weight)
    assert weight.tolist() == [-1, -1]
    kind = r"read-only, an update writes to it: copy it with np.array\(x\)"
    if not isinstance(made, np.ndarray):
        kind = r"a \w+, which is read-only: .* np.array\(x\), and assign it back"
    with pytest.raises(ValueError, match=f"index 0: weight is {kind}"):
        updater(0, np.ones(2, np.float32), made)
    assert updater.optimizer._index_update_count == {0: 2}


class Broken(Exported):
    def __dlpack__(self, **kwargs):
        raise RuntimeError("it is elsewhere")


MEMORY = np.ones(4, np.float32)
BAD = {
    "a dtype": (lambda: bytearray(8), "weight must be float16 or .* got uint8"),
    "integers": (lambda: array.array("i", [1, 2]), "weight must be float16 or .* got int32"),
    "no view": (lambda: Broken(np.ones(2)), "weight is a Broken that NumPy cannot view: it is els"),
    "overlap": (lambda: memoryview(MEMORY)[1:3], "weight and gradient share memory"),
}


@pytest.mark.parametrize(("make", "words"), BAD.values(), ids=BAD)
def test_other_arrays_are_refused(make, words):
    updater = adam()
    with pytest.raises((TypeError, ValueError), match=f"index 'w'.*{words}"):
        updater(["v", "w"], [np.ones(2), memoryview(MEMORY)[:2]], [np.ones(2), make()])
    assert updater.states == {}
    assert (MEMORY == 1).all()


def test_an_optimizer_in_numpy_gets_arrays():
    class Plain(optimizer.Optimizer):
        def update(self, index, weight, grad, state):
            assert type(weight) is type(grad) is np.ndarray
            weight -= grad

    weight = floats(3.0)
    optimizer.Updater(Plain())(0, floats(1.0), weight)
    assert list(weight) == [2.0]


def test_labels_of_pandas_and_xarray():
    pandas, xarray = pytest.importorskip("pandas"), pytest.importorskip("xarray")
    weights = xarray.Dataset({"a": ("x", np.ones(2))})
    adam().step({"a": pandas.Series([1.0, -2.0])}, weights)
    np.testing.assert_allclose(weights["a"].values, [0.9, 1.1])
    with pytest.raises(ValueError, match="weight is a Series, which is read-only"):
        adam().step(np.ones(2), pandas.Series([1.0, 1.0]))


class Noted(np.ndarray):
    """An array with something beside it, which a copy keeps, as PennyLane's have."""

    def __array_finalize__(self, array):
        self.note = getattr(array, "note", None)


def test_updated_keeps_what_an_array_has_beside():
    weight = np.ones(2).view(Noted)
    weight.note = "trainable"
    result = adam().updated({"a": np.ones(2)}, {"a": weight})["a"]
    assert (type(result), result.note, weight.tolist()) == (Noted, "trainable", [1, 1])
    np.testing.assert_allclose(result, 0.9)


# Tensors of torch


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def test_a_view_of_bfloat16_is_updated_in_place(torch):
    """A dtype that NumPy has not."""
    updater = optimizer.Updater(optimizer.SGD(learning_rate=0.5, multi_precision=True))
    whole = torch.ones(4, 3, dtype=torch.bfloat16)
    for step in range(3):
        updater(0, torch.full((2, 2), step, dtype=torch.bfloat16), whole[::2, 1:])
    expected = torch.ones_like(whole)
    expected[::2, 1:] -= 1.5
    assert torch.equal(whole, expected)


def test_gradients_of_torch_without_numbers_of_their_own(torch):
    zero = torch._efficientzerotensor(2)
    for grad, expected in ((torch._neg_view(torch.ones(2)), 2), (zero, 1)):
        weight = torch.ones(2)
        optimizer.Updater(optimizer.SGD(learning_rate=1.0))(0, grad, weight)
        assert weight.tolist() == [expected] * 2


def test_torch_notices_updates(torch):
    weight = torch.nn.Parameter(torch.ones(2))
    loss = (weight * weight).sum()
    before = weight._version
    updater = adam()
    for _ in range(3):
        updater(0, torch.ones(2), weight)
    assert weight._version >= before + 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_that_counts_one_tensor_at_a_time(torch, monkeypatch):
    graph = torch.autograd.graph
    newer, counted = graph.increment_version, []

    def increment_version(tensor):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("increment_version(): argument must be Tensor")
        counted.append(tensor)
        newer(tensor)

    monkeypatch.setattr(graph, "increment_version", increment_version)
    weights = [torch.ones(2), torch.ones(2)]
    adam()([0, 1], [torch.ones(2)] * 2, weights)
    assert [id(tensor) for tensor in counted] == list(map(id, weights))


def test_a_tensor_stays_resizable(torch):
    updater = optimizer.Updater(optimizer.SGD(learning_rate=1.0))
    weight = torch.ones(2)
    updater(0, torch.ones(2), weight)
    weight.resize_(200_000).fill_(1)
    updater(0, torch.ones(200_000), weight)
    updater(0, torch.ones(200_000), weight)
    assert bool((weight == -1).all())
    weight.set_(torch.ones(3))
    updater(0, torch.ones(3), weight)
    weight.data = torch.ones(3, dtype=torch.float64)
    updater(0, torch.ones(3, dtype=torch.float64), weight)
    assert weight.tolist() == [0, 0, 0]
    weight.t_().unsqueeze_(0)
    updater(0, torch.ones(1, 3, dtype=torch.float64), weight)
    assert weight.tolist() == [[-1, -1, -1]]


def test_averages_are_in_the_memory_that_a_tensor_has_now(torch):
    updater = optimizer.Updater(optimizer.SGD(learning_rate=1.0), average=EMA(decay=0.5))
    weight = torch.zeros(2, dtype=torch.complex64)
    updater(0, torch.tensor([1, 1 + 1j]).conj(), weight)
    old = weight.data
    weight.data = old.clone()
    with updater.averaged():
        assert weight.tolist() == [-0.5, -0.5 + 0.5j]
        assert old.tolist() == [-1, -1 + 1j]
    weight.data = torch._neg_view(torch.ones(2))
    with pytest.raises(TypeError, match="index 0: weight is a lazily negated"):
        updater.averaged().__enter__()


def refused(torch):
    one = torch.ones(2)
    matrix = torch.ones(2, 2)
    wrong = torch.sparse_coo_tensor(
        torch.tensor([[2]]), torch.ones(1, 2), (5, 2), check_invariants=True
    )
    return {
        "meta": (one, torch.ones(2, device="meta"), TypeError, "weight must be .* one on meta"),
        "meta gradient": (torch.ones(2, device="meta"), one, TypeError, "gradient must be a tens"),
        "negated": (one, torch._neg_view(one), TypeError, r"weight .* pass x.resolve_neg\(\)"),
        "complex": (one, one.to(torch.complex64), TypeError, "complex64 .* got float32"),
        "conjugate": (one, one.to(torch.complex64).conj(), TypeError, r"pass x.resolve_conj"),
        "integers": (one, one.long(), TypeError, "weight must be float16 or .* got int64"),
        "expanded": (one, torch.ones(1).expand(2), ValueError, "weight share an address"),
        "sparse weight": (matrix, matrix.to_sparse(), TypeError, "weight must be a dense tensor"),
        "sparse elements": (matrix.to_sparse(), matrix, TypeError, "sparse by rows, .* got 2"),
        "CSR": (matrix.to_sparse_csr(), matrix, TypeError, "gradient must be a dense tensor"),
        "no memory": (one, torch._efficientzerotensor(2), TypeError, "no memory"),
        "shape": (torch.ones(3), torch.ones(2), ValueError, r"gradient must have shape \(2,\)"),
        "rows": (wrong, matrix, ValueError, r"must have shape \(2, 2\), got \(5, 2\)"),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
def test_tensors_that_cannot_be_updated(torch, seen):
    for name, (grad, weight, error, words) in refused(torch).items():
        updater = adam()
        if seen:
            shape = (2, 2) if weight.ndim == 2 else (2,)
            updater(0, torch.ones(shape), torch.ones(shape))
        before = copy.deepcopy(updater.states)
        with pytest.raises(error, match=f"index 0: .*{words}"):
            updater(0, grad, weight)
        np.testing.assert_equal(updater.states, before, err_msg=name)
