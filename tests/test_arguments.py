"""One description of each argument: constructor, assignment and restoration refuse the same."""

import copy
import inspect
import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from fastopt import arguments, lr_scheduler, optimizer
from fastopt.checkpoint import CheckpointError, dumps, loads
from fastopt.optimizer import Optimizer
from helpers.refusals import check_refused
from helpers.schedules import EXAMPLES

OPTIMIZERS = {
    klass.__name__: klass
    for klass in Optimizer.opt_registry.values()
    if klass.__module__.startswith("fastopt.") and klass.__name__ != "ccSGD"
}
SCHEDULES = {type(each).__name__: each for each in (*EXAMPLES, lr_scheduler.LRScheduler())}
ODD = ("x", None, math.nan, -1, 1.0, 7, 0, 10**400, [], {0: 1}, np.ones(2), b"x", True)
"""Values that are wrong for some arguments."""


def test_every_schedule_is_tested():
    assert {*SCHEDULES} == {*lr_scheduler.scheduler_registry} | {"LRScheduler"}


def test_bounds_are_allowed():
    assert [arguments.number("x", end, least=0, most=1) for end in (0, 1)] == [0, 1]


def refusal(function, *args, **kwargs):
    """Error of a call, or None; no other kind of exception."""
    try:
        function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return error
    return None


def parameter_of(klass, attribute):
    """Name of the constructor's argument that an attribute keeps, if it has the same values."""
    name = {"lr": "learning_rate", "float_stable_eps": "eps"}.get(attribute, attribute)
    names = set(inspect.signature(klass).parameters) | set(inspect.signature(Optimizer).parameters)
    return name if name in names else None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_constructor_refuses_no_assignment_and_no_checkpoint_brings_in(name):
    for attribute, check in OPTIMIZERS[name]._arguments.items():
        if name == "Adam" or Optimizer._arguments.get(attribute) is not check:
            for odd in ODD:  # one description of the base class serves all of them
                check_odd(OPTIMIZERS[name], attribute, check, odd)


def check_odd(klass, attribute, check, odd):
    made = klass()
    before = made.__getstate__()
    error = refusal(check, attribute, odd)
    told = refusal(setattr, made, attribute, odd)
    argument = parameter_of(klass, attribute)
    if error is None and told is not None:  # it contradicts the other attributes
        error = refusal(klass, **{argument: odd})
    assert (type(told), str(told)) == (type(error), str(error))
    assert error is None or made.__getstate__() == before
    if argument and odd is not None:
        by_constructor = refusal(klass, **{argument: odd})
        assert error is None or type(by_constructor) is type(error)
    if error is not None:
        saved = optimizer.get_updater(klass()).states_dict()
        saved["attributes"][attribute] = odd
        updater = optimizer.get_updater(made)
        with pytest.raises(CheckpointError, match=str(error)[:12]):
            updater.load_states_dict(saved)
        assert made.__getstate__() == before


CONTRADICTIONS = [
    ("RMSProp", {"centered": True}, "momentum", 0.5, "momentum must be 0"),
    ("SGD", {"formula": "torch", "dampening": 0.5}, "formula", "mxnet", "needs formula='torch'"),
    ("SGD", {}, "corrected_decay", 0.1, "needs decoupled decay"),
    ("SGD", {"decouple": True, "corrected_decay": 0.1}, "decouple", False, "needs decoupled decay"),
    ("AdamW", {"cautious_decay": True, "lazy_update": True}, "sparse_decay", "dense", "touched"),
    ("Muon", {"fallback": "adamw", "fallback_for": "x"}, "fallback", None, "needs a fallback"),
    ("CAME", {}, "state_dtype", "bfloat16", "state_dtype must be None"),
]
"""A class, its arguments, an assignment that contradicts them, and what the error says."""


@pytest.mark.parametrize(("name", "given", "attribute", "value", "words"), CONTRADICTIONS)
def test_an_assignment_that_contradicts_other_attributes_changes_nothing(
    name, given, attribute, value, words
):
    made = OPTIMIZERS[name](**given)
    before = made.__getstate__()
    with pytest.raises(ValueError, match=words):
        setattr(made, attribute, value)
    assert made.__getstate__() == before


@pytest.mark.parametrize("name", SCHEDULES)
def test_attributes_of_schedules_too(name):
    for (attribute, check), odd in product(type(SCHEDULES[name])._arguments.items(), ODD):
        made = copy.deepcopy(SCHEDULES[name])
        before = dict(vars(made))
        error = refusal(check, attribute, odd)
        told = refusal(setattr, made, attribute, odd)
        if error is None and told is not None:  # it contradicts the other attributes
            other = copy.copy(made)
            vars(other)[attribute] = check(attribute, odd)
            error = refusal(other.check_together)
        assert (type(told), str(told)) == (type(error), str(error))
        assert error is None or vars(made) == before
        if error is not None and name != "LRScheduler" and not isinstance(odd, (bytes, np.ndarray)):
            vars(made)[attribute] = odd
            with pytest.raises(CheckpointError):
                loads(dumps(made))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_that_lacks_an_attribute_is_refused(name):
    klass = OPTIMIZERS[name]
    saved = optimizer.get_updater(klass()).states_dict()
    later = {each.stored or argument for argument, each in klass.declared.items() if each.new}
    for attribute in saved["attributes"].keys() - later:
        some = copy.deepcopy(saved)
        del some["attributes"][attribute]
        with pytest.raises(CheckpointError, match=attribute):
            optimizer.get_updater(klass()).load_states_dict(some)
    made = klass()
    del made.wd
    with pytest.raises(CheckpointError, match=f"the saved {name} lacks wd"):
        loads(dumps({"states": {}, "optimizer": made}))


def test_arguments_that_a_users_class_got_later_take_their_defaults():
    class Mine(optimizer.SGD):
        first: float = arguments.arg(default=1.0)

    saved = optimizer.get_updater(Mine()).states_dict()

    class Mine(optimizer.SGD):
        first: float = arguments.arg(default=1.0)
        later: float = arguments.arg(default=2.0)

    updater = optimizer.get_updater(Mine(later=3.0))
    with pytest.warns(UserWarning, match=r"saved Mine lacks arguments, .* defaults: later=2.0$"):
        updater.load_states_dict(saved)
    assert updater.optimizer.later == 2


HIDING = "rule", "hyper", "forms", "update", "param_dict", "learning_rate", "native", "__class__"


@pytest.mark.parametrize(("name", "attribute"), [("nadam", "per_index"), *product(["sgd"], HIDING)])
def test_no_attribute_of_a_checkpoint_hides_one_of_the_class(name, attribute):
    updater = optimizer.get_updater(optimizer.create(name))
    saved = updater.states_dict()
    saved["attributes"][attribute] = {}
    before = dict(vars(updater.optimizer))
    with pytest.raises(CheckpointError, match=f"cannot store an attribute '{attribute}'"):
        updater.load_states_dict(saved)
    assert vars(updater.optimizer) == before


@pytest.mark.parametrize(("changes", "words"), [
    ({"sparse_decay": "catch_up"}, "needs decoupled decay"),
    ({"sparse_decay": "dense", "lazy_update": False}, "needs lazy updates"),
    ({"lr_scheduler": 3}, "lr_scheduler must be a function"),
    ({"num_update": 2**63}, "num_update must be at most"),
    ({"_index_update_count": {0: -1}}, r"_index_update_count\[0\] must be at least 0"),
    ({"_index_update_count": [1]}, "_index_update_count must be a table"),
    ({"lr_mult": {"a": math.inf}}, r"lr_mult\['a'\] must be a finite number"),
    ({"sym_info": ({"a": {"__lr_mult__": "x"}}, ["a"])}, "could not convert"),
    ({"sym_info": "ab"}, "sym_info must be a pair"),
])  # fmt: skip
def test_attributes_of_a_checkpoint_fit_together(changes, words):
    updater = optimizer.get_updater(optimizer.SGD())
    saved = updater.states_dict()
    saved["attributes"].update(changes)
    with pytest.raises(CheckpointError, match=words):
        updater.load_states_dict(saved)


def test_attributes_of_a_schedule_fit_together():
    for made, attribute, value in [
        (lr_scheduler.CosineScheduler(9), "warmup_steps", 9),
        (lr_scheduler.PolyScheduler(9), "warmup_begin_lr", 1.0),
        (lr_scheduler.JoinedScheduler([lr_scheduler.PolyScheduler(3)], []), "boundaries", [3]),
    ]:
        vars(made)[attribute] = value
        with pytest.raises(CheckpointError, match="must be"):
            loads(dumps(made))
    made = lr_scheduler.FactorScheduler(3)
    vars(made)["nosuch"] = 1
    with pytest.raises(CheckpointError, match="FactorScheduler has no attribute nosuch"):
        loads(dumps(made))


def test_an_attribute_defined_by_the_user_is_restored_if_the_class_has_it():
    old, new = optimizer.SGD(), optimizer.SGD()
    old.note, new.note = "second run", ""
    saved = optimizer.get_updater(old).states_dict()
    for made in (new, type("SGD", (optimizer.SGD,), {"note": 1})()):
        optimizer.get_updater(made).load_states_dict(saved)
        assert made.note == "second run"
    with pytest.raises(CheckpointError, match="SGD has no attribute note; set it before a load"):
        optimizer.get_updater(optimizer.SGD()).load_states_dict(saved)


class Plain(Optimizer):
    """Describes nothing."""

    damping = 0.5
    words = ()

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.damping, self.words, self.step_sizes = 0.25, ["a"], {0: (1, None)}

    def update(self, index, weight, grad, state):
        self._update_count(index)
        weight -= self.damping * grad


def test_a_class_of_the_users_needs_no_descriptions():
    old, new = Plain(wd=0.5), Plain()
    old.words, old.anything = {"b": math.nan}, np.arange(3)
    optimizer.get_updater(new).load_states_dict(optimizer.get_updater(old).states_dict())
    assert (new.damping, new.step_sizes, new.wd) == (0.25, {0: (1, None)}, 0.5)
    np.testing.assert_equal((new.words, new.anything), (old.words, old.anything))


class Described(Plain):
    """Adds a description to those of its bases."""

    arguments = {"power": arguments.Real(least=1)}  # noqa: RUF012

    def __init__(self, power=2.0, **kwargs):
        super().__init__(**kwargs)
        self.power = power


def test_a_class_of_the_users_may_describe_its_arguments():
    with pytest.raises(ValueError, match="power must be a finite number, at least 1, got 0"):
        Described(power=0)
    made = Described(power=3)
    with pytest.raises(TypeError, match="wd must be a number"):
        made.wd = "x"
    with pytest.raises(TypeError, match=r"Wrong\.arguments must map names to descriptions"):
        type("Wrong", (Optimizer,), {"arguments": {"power": 3}})


WRONG = {
    "Real()('x', Fraction(10**400))": "ValueError: must be in the range of float64",
    "Real(least=0, below=1)('x', 1)": "ValueError: at least 0, below 1, got 1",
    "Integer(most=3)('x', 4)": "ValueError: must be at most 3, got 4",
    "ListOf(FLAG)('x', [True, 1])": r"TypeError: x\[1\] must be True or",
    "ListOf(FLAG)('x', ())": "TypeError: x must be a list",
    "TableOf(Real())('x', {0: 'a'})": r"TypeError: x\[0\] must be a number",
    "TableOf(Real())('x', {(): 1})": "TypeError: x must have indices or names",
    "TableOf(Real())('x', [])": "TypeError: x must be a table",
    "Choice('a')('x', [])": r"ValueError: x must be one of \('a',\), got \[\]",
}


@pytest.mark.parametrize("code", WRONG)
def test_descriptions_say_what_they_want(code):
    check_refused(code, WRONG[code], {**vars(arguments), "Fraction": Fraction})


class Listed(Optimizer):
    """An argument whose default can be changed in place."""

    parts: list[float] = arguments.arg(default=[1], check=arguments.ListOf(arguments.Real()))

    def update(self, index, weight, grad, state):
        self._update_count(index)


def test_instances_do_not_share_a_default_that_can_change():
    first, second = Listed(), Listed()
    first.parts.append(2.0)
    assert second.parts == [1.0] == Listed().parts
    assert Listed(parts=[3]).parts == [3.0]
