import numpy as np
import pytest

from fastopt import initializer
from helpers.initializers import LIBRARY, made, named
from helpers.refusals import check_refused, each

PLAIN = [made(name, rng=3) for name in LIBRARY]
CHANGED = [
    initializer.Constant([[1, 2], [3, 4]]),
    initializer.Constant(-np.inf),
    initializer.Uniform(np.float32(0.25)),
    initializer.TruncatedNormal(0.5, bound=3),
    initializer.Xavier("truncated", "in", 2),
    initializer.MSRAPrelu("out", 0.5),
    initializer.HeNormal(truncated=False),
    initializer.Orthogonal(2, "normal"),
    initializer.FusedRNN(initializer.Normal(0.5), 2, 1, "lstm", True, 2.5),
]


@pytest.mark.parametrize("init", PLAIN + CHANGED, ids=repr)
def test_the_text_of_an_initializer_makes_its_like(init):
    text = init.dumps()
    again = initializer.create(text, rng=3)
    assert "rng" not in text
    assert (type(again), again.dumps(), repr(again)) == (type(init), text, repr(init))
    assert vars(again).keys() == vars(init).keys()
    if init in CHANGED:
        assert text not in [plain.dumps() for plain in PLAIN]
        return
    shape = (6 * 9,) if isinstance(init, initializer.FusedRNN) else (3, 2, 4, 4)
    assert np.array_equal(named(init, "weight", shape), named(again, "weight", shape))


def test_create_takes_names_in_any_case_texts_and_initializers():
    init = initializer.create("XaVier", magnitude=2)
    assert (type(init), init.magnitude) == (initializer.Xavier, 2)
    assert initializer.create('["uniform", {"scale": 3}]', scale=4).scale == 4
    assert initializer.create(init) is init


WRONG = {
    "Initializer(a={1}).dumps()": r"TypeError: cannot be written as JSON: \{1\}",
    "initializer.create('nosuch')": "ValueError: find initializer 'nosuch'; the names are ",
    'initializer.create(\'["no", {}]\')': "ValueError: Cannot find initializer 'no'",
    "initializer.create(3)": "TypeError: name must be a string or an Initializer, got",
    "initializer.create('[zero')": r'ValueError: is \["name", {arguments}\], got',
    'initializer.create(\'["zero", []]\')': "ValueError: the text of an initializer is",
    "initializer.create('zero', a=1)": "TypeError: Zero takes rng; .*argument 'a'",
    "initializer.create('constant')": "TypeError: Constant takes value, rng; missing",
    "initializer.create(initializer.Zero(), rng=0)":
        r"TypeError: Zero\(\) is an instance and takes no rng",
    "initializer.Zero(a=1)": "TypeError: unexpected keyword argument 'a'",
    "initializer.Uniform(-1)": "ValueError: scale must be .* at least 0, got -1",
    "initializer.Normal(np.nan)": "ValueError: sigma must be a finite number",
    "initializer.TruncatedNormal(1, 0.5)": "ValueError: bound must be .* at least 1",
    "initializer.Orthogonal(1, 'x')": "ValueError: rand_type must be one of .* got 'x'",
    "initializer.Xavier('x')": "ValueError: rnd_type must be one of .* got 'x'",
    "initializer.Xavier('uniform', 'x')": "ValueError: factor_type must be one of",
    "initializer.Xavier(magnitude=-1)": "ValueError: magnitude must be .* at least 0",
    "initializer.MSRAPrelu(slope=np.inf)": "ValueError: slope must be a finite number",
    "initializer.LSTMBias('1')": "TypeError: forget_bias must be a number, got '1'",
    **each("initializer.Constant({})", "TypeError: value must be a real number or an array of them",
           "'one'", "None", "True", "1j", "[[1], [2, 3]]", "['a']"),
    **each("initializer.Normal(rng={})",
           "TypeError: rng must be None, a numpy.random.Generator or a non-neg",
           "'x'", "-1", "1.5", "[-1]"),
    **each("named(initializer.Bilinear(), 'weight', {})",
           r"ValueError: ^weight: bilinear upsampling needs shape \(out, in, hei",
           "()", "(4,)", "(4, 4)", "(1, 1, 1, 4, 4)"),
    **each("named(initializer.Zero(), {})",
           "ValueError: ^.*: names .* endings, one of weight, bias, gamma",
           "'foo'", "'weight_foo'", "'bn_moving_mean'", "''", "'BIAS'"),
    **each("named(initializer.Zero(), 'x', own={})",
           "TypeError: ^x: init must be an initializer, its",
           "3", "['zero', {}]", "initializer.Zero"),
    "named(Initializer(), 'weight')":
        "NotImplementedError: Initializer must define _init_weight",
    "initializer.InitDesc(3)": "TypeError: name must be a string, got 3",
    "initializer.Zero()(3, np.ones(2))": "TypeError: name must be a string, got 3",
    "initializer.InitDesc('a', [1])": r"TypeError: attrs must be a mapping, got \[1\]",
    **each("initializer.{}", "TypeError: only subclasses of Initializer can be registered",
           "register(dict)", "register(abs)", "register('zero')", "register(initializer.Load)",
           "alias('other')(abs)", "alias('other')(initializer.Load)"),
    "initializer.seed('x')": "TypeError: a non-negative seed, got 'x'",
    "initializer.Zero()._init_loc_bias('stn', np.ones(5))":
        r"ValueError: stn: an affine map has shape \(6,\), got \(5,\)",
    "initializer.alias(initializer.Zero)": r"TypeError: names must be strings, got \(<class",
    "initializer.Zero().set_verbosity(True, 3)":
        "TypeError: print_func must be a function of an array, got 3",
    "named(LSTMBias(), 'x_weight', ())": "ValueError: x_weight: LSTMBias needs one dimension or m",
    "FusedRNN(3, 1, 1, 'gru')": "TypeError: init must be an Initializer, its text",
    "FusedRNN(None, 0, 1, 'gru')": "ValueError: num_hidden must be at least 1, got 0",
    "FusedRNN(None, 1, 1.0, 'gru')": "TypeError: num_layers must be an integer",
    "FusedRNN(None, 1, 1, 'rnn')": "ValueError: mode must be one of .* got 'rnn'",
    "FusedRNN(None, 1, 1, 'gru', forget_bias='1')": "TypeError: forget_bias must be a",
    "named(FusedRNN(None, 1, 1, 'rnn_tanh'), 'rnn_weight', (5,))":
        r"ValueError: rnn_weight: FusedRNN\(init=None\) needs a global initializer",
    "named(FusedRNN('ones', 1, 1, 'rnn_tanh'), 'rnn_weight', (5, 1))":
        r"ValueError: rnn_weight: FusedRNN needs a packed vector, got shape \(5, 1\)",
    "named(FusedRNN('ones', 2, 1, 'rnn_tanh'), 'rnn_weight', (9,))":
        r"ValueError: ^rnn_weight: size must be 2 \* \(4 \+ inputs\) for FusedRNN.*, got 9",
}  # fmt: skip


@pytest.mark.parametrize("code", WRONG)
def test_wrong_arguments_are_named_with_what_was_expected(code):
    check_refused(code, WRONG[code], vars(initializer) | globals())
