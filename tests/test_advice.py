"""What users of other libraries type first works, or the error says what to write."""

import inspect
import math
import pickle
import re
import sys
import warnings
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastopt
from fastopt import (
    adapters,
    amp,
    checkpoint,
    initializer,
    lr_scheduler,
    optimizer,
    precision,
    sparse,
)
from fastopt._advice import _tables, closest
from fastopt.arguments import LENGTH, Same, brief
from fastopt.distributed import ShardedEmbeddingTable, ShardedTable, ShardedUpdater
from fastopt.distributed.threads import Board, ThreadRank
from fastopt.kernels.rule import scalar  # noqa: F401
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


def ones(*shape):
    return np.ones(shape or 3, np.float32)


def stepped(made):
    """Weights after two updates."""
    updater, weight = fastopt.Updater(made), ones()
    for _ in range(2):
        updater(0, np.array([1.0, -2.0, 0.5]), weight)
    return weight


# What works

SAME = [
    (lambda: fastopt.Adam(lr=0.1), lambda: fastopt.Adam(learning_rate=0.1)),
    (lambda: fastopt.Adam(betas=(0.5, 0.75), eps=0.1, weight_decay=0.5),
     lambda: fastopt.Adam(beta1=0.5, beta2=0.75, epsilon=0.1, wd=0.5)),
    (lambda: fastopt.Lion(betas=[0.5, 0.75]), lambda: fastopt.Lion(beta1=0.5, beta2=0.75)),
    (lambda: fastopt.get_updater("adam").optimizer, fastopt.Adam),
    (lambda: fastopt.Updater("AdamW").optimizer, fastopt.AdamW),
    (lambda: fastopt.Adam(lr=lr_scheduler.CosineScheduler(9, base_lr=0.3)),
     lambda: fastopt.Adam(None, lr_scheduler=lr_scheduler.CosineScheduler(9, base_lr=0.3))),
    (lambda: fastopt.SGD(learning_rate=lambda n: 0.1 / n),
     lambda: fastopt.SGD(lr_scheduler=lambda n: 0.1 / n)),
    (lambda: setattr(updater := fastopt.Updater("adam"), "optimizer", "sgd") or updater.optimizer,
     fastopt.SGD),
    (lambda: pickle.loads(pickle.dumps(optimizer)).Adam(), fastopt.Adam),
    (lambda: fastopt.SGD(0.9, lr=0.1), lambda: fastopt.SGD(momentum=0.9, learning_rate=0.1)),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_both_names_mean_the_same(theirs, ours):
    one, other = theirs(), ours()
    assert type(one) is type(other)
    np.testing.assert_array_equal(stepped(one), stepped(other))


def test_every_class_is_an_attribute_of_the_package_that_type_checkers_see(registries):
    klass = optimizer.register(type("Steepest", (optimizer.SGD,), {}))  # of a user
    assert fastopt.Steepest is klass
    listed = [name for name in vars(optimizer.algorithms) if not name.startswith("_")]
    assert sorted(listed) == [klass.__name__ for klass in CLASSES]
    for package in (fastopt, optimizer):
        assert "from fastopt.optimizer.algorithms import *" in inspect.getsource(package)
        assert [getattr(package, klass.__name__) for klass in CLASSES] == CLASSES
    assert {*listed} <= {*dir(fastopt)}


@every_class
def test_signatures_show_every_argument_and_its_other_names(klass):
    parameters = inspect.signature(klass).parameters
    common = {*inspect.signature(optimizer.Optimizer).parameters} - {"lazy_update"}
    assert common <= {*parameters} == {name for name, each in klass.declared.items() if each.init}
    assert not {each.kind.name for each in parameters.values()} & {"VAR_KEYWORD", "VAR_POSITIONAL"}
    assert repr(parameters["lr"].default) == "learning_rate"
    defaults = {name: each.default for name, each in parameters.items()}
    own = {name: default for name, default in defaults.items() if not isinstance(default, Same)}
    assert repr(quiet(klass, **own)) == repr(quiet(klass))


def test_get_updater_takes_what_an_updater_takes():
    shown = [inspect.signature(made).parameters for made in (fastopt.get_updater, fastopt.Updater)]
    assert shown[0] == shown[1]
    assert fastopt.get_updater("sgd", clip_global_norm=1.0).clip_global_norm == 1


# What gets an error that says what to write

PLACE = r" \(\S+advice\.py:\d+\)$"


class Odd(optimizer.SGD):
    rule = property(lambda self: self.nothing_of_the_kind)


def compiled(fn):
    class Mine(optimizer.Optimizer):
        rule = fastopt.rule(hyper=("lr",))(fn)

    return lambda: fastopt.Updater(Mine())(0, ones(), ones())


def reads_an_attribute(weight, grad, state, h):
    return weight.size, ()


def reads_a_slot(weight, grad, state, h):
    return weight - state[0], ()


def misspells(weight, grad, state, h):
    return math.squrt(weight), ()


def returns_more_or_less(weight, grad, state, h):
    return weight, (() if grad > 0 else (grad,))


def plain(weight, grad, state, h):
    return weight, ()


GIVEN = "not both: they are the same argument"
CALL = r"updater: Updater\(optimizer\)\.step\(grads, weights\)"
WEIGHTS = f"weights go to each call of an {CALL}"
MISTAKES = {
    "updater([0, 1], [ones(), ones()], [ones()])":
        "TypeError: a list of 2 indices needs a list of as many weights, got 1",
    "optimizer.Adam([np.eye(99), ones()], 0.1)":
        r"TypeError: Adam takes no weights, got \[array\(\[\[1., .{70,90}\.\.\. as "
        r"learning_rate; weights",
    "optimizer.SGD(sym=3)": r"TypeError: sym must have attr_dict\(\)",
    "Updater(SGD(param_dict={0: 3}))(0, ones(), ones())":
        "TypeError: index 0: lr_mult of its parameter must be a number, got None",
    "setattr(sgd := SGD(), 'lr_mult', {0: 'x'}) or Updater(sgd)(0, ones(), ones())":
        "TypeError: index 0: lr_mult must be a number, got 'x'",
    "setattr(sgd := SGD(), 'lr_scheduler', 0.1) or Updater(sgd)(0, ones(), ones())":
        "TypeError: lr_scheduler must be a function of the number of updates, got 0.1",
    "LossScaler().scale_loss(None)": "TypeError: loss must be a number or an array, got None",
    "waiting().flush(0, [[1.0]])": "TypeError: index 0: weight must be a NumPy array, got list",
    "ones(2, 2) @ Parameter('p', shape=2)":
        r"TypeError: Parameter 'p' is not an array, its data\(\) is one",
    "lr_scheduler.CosineScheduler(10)('1')":
        "TypeError: num_update must be a number of updates, got '1'",
    "Parameter('p', size=3)": "TypeError: Parameter 'p' does not take size",
    "Parameter('p', shape=2).initialize('hee')":
        "ValueError: Parameter 'p': Cannot find initializer 'hee'",
    "[(w := Parameter('w', shape=2)).initialize('ones'), w.add_grad((ones(1, 1), [0]))]":
        r"ValueError: Parameter 'w': values must have shape \(1,\) for 1 ind.*, got \(1, 1\)",
    "ParameterDict().update([])": "TypeError: other must hold Parameters by name, got list",
    "np.asarray(RowSparse(ones(1, 2), [0], (5, 2)))": r"TypeError: call to_dense\(\)",
    "RowSparse(np.ones(1), [0], None)": "TypeError: an integer or a tuple of integers, got None",
    "ParameterDict().select(None)": "ValueError: got None",
    "[(params := ParameterDict()).get('p', shape=2), params.setattr('name', 2)]":
        "ValueError: has no attribute 'name' that can be set",
    "initializer.Load({1: [2.0]})": "TypeError: param must have names as keys, got 1",
    "Trainer([], 'sgd', 0.1)": "TypeError: optimizer_params must be a dict of arguments, got 0.1",
    "Initializer('ones').create_param('w', 3, 2)":
        "TypeError: init_net must be a dict of arrays or None, got 3",
    "update_initializer(3, None, ('ones', {}))":
        "TypeError: initializer_class must be a class or None, got 3",
    "checkpoint.from_torch_state_dict({}, updater)":
        "TypeError: updater must be an Updater, got dict",
    "amp.GradScaler": r"AttributeError: Updater\(optimizer, loss_scaler=LossScaler\(\)\)",
    "updater.load(updater.states_dict())":
        r"TypeError: path must be that of a file, got a dict: load_states_dict\(\) takes dicts",
    "checkpoint.dumps({'z': np.ones(2, complex)})":
        r"TypeError: z has dtype complex128, which cannot be saved: save its view\(float64\)",
    "updater.load(0)": "TypeError: os.PathLike",
    "updater.get_states('run.safetensors')":
        "TypeError: dump_optimizer must be True or False, got 'run.safetensors'",
    "updater.load_states_dict(updater.states_dict(), 'no')":
        "TypeError: strict must be True or False, got 'no'",
    r"updater.set_states(b'\x80\x04' + b'\xff' * 99)": "CheckpointError: load_mxnet reads those",
    "(tree := []).append(tree) or checkpoint.dumps(tree)":
        "TypeError: the tree is nested too deeply, or holds itself",
    "updater.load_mxnet(b'K\\x03' + b'\\xff' * 10000)": "CheckpointError: ^.{0,200}$",
    "fastopt.rule(state=3, hyper=('lr',))": "TypeError: state must be a sequence of names, got 3",
    "fastopt.rule(hyper=('lr',))(lambda grad, weight, state, h: None)":
        r"TypeError: takes \(weight, grad, state, h, ...\) in this order",
    "scalar(3)": "TypeError: functions of scalars, got 3",
    "fastopt.rule(hyper=('lr',), passes=[(plain, plain, min)])":
        r"TypeError: \(sums, finish, max\) for the largest numbers",
    "fastopt.rule(hyper=('lr',), row=plain, passes=[(plain, plain)])":
        "TypeError: row cannot be combined with noise or passes",
    "compiled(reads_an_attribute)()":
        "TypeError: rule reads_an_attribute cannot be compiled: Unknown attribute 'size' of type "
        "float32" + PLACE,
    "compiled(misspells)()":
        "TypeError: index 0: rule misspells cannot be compiled: module 'math' has no attribute "
        "'squrt'" + PLACE,
    "compiled(reads_a_slot)()":
        "TypeError: rule reads_a_slot cannot be compiled: tuple index out of range; .* the slots "
        r"\(\)" + PLACE,
    "compiled(returns_more_or_less)()":
        "TypeError: rule returns_more_or_less cannot be compiled: (Cannot unify .* defined at .*"
        r"\(\d+\)|Can't unify return type from .* types: Tuple.*\))" + PLACE,
    "EmbeddingTable(2, 'sgd').load('table')":
        r"TypeError: EmbeddingTable.load\(...\) returns a new object: call it on the class",
    "updater.finish('w')": "ValueError: 'w' is of no parameter; those so far",
    "Updater('lbfgs')": "ValueError: Cannot find optimizer 'lbfgs'; .* scipy.optimize",
    "Updater('sgd', groups={'w': {}}).groups['w'].update(wd=0.1)":
        "TypeError: groups are read-only, and .* = {pattern: {...}, ",
    "fastopt.Adamm": "AttributeError: has no attribute 'Adamm'; did you mean Adam?",
    "fastopt.create": "AttributeError: did you mean optimizer.create?",
    "fastopt.CosineScheduler": "AttributeError: did you mean lr_scheduler.CosineScheduler?",
    "optimizer.create('adamm')": "ValueError: did you mean 'adam'?",
    "optimizer.create(Adam(), lr=1)":
        r"ValueError: lr must be passed with a name, got the optimizer Adam\(.*set its attributes",
    "Updater(fastopt.Adam)": r"TypeError: got the class Adam: call it, Adam\(\)",
    "Updater(3)": "TypeError: optimizer must be an Optimizer or its name, got 3",
    "Adam(1, lr=1)": f"TypeError: Adam takes lr or learning_rate, {GIVEN}",
    "Adam(betas=(0.9, 0.9), beta2=0.9)": f"TypeError: takes betas or beta2, {GIVEN}",
    "Adam(betas=0.9)": r"TypeError: betas must be a pair \(beta1, beta2\), got 0.9",
    "Adam(betas=(0.9, 1.0))": "ValueError: beta2 must be .* below 1",
    "SGD(betas=(0.9, 0.9))": "TypeError: SGD does not take betas; it takes momentum",
    "Adam(beta_1=0.9, b2=0.9)": "TypeError: beta_1, b2; did you mean beta1, beta2?$",
    "fastopt.get_updater('sgd', clip_norm=1)":
        "TypeError: get_updater does not take clip_norm; did you mean clip_global_norm?",
    "updater('t', (np.array([1]), np.ones((1, 3))), np.ones((3, 3)))":
        r"TypeError: index 't': a row-sparse gradient is \(values, indices\), in this order, "
        r"got int64 values",
    "initializer.create('xavier', seed=0)": "TypeError: the seed is the argument rng",
    "Parameter('w', shape=2).initialize(np.ones(2))": "TypeError: w: init must be an initializer",
    "Parameter('w', shape=2).initialize(initializer.One)": "TypeError: class One: call it",
    "updater.load_state_dict('a.safetensors')": r"CheckpointError: load\(path\) reads a file",
    "EmbeddingTable(2, 'sgd').lookup([[1], [2, 3]])":
        "TypeError: table 'embedding': ids must be an array of integers, got",
    "EmbeddingTable(2, 'sgd').lookup([2**63, -1])": "TypeError: np.array",
    "EmbeddingTable(2, 'sgd').update([1], [[1, 2]])":
        "TypeError: grads must have the weight's dtype float32 or another real floating "
        "dtype, got int64",
    "Adam([ones()])": f"TypeError: Adam takes no weights, got .*; {WEIGHTS}",
    "Adam()(0, ones(), ones())": f"TypeError: Adam is not callable; .* {CALL}; .*SciPy",
    "fastopt.minimize(abs, 1.0, method='adam')": "TypeError: optimizer takes it",
    "fastopt.minimize(abs, 1.0, constraints=())": r"TypeError: fastopt.scipy_method\(optimizer",
    "Updater(0.1)": "TypeError: its name, got 0.1; lr=0.1 is a learning rate",
    "Adam(lr=lambda n: 1, lr_scheduler=lambda n: 1)": "TypeError: is a schedule already",
    "Adam(lr=lr_scheduler.CosineScheduler)":
        "TypeError: must be a function of the number of updates, got the class "
        "CosineScheduler: pass an inst",
    "setattr(Adam(), 'learning_rate', lr_scheduler.CosineScheduler(9))":
        "TypeError: learning_rate must be a number; assign a schedule to lr_scheduler",
    "SGD(lr=-0.1)": "ValueError: at least 0, got -0.1; maximize=True ascends",
    "setattr(Adam(), 'weight_decay', 0.5)": "AttributeError: set wd",
    "setattr(Adam(), 'betas', (0.1, 0.2))": "AttributeError: set beta1 and beta2",
    "SGD(0.1)": r"UserWarning: SGD\(0.1\) sets momentum, .* write momentum=0.1 or lr=0.1",
    "Adam().momentum": "AttributeError: 'Adam' object has no attribute 'momentum'$",
    "setattr(updater, 'lr', 0.1)": "AttributeError: set updater.optimizer.learning_rate",
    "updater({'w': ones()}, {'w': ones()})": r"TypeError: updater.step\(grads, weights\) takes",
    "updater('w', [ones()], [ones()])": "TypeError: got list; updater.step.* takes nested weights",
    "updater('w', ones())": "TypeError: index 'w': weight is None; a call takes index, grad and w",
    "updater(ones(), 'w', ones())": r"TypeError: order is updater\(index, grad, weight\)",
    "updater('w', (ones(), ['0']), ones())": "TypeError: got tuple of ndarray, list",
    "updater((0, 'W'), ones(), ones())": "TypeError: an index is not a tuple .*fastopt.adapters",
    "updater.step({'w': ones()}, object())": "TypeError: got object: pass a dict of its arrays",
    "updater.step({'w': None}, iter([ones()]))": "TypeError: list_iterator: make a list or dict",
    "updater.load_state_dict({'state': {}, 'param_groups': []})":
        r"CheckpointError: from_torch_state_dict\(\) loads a torch state_dict",
    "updater.statse": "AttributeError: did you mean states?",
    "lr_scheduler.CosineScheduler()": "TypeError: ^CosineScheduler needs max_update$",
    "Odd().rule": "AttributeError: no attribute 'nothing_of_the_kind'",
    "fastopt.optimizer('adam', lr=0.1)":
        r"TypeError: is a module: fastopt.Adam\(...\) or .*create\('adam'",
    "setattr(updater, 'optimizer', 'adma')": "ValueError: did you mean 'adam'?",
    "Updater('sgd', swing=1)": "TypeError: it takes optimizer, loss_scaler, .*, average",
}  # fmt: skip


def waiting():
    made = fastopt.Updater(fastopt.AdaGrad(wd=0.1, sparse_decay="catch_up"))
    made(0, (ones(1, 1), np.array([0])), ones(2, 1))
    return made


@pytest.mark.parametrize("code", MISTAKES)
def test_an_error_says_what_to_write(code):
    known = {
        **{name: getattr(fastopt, name) for name in dir(fastopt) if name[0].isupper()},
        **globals(),
        **vars(amp),
        **vars(checkpoint),
        **vars(sparse),
        **vars(precision),
        "math": math,
        "updater": fastopt.Updater("adam"),
        "schedule": lr_scheduler.CosineScheduler(9),
        "trainer": fastopt.Trainer([]),
    }
    check_refused(code, MISTAKES[code].replace("?", r"\?"), known)


def test_a_file_of_another_kind_is_refused_by_name(tmp_path):
    path, params = tmp_path / "run.safetensors", ParameterDict()
    params.update({"w": Parameter("w", shape=2)})
    params.initialize("zeros")
    params.save(path)
    with pytest.raises(checkpoint.CheckpointError, match=r"run.safetensors: it contains no"):
        fastopt.Trainer(params).load_states(path)
    fastopt.Updater("sgd").save(path)
    with pytest.raises(checkpoint.CheckpointError, match=r"load\(\) reads files of save\(\)"):
        fastopt.Updater("sgd").set_states(path.read_bytes())


MISSPELLED = [
    (fastopt.SGD, "weigth_decay", "did you mean weight_decay"),
    (lambda: lr_scheduler.CosineScheduler(9), "base_Ir", "did you mean base_lr"),
    (lambda: fastopt.Updater("sgd"), "weight_decay", "it is an argument of the optimizer"),
    (lambda: fastopt.Trainer([]), "lr", "optimizer_params=.* takes it"),
    (lambda: fastopt.EmbeddingTable(2, "sgd"), "init", "init is an argument of"),
    (amp.LossScaler, "growth_intervall", "did you mean growth_interval"),
    (lambda: Parameter("p", shape=2), "lr_mul", "did you mean lr_mult"),
]


@pytest.mark.parametrize(("make", "name", "words"), MISSPELLED)
def test_a_misspelled_attribute_is_an_error_that_names_the_right_one(make, name, words):
    made = make()
    with pytest.raises(AttributeError, match=f"has no attribute {name!r} to set; .*{words}"):
        setattr(made, name, 0.5)
    assert name not in vars(made)
    made.remark = "of mine"
    mine = type("Mine", (fastopt.Adam,), {})()
    mine.weigth_decay = 0.5  # attributes of subclasses may have any name
    assert (made.remark, mine.weigth_decay) == ("of mine", 0.5)


def test_a_quoted_value_is_one_line_of_bounded_length():
    assert brief("x" * (LENGTH - 2)) == f"'{'x' * (LENGTH - 2)}'"
    assert brief("x" * LENGTH) == f"'{'x' * (LENGTH - 1)} ..."
    words = brief(["a\nb", *["word"] * LENGTH])  # cut between words
    assert re.fullmatch(r"\['a\\nb', ('word', )+\.\.\.", words)
    assert len(words) <= LENGTH + 4


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
    for name, words in klass.attribute_advice.items():
        if not hasattr(made, name):
            with pytest.raises(AttributeError, match=re.escape(words)):
                getattr(made, name)


LOOKING = {
    "PACKAGE": partial(getattr, fastopt),
    "CHECKPOINT": partial(getattr, checkpoint),
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


def test_names_of_a_users_class_are_its_own():
    class Mine(optimizer.SGD):
        def __init__(self, lr, damping=0.5, **kwargs):
            self.power = kwargs.pop("power", 1)
            super().__init__(learning_rate=2 * lr, **kwargs)
            self.damping = damping

    made = Mine(0.1, weight_decay=0.5, power=2)
    assert (made.lr, made.wd, made.damping, made.power) == (0.2, 0.5, 0.5, 2)
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


@given(st.sampled_from([klass.__name__ for klass in CLASSES if len(klass.__name__) > 4]), st.data())
def test_one_wrong_letter_is_understood(name, data):
    place = data.draw(st.integers(0, len(name) - 1))
    assert closest(name[:place] + name[place + 1 :], [name, "unlike", "other"]) == name
    assert closest(name.upper(), [name, "unlike"]) == name


# What is shown


def used():
    updater = fastopt.Updater(fastopt.Adam(lr=0.1, betas=(0.8, 0.999)), clip_global_norm=2.0)
    updater(["a", "b"], [ones(), ones()], [ones(), ones()])
    updater.optimizer.set_lr_mult({"a": 0.5})
    return updater


SHOWN = {
    "Updater(Adam(learning_rate=0.1, beta1=0.8, lr_mult={'a': 0.5}, num_update=1), "
    "clip_global_norm=2.0, states=2)": used,
    "AdaGrad(learning_rate=0.01, eps=0.5, lazy_update=False)":
        lambda: fastopt.AdaGrad(eps=0.5, lazy_update=False),
    "SGD(lr_scheduler=<lambda>)": lambda: fastopt.SGD(lr=lambda n: 0.1),
    "SGD(lr_scheduler=functools.partial": lambda: fastopt.SGD(lr=partial(pow, 2)),
    "Adam(lr_scheduler=PolyScheduler(max_update=9":
        lambda: fastopt.Adam(lr=lr_scheduler.PolyScheduler(9, base_lr=0.5)),
    "Trainer(1 parameters, Updater(Adam(learning_rate=0.001), states=0))":
        lambda: fastopt.Trainer([Parameter("w", shape=2)], "adam"),
    "Parameter(name='w', shape=(2,), dtype=float32)": lambda: Parameter("w", shape=2),
}  # fmt: skip


@pytest.mark.parametrize("words", SHOWN)
def test_representations_show_what_is_not_the_default(words):
    assert repr(SHOWN[words]()).startswith(words)


@every_class
def test_no_representation_has_an_address(klass):
    words = repr(fastopt.Updater(quiet(klass, lr_scheduler=lambda n: 0.1, maximize=True)))
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
from fastopt.arguments import Real, arg
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
made = optimizer.create("adamw", lr_scheduler=lr_scheduler.CosineScheduler(100), wd=0.01)
updater = Updater(made, loss_scaler=LossScaler(), average=EMA(0.9), clip_global_norm=1.0)
updater.step({"layer": {"w": weight, "b": weight}}, {"layer": {"w": weight, "b": weight}})
norm: float | None = updater.info.global_norm
updater.save(Path("run.safetensors"))


@rule(state=("mom",), hyper=("lr", "momentum"))
def heavy(weight: Scalar, grad: Scalar, state: State, h: Hyper) -> Step:
    mom = h.momentum * state[0] + grad
    return weight - h.lr * mom, (mom,)


@optimizer.register
class Heavy(optimizer.Optimizer):
    rule = heavy
    momentum: float = arg(default=0.9, check=Real(least=0))


Heavy(0.5, lr=0.1).momentum = 0.25
Heavy(momentun=0.5)  # 7: no such argument
"""
"""Seven mistakes in a program that has no other."""


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
    assert len(marked) == 7


def test_completion_lists_what_users_and_authors_call():
    updater = optimizer.Updater("adam")
    of_updater, of_optimizer = ({*dir(made)} for made in (updater, updater.optimizer))
    assert {"step", "save", "load", "info", "optimizer", "states", "averaged"} <= of_updater
    assert {"learning_rate", "beta1", "set_lr_mult", "hyper", "rule"} <= of_optimizer
    assert not (of_updater | of_optimizer) & {"parameters", "records", "aliases", "version"}
    aliases = {"betas", "eps", "weight_decay", "param_idx2name", "sym"}
    assert {*inspect.signature(fastopt.Adam).parameters} - of_optimizer == aliases
