import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import initializer
from fastopt.initializer import FusedRNN, InitDesc, LSTMBias
from helpers.initializers import named

GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}


@given(length=st.integers(0, 30), forget=st.floats(-2, 2))
def test_the_second_fourth_of_a_bias_is_the_forget_gate(length, forget):
    bias = named(initializer.Zero(), "lstm_bias", (length,), own=LSTMBias(forget))
    gate = slice(length // 4, length // 4 * 2)
    assert (bias[gate] == forget).all()
    bias[gate] = 0
    assert not bias.any()


def test_lstm_bias_warns_that_a_name_gets_zeros():
    bias = np.full(8, 9.0)
    with pytest.warns(UserWarning, match="^lstm_bias gets zeros because of its name") as caught:
        LSTMBias()(InitDesc("lstm_bias"), bias)
    assert caught[0].filename == __file__
    assert not bias.any()


layers = st.builds(
    dict,
    num_hidden=st.integers(1, 4),
    num_layers=st.integers(1, 3),
    mode=st.sampled_from(sorted(GATES)),
    bidirectional=st.booleans(),
)


def packed_size(inputs, num_hidden, num_layers, mode, bidirectional):
    """Length of a packed vector, layer by layer."""
    directions = 2 if bidirectional else 1
    widths = [inputs] + [directions * num_hidden] * (num_layers - 1)
    return sum(directions * GATES[mode] * num_hidden * (w + num_hidden + 2) for w in widths)


@given(kwargs=layers, inputs=st.integers(1, 5))
def test_weights_get_the_inner_initializer_and_biases_zeros_or_the_forget_bias(kwargs, inputs):
    """Their parts cover the packed vector once."""
    init = FusedRNN(initializer.Constant(3), forget_bias=2, **kwargs)
    arr, end = named(init, "rnn_weight", packed_size(inputs, **kwargs)), 0
    layout = init.layout(arr.size)
    for name, shape, start in layout:
        value = 3 if name.endswith("weight") else 2 if name.endswith("_f_bias") else 0
        assert set(arr[start : start + math.prod(shape)]) == {value}
        assert (start, len(shape)) == (end, 2 if value == 3 else 1)
        end += math.prod(shape)
    assert end == arr.size
    assert len({name for name, _, _ in layout}) == len(layout)
    assert layout[0][1] == (kwargs["num_hidden"], inputs)


@given(kwargs=layers, size=st.integers(0, 400))
def test_a_length_is_taken_if_some_number_of_inputs_leads_to_it(kwargs, size):
    init = FusedRNN("ones", **kwargs)
    if size in {packed_size(inputs, **kwargs) for inputs in range(1, 400)}:
        assert init.layout(size)
    else:
        with pytest.raises(ValueError, match=r"size must be \d+ \* \(\d+ \+ inputs\) for FusedRNN"):
            init.layout(size)


def test_without_an_initializer_the_global_one_fills_the_parts():
    fused = FusedRNN(None, num_hidden=1, num_layers=1, mode="rnn_relu")
    for own in [fused, fused.dumps()]:
        arr = named(initializer.Constant(7), "rnn_parameters", (5,), own=own)
        assert arr.tolist() == [7, 7, 7, 0, 0]


def test_parts_are_drawn_one_after_the_other_from_one_generator():
    kwargs = {"num_hidden": 2, "num_layers": 1, "mode": "rnn_tanh", "rng": 0}
    arr = named(FusedRNN('["normal", {"sigma": 1}]', **kwargs), "rnn_weight", (14,))
    assert np.array_equal(arr[:10], np.random.default_rng(0).standard_normal(10))


def test_a_part_that_fails_leaves_the_packed_vector_as_it_was():
    init = FusedRNN(initializer.Constant([1.0, 2.0]), num_hidden=2, num_layers=1, mode="rnn_tanh")
    arr = np.full(14, -9.0)
    with pytest.raises(ValueError, match="l0_i2h_weight: value has shape"):
        init(InitDesc("rnn_weight"), arr)
    assert (arr == -9).all()
