import logging
import math

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from fastopt import initializer
from fastopt.initializer import FusedRNN, InitDesc, Load, LSTMBias, Mixed

GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}


def filled(init, name, shape=(3, 2), dtype=np.float64):
    arr = np.full(shape, -9, dtype)
    init(InitDesc(name), arr)
    return arr


def with_own(init, own, name, shape):
    arr = np.full(shape, -9.0)
    init(InitDesc(name, {"__init__": own}), arr)
    return arr


# LSTMBias


@given(length=st.integers(0, 30), forget=st.floats(-2, 2))
def test_the_second_fourth_of_a_bias_is_the_forget_gate(length, forget):
    bias = with_own(initializer.Zero(), LSTMBias(forget), "lstm_bias", (length,))
    hidden = length // 4
    assert (bias[hidden : 2 * hidden] == forget).all()
    assert not bias[:hidden].any()
    assert not bias[2 * hidden :].any()


def test_lstm_bias_warns_that_a_name_gets_zeros():
    with pytest.warns(UserWarning, match="^lstm_bias gets zeros because of its name") as caught:
        bias = filled(LSTMBias(), "lstm_bias", (8,))
    assert caught[0].filename == __file__
    assert not bias.any()


def test_lstm_bias_needs_a_dimension():
    with pytest.raises(ValueError, match=r"x_weight: LSTMBias needs one dimension or more"):
        filled(LSTMBias(), "x_weight", ())


# FusedRNN

layers = st.fixed_dictionaries(
    {
        "num_hidden": st.integers(1, 4),
        "num_layers": st.integers(1, 3),
        "mode": st.sampled_from(sorted(GATES)),
        "bidirectional": st.booleans(),
    }
)


def packed_size(inputs, num_hidden, num_layers, mode, bidirectional):
    """Length of a packed vector, layer by layer."""
    directions = 2 if bidirectional else 1
    size = 0
    for layer in range(num_layers):
        width = inputs if layer == 0 else directions * num_hidden
        size += directions * GATES[mode] * num_hidden * (width + num_hidden + 2)
    return size


@given(kwargs=layers, inputs=st.integers(1, 5))
def test_parts_cover_the_packed_vector_once(kwargs, inputs):
    size = packed_size(inputs, **kwargs)
    layout = FusedRNN("ones", **kwargs).layout(size)
    assert len({name for name, _, _ in layout}) == len(layout)
    end = 0
    for name, shape, start in layout:
        assert start == end
        assert name.endswith("_weight" if len(shape) == 2 else "_bias")
        end += math.prod(shape)
    assert end == size
    assert layout[0][1] == (kwargs["num_hidden"], inputs)


@given(kwargs=layers, inputs=st.integers(1, 5))
def test_weights_get_the_inner_initializer_and_biases_zeros_or_the_forget_bias(kwargs, inputs):
    init = FusedRNN(initializer.Constant(3), forget_bias=2, **kwargs)
    arr = filled(init, "rnn_weight", packed_size(inputs, **kwargs))
    for name, shape, start in init.layout(arr.size):
        value = 3 if name.endswith("weight") else 2 if name.endswith("_f_bias") else 0
        assert set(arr[start : start + math.prod(shape)]) == {value}


@given(kwargs=layers, size=st.integers(0, 400))
def test_a_length_is_taken_if_some_number_of_inputs_leads_to_it(kwargs, size):
    init = FusedRNN("ones", **kwargs)
    if size in {packed_size(inputs, **kwargs) for inputs in range(1, 400)}:
        assert init.layout(size)
    else:
        with pytest.raises(ValueError, match=r"size must be \d+ \* \(\d+ \+ inputs\) for FusedRNN"):
            init.layout(size)


def test_gates_of_a_gru_are_reset_update_and_candidate():
    names = [name for name, _, _ in FusedRNN("ones", 1, 1, "gru").layout(3 * 4)]
    assert names[:3] == ["l0_i2h_r_weight", "l0_i2h_z_weight", "l0_i2h_o_weight"]


def test_without_an_initializer_the_global_one_fills_the_parts():
    fused = FusedRNN(None, num_hidden=1, num_layers=1, mode="rnn_relu")
    for own in [fused, fused.dumps()]:
        arr = with_own(initializer.Constant(7), own, "rnn_parameters", (5,))
        assert arr.tolist() == [7, 7, 7, 0, 0]


def test_parts_are_drawn_one_after_the_other_from_one_generator():
    kwargs = {"num_hidden": 2, "num_layers": 1, "mode": "rnn_tanh", "rng": 0}
    arr = filled(FusedRNN('["normal", {"sigma": 1}]', **kwargs), "rnn_weight", (14,))
    assert np.array_equal(arr[:10], np.random.default_rng(0).standard_normal(10))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FusedRNN(3, 1, 1, "gru"), TypeError, "init must be an Initializer, its text"),
        (lambda: FusedRNN("no", 1, 1, "gru"), ValueError, "Cannot find initializer 'no'"),
        (lambda: FusedRNN(None, 0, 1, "gru"), ValueError, "num_hidden must be at least 1, got 0"),
        (lambda: FusedRNN(None, 1, 0, "gru"), ValueError, "num_layers must be at least 1, got 0"),
        (lambda: FusedRNN(None, 1, 1.0, "gru"), TypeError, "num_layers must be an integer"),
        (lambda: FusedRNN(None, 1, 1, "rnn"), ValueError, "mode must be one of .* got 'rnn'"),
        (lambda: FusedRNN(None, 1, 1, "gru", forget_bias="1"), TypeError, "forget_bias must be a"),
        (
            lambda: filled(FusedRNN(None, 1, 1, "rnn_tanh"), "rnn_weight", (5,)),
            ValueError,
            r"rnn_weight: FusedRNN\(init=None\) needs a global initializer",
        ),
        (
            lambda: filled(FusedRNN("ones", 1, 1, "rnn_tanh"), "rnn_weight", (5, 1)),
            ValueError,
            r"rnn_weight: FusedRNN needs a packed vector, got shape \(5, 1\)",
        ),
        (
            lambda: filled(FusedRNN("ones", 2, 1, "rnn_tanh"), "rnn_weight", (9,)),
            ValueError,
            r"^rnn_weight: size must be 2 \* \(4 \+ inputs\) for FusedRNN.*, got 9",
        ),
    ],
)
def test_wrong_arguments_of_fused_layers_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_part_that_fails_leaves_the_packed_vector_as_it_was():
    init = FusedRNN(initializer.Constant([1.0, 2.0]), num_hidden=2, num_layers=1, mode="rnn_tanh")
    arr = np.full(14, -9.0)
    with pytest.raises(ValueError, match="l0_i2h_weight: value has shape"):
        init(InitDesc("rnn_weight"), arr)
    assert (arr == -9).all()


# Mixed


def test_the_first_pattern_that_matches_from_the_start_decides():
    init = Mixed(["bias", "fc.*", ".*"], [initializer.Zero(), initializer.Constant(3), "ones"])
    assert set(filled(init, "fc_weight").ravel()) == {3}
    assert set(filled(init, "bias_weight").ravel()) == {0}
    assert set(filled(init, "other_bias_weight").ravel()) == {1}


def test_a_chosen_initializer_goes_by_the_name():
    init = Mixed([".*"], [initializer.Constant(3)])
    assert not filled(init, "fc_bias").any()


def test_the_chosen_initializer_is_the_global_one():
    one, two = initializer.Constant(3), initializer.Constant(5)
    init = Mixed(["a", ".*"], [one, two])
    fused = FusedRNN(None, num_hidden=1, num_layers=1, mode="rnn_relu")
    assert with_own(init, fused, "b", (5,)).tolist() == [5, 5, 5, 0, 0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Mixed([".*"], []), ValueError, "got 1 patterns and 0 initializers"),
        (lambda: Mixed(".*", ["zeros"]), TypeError, r"patterns must be a list, got '\.\*'"),
        (lambda: Mixed([".*"], "ones"), TypeError, "initializers must be a list, got 'ones'"),
        (lambda: Mixed(["a", "("], ["ones"] * 2), ValueError, r"patterns\[1\] must be a regular"),
        (lambda: Mixed([3], ["ones"]), ValueError, r"patterns\[0\] must be a regular expression"),
        (lambda: Mixed(["a"], ["no"]), ValueError, "Cannot find initializer 'no'"),
        (
            lambda: Mixed(["a"], [initializer.Zero]),
            TypeError,
            r"initializers\[0\] must be an initializer, its text or name, or a function",
        ),
        (
            lambda: filled(Mixed(["a", "bias"], ["ones"] * 2), "fc_bias"),
            ValueError,
            r"^fc_bias does not match, from its first character on, any of the patterns 'a', 'bia",
        ),
    ],
)
def test_wrong_arguments_of_mixed_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


# Load

ARRAYS = {
    "arg:fc_weight": np.arange(6, dtype=np.float32).reshape(3, 2),
    "aux:bn_moving_mean": np.ones(2, np.float16),
    "arg:arg:x": np.full(2, 4, np.int64),
    "steps": np.array(5, np.int32),
}


@pytest.fixture(params=["dict", "npz", "safetensors"])
def source(request, tmp_path):
    path = tmp_path / f"arrays.{request.param}"
    if request.param == "npz":
        np.savez(path, **ARRAYS)
    elif request.param == "safetensors":
        safetensors.numpy.save_file(ARRAYS, path)
    return ARRAYS if request.param == "dict" else path


def test_arrays_are_loaded_by_name_without_prefix(source):
    init = Load(source)
    assert filled(init, "fc_weight").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert filled(init, "bn_moving_mean", (2,), np.float32).tolist() == [1, 1]
    assert filled(init, "arg:x", (2,)).tolist() == [4, 4]
    assert filled(init, "steps", (), np.int32) == 5


def test_paths_may_be_strings(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(2))
    assert filled(Load(str(tmp_path / "a.npz")), "x", (2,)).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["fc_weight", "foo"])
def test_loaded_arrays_go_before_names_and_attributes(name):
    assert with_own(Load({name: np.full(2, 5)}), "ones", name, (2,)).tolist() == [5, 5]


@pytest.mark.parametrize("default", [initializer.Constant(3), '["constant", {"value": 3}]'])
def test_other_arrays_get_the_default(default):
    init = Load(ARRAYS, default)
    assert set(filled(init, "other_weight").ravel()) == {3}
    assert not filled(init, "other_bias").any()
    assert with_own(init, "ones", "foo", (2,)).tolist() == [1, 1]


def test_loading_fills_strided_arrays_and_other_precisions():
    arr = np.zeros((6, 4), np.float16)
    Load(ARRAYS)(InitDesc("fc_weight"), arr[::2, 1::2])
    assert arr[::2, 1::2].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert arr.sum() == 15


def test_bfloat16_files_load_into_every_float(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numbers = np.array([1, -2.5, 3e38, np.inf], ml_dtypes.bfloat16)
    safetensors.numpy.save_file({"x": numbers}, tmp_path / "a.safetensors")
    init = Load(tmp_path / "a.safetensors")
    for dtype in [np.float32, np.float64, ml_dtypes.bfloat16]:
        assert np.array_equal(filled(init, "x", 4, dtype), numbers.astype(dtype))
    assert np.array_equal(filled(Load({"x": numbers}), "x", 4, np.float32), numbers.astype("f4"))
    assert np.array_equal(filled(Load({"x": numbers[:2]}), "x", 2, np.float16), [1, -2.5])


def test_loading_is_logged(caplog):
    caplog.set_level(logging.INFO, "fastopt.initializer")
    init = Load(ARRAYS, initializer.One(), verbose=True)
    filled(init, "fc_weight")
    filled(init, "other_weight")
    filled(Load(ARRAYS), "fc_weight")
    assert caplog.messages == [
        "Initialized fc_weight by loading",
        "Initialized other_weight by default",
    ]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda arr: Load(3), TypeError, "param must be a mapping or the path of a file, got 3"),
        (lambda arr: Load("a.params"), ValueError, "param must be a .safetensors or .npz file"),
        (lambda arr: Load({"x": "a"}), TypeError, r"param\['x'\] must hold real numbers, got dtyp"),
        (lambda arr: Load({"x": 1, "arg:x": 2}), ValueError, "param has 'x' twice, with and witho"),
        (lambda arr: Load({}, 3), TypeError, "default_init must be an initializer, its text or"),
        (
            lambda arr: Load({})(InitDesc("x"), arr),
            ValueError,
            "x is not among the loaded arrays, and default_init is None",
        ),
        (
            lambda arr: Load({"x": np.ones((2, 3))})(InitDesc("x"), arr),
            ValueError,
            r"x: the loaded array has shape \(2, 3\), expected \(3, 2\)",
        ),
        (
            lambda arr: Load({"x": np.ones(2)})(InitDesc("x"), arr),
            ValueError,
            r"x: the loaded array has shape \(2,\), expected \(3, 2\)",
        ),
        (
            lambda arr: Load({"x": np.ones((3, 2))})(InitDesc("x"), arr.view(np.int64)),
            TypeError,
            r"x: the loaded array \(float64\) does not fit into int64",
        ),
        (
            lambda arr: Load({"x": np.ones((3, 2))})(InitDesc("x"), arr.tolist()),
            TypeError,
            "x: arr must be a NumPy array, got list",
        ),
    ],
)
def test_wrong_arguments_of_load_are_named_and_change_nothing(call, error, message):
    arr = np.full((3, 2), -9.0)
    with pytest.raises(error, match=message):
        call(arr)
    assert (arr == -9).all()


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_broken_file_is_named(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(ValueError, match=rf"param must be an intact file, got .*a\.{kind}"):
        Load(path)


def test_files_of_other_numbers_are_refused(tmp_path):
    safetensors.numpy.save_file({"x": np.ones(2, bool)}, tmp_path / "a.safetensors")
    with pytest.raises(TypeError, match="param must hold real numbers, got safetensors dtype BOOL"):
        Load(tmp_path / "a.safetensors")


def test_a_missing_file_is_missing(tmp_path):
    for kind in ["npz", "safetensors"]:
        with pytest.raises(FileNotFoundError, match=f"a.{kind}"):
            Load(tmp_path / f"a.{kind}")
