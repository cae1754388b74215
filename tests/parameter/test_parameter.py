"""Parameters: what they are given, how they are initialized, read and given other numbers."""

import copy
import inspect
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import initializer
from fastopt.device import cpu, cuda
from fastopt.parameter import Constant, DeferredInitializationError, Parameter
from fastopt.sparse import RowSparse
from fastopt.trainer import Trainer
from helpers.refusals import check_refused, each

DTYPES = ["float16", "bfloat16", "float32", "float64"]
lengths = st.integers(1, 4)
shapes = st.lists(lengths, max_size=3).map(tuple)


def made(shape=3, init="zeros", device=None, **kwargs):
    parameter = Parameter("w", shape=shape, **kwargs)
    parameter.initialize(init, device)
    return parameter


# Attributes


GLUON = {
    "name": "weight", "grad_req": "write", "shape": None, "dtype": "float32", "lr_mult": 1.0,
    "wd_mult": 1.0, "init": None, "allow_deferred_init": False, "differentiable": True,
    "stype": "default", "grad_stype": "default",
}  # fmt: skip


def test_arguments_and_defaults_are_those_of_gluon():
    arguments, parameter = inspect.signature(Parameter).parameters.values(), Parameter()
    assert {p.name: p.default for p in arguments if p.kind != p.VAR_KEYWORD} == GLUON
    assert {name: getattr(parameter, name) for name in GLUON} == GLUON
    assert repr(parameter) == "Parameter(name='weight', shape=None, dtype=float32)"


# Initialization


def fill(name, array):
    assert name == "fc_bias"
    array[...] = 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        *(((ones, "zeros", "zeros"), 1) for ones in ("ones", initializer.One(), '["one", {}]')),
        *(((fill, "zeros", "zeros"), 7), ((None, fill, "zeros"), 7), ((None, None, fill), 7)),
        *(((None, "ones", "zeros"), 1), ((None, None, "ones"), 1)),
    ],
)
def test_the_argument_goes_before_the_attribute_and_that_before_the_default(
    arguments, value, dtype
):
    """Whatever the name ends in."""
    init, own, default = arguments
    parameter = Parameter("fc_bias", shape=(2, 3), dtype=dtype, init=own)
    parameter.initialize(init, default_init=default)
    assert parameter.data().dtype.name == dtype
    assert (parameter.data() == value).all()


def test_the_default_is_uniform():
    assert 0.05 < abs(made((50, 50), None).data()).max() <= 0.07


def test_an_initializer_fills_the_parts_of_packed_layers():
    rnn = initializer.FusedRNN(None, num_hidden=2, num_layers=1, mode="lstm")
    for init, default in ((initializer.One(), "uniform"), (None, initializer.One())):
        parameter = Parameter("rnn_weight", shape=64, init=rnn)
        parameter.initialize(init, default_init=default)
        assert (parameter.data()[:48] == 1).all()  # weights
        assert set(parameter.data()[48:]) == {0, 1}  # biases, those of the forget gates are 1


def test_initializing_again_warns_and_does_nothing_unless_forced():
    parameter = made()
    array = parameter.data()
    with pytest.warns(UserWarning, match="'w' is already initialized"):
        parameter.initialize("ones")
    assert parameter.data() is array
    parameter.initialize("ones", force_reinit=True)
    assert parameter.data() is not array
    assert (array == 0).all()


# Deferred initialization


def deferred(shape=(2, 0), **kwargs):
    parameter = Parameter("w", shape=shape, allow_deferred_init=True, **kwargs)
    parameter.initialize("ones", device=[cpu(0), cpu(1)])
    return parameter


def test_setting_the_shape_ends_the_wait():
    """In which a parameter can be cast and moved."""
    parameter, places = deferred((0, 0)), [cpu(2), cpu(1)]
    parameter.cast("float64")
    parameter.reset_device(places)
    parameter.shape = (2, 0)
    with pytest.raises(DeferredInitializationError):
        parameter.data(cpu(2))
    parameter.shape = (2, 3)
    assert parameter.list_device() == places
    for array in parameter.list_data():
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, np.ones((2, 3)))


# Data


def test_data_is_the_live_array():
    parameter = made()
    before = parameter.data()
    parameter.list_data()[0][2] = 6
    np.testing.assert_array_equal(before, [0, 0, 6])
    for values in ([7, 8, 9], RowSparse([5.0], [2], (3,))):
        parameter.set_data(values)
        parameter.cast(np.float32)
        assert parameter.data() is before
        np.testing.assert_array_equal(before, getattr(values, "to_dense", lambda v=values: v)())


@given(shapes, st.sampled_from(DTYPES), st.integers(1, 3), st.booleans())
def test_set_data_writes_to_all_copies_and_ends_the_wait_for_a_shape(shape, dtype, devices, waits):
    places, known = [cpu(i) for i in range(devices)], (0,) * len(shape) if waits else shape
    parameter = Parameter("w", shape=known, dtype=dtype, allow_deferred_init=True)
    parameter.initialize("ones", places)
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
    parameter.set_data(values)
    expected = values.copy()
    values[...] = -1
    for place in places:
        np.testing.assert_array_equal(parameter.data(place).astype(np.float64), expected)
        assert parameter.data(place).dtype.name == dtype


# Devices


def test_the_current_device_chooses_among_copies_and_one_copy_serves_all():
    parameter = made(device=[cpu(0), cpu(1)])
    with cpu(1):
        assert parameter.data() is parameter.list_data()[1]
        assert parameter.grad() is parameter.list_grad()[1]
    assert parameter.data() is parameter.list_data()[0]
    with cpu(5):
        with pytest.raises(RuntimeError, match=r"'w' is not on device cpu\(5\), only on \[cpu"):
            parameter.data()
        assert made().list_device() == [cpu(5)]
    with cpu(6):
        single = made(device=cpu(2))
        assert single.data() is single.list_data()[0]
    with pytest.raises(RuntimeError, match=r"only on \[cpu\(2\)\]"):
        single.data(cpu(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_moving_averages_copies_that_differ_without_overflow(dtype):
    """Equal ones stay equal bit for bit."""
    parameter = made(2, "uniform", [cpu(0), cpu(1), cpu(2)], dtype=dtype)
    before = parameter.data(cpu(0)).tobytes()
    parameter.reset_device([cpu(9), cpu(8), cpu(7)])
    assert parameter.list_device() == [cpu(9), cpu(8), cpu(7)]
    assert {array.tobytes() for array in parameter.list_data()} == {before}
    for number, array in zip((2.0, 6.0, 10.0), parameter.list_data(), strict=True):
        array[...] = [number, 49152]  # a sum that float16 does not have
    parameter.reset_device()
    assert parameter.list_device() == [cpu(0)]
    np.testing.assert_array_equal(parameter.data().astype(np.float64), [6, 49152])


def test_old_spellings_work_and_warn():
    parameter, places = Parameter("w", shape=3), [cpu(1), cpu(2)]

    def old(words, method, *args, **kwargs):
        with pytest.warns(DeprecationWarning, match=words):
            return getattr(parameter, method)(*args, **kwargs)

    old("ctx is deprecated, use device", "initialize", ctx=places)
    assert old("list_ctx is deprecated, use list_device", "list_ctx") == places
    assert old("ctx is deprecated", "data", ctx=cpu(2)) is parameter.list_data()[1]
    assert old("ctx is deprecated", "grad", ctx=cpu(2)) is parameter.list_grad()[1]
    old("reset_ctx is deprecated, use reset_device", "reset_ctx", cpu(3))
    assert parameter.list_device() == [cpu(3)]
    with pytest.raises(TypeError, match="device is given twice"):
        old("ctx is deprecated", "data", device=cpu(3), ctx=cpu(3))


# Types


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_casting_keeps_numbers_and_gradients(old, new):
    parameter = made(3, "ones", [cpu(0), cpu(1)], dtype=old)
    parameter.set_grad([1.5, 2.5, 3.5], cpu(1))
    parameter.dtype = new
    assert parameter.dtype.name == new
    for array in parameter.list_data():
        assert array.dtype == parameter.dtype
        assert (array == 1).all()
    parameter.add_grad([1, 1, 1], cpu(1))
    gradient = parameter.grad(cpu(1))
    assert gradient.dtype == parameter.dtype
    np.testing.assert_array_equal(gradient.astype(np.float64), [2.5, 3.5, 4.5])


def test_bfloat16_goes_by_its_name_and_by_its_type_and_needs_its_package(monkeypatch):
    assert Parameter(dtype="bfloat16").dtype == Parameter(dtype=ml_dtypes.bfloat16).dtype
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="dtype bfloat16 needs the package ml_dtypes"):
        Parameter(dtype="bfloat16")


# Rows


def table(**kwargs):
    parameter = made((5, 2), device=[cpu(0), cpu(1)], stype="row_sparse", **kwargs)
    parameter.set_data(np.arange(10).reshape(5, 2))
    return parameter


@given(st.lists(st.integers(0, 4), max_size=8))
def test_pulled_rows_are_sorted_unique_copies(rows):
    parameter = table()
    trainer = Trainer([parameter])
    wanted = np.array(rows, np.int64)
    one, two = parameter.list_row_sparse_data(wanted)
    for piece in (one, two, parameter.row_sparse_data(wanted)):
        assert piece.indices.tolist() == sorted(set(rows))
        expected = np.zeros((5, 2))
        expected[rows] = np.arange(10).reshape(5, 2)[rows]
        np.testing.assert_array_equal(piece.to_dense(), expected)
        piece.values[...] = -1
    del trainer


def test_rows_need_a_trainer_that_is_alive_and_only_one():
    sparse, dense, row = table(), made(), np.array([1])
    first = Trainer([sparse, dense])
    with pytest.raises(RuntimeError, match="'w' is row-sparse and already belongs"):
        Trainer([dense, sparse])
    sparse._set_trainer(first)
    sparse.reset_device(cpu(4))
    assert sparse.row_sparse_data(row).values.tolist() == [[2, 3]]
    del first
    for need in (lambda: sparse.row_sparse_data(row), sparse.reset_device):
        with pytest.raises(RuntimeError, match="'w' is row-sparse and has no Trainer"):
            need()
    others = Trainer([dense]), Trainer([dense, sparse])
    del others
    Trainer([sparse])


# Copies and constants


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_are_equal_independent_and_without_trainer(copied):
    parameter = table(grad_req="add")
    trainer = Trainer([parameter])
    parameter.add_grad(np.ones((5, 2)), cpu(1))
    twin = copied(parameter)
    Trainer([twin])
    np.testing.assert_array_equal(twin.grad(cpu(1)), 1)
    twin.set_data(np.zeros((5, 2)))
    assert parameter.row_sparse_data(np.array([4])).values.tolist() == [[8, 9]]
    del trainer


def test_a_constant_keeps_its_numbers_and_has_no_gradient():
    values = np.arange(3.0)
    constant = Constant(values)
    values[...] = 7
    assert (constant.name, constant.dtype, constant.shape) == ("const", np.float64, (3,))
    constant.initialize(default_init="ones")
    with pytest.warns(UserWarning, match="'const' keeps grad_req 'null', 'add' is ignored"):
        constant.grad_req = "add"
    constant.grad_req = "null"
    with pytest.raises(RuntimeError, match="Constant 'const' has no gradient"):
        constant.grad()
    Trainer([constant]).step(1)
    np.testing.assert_array_equal(constant.data(), [0, 1, 2])
    constant.set_data([3, 4, 5])
    np.testing.assert_array_equal(constant.data(), [3, 4, 5])
    assert repr(constant) == "Constant(name='const', shape=(3,), dtype=float64)"


def test_constants_of_lists_are_float32_and_integers_stay_integers():
    assert Constant([[1, 2], [3, 4]]).dtype == np.float32
    whole = Constant(np.array([1, 2]))
    whole.initialize()
    assert whole.data().dtype == np.int64
    with pytest.raises(TypeError, match="expected an array of numbers, got 'text'"):
        Constant("text")


# Refusals

WRONG = {
    "ValueError": (
        *("np.ones(4)", "np.ones((3, 1))", "1.0", "RowSparse(np.ones(1), [0], (5,))"),
        "(np.ones(1), np.array([3]))",
    ),
    "TypeError": ("np.ones(3) * 1j", "(np.ones(1), np.array([0.5]))", "'text'", "np.ma.ones(3)"),
}
"""Gradients of a vector of three elements that are refused."""
REFUSED = {
    "Parameter(1)": "TypeError: name must be a string, got 1",
    "Parameter(grad_req='sum')": "ValueError: 'weight': grad_req must be one of",
    "Parameter(shape=1.5)": "TypeError: 'weight': shape must be an integer or a tuple of int.*1.5",
    "Parameter(shape=(2, -2))": "ValueError: 'weight': shape must be at least -1, got -2",
    **each("Parameter(dtype={})", "TypeError: 'weight': dtype must be a type of real numbers",
           "'real'", "None", "'complex64'"),
    "Parameter(dtype='>f4')": "TypeError: 'weight': dtype must have the byte order",
    "Parameter(lr_mult='2')": "TypeError: 'weight': lr_mult must be a number",
    "Parameter(wd_mult=float('nan'))": "ValueError: 'weight': wd_mult must be a finite number",
    "Parameter(init=1)": "TypeError: 'weight': init must be an initializer",
    "Parameter(stype='csr')": "ValueError: 'weight': stype cannot be 'csr'",
    "Parameter(grad_stype='csr')": "ValueError: 'weight': grad_stype cannot be 'csr'",
    "Parameter(stype='dense')": "ValueError: 'weight': stype must be one of",
    **each("setattr(new, 'shape', {})", "ValueError: Parameter 'w': shape",
           "(2, 4)", "(2,)", "(2, 3, 1)", "(0, 3)", "None", "2"),
    "setattr(new, 'shape', (2, '3'))": "TypeError: Parameter 'w': shape",
    "new.reset_device(cpu(1))": "ValueError: 'w' is not initialized, so it cannot move",
    **each("new.{}", "RuntimeError: Parameter 'w' is not initialized",
           "data()", "list_data()", "grad()", "list_grad()", "list_device()",
           "set_data(np.ones((2, 3)))", "add_grad(np.ones((2, 3)))"),
    "made((2, 0))": r"ValueError: 'w' cannot be initialized, its shape is \(2, -1\)",
    **each("waiting.{}()", r"DeferredInitializationError: shape \(2, -1\) has unknown",
           "data", "grad", "list_data", "list_grad"),
    "waiting.set_data(np.zeros((3, 3)))":
        r"ValueError: shape \(3, 3\) does not agree with \(2, -1\)",
    "setattr(waiting, 'shape', (2, '3'))": "TypeError: Parameter 'w': shape",
    "setattr(vector, 'shape', 3)": "ValueError: w",
    **each("{}.initialize('nothing', force_reinit=True)", "ValueError: Cannot find",
           "ones", "waiting"),
    **each("ones.initialize({}, force_reinit=True)", "ValueError: w.*: ", "initializer.Xavier()",
           "device=[cuda(), cpu()]", "device=[]", "device=[cpu(), cpu()]"),
    "ones.initialize(device='cpu', force_reinit=True)": "TypeError: w.*: ",
    **each("ones.set_data({})", "ValueError: Parameter 'w'",
           "np.ones(4)", "np.ones((1, 3))", "np.ones(0)", "1.0"),
    **each("ones.set_data({})", "TypeError: Parameter 'w'",
           "np.ones(3) * 1j", "['a', 'b', 'c']", "np.ma.ones(3)"),
    **{f"{to}.{how}_grad({grad})": f"{error}: Parameter 'w': "
       for to in ("ones", "listed") for how in ("add", "set") for error, grads in WRONG.items()
       for grad in grads},
    "ones.cast('text')": "TypeError: Parameter 'w': dtype must be",
    "ones.row_sparse_data(row)": "RuntimeError: 'w' has stype 'default'.* use data",
    "ones.list_row_sparse_data(row)": "RuntimeError: 'w' has stype 'default'.* use list_data",
    "setattr(ones, 'data', 2)": r"AttributeError: ^Parameter 'w': data cannot be .* set_data\(v",
    "setattr(ones, 'grad', 2)": r"AttributeError: call set_grad\(values\), or add_grad\(values\)",
    "setattr(ones, 'requires_grad', 2)": "AttributeError: set grad_req, to 'null'",
    "setattr(ones, 'initialize', 2)": r"AttributeError: call initialize\(\)",
    "rows.data()": "RuntimeError: 'w' has stype 'row_sparse'.* use row_sparse_data",
    "rows.list_data()": "RuntimeError: 'w' has stype 'row_sparse'.* use list_row_sparse_data",
    **each("rows.row_sparse_data({})", "TypeError: Parameter 'w': row_id must be",
           "[1]", "np.array([1.0])"),
    **each("rows.row_sparse_data({})", "ValueError: Parameter 'w': row_id must be",
           "np.array([5])", "np.array([-1])"),
    "listed.cast('int32')": "TypeError: Parameter 'w': values must be .*, got int32",
}  # fmt: skip


def test_what_is_wrong_is_refused_by_name_and_changes_nothing():
    new, vector = Parameter("w", shape=(2, 3)), Parameter("w", shape=0, allow_deferred_init=True)
    vector.initialize("xavier")
    ones, rows, listed = made(init="ones"), table(), made(grad_stype="row_sparse")
    waiting, trainer = deferred(), Trainer([rows])
    listed.set_grad([5, 5, 5])

    def held():
        arrays = ones.data(), ones.grad(), listed.data(), listed.grad(), *rows._data
        numbers = ones.data().tolist(), ones.grad().tolist(), listed.grad().to_dense().tolist()
        return [*map(id, arrays)], *numbers, new.shape, waiting.shape, vector.shape

    names, before = {"row": np.array([1]), "cuda": cuda, **locals()}, held()
    for code, error in REFUSED.items():
        check_refused(code, error, globals() | names)
        assert held() == before, code
    assert before[1:] == ([1] * 3, [0] * 3, [5] * 3, (2, 3), (2, -1), (-1,))
    new.zero_grad()
    assert issubclass(DeferredInitializationError, RuntimeError)
    assert waiting.list_device() == [cpu(0), cpu(1)]
    assert listed.dtype == np.float32
    assert not hasattr(ones, "requires_grad")
    del trainer
