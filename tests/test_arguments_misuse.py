"""What a newcomer gets wrong is told in a sentence, and changes nothing."""

import math

import numpy as np
import pytest
import scipy.sparse

import fastopt
from fastopt import Trainer, checkpoint, initializer, lr_scheduler, optimizer
from fastopt.amp import LossScaler
from fastopt.arguments import LENGTH, brief
from fastopt.kernels.rule import scalar
from fastopt.parameter import Constant, Parameter, ParameterDict
from fastopt.precision import Initializer, ReversePseudoFP16Initializer, update_initializer
from fastopt.sparse import RowSparse
from helpers.refusals import check_refused


def updater(name="sgd", **arguments):
    return optimizer.get_updater(optimizer.create(name, **arguments))


def ones(*shape):
    return np.ones(shape or 3, np.float32)


def parameter():
    made = Parameter("p", shape=2)
    made.initialize("zeros")
    return made


def assigned(name, value):
    made = updater()
    setattr(made.optimizer, name, value)
    return made


def of_a_subclass(name, value):
    class Mine(fastopt.Adam):
        pass

    made = Mine()
    setattr(made, name, value)
    return made


MISSPELLED = [
    (fastopt.SGD, "weigth_decay", "did you mean weight_decay"),
    (fastopt.SGD, "momentun", "did you mean momentum"),
    (fastopt.SGD, "nesterov", "NAG is SGD with Nesterov's momentum"),
    (fastopt.Adam, "beta_1", "did you mean beta1"),
    (fastopt.Adam, "step_size", "did you mean learning_rate"),
    (lambda: lr_scheduler.CosineScheduler(9), "base_Ir", "did you mean base_lr"),
    (updater, "clip_globl_norm", "did you mean clip_global_norm"),
    (updater, "acumulate", "did you mean accumulate"),
    (updater, "weight_decay", "it is an argument of the optimizer"),
    (lambda: Trainer([parameter()]), "learnin_rate", "did you mean learning_rate"),
    (lambda: Trainer([parameter()]), "lr", "optimizer_params=.* takes it"),
    (lambda: fastopt.EmbeddingTable(2, "sgd"), "optimzer", "did you mean optimizer"),
    (lambda: fastopt.EmbeddingTable(2, "sgd"), "init", "init is an argument of"),
    (LossScaler, "growth_intervall", "did you mean growth_interval"),
    (parameter, "lr_mul", "did you mean lr_mult"),
]


@pytest.mark.parametrize(("make", "name", "words"), MISSPELLED)
def test_a_misspelled_attribute_is_an_error_that_names_the_right_one(make, name, words):
    made = make()
    with pytest.raises(AttributeError, match=f"has no attribute {name!r} to set; .*{words}"):
        setattr(made, name, 0.5)
    assert name not in vars(made)
    made.remark = "of mine"
    assert made.remark == "of mine"


def test_attributes_of_subclasses_may_have_any_name():
    for name in ("weigth_decay", "beta3", "momentun"):
        assert vars(of_a_subclass(name, 1.0))[name] == 1.0


def waiting():
    made = updater("adagrad", wd=0.1, sparse_decay="catch_up")
    made(0, (ones(1, 1), np.array([0])), ones(2, 1))
    return made


PLACE = r" \(\S+misuse\.py:\d+\)$"


def compiled(fn):
    class Mine(optimizer.Optimizer):
        rule = fastopt.rule(hyper=("lr",))(fn)

    return lambda: optimizer.get_updater(Mine())(0, ones(), ones())


def takes_an_element(weight, grad, state, h):
    return weight[0], ()


def imports(weight, grad, state, h):
    import math

    return math.sqrt(weight), ()


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


FORMS = r"or row-sparse: a RowSparse, a pair \(values, indices\) of arrays"
FLAG = "must be True or False, got"

MISTAKES = {
    "updater()(0, [1.0] * 3, ones())": f"TypeError: {FORMS}",
    "updater()(0, ([[1.0]], [0]), ones(3, 1))": f"TypeError: {FORMS}",
    "updater()(0, scipy.sparse.csc_array(ones(3, 2)), ones(3, 2))":
        "TypeError: CSR or COO format, got csc_array",
    "updater()([0], (g for g in [ones()]), [ones()])":
        "TypeError: needs a list of as many gradients, got generator",
    "updater()([0, 1], [ones(), ones()], [ones()])":
        "TypeError: a list of 2 indices needs a list of as many weights, got 1",
    "np.asarray(RowSparse(ones(1, 2), [0], (5, 2)))": r"TypeError: call to_dense\(\)",
    "optimizer.Adam(swing=0.1)":
        "TypeError: Adam does not take swing; it takes learning_rate, beta1, .*rescale_grad, "
        ".*seed",
    "optimizer.Adam([ones(100, 100), ones()], 0.1)":
        r"TypeError: Adam takes no weights, got \[array\(\[\[1., .{70,90}\.\.\. as "
        r"learning_rate; weights",
    "optimizer.SGD(multi_precision='no')": f"TypeError: {FLAG}",
    "initializer.HeNormal('x')": f"TypeError: {FLAG}",
    "optimizer.SGD(sym=3)": r"TypeError: sym must have attr_dict\(\)",
    "updater(param_dict={0: 3})(0, ones(), ones())":
        "TypeError: index 0: lr_mult of its parameter must be a number, got None",
    "assigned('lr_mult', {0: 'low'})(0, ones(), ones())":
        "TypeError: index 0: lr_mult must be a number, got 'low'",
    "updater(param_idx2name={0: 'w'}).optimizer.multiplier(0, {'w': None}, 'wd_mult')":
        r"TypeError: index 0 \(w\): wd_mult must be a number, got None",
    "assigned('lr_scheduler', 0.1)(0, ones(), ones())":
        "TypeError: lr_scheduler must be a function of the number of updates, got 0.1",
    "LossScaler().scale_loss(None)": "TypeError: loss must be a number or an array, got None",
    "waiting().flush(0, [[1.0]])": "TypeError: index 0: weight must be a NumPy array, got list",
    "updater()('bias', 0.5, 1.0)":
        r"TypeError: index 'bias': weight must be .* got float, which cannot change .* store "
        r"np.array\(x\)$",
    "ones(2, 2) @ parameter()": r"TypeError: Parameter 'p' is not an array, its data\(\) is one",
    "lr_scheduler.CosineScheduler(10)('1')":
        "TypeError: num_update must be a number of updates, got '1'",
    "Parameter('p', size=3)": "TypeError: Parameter 'p' does not take size",
    "Parameter('p', shape=2).initialize('hee')":
        "ValueError: Parameter 'p': Cannot find initializer 'hee'",
    "parameter().add_grad((ones(1, 1), [0]))":
        r"ValueError: Parameter 'p': values must have shape \(1,\) for 1 indices into .*, "
        r"got \(1, 1\)",
    "ParameterDict().update([parameter()])":
        "TypeError: other must hold Parameters by name, got list",
    "ParameterDict().select(None)": "ValueError: got None",
    "(params := ParameterDict()).update({'p': parameter()}) or params.setattr('name', 2)":
        "ValueError: has no attribute 'name' that can be set",
    "(params := ParameterDict()).update({'p': parameter()}) or params.setattr('data', 2)":
        "ValueError: has no attribute 'data' that can be set",
    "initializer.Load({1: [2.0]})": "TypeError: param must have names as keys, got 1",
    "Trainer([parameter()], 'sgd', 0.1)":
        "TypeError: optimizer_params must be a dict of arguments, got 0.1",
    "Initializer('ones').create_param('w', 3, 2)":
        "TypeError: init_net must be a dict of arrays or None, got 3",
    "Initializer('ones').create_param('w', None, 2).bind(None)":
        "TypeError: updater must be an Updater, got NoneType",
    "ReversePseudoFP16Initializer('ones').create_param('w', None, 2).bind(updater(), [1])":
        "TypeError: index must be an int, str or bytes",
    "update_initializer(3, None, ('ones', {}))":
        "TypeError: initializer_class must be a class or None, got 3",
    "checkpoint.from_torch_state_dict({}, updater())":
        "TypeError: updater must be an Updater, got dict",
    "updater().load(0)": "TypeError: os.PathLike",
    "updater().get_states('run.safetensors')":
        "TypeError: dump_optimizer must be True or False, got 'run.safetensors'",
    "updater().load_states_dict(updater().states_dict(), 'no')":
        "TypeError: strict must be True or False, got 'no'",
    "updater().set_states(b'abc')": "CheckpointError: not a safetensors file, or a truncated one",
    r"updater().set_states(b'\x80\x04' + b'\xff' * 99)": "CheckpointError: load_mxnet reads those",
    "fastopt.Updater({'w': 1.0})": r"TypeError: passed to updater.step\(grads, weights\)",
    "(tree := []).append(tree) or checkpoint.dumps(tree)":
        "TypeError: the tree is nested too deeply, or holds itself",
    "updater().load_mxnet(b'K\\x03' + b'\\xff' * 10000)": "CheckpointError: ^.{0,200}$",
    "fastopt.rule(state=3, hyper=('lr',))": "TypeError: state must be a sequence of names, got 3",
    "fastopt.rule(hyper=('lr',))(lambda grad, weight, state, h: None)":
        r"TypeError: takes \(weight, grad, state, h, ...\) in this order",
    "scalar(3)": "TypeError: functions of scalars, got 3",
    "fastopt.rule(hyper=('lr',), row=3)(lambda weight, grad, state, h, mean: None)":
        "TypeError: functions of scalars, got 3",
    "fastopt.rule(hyper=('lr',), passes=[plain])": "TypeError: passes must be pairs of functions",
    "fastopt.rule(hyper=('lr',), passes=[(plain, plain, min)])":
        r"TypeError: \(sums, finish, max\) for the largest numbers",
    "fastopt.rule(hyper=('lr',), row=plain, passes=[(plain, plain)])":
        "TypeError: row cannot be combined with noise or passes",
    "compiled(takes_an_element)()":
        r"TypeError: rule takes_an_element cannot be compiled: there is no getitem\(float32",
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
    "compiled(imports)()": "TypeError: rule imports cannot be compiled: .*IMPORT_NAME",
    "fastopt.EmbeddingTable(2, 'sgd').load('table')":
        r"TypeError: EmbeddingTable.load\(...\) returns a new object: call it on the class",
    "RowSparse(ones(1), [0], (3,)).from_dense(ones(3))":
        r"TypeError: RowSparse.from_dense\(...\) returns a new object: call it on the class",
    "updater().finish('w')": "ValueError: 'w' is of no parameter; those so far",
    "updater().finish('w', np.ones(1))": "ValueError: 'w' is of no parameter; those so far",
    "fastopt.Updater('lbfgs')": "ValueError: Cannot find optimizer 'lbfgs'; .* scipy.optimize",
    "fastopt.Updater('sgd', groups={'w': {}}).groups['w'].update(wd=0.1)":
        "TypeError: groups are read-only, and .* = {pattern: {...}, ",
}  # fmt: skip


KNOWN = (scipy, Constant, Initializer, ReversePseudoFP16Initializer, RowSparse, scalar)
NAMES = {each.__name__: each for each in (*KNOWN, update_initializer)} | {
    "initializer": initializer
}


@pytest.mark.parametrize("code", MISTAKES)
def test_a_mistake_is_reported_in_a_sentence(code):
    check_refused(code, MISTAKES[code], globals() | vars(checkpoint) | NAMES)


def test_parameters_in_place_of_states_are_refused_by_name(tmp_path):
    params = ParameterDict()
    params.update({"p": parameter()})
    params.save(tmp_path / "params.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match=r"params.safetensors: it contains no"):
        Trainer(params).load_states(tmp_path / "params.safetensors")


def test_bytes_of_a_file_in_place_of_states_are_refused_by_name(tmp_path):
    updater().save(tmp_path / "run.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match=r"load\(\) reads files of save\(\)"):
        updater().set_states((tmp_path / "run.safetensors").read_bytes())


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("clip_global_norm", -1, ValueError),
        ("clip_global_norm", np.nan, ValueError),
        ("clip_global_norm", "1", TypeError),
        ("loss_scaler", 1024, TypeError),
    ],
)
@pytest.mark.parametrize("before", [0, 1], ids=["first", "second"])
def test_limits_are_checked_when_they_are_set_later(name, value, error, before):
    made, weight = updater(), ones()
    for _ in range(before):
        made(0, ones(), weight)
    expected = weight.copy()
    with pytest.raises(error, match=f"{name} must be"):
        setattr(made, name, value)
    assert getattr(made, name) is None
    assert np.array_equal(weight, expected)
    assert made.optimizer.num_update == len(made.states) == before


def test_a_quoted_value_is_one_line_of_bounded_length():
    assert brief("a\nb") == r"'a\nb'"
    assert brief(np.eye(2)) == "array([[1., 0.], [0., 1.]])"
    assert brief("x" * (LENGTH - 2)) == f"'{'x' * (LENGTH - 2)}'"
    assert brief("x" * LENGTH) == f"'{'x' * (LENGTH - 1)} ..."
    words = brief(["word"] * LENGTH)  # cut between words
    assert words.endswith("'word', ...")
    assert len(words) <= LENGTH + 4
