"""What users of other libraries type first works, or the error says what to write."""

import inspect
import pickle
import re
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastopt
from fastopt import adapters, amp, checkpoint, initializer, lr_scheduler, optimizer, sparse
from fastopt._advice import _tables, closest
from fastopt.arguments import Same
from fastopt.distributed import ShardedEmbeddingTable, ShardedTable, ShardedUpdater
from fastopt.distributed.threads import Board, ThreadRank
from fastopt.parameter import Parameter, ParameterDict
from helpers.processes import run
from helpers.refusals import check_refused
from helpers.schedules import EXAMPLES

CLASSES = sorted(
    (klass for klass in optimizer.opt_registry.values() if klass.__module__.startswith("fastopt")),
    key=lambda klass: klass.__name__,
)
every_class = pytest.mark.parametrize("klass", CLASSES, ids=lambda klass: klass.__name__)


def quiet(klass, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ccSGD is deprecated")
        return klass(*args, **kwargs)


def ones():
    return np.ones(3)


def stepped(made, steps=2):
    """Weights after some updates."""
    updater, weight = fastopt.Updater(made), ones()
    for _ in range(steps):
        updater(0, np.array([1.0, -2.0, 0.5]), weight)
    return weight


# What works

SAME = [
    (lambda: fastopt.Adam(lr=0.1), lambda: fastopt.Adam(learning_rate=0.1)),
    (lambda: fastopt.SGD(lr=0.1), lambda: fastopt.SGD(learning_rate=0.1)),
    (lambda: fastopt.FTML(lr=0.1), lambda: fastopt.FTML(learning_rate=0.1)),
    (lambda: fastopt.SGLD(lr=0.1), lambda: fastopt.SGLD(learning_rate=0.1)),
    (lambda: fastopt.Adam(betas=(0.5, 0.75), eps=0.1, weight_decay=0.5),
     lambda: fastopt.Adam(beta1=0.5, beta2=0.75, epsilon=0.1, wd=0.5)),
    (lambda: fastopt.Lion(betas=[0.5, 0.75]), lambda: fastopt.Lion(beta1=0.5, beta2=0.75)),
    (lambda: fastopt.AdaGrad(epsilon=0.1), lambda: fastopt.AdaGrad(eps=0.1)),
    (lambda: fastopt.RMSProp(eps=0.1), lambda: fastopt.RMSProp(epsilon=0.1)),
    (lambda: optimizer.create("adam", lr=0.1), lambda: fastopt.Adam(learning_rate=0.1)),
    (lambda: fastopt.get_updater("adam").optimizer, fastopt.Adam),
    (lambda: fastopt.Updater("AdamW").optimizer, fastopt.AdamW),
    (lambda: fastopt.Adam(lr=lr_scheduler.CosineScheduler(9, base_lr=0.3)),
     lambda: fastopt.Adam(None, lr_scheduler=lr_scheduler.CosineScheduler(9, base_lr=0.3))),
    (lambda: fastopt.SGD(learning_rate=lambda n: 0.1 / n),
     lambda: fastopt.SGD(lr_scheduler=lambda n: 0.1 / n)),
    (lambda: fastopt.Adam(lr_scheduler.FactorScheduler(1, 0.5, base_lr=0.2)),
     lambda: fastopt.Adam(lr=lr_scheduler.FactorScheduler(1, 0.5, base_lr=0.2))),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_both_names_mean_the_same(theirs, ours):
    one, other = theirs(), ours()
    assert type(one) is type(other)
    np.testing.assert_array_equal(stepped(one), stepped(other))


@every_class
def test_every_class_takes_a_schedule_as_its_rate(klass):
    for name in ("lr", "learning_rate"):
        made = quiet(klass, **{name: lambda n: 0.25 / (n + 1)})
        assert made.learning_rate == 0.25
        assert made.lr_scheduler is not None


def test_a_schedule_as_the_rate_sets_the_first_step():
    made = fastopt.Adam(lr=lr_scheduler.FactorScheduler(step=1000, base_lr=0.3))
    assert made.learning_rate == 0.3
    np.testing.assert_allclose(stepped(made, 1), [0.7, 1.3, 0.7], rtol=1e-6)


@every_class
def test_every_class_is_an_attribute_of_the_package(klass):
    name = klass.__name__
    assert getattr(fastopt, name) is klass is getattr(optimizer, name)
    assert name in dir(fastopt)


def test_type_checkers_see_every_class():
    listed = [name for name in vars(optimizer.algorithms) if not name.startswith("_")]
    assert sorted(listed) == [klass.__name__ for klass in CLASSES]
    for package in (fastopt, optimizer):
        assert "from fastopt.optimizer.algorithms import *" in inspect.getsource(package)


def test_a_class_of_the_users_is_an_attribute_too():
    class Steepest(optimizer.SGD):
        pass

    try:
        optimizer.register(Steepest)
        assert fastopt.Steepest is Steepest
    finally:
        del optimizer.opt_registry["steepest"]


@pytest.mark.slow
def test_the_package_imports_no_more_than_its_parts(run_python):
    """Names at the top level cost nothing that ``fastopt.optimizer`` does not."""
    code = "import sys, {}; print(sum(name.startswith('fastopt') for name in sys.modules))"
    alone, package = (int(run_python(code.format(name))) for name in ("fastopt.trainer", "fastopt"))
    assert alone == package


@every_class
def test_signatures_show_every_argument_and_its_other_names(klass):
    parameters = inspect.signature(klass).parameters
    common = {*inspect.signature(optimizer.Optimizer).parameters} - {"lazy_update"}
    assert common <= {*parameters}
    assert not any(
        each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in parameters.values()
    )
    assert repr(parameters["lr"].default) == "learning_rate"
    defaults = {
        name: each.default
        for name, each in parameters.items()
        if not isinstance(each.default, Same)
    }
    made = quiet(klass, **defaults)
    assert repr(made) == repr(quiet(klass))


@every_class
def test_typed_arguments_are_those_that_the_constructor_takes(klass):
    """Checkers read the declarations: exactly the names that a call takes."""
    typed = {name for name, each in klass.declared.items() if each.init}
    assert typed == {*inspect.signature(klass).parameters}


def test_get_updater_takes_what_an_updater_takes():
    def arguments(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert arguments(fastopt.get_updater) == arguments(fastopt.Updater)
    assert fastopt.get_updater("sgd", clip_global_norm=1.0).clip_global_norm == 1


# What gets an error that says what to write

GIVEN = "not both: they are the same argument"
CALL = r"updater: Updater\(optimizer\)\.step\(grads, weights\)"
WEIGHTS = f"weights go to each call of an {CALL}"
MISTAKES = {
    "fastopt.Adamm": "AttributeError: has no attribute 'Adamm'; did you mean Adam?",
    "fastopt.RMSprop": "AttributeError: did you mean RMSProp?",
    "fastopt.Adagrad": "AttributeError: did you mean AdaGrad?",
    "fastopt.NAdam": "AttributeError: did you mean Nadam?",
    "fastopt.adam": "AttributeError: did you mean Adam?",
    "fastopt.create": "AttributeError: did you mean optimizer.create?",
    "fastopt.CosineScheduler": "AttributeError: did you mean lr_scheduler.CosineScheduler?",
    "optimizer.Adamm": "AttributeError: 'fastopt.optimizer' has no attribute 'Adamm'; did you mean",
    "optimizer.create('adamm')": "ValueError: did you mean 'adam'?",
    "optimizer.create(fastopt.Adam(), lr=1)":
        r"ValueError: lr must be passed with a name, got the optimizer Adam\(.*set its attributes",
    "fastopt.Updater(fastopt.Adam)": r"TypeError: got the class Adam: call it, Adam\(\)",
    "fastopt.Updater(3)": "TypeError: optimizer must be an Optimizer or its name, got 3",
    "fastopt.Adam(lr=1, learning_rate=1)": f"TypeError: Adam takes lr or learning_rate, {GIVEN}",
    "fastopt.Adam(1, lr=1)": f"TypeError: Adam takes lr or learning_rate, {GIVEN}",
    "fastopt.Adam(eps=1, epsilon=1)": f"TypeError: takes eps or epsilon, {GIVEN}",
    "fastopt.Adam(weight_decay=0, wd=0)": f"TypeError: takes weight_decay or wd, {GIVEN}",
    "fastopt.Adam(betas=(0.9, 0.9), beta2=0.9)": f"TypeError: takes betas or beta2, {GIVEN}",
    "fastopt.Adam(betas=0.9)": r"TypeError: betas must be a pair \(beta1, beta2\), got 0.9",
    "fastopt.Adam(betas=(0.9, 1.0))": "ValueError: beta2 must be .* below 1",
    "fastopt.SGD(betas=(0.9, 0.9))": "TypeError: SGD does not take betas; it takes momentum",
    "fastopt.SGD(momentun=0.9)": "TypeError: SGD does not take momentun; did you mean momentum?",
    "fastopt.RMSProp(momentum=0.9, centered=True)": "ValueError: momentum gamma2=0.9",
    "fastopt.Adam(beta_1=0.9, b2=0.9)": "TypeError: beta_1, b2; did you mean beta1, beta2?$",
    "fastopt.get_updater('adma')": "ValueError: did you mean 'adam'?",
    "fastopt.get_updater('sgd', clip_norm=1)":
        "TypeError: get_updater does not take clip_norm; did you mean clip_global_norm?",
    "optimizer.get_updater('sgd', acumulate=2)": "TypeError: did you mean accumulate?",
    "fastopt.EMA(deacy=0.9)": "TypeError: EMA does not take deacy; did you mean decay?",
    "LossScaler(init_scal=9)": "TypeError: LossScaler does not take init_scal; did you mean init_",
    "fastopt.EmbeddingTable(8, 'sgd', capcity=9)": "TypeError: EmbeddingTable does not take capci",
    "Parameter('w', shap=3)": "TypeError: did you mean shape?",
    "updater('t', (np.array([1]), np.ones((1, 3))), np.ones((3, 3)))":
        r"TypeError: index 't': a row-sparse gradient is \(values, indices\), in this order, "
        r"got int64 values",
    "initializer.Xavierr": "AttributeError: did you mean Xavier?",
    "initializer.create('xaver')": "ValueError: did you mean 'xavier'?",
    "initializer.create('xavier', seed=0)": "TypeError: the seed is the argument rng",
    "Parameter('w', shape=2).initialize(np.ones(2))": "TypeError: w: init must be an initializer",
    "Parameter('w', shape=2).initialize(0)": "TypeError: w: init must be an initializer",
    "Parameter('w', shape=2).initialize(initializer.One)": "TypeError: class One: call it",
    "Parameter('w', shape='2')": "TypeError: an integer or a tuple of integers, got '2'",
    "RowSparse(np.ones(1), [0], None)": "TypeError: an integer or a tuple of integers, got None",
    "updater.load_state_dict('a.safetensors')": r"CheckpointError: load\(path\) reads a file",
    "fastopt.EmbeddingTable(2, 'sgd').lookup([[1], [2, 3]])":
        "TypeError: table 'embedding': ids must be an array of integers, got",
    "fastopt.EmbeddingTable(2, 'sgd').lookup(None)": "TypeError: at most 64 bits, got None",
    "fastopt.EmbeddingTable(2, 'sgd').lookup([2**63, -1])": "TypeError: np.array",
    "fastopt.EmbeddingTable(2, 'sgd').update([1], [[1, 2]])":
        "TypeError: grads must have the weight's dtype float32 or another real floating "
        "dtype, got int64",
    "fastopt.Adam([ones()])": f"TypeError: Adam takes no weights, got .*; {WEIGHTS}",
    "fastopt.SGD({'w': ones()}, lr=0.1)": f"TypeError: SGD takes no weights, got .*; {WEIGHTS}",
    "fastopt.Adam(w for w in [ones()])": "TypeError: fastopt.torch has optimizers for models",
    "fastopt.Adam()(0, ones(), ones())": f"TypeError: Adam is not callable; .* {CALL}; .*SciPy",
    "fastopt.minimize(abs, 1.0, method='adam')": "TypeError: optimizer takes it",
    "fastopt.minimize(abs, 1.0, constraints=())": r"TypeError: fastopt.scipy_method\(optimizer",
    "fastopt.scipy_method('adma')": "ValueError: did you mean 'adam'?",
    "fastopt.scipy_method('adam', betta1=0.9)": "TypeError: did you mean beta1?",
    "fastopt.scipy_method(updater, lr=1)": "ValueError: lr cannot be passed with an Updater",
    "fastopt.Updater(0.1)": "TypeError: its name, got 0.1; lr=0.1 is a learning rate",
    "fastopt.SGLD(w for w in [ones()])": "TypeError: SGLD takes no weights",
    "fastopt.Adam(lr=lambda n: 1, lr_scheduler=lambda n: 1)": "TypeError: is a schedule already",
    "fastopt.Adam(lr=lr_scheduler.CosineScheduler)":
        "TypeError: must be a function of the number of updates, got the class "
        "CosineScheduler: pass an inst",
    "setattr(fastopt.Adam(), 'learning_rate', lr_scheduler.CosineScheduler(9))":
        "TypeError: learning_rate must be a number; assign a schedule to lr_scheduler",
    "fastopt.SGD(lr=-0.1)": "ValueError: at least 0, got -0.1; maximize=True ascends",
    "setattr(fastopt.Adam(), 'lr', lambda n: 0.1)": "TypeError: assign a schedule to lr_scheduler",
    "setattr(fastopt.Adam(), 'weight_decay', 0.5)": "AttributeError: set wd",
    "setattr(fastopt.Adam(), 'eps', 1.0)": "AttributeError: set epsilon",
    "setattr(fastopt.Adam(), 'betas', (0.1, 0.2))": "AttributeError: set beta1 and beta2",
    "fastopt.SGD(0.1)": r"UserWarning: SGD\(0.1\) sets momentum, .* write momentum=0.1 or lr=0.1",
    "fastopt.AdaGrad(0.1)": r"UserWarning: AdaGrad\(0.1\) sets eps",
    "fastopt.SGLD(0.1)": r"UserWarning: SGLD\(0.1\) sets rescale_grad",
    "fastopt.Adam().learning_rat": "AttributeError: did you mean learning_rate?",
    "fastopt.Adam().momentum": "AttributeError: 'Adam' object has no attribute 'momentum'$",
    "setattr(updater, 'lr', 0.1)": "AttributeError: set updater.optimizer.learning_rate",
    "setattr(updater, 'learning_rate', 0.1)": "AttributeError: set updater.optimizer.learning_ra",
    "updater({'w': ones()}, {'w': ones()})": r"TypeError: updater.step\(grads, weights\) takes",
    "updater([ones()], [ones()])": r"TypeError: updater.step\(grads, weights\) takes nested",
    "updater('w', [ones()], [ones()])": "TypeError: got list; updater.step.* takes nested weights",
    "updater('w', ones())": "TypeError: index 'w': weight is None; a call takes index, grad and w",
    "updater(ones(), 'w', ones())": r"TypeError: order is updater\(index, grad, weight\)",
    "updater('w', (ones(), ['0']), ones())": "TypeError: got tuple of ndarray, list",
    "updater((0, 'W'), ones(), ones())": "TypeError: an index is not a tuple .*fastopt.adapters",
    "updater.step({'w': ones()}, object())": "TypeError: got object: pass a dict of its arrays",
    "updater('w', None, ones())": "TypeError: index 'w': .* got None; omit the index",
    "updater.step({'w': None}, iter([ones()]))": "TypeError: list_iterator: make a list or dict",
    "updater.step([ones()], {'w': ones()}.values())": "TypeError: dict_values: make a list or",
    "updater.load_state_dict({'state': {}, 'param_groups': []})":
        r"CheckpointError: from_torch_state_dict\(\) loads a torch state_dict",
    "updater.statse": "AttributeError: did you mean states?",
    "fastopt.Lookahead(sync_period=9)": "TypeError: did you mean k?",
    "initializer.KaimingUniform": "AttributeError: did you mean HeUniform?",
    "lr_scheduler.StepLR": "AttributeError: FactorScheduler is its counterpart",
    "lr_scheduler.CosineSchedule": "AttributeError: did you mean CosineScheduler?",
    "lr_scheduler.CosineScheduler()": "TypeError: ^CosineScheduler needs max_update$",
    "lr_scheduler.JoinedScheduler()": "TypeError: JoinedScheduler needs schedules, boundaries",
    "fastopt.Trainer([ones()])": r"TypeError: arrays are updated by an Updater: Updater\(optimizer",
    "fastopt.Updater('sgd', averge=1)":
        "TypeError: Updater does not take averge; did you mean average?",
    "fastopt.Updater('sgd', group={})": "TypeError: did you mean groups?",
    "fastopt.Updater('sgd', swing=1)": "TypeError: it takes optimizer, loss_scaler, .*, average",
    "fastopt.Trainer([], loss_scaller=1)": "TypeError: Trainer does not take loss_scaller; did you",
    "fastopt.Trainer([], optimizer_param={})": "TypeError: did you mean optimizer_params?",
}  # fmt: skip


@pytest.mark.parametrize("code", MISTAKES)
def test_an_error_says_what_to_write(code):
    known = {
        **globals(),
        **vars(amp),
        **vars(checkpoint),
        **vars(sparse),
        "Parameter": Parameter,
        "updater": fastopt.Updater("adam"),
        "schedule": lr_scheduler.CosineScheduler(9),
        "trainer": fastopt.Trainer([]),
    }
    check_refused(code, MISTAKES[code].replace("?", r"\?"), known)


COMM = ThreadRank(Board(1), 0)
NEEDED = {
    fastopt.Updater: ("sgd",),
    fastopt.Trainer: ([],),
    fastopt.EmbeddingTable: (2, "sgd"),
    Parameter: ("w",),
    ShardedUpdater: ("sgd", COMM),
    ShardedTable: ((3, 2), "sgd", COMM),
    ShardedEmbeddingTable: (fastopt.EmbeddingTable(2, "sgd"), COMM),
    **dict.fromkeys((fastopt.EMA, fastopt.SWA, fastopt.Lookahead, amp.LossScaler, *CLASSES), ()),
}
SCHEDULES = {type(schedule): schedule for schedule in EXAMPLES}


@pytest.mark.parametrize("klass", [*NEEDED, *SCHEDULES], ids=lambda klass: klass.__name__)
def test_every_advice_about_a_class_is_given(klass):
    needed, names = NEEDED.get(klass, ()), inspect.signature(klass).parameters
    for name in {*klass.argument_names, *klass.argument_advice} - {*names}:
        meant = [f"mean {each}?" for each in klass.argument_names.get(name, ()) if each in names]
        words = klass.argument_advice.get(name, next(iter(meant), "not take"))
        with pytest.raises(TypeError, match=re.escape(words)):
            klass(*needed, **{name: 1})
    made = SCHEDULES.get(klass) or quiet(klass, *needed)
    for name, words in klass.elsewhere.items():
        if not hasattr(made, name):
            with pytest.raises(AttributeError, match=re.escape(words)):
                getattr(made, name)


LOOKING = {
    "PACKAGE": partial(getattr, fastopt),
    "SCHEDULES": partial(getattr, lr_scheduler),
    "INITIALIZERS": initializer.create,
    "ADAPTERS": partial(getattr, adapters),
}


@pytest.mark.parametrize("table", LOOKING)
def test_every_advice_about_a_name_is_given(table):
    for name, words in _tables()[table].items():
        if table != "PACKAGE" or name not in vars(fastopt):  # modules that were imported
            with pytest.raises((AttributeError, ValueError), match=re.escape(words)):
                LOOKING[table](name)


def test_a_positional_argument_beside_a_rate_is_meant():
    assert fastopt.SGD(0.9, lr=0.1).momentum == 0.9
    assert fastopt.SGD(0.9, learning_rate=0.1).lr == 0.1


def test_names_of_a_users_class_are_its_own():
    class Mine(optimizer.SGD):
        def __init__(self, lr, damping=0.5, **kwargs):
            super().__init__(learning_rate=2 * lr, **kwargs)
            self.damping = damping

    made = Mine(0.1, weight_decay=0.5)
    assert (made.lr, made.wd, made.damping) == (0.2, 0.5, 0.5)
    assert Mine(lr=0.1, momentum=0.9).momentum == 0.9
    with pytest.raises(TypeError, match=r"Mine does not take dampin; did you mean damping\?"):
        Mine(0.1, dampin=1)
    assert inspect.signature(Mine).parameters["weight_decay"].kind.name == "KEYWORD_ONLY"


def test_arguments_of_updaters_are_shown_and_passed_on_by_a_users_class():
    class Mine(fastopt.Updater):
        def __init__(self, *arguments, verbose=False, **kwargs):
            super().__init__(*arguments, **kwargs)
            self.verbose = verbose

    made = Mine("sgd", verbose=True, clip_global_norm=1.0)
    assert (made.verbose, made.clip_global_norm) == (True, 1.0)
    with pytest.raises(TypeError, match=r"Plain does not take averge; did you mean average\?"):
        type("Plain", (fastopt.Updater,), {})("sgd", averge=1)
    for klass in (fastopt.Updater, fastopt.Trainer):
        own = list(inspect.signature(klass.__init__).parameters.values())[1:]
        assert list(inspect.signature(klass).parameters.values()) == own


def test_a_users_class_may_take_arguments_out_of_the_others():
    class Popping(optimizer.Adam):
        def __init__(self, **kwargs):
            self.damping = kwargs.pop("damping", 1)
            super().__init__(**kwargs)

    made = Popping(damping=2, lr=0.5)
    assert (made.damping, made.lr) == (2, 0.5)


def test_a_property_that_fails_says_why():
    class Odd(optimizer.SGD):
        @property
        def rule(self):
            return self.nothing_of_the_kind

    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        _ = Odd().rule


@given(st.text(st.characters(codec="ascii", categories=("L", "N")), max_size=20))
def test_whatever_is_typed_the_error_is_one_of_attributes_or_arguments(name):
    if not hasattr(fastopt, name):
        with pytest.raises(AttributeError, match="has no attribute"):
            getattr(fastopt, name)
    if name and name not in inspect.signature(fastopt.Adam).parameters:
        with pytest.raises(TypeError, match="Adam does not take"):
            fastopt.Adam(**{name: 1})


@given(st.sampled_from([klass.__name__ for klass in CLASSES if len(klass.__name__) > 4]), st.data())
def test_one_wrong_letter_is_understood(name, data):
    place = data.draw(st.integers(0, len(name) - 1))
    assert closest(name[:place] + name[place + 1 :], [name, "unlike", "other"]) == name
    assert closest(name.upper(), [name, "unlike"]) == name


# What is shown


def test_representations_show_what_is_not_the_default():
    updater = fastopt.Updater(fastopt.Adam(lr=0.1, betas=(0.8, 0.999)), clip_global_norm=2.0)
    shown = "Adam(learning_rate=0.1, beta1=0.8{})"
    assert repr(updater) == f"Updater({shown.format('')}, clip_global_norm=2.0, states=0)"
    updater(["a", "b"], [ones(), ones()], [ones(), ones()])
    updater.optimizer.set_lr_mult({"a": 0.5})
    counted = shown.format(", lr_mult={'a': 0.5}, num_update=1")
    assert repr(updater) == f"Updater({counted}, clip_global_norm=2.0, states=2)"
    assert repr(fastopt.AdaGrad(eps=0.5, lazy_update=False)) == (
        "AdaGrad(learning_rate=0.01, eps=0.5, lazy_update=False)"
    )
    assert repr(fastopt.SGD(lr=lambda n: 0.1)) == "SGD(lr_scheduler=<lambda>)"
    assert repr(fastopt.SGD(lr=partial(pow, 2))).startswith("SGD(lr_scheduler=")
    schedule = lr_scheduler.PolyScheduler(9, base_lr=0.5)
    assert repr(fastopt.Adam(lr=schedule)).startswith(
        "Adam(lr_scheduler=PolyScheduler(max_update=9"
    )


def test_representations_of_trainers_and_parameters():
    params = ParameterDict()
    params.get("w", shape=2)
    params.initialize(initializer.One())
    trainer = fastopt.Trainer(params, "adam")
    assert repr(trainer) == "Trainer(1 parameters, Updater(Adam(learning_rate=0.001), states=0))"
    assert repr(params).endswith("Parameter(name='w', shape=(2,), dtype=float32)")


@every_class
def test_no_representation_has_an_address(klass):
    made = quiet(klass, lr_scheduler=lambda n: 0.1, maximize=True)
    words = repr(fastopt.Updater(made))
    assert " at 0x" not in words
    assert "maximize=True" in words
    assert repr(klass.__new__(klass)) == f"{klass.__name__}(learning_rate=None)"


# What type checkers find

PLANTED = """
# pyright: strict
from pathlib import Path

import numpy as np
from fastopt import EMA, SGD, Adam, Updater, get_updater, lr_scheduler, optimizer, rule
from fastopt.amp import LossScaler
from fastopt.arguments import FLAG, Real, arg
from fastopt.kernels.rule import Hyper, Scalar, State, Step

weight = np.ones(3)
Adam(lrr=0.1)  # 1: no such argument
SGD(lr=0.1, weight_decay="0.1")  # 2: a text
Adam(0.1, betas=0.9)  # 3: no pair
updater = get_updater("adam", clip_norm=1.0)  # 4: no such argument
updater = Updater(Adam(lr=lambda n: 0.1 / (n + 1), formula="torch"), clip_global_norm=1.0)
updater({"w": weight}, weight, weight)  # 5: a dict as the index
updater("w", "gradient", weight)  # 6: a text as the gradient
updater("w", weight, weight)
updater(["a", "b"], [weight, weight], [weight, weight])
updater("w", (weight, np.array([0, 1, 2])), weight)
SGD(momentum=0.9, learning_rate=0.1, wd=0.1, clip_gradient=1.0, maximize=True)
schedule = lr_scheduler.CosineScheduler(max_update=100, base_lr=0.1)
made = optimizer.create("adamw", lr_scheduler=schedule, wd=0.01)
updater = Updater(made, loss_scaler=LossScaler(), average=EMA(0.9), clip_global_norm=1.0)
updater.step({"layer": {"w": weight, "b": weight}}, {"layer": {"w": weight, "b": weight}})
norm: float | None = updater.info.global_norm
updater.save(Path("run.safetensors"))
updater.load("run.safetensors")
with updater.averaged():
    print(weight.sum())


@rule(state=("mom",), hyper=("lr", "momentum"))
def heavy(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    mom = h.momentum * state[0] + grad
    return weight - h.lr * mom, (mom,)


@optimizer.register
class Heavy(optimizer.Optimizer):
    rule = heavy
    momentum: float = arg(default=0.9, check=Real(least=0))


class Cautious(optimizer.AdamFamily):
    plain = heavy
    decoupled = True
    cautious: bool = arg(default=False, check=FLAG, kw_only=True)

    def hyper(self, t: int, lr: float, wd: float) -> dict[str, float]:
        return {"momentum": self.beta1}


Heavy(0.5, lr=0.1).momentum = 0.25
Heavy(momentun=0.5)  # 7: no such argument
Cautious(0.1, 0.9, cautious=1.5)  # 8: no flag
"""
"""Eight mistakes in a program that has no other."""


CHECKERS = {
    "mypy": ("--strict", "--config-file=", "--cache-dir=.", "--follow-imports=silent"),
    "pyright": ("--pythonpath", sys.executable),
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_checkers_find_the_planted_mistakes_and_no_other(checker, tmp_path):
    pytest.importorskip(checker)
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    command = [sys.executable, "-m", checker, *CHECKERS[checker], str(script)]
    done = run(*command, status=None, cwd=tmp_path)
    if checker == "pyright" and not re.search(r"\d+ errors?, ", done.stdout):
        pytest.skip("pyright has no Node.js to run on")
    found = {int(line) for line in re.findall(r"planted\.py:(\d+):.* error", done.stdout)}
    marked = {n for n, line in enumerate(PLANTED.splitlines(), 1) if re.search(r"# \d:", line)}
    assert found == marked, done.stdout + done.stderr
    assert len(marked) == 8


def test_the_module_of_optimizers_names_what_to_call_instead():
    with pytest.raises(TypeError, match=r"is a module: fastopt.Adam\(...\) or .*create\('adam'"):
        fastopt.optimizer("adam", lr=0.1)
    assert pickle.loads(pickle.dumps(fastopt.optimizer)) is fastopt.optimizer


def test_an_optimizer_may_be_assigned_by_its_name():
    updater = fastopt.Updater("adam")
    updater.optimizer = "sgd"
    assert isinstance(updater.optimizer, fastopt.SGD)
    with pytest.raises(ValueError, match="adma"):
        updater.optimizer = "adma"
    assert isinstance(updater.optimizer, fastopt.SGD)


def test_every_table_of_advice_has_its_place():
    sources = Path(fastopt.__file__).parent.rglob("*.py")
    texts = (each.read_text("utf-8") for each in sources)
    named = {name for text in texts for name in re.findall(r'Advice\("(\w+)"', text)}
    assert named == {*_tables()}


def test_completion_lists_what_users_and_authors_call():
    updater = optimizer.Updater("adam")
    inner = "parameters records devices elsewhere argument_advice argument_names first_attributes"
    of_updater, of_optimizer = ({*dir(made)} for made in (updater, updater.optimizer))
    assert {"step", "save", "load", "info", "optimizer", "states", "averaged"} <= of_updater
    assert {"learning_rate", "beta1", "set_lr_mult", "hyper", "rule"} <= of_optimizer
    assert not of_updater & {*inner.split()}
    assert not of_optimizer & {"unlisted", "aliases", "version", "snapshot", "folds", "seen"}
    aliases = {"betas", "eps", "weight_decay", "param_idx2name", "sym"}
    assert {*inspect.signature(fastopt.Adam).parameters} - of_optimizer == aliases
