import copy
import inspect
import json
import logging
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import initializer
from fastopt.initializer import InitDesc, Initializer, initializer_registry
from fastopt.initializer.names import DESCRIBED

ENDINGS = {
    "weight": 7,
    "bias": 0,
    "gamma": 1,
    "beta": 0,
    "min": 0,
    "max": 1,
    "bias_quantize": 0,
}
PLAIN = {
    "weight": 7,
    "bias": 0,
    "gamma": 1,
    "beta": 0,
    "min": 0,
    "max": 1,
    "moving_mean": 0,
    "moving_var": 1,
    "moving_inv_var": 0,
    "moving_avg": 0,
}
ENOUGH = {
    "fusedrnn": {"init": "ones", "num_hidden": 2, "num_layers": 1, "mode": "gru"},
    "constant": {"value": 7},
}

prefixes = st.text(max_size=8).filter(lambda text: not text.startswith(("upsampling", "stn_loc")))


def filled(init, desc, shape=(3, 2), dtype=np.float32):
    arr = np.full(shape, 9, dtype)
    init(desc, arr)
    return arr


def made(name, **kwargs):
    return initializer.create(name, **{**ENOUGH.get(name, {}), **kwargs})


@pytest.fixture
def registry():
    before = dict(initializer_registry)
    yield initializer_registry
    initializer_registry.clear()
    initializer_registry.update(before)


LIBRARY = sorted(initializer_registry)


# Dispatch


@given(prefix=prefixes, ending=st.sampled_from(sorted(ENDINGS)))
def test_the_end_of_the_name_decides(prefix, ending):
    arr = filled(initializer.Constant(7), InitDesc(prefix + ending))
    assert set(arr.ravel()) == {ENDINGS[ending]}


@given(prefix=prefixes, ending=st.sampled_from(sorted(PLAIN)))
def test_plain_names_are_deprecated_and_know_moving_averages(prefix, ending):
    with pytest.warns(DeprecationWarning, match="plain names are deprecated, use InitDesc"):
        arr = filled(initializer.Constant(7), prefix + ending)
    assert set(arr.ravel()) == {PLAIN[ending]}


def test_the_warning_about_plain_names_points_to_the_caller():
    with pytest.warns(DeprecationWarning, match="plain names") as caught:
        filled(initializer.Zero(), "weight")
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.filterwarnings("ignore:plain names are deprecated")
def test_plain_names_of_spatial_transformers_and_upsampling():
    init = initializer.Constant(7)
    assert filled(init, "stn_loc_bias", (6,)).tolist() == [1, 0, 0, 0, 1, 0]
    assert not filled(init, "stn_loc_fc_weight").any()
    kernel = filled(init, "upsampling0_bias", (2, 1, 4, 4))
    assert np.array_equal(kernel, filled(initializer.Bilinear(), InitDesc("weight"), (2, 1, 4, 4)))
    with pytest.raises(ValueError, match=r"stn_loc_bias: an affine map has shape \(6,\), got \(5,"):
        filled(init, "stn_loc_bias", (5,))


@pytest.mark.parametrize("name", ["foo", "weight_foo", "bn_moving_mean", "", "BIAS"])
def test_other_names_are_refused_with_the_known_endings(name):
    with pytest.raises(ValueError, match=f"^{name}: names .* endings, one of weight, bias, gamma"):
        filled(initializer.Zero(), InitDesc(name))


def test_quantized_weights_are_integers_of_eight_bits():
    arr = filled(initializer.Zero(rng=0), InitDesc("fc_weight_quantize"), (100, 100), np.int8)
    assert (arr.min(), arr.max()) == (-127, 126)
    assert len(np.unique(arr)) == 254


OWN = [
    '["constant", {"value": 3}]',
    initializer.Constant(3),
    initializer.Mixed([".*"], [lambda name, arr: arr.fill(3)]),
    lambda name, arr: arr.fill(3),
]


@pytest.mark.parametrize("own", OWN, ids=["text", "instance", "mixed", "function"])
@pytest.mark.parametrize("name", ["fc_weight", "fc_bias", "bn_gamma", "foo"])
def test_an_initializer_of_its_own_goes_before_the_name(own, name):
    arr = filled(initializer.Zero(), InitDesc(name, {"__init__": own}))
    assert set(arr.ravel()) == {3}


def test_an_own_function_sees_the_name_without_the_attribute_and_the_global_initializer():
    seen = []
    outer = initializer.Zero()
    own = {"__init__": lambda desc, arr: seen.append((desc, desc.attrs, desc.global_init))}
    filled(outer, InitDesc("x", {**own, "lr_mult": "2"}))
    assert seen == [("x", {"lr_mult": "2"}, outer)]


@pytest.mark.parametrize("own", [3, ["zero", {}], initializer.Zero])
def test_an_own_initializer_must_be_one(own):
    with pytest.raises(TypeError, match=r"^x: attrs\['__init__'\] must be an initializer, its"):
        filled(initializer.Zero(), InitDesc("x", {"__init__": own}))


@pytest.mark.parametrize("own", [None, ""])
def test_an_empty_attribute_leaves_the_array_to_the_name(own):
    assert set(filled(initializer.Zero(), InitDesc("gamma", {"__init__": own})).ravel()) == {1}


HOOKS = {
    "_init_weight": "weight",
    "_init_bias": "bias",
    "_init_gamma": "gamma",
    "_init_beta": "beta",
    "_init_zero": "min",
    "_init_one": "max",
    "_init_quantized_weight": "weight_quantize",
    "_init_quantized_bias": "bias_quantize",
    "_init_default": "foo",
}


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_can_be_overridden_and_no_other_changes(hook):
    class Changed(initializer.Constant):
        pass

    setattr(Changed, hook, lambda self, desc, arr: arr.fill(5))
    for other, name in HOOKS.items():
        if other == "_init_default" and hook != other:
            continue
        arr = filled(Changed(7, rng=0), InitDesc(name))
        assert (set(arr.ravel()) == {5}) == (other == hook)


def test_the_base_class_has_no_weights():
    with pytest.raises(NotImplementedError, match="Initializer must define _init_weight"):
        filled(Initializer(), InitDesc("weight"))
    assert not filled(Initializer(), InitDesc("bias")).any()


# Names


def test_a_description_is_its_name():
    desc = InitDesc("fc_weight", {"a": "b"}, initializer.Zero())
    assert desc == "fc_weight"
    assert {"fc_weight": 1}[desc] == 1
    assert isinstance(desc, str)


def test_a_description_survives_copies_and_keeps_its_own_attributes():
    attrs = {"__init__": "ones"}
    desc = InitDesc("scale", attrs)
    attrs.clear()
    for copied in [copy.deepcopy(desc), pickle.loads(pickle.dumps(desc))]:
        assert (copied, copied.attrs, copied.global_init) == ("scale", {"__init__": "ones"}, None)


def test_a_call_does_not_change_the_description():
    desc = InitDesc("fc_weight")
    filled(initializer.Zero(), desc)
    assert desc.global_init is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InitDesc(3), "name must be a string, got 3"),
        (lambda: InitDesc("a", [1]), r"attrs must be a mapping, got \[1\]"),
        (lambda: initializer.Zero()(3, np.ones(2)), "name must be a string, got 3"),
    ],
)
def test_wrong_descriptions_are_named(make, message):
    with pytest.raises(TypeError, match=message):
        make()


# Arrays


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize(
    ("arr", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "arr must be a NumPy array, got list"),
        (np.ma.ones(3), TypeError, "arr must be a NumPy array, got MaskedArray"),
        (np.ones(3, complex), TypeError, "arr must hold real numbers, got dtype complex128"),
        (np.ones(3, bool), TypeError, "arr must hold real numbers, got dtype bool"),
        (np.broadcast_to(1.0, 3), ValueError, "arr is read-only, an initializer writes to it"),
    ],
    ids=["list", "masked", "complex", "bool", "read-only"],
)
def test_wrong_arrays_are_named(name, arr, error, message):
    with pytest.raises(error, match=f"^fc_weight: {message}"):
        made(name)(InitDesc("fc_weight"), arr)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i4", "i8", "u2", ">f4"])
def test_fixed_values_fill_any_real_dtype(dtype):
    for init, value in [
        (initializer.Zero(), 0),
        (initializer.One(), 1),
        (initializer.Constant(3), 3),
        (initializer.Bilinear(), 1),
    ]:
        arr = filled(init, InitDesc("weight"), (2, 2, 1, 1), np.dtype(dtype).newbyteorder("="))
        assert set(arr.ravel()) == {value}


def test_what_is_no_plain_array_is_filled_too():
    arr = np.zeros((2, 3)).view(np.matrix)
    initializer.One()(InitDesc("weight"), arr)
    assert arr.sum() == 6
    initializer.Normal(rng=0)(InitDesc("weight"), arr)
    assert len(np.unique(arr)) == 6


@pytest.mark.parametrize("name", LIBRARY)
def test_arrays_without_elements_are_left_alone(name):
    if name != "fusedrnn":
        filled(made(name), InitDesc("weight"), (2, 0, 3, 3))
        filled(made(name), InitDesc("weight"), (0, 2, 3, 3))


def test_constant_repeats_arrays_and_keeps_a_copy():
    value = np.array([[1.0], [2.0]])
    init = initializer.Constant(value)
    value[:] = 9
    assert filled(init, InitDesc("weight"), (2, 3)).tolist() == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    ("value", "dtype", "error", "message"),
    [
        ([1, 2, 3], "f4", ValueError, r"^weight: value has shape \(3,\), which does not fit \(2,"),
        (np.ones((1, 2, 2)), "f4", ValueError, r"value has shape \(1, 2, 2\)"),
        (0.5, "i4", TypeError, r"^weight: value \(float64\) does not fit into int32"),
        (200, "i1", TypeError, r"^weight: value \(int64\) does not fit into int8"),
        (-1, "u1", TypeError, "does not fit into uint8"),
    ],
)
def test_constants_that_do_not_fit_are_refused_and_change_nothing(value, dtype, error, message):
    arr = np.full((2, 2), 9, dtype)
    with pytest.raises(error, match=message):
        initializer.Constant(value)(InitDesc("weight"), arr)
    assert (arr == 9).all()


@pytest.mark.parametrize("value", ["one", None, True, 1j, [[1], [2, 3]], ["a"]])
def test_constants_are_real_numbers(value):
    with pytest.raises(TypeError, match="value must be a real number or an array of them, got"):
        initializer.Constant(value)


@given(factor=st.integers(1, 6), channels=st.integers(1, 3))
def test_bilinear_upsampling_keeps_a_constant_image(factor, channels):
    """The weights that meet in one pixel of the output sum up to 1."""
    size = 2 * factor - factor % 2
    kernel = filled(initializer.Bilinear(), InitDesc("weight"), (channels, 1, size, size), "f8")
    padded = np.pad(kernel[-1, 0], (0, 2 * factor - size))
    for row in range(factor):
        for column in range(factor):
            assert padded[row::factor, column::factor].sum() == pytest.approx(1)


@pytest.mark.parametrize("shape", [(), (4,), (4, 4), (1, 1, 1, 4, 4)])
def test_bilinear_upsampling_needs_four_dimensions(shape):
    with pytest.raises(
        ValueError, match=r"^weight: bilinear upsampling needs shape \(out, in, hei"
    ):
        filled(initializer.Bilinear(), InitDesc("weight"), shape)


# Text


@pytest.mark.parametrize("name", LIBRARY)
def test_the_text_of_an_initializer_makes_its_like(name):
    init = made(name, rng=3)
    text = init.dumps()
    assert "rng" not in text
    again = initializer.create(text, rng=3)
    assert (type(again), again.dumps(), repr(again)) == (type(init), text, repr(init))
    shape = (3, 2, 4, 4) if name != "fusedrnn" else (6 * 9,)
    arrays = [filled(i, InitDesc("weight"), shape, np.float64) for i in (init, again)]
    assert np.array_equal(*arrays)


CHANGED = [
    initializer.Constant([[1, 2], [3, 4]]),
    initializer.Constant(np.float32(0.5)),
    initializer.Constant(-np.inf),
    initializer.Uniform(np.float32(0.25)),
    initializer.TruncatedNormal(0.5, bound=3),
    initializer.Xavier("truncated", "in", 2),
    initializer.MSRAPrelu("out", 0.5),
    initializer.HeNormal(truncated=False),
    initializer.Orthogonal(2, "normal"),
    initializer.FusedRNN(initializer.Normal(0.5), 2, 1, "lstm", True, 2.5),
]


@pytest.mark.parametrize("init", CHANGED, ids=repr)
def test_the_text_holds_all_arguments(init):
    assert vars(initializer.create(init.dumps())).keys() == vars(init).keys()
    assert initializer.create(init.dumps()).dumps() == init.dumps()
    assert (
        initializer.create(init.dumps()).dumps()
        != type(init)(**ENOUGH.get(type(init).__name__.lower(), {})).dumps()
    )


def test_text_of_known_initializers():
    texts = {
        initializer.Normal(0.5, rng=1): ["normal", {"sigma": 0.5}],
        initializer.MSRAPrelu(): ["msraprelu", {"factor_type": "avg", "slope": 0.25}],
        initializer.HeUniform(): ["heuniform", {}],
        initializer.Constant(np.arange(2)): ["constant", {"value": [0, 1]}],
    }
    for init, text in texts.items():
        assert json.loads(init.dumps()) == text


def test_arrays_in_a_users_arguments_become_lists_and_other_things_are_refused():
    assert Initializer(a=np.arange(2), b=np.int8(3)).dumps() == (
        '["initializer", {"a": [0, 1], "b": 3}]'
    )
    with pytest.raises(TypeError, match=r"cannot be written as JSON: \{1\}"):
        Initializer(a={1}).dumps()


def test_create_takes_names_in_any_case_texts_and_initializers():
    init = initializer.create("XaVier", magnitude=2)
    assert (type(init), init.magnitude) == (initializer.Xavier, 2)
    assert initializer.create('["uniform", {"scale": 3}]', scale=4).scale == 4
    assert initializer.create(init) is init


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: initializer.create("nosuch"), ValueError, "find initializer 'nosuch'; there are "),
        (lambda: initializer.create('["no", {}]'), ValueError, "Cannot find initializer 'no'"),
        (lambda: initializer.create(3), TypeError, "name must be a string or an Initializer, got"),
        (lambda: initializer.create("[zero"), ValueError, r'is \["name", {arguments}\], got'),
        (lambda: initializer.create("[]"), ValueError, r"got '\[\]'"),
        (lambda: initializer.create('["zero", []]'), ValueError, "the text of an initializer is"),
        (lambda: initializer.create("zero", a=1), TypeError, "Zero takes rng; .*argument 'a'"),
        (lambda: initializer.create("constant"), TypeError, "Constant takes value, rng; missing"),
        (
            lambda: initializer.create(initializer.Zero(), rng=0),
            TypeError,
            r"Zero\(\) is made already and takes no rng",
        ),
        (lambda: initializer.Zero(a=1), TypeError, "unexpected keyword argument 'a'"),
        (lambda: initializer.Uniform(-1), ValueError, "scale must be .* at least 0, got -1"),
        (lambda: initializer.Uniform("1"), TypeError, "scale must be a number, got '1'"),
        (lambda: initializer.Normal(np.nan), ValueError, "sigma must be a finite number"),
        (lambda: initializer.Normal(-0.1), ValueError, "sigma must be .* at least 0, got -0.1"),
        (lambda: initializer.TruncatedNormal(-1), ValueError, "sigma must be .* at least 0"),
        (lambda: initializer.TruncatedNormal(1, 0.5), ValueError, "bound must be .* at least 1"),
        (lambda: initializer.Orthogonal(-1), ValueError, "scale must be .* at least 0"),
        (lambda: initializer.Orthogonal(1, "x"), ValueError, "rand_type must be one of .* got 'x'"),
        (lambda: initializer.Xavier("x"), ValueError, "rnd_type must be one of .* got 'x'"),
        (lambda: initializer.Xavier("uniform", "x"), ValueError, "factor_type must be one of"),
        (lambda: initializer.Xavier(magnitude=-1), ValueError, "magnitude must be .* at least 0"),
        (lambda: initializer.MSRAPrelu(slope=np.inf), ValueError, "slope must be a finite number"),
        (lambda: initializer.LSTMBias("1"), TypeError, "forget_bias must be a number, got '1'"),
    ],
)
def test_wrong_arguments_are_named_with_what_was_expected(make, error, message):
    with pytest.raises(error, match=message):
        make()


# Registry


def test_a_users_class_registers_under_its_name_and_others(registry):
    @initializer.register
    @initializer.alias("Mine", "own")
    class MyInit(Initializer):
        def __init__(self, value=2, rng=None):
            super().__init__(rng=rng, value=value)
            self.value = value

        def _init_weight(self, _, arr):
            arr[:] = self.value

    for name in ["myinit", "mine", "OWN", MyInit(2).dumps()]:
        assert set(filled(initializer.create(name), InitDesc("weight")).ravel()) == {2}
    arr = filled(initializer.Zero(), InitDesc("foo", {"__init__": '["own", {"value": 4}]'}))
    assert set(arr.ravel()) == {4}


def test_replacing_a_registered_class_warns(registry):
    class Zero(Initializer):
        pass

    with pytest.warns(UserWarning, match="replaces .* in initializer_registry") as caught:
        initializer.register(Zero)
    assert caught[0].filename == __file__
    assert registry["zero"] is Zero
    assert initializer.register(Zero) is Zero


@pytest.mark.parametrize("wrong", [dict, abs, "zero", initializer.Load])
def test_only_initializers_register(registry, wrong):
    for decorate in [initializer.register, initializer.alias("other")]:
        with pytest.raises(TypeError, match="only subclasses of Initializer can be registered"):
            decorate(wrong)


def test_other_names_of_a_class_are_strings():
    with pytest.raises(TypeError, match=r"names must be strings, got \(<class"):
        initializer.alias(initializer.Zero)


# The guide

PAGE = Path(__file__).parents[1] / "docs" / "initializers.md"


def call_of(klass):
    """The call that makes an initializer, as the guide writes it."""
    parameters = [p for p in inspect.signature(klass).parameters.values() if p.name != "rng"]
    arguments = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace("'", '"')
        for p in parameters
    ]
    return f"{klass.__name__}({', '.join(arguments)})"


def test_the_guide_lists_every_initializer_with_its_arguments():
    rows = re.findall(r"^\|(.*?)\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = re.findall(r"`(\w+\(.*?\))`", "\n".join(rows))
    assert sorted(listed) == sorted({call_of(initializer_registry[name]) for name in LIBRARY})


def test_the_guide_lists_every_ending_with_its_hook():
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert {f"*{ending}": hook for ending, hook in listed} == DESCRIBED


# Verbosity


def test_verbosity_logs_name_reason_and_size(caplog):
    caplog.set_level(logging.INFO, "fastopt.initializer")
    init = initializer.Constant(3)
    assert init.set_verbosity(True) is init
    filled(init, InitDesc("fc_weight"))
    filled(init, InitDesc("fc_bias"))
    filled(init, InitDesc("foo", {"__init__": "ones"}))
    filled(init, InitDesc("empty_weight"), (0,))
    filled(init.set_verbosity(True, lambda arr: str(arr.shape)), InitDesc("fc_gamma"))
    filled(init.set_verbosity(False), InitDesc("fc_weight"))
    assert caplog.messages == [
        "Initialized fc_weight as weight: 3",
        "Initialized fc_bias as bias: 0",
        "Initialized foo as ones: 1",
        "Initialized empty_weight as weight: 0",
        "Initialized fc_gamma as gamma: (3, 2)",
    ]


def test_verbosity_takes_a_function():
    with pytest.raises(TypeError, match="print_func must be a function of an array, got 3"):
        initializer.Zero().set_verbosity(True, 3)
