import copy
import inspect
import logging
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt import initializer
from fastopt.initializer import InitDesc, Initializer, initializer_registry
from fastopt.initializer.base import DESCRIBED
from helpers.initializers import LIBRARY, filled
from helpers.paths import DOCS

ENDINGS = {"weight": 7, "bias": 0, "gamma": 1, "beta": 0, "min": 0, "max": 1}
OF_DESCRIPTIONS = ENDINGS | {"bias_quantize": 0}
OF_PLAIN_NAMES = ENDINGS | {"moving_mean": 0, "moving_var": 1, "moving_inv_var": 0, "moving_avg": 0}
prefixes = st.text(max_size=8).filter(lambda text: not text.startswith(("upsampling", "stn_loc")))


@given(prefix=prefixes, ending=st.sampled_from(sorted(OF_DESCRIPTIONS)))
def test_the_end_of_the_name_decides(prefix, ending):
    arr = filled(initializer.Constant(7), InitDesc(prefix + ending))
    assert set(arr.ravel()) == {OF_DESCRIPTIONS[ending]}


@given(prefix=prefixes, ending=st.sampled_from(sorted(OF_PLAIN_NAMES)))
def test_plain_names_are_deprecated_and_know_moving_averages(prefix, ending):
    with pytest.warns(DeprecationWarning, match="plain names are deprecated, use InitDesc"):
        arr = filled(initializer.Constant(7), prefix + ending)
    assert set(arr.ravel()) == {OF_PLAIN_NAMES[ending]}


def test_the_warning_about_plain_names_points_to_the_caller():
    with pytest.warns(DeprecationWarning, match="plain names") as caught:
        initializer.Zero()("weight", np.empty(2))
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


def test_the_base_class_has_biases():
    assert not filled(Initializer(), InitDesc("bias")).any()


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


def test_a_users_class_registers_under_its_name_and_others(registries):
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


def test_replacing_a_registered_class_warns(registries):
    class Zero(Initializer):
        pass

    with pytest.warns(UserWarning, match="replaces .* in initializer_registry") as caught:
        initializer.register(Zero)
    assert caught[0].filename == __file__
    assert initializer_registry["zero"] is Zero
    assert initializer.register(Zero) is Zero


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


PAGE = DOCS / "initializers.md"


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
