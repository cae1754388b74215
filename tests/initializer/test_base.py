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
from helpers.golden import MANIFEST, outcome_of_initializer
from helpers.initializers import LIBRARY, filled, named
from helpers.paths import DOCS

ENDINGS = {"weight": 7, "bias": 0, "gamma": 1, "beta": 0, "min": 0, "max": 1}
OF_DESCRIPTIONS = ENDINGS | {"bias_quantize": 0}
OF_PLAIN_NAMES = ENDINGS | {"moving_mean": 0, "moving_var": 1, "moving_inv_var": 0, "moving_avg": 0}
prefixes = st.text(max_size=8).filter(lambda text: not text.startswith(("upsampling", "stn_loc")))


@given(prefixes, st.sampled_from(sorted(OF_DESCRIPTIONS)), st.sampled_from([None, ""]))
def test_the_end_of_the_name_decides(prefix, ending, own):
    arr = named(initializer.Constant(7), prefix + ending, own=own)
    assert set(arr.ravel()) == {OF_DESCRIPTIONS[ending]}


@given(prefix=prefixes, ending=st.sampled_from(sorted(OF_PLAIN_NAMES)))
def test_plain_names_are_deprecated_and_know_moving_averages(prefix, ending):
    arr = np.full(3, 9)
    words = "plain names are deprecated, use InitDesc"
    with pytest.warns(DeprecationWarning, match=words) as caught:
        initializer.Constant(7)(prefix + ending, arr)
    assert set(arr) == {OF_PLAIN_NAMES[ending]}
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.filterwarnings("ignore:plain names are deprecated")
def test_the_bias_of_a_spatial_transformer_is_the_identity():
    assert filled(initializer.Zero(), "stn_loc_bias", (6,)).tolist() == [1, 0, 0, 0, 1, 0]


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
    assert (named(initializer.Zero(), name, own=own) == 3).all()


def test_an_own_function_sees_the_name_without_the_attribute_and_the_global_initializer():
    seen, outer = [], initializer.Zero()
    own = {"__init__": lambda desc, arr: seen.append((desc, desc.attrs, desc.global_init))}
    given = InitDesc("x", {**own, "lr_mult": "2"})
    filled(outer, given)
    assert seen == [("x", {"lr_mult": "2"}, outer)]
    assert given.global_init is None


HOOKS = {hook: ending[1:] for ending, hook in DESCRIBED.items()} | {"_init_default": "foo"}


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_can_be_overridden_and_no_other_changes(hook):
    kind = type("Changed", (initializer.Constant,), {hook: lambda self, desc, arr: arr.fill(5)})
    for other, name in HOOKS.items():
        if other == "_init_default" and hook != other:
            continue
        arr = filled(kind(7, rng=0), InitDesc(name))
        assert (set(arr.ravel()) == {5}) == (other == hook)


def test_a_description_is_its_name():
    """With attributes of its own, which copies have too."""
    attrs = {"__init__": "ones"}
    desc = InitDesc("scale", attrs)
    attrs.clear()
    for copied in [desc, copy.deepcopy(desc), pickle.loads(pickle.dumps(desc))]:
        assert (copied, copied.attrs, copied.global_init) == ("scale", {"__init__": "ones"}, None)
        assert {"scale": 1}[copied] == 1
        assert isinstance(copied, str)


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
        assert (named(initializer.create(name), "weight") == 2).all()
    assert (named(initializer.Zero(), "foo", own='["own", {"value": 4}]') == 4).all()


def test_replacing_a_registered_class_warns(registries):
    kind = type("Zero", (Initializer,), {})
    with pytest.warns(UserWarning, match="replaces .* in initializer_registry") as caught:
        initializer.register(kind)
    assert caught[0].filename == __file__
    assert initializer_registry["zero"] is kind is initializer.register(kind)


def test_verbosity_logs_name_reason_and_size(caplog):
    caplog.set_level(logging.INFO, "fastopt.initializer")
    init = initializer.Constant(3)
    assert init.set_verbosity(True) is init
    for desc in (InitDesc("fc_weight"), InitDesc("fc_bias"), InitDesc("foo", {"__init__": "ones"})):
        filled(init, desc)
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


PAGE = (DOCS / "initializers.md").read_text(encoding="utf-8")


def call_of(klass):
    """The call that makes an initializer, as the guide writes it."""
    given = [p for p in inspect.signature(klass).parameters.values() if p.name != "rng"]
    bare = inspect.Signature([p.replace(annotation=p.empty) for p in given])
    return f"{klass.__name__}{bare}".replace("'", '"')


def test_the_guide_lists_every_initializer_with_its_arguments():
    rows = re.findall(r"^\|(.*?)\|", PAGE, re.MULTILINE)
    listed = re.findall(r"`(\w+\(.*?\))`", "\n".join(rows))
    assert sorted(listed) == sorted({call_of(initializer_registry[name]) for name in LIBRARY})


def test_the_guide_lists_every_ending_with_its_hook():
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE, re.M)
    assert {f"*{ending}": hook for ending, hook in listed} == DESCRIBED


CASES = {case["id"]: case for case in MANIFEST["initializer_cases"]}


@pytest.mark.filterwarnings("ignore:plain names are deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* gets zeros because of its name:UserWarning")
def test_every_case_passes_and_none_is_skipped():
    """What fails in the newest MXNet fails here too, but for the text of fused layers."""
    ends = {name: outcome_of_initializer(case) for name, case in CASES.items()}
    assert len(ends) == 343
    assert "differs" not in ends.values()
    assert {ends[name] for name, case in CASES.items() if case["category"] == "core"} == {"same"}
    recommended = {name for name, case in CASES.items() if case.get("alt")}
    assert {name for name in ends if ends[name] == "recommended"} == recommended
    failing = [
        (ends[name], "works" if case["kind"] == "fusedrnn" else "raises")
        for name, case in CASES.items()
        if "error" in case and "1.9.1" in (case["mxnet"], *case["also_identical_in"])
    ]
    assert len(failing) > 50
    assert all(end == expected for end, expected in failing)


@pytest.mark.parametrize(
    "case", [case for case in CASES.values() if "layout" in case], ids=lambda case: case["id"]
)
def test_layout_of_packed_layers(case):
    name, kwargs = case["init"]
    layout = initializer.create(name, **kwargs).layout(*case["shape"])
    assert [[part, list(shape), start] for part, shape, start in layout] == case["layout"]


def test_the_guide_mentions_every_quirk_of_the_cases():
    quirks = {case["quirk"] for case in CASES.values() if "quirk" in case}
    assert quirks
    assert quirks <= set(re.findall(r"`(Q-[A-Z0-9-]+)`", PAGE))
