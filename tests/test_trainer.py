"""The trainer: one call for all parameters, equal copies, stale gradients, states."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest

from fastopt import lr_scheduler, optimizer
from fastopt.amp import LossScaler
from fastopt.device import cpu
from fastopt.parameter import Constant, DeferredInitializationError, Parameter, ParameterDict
from fastopt.trainer import StaleGradientError, Trainer
from helpers.refusals import check_refused

SHAPES = {"b": (3,), "a_weight": (2, 3), "c": ()}
OPTIMIZERS = [("sgd", {"learning_rate": 0.5, "momentum": 0.9, "wd": 0.1}), ("lamb", {})]


def model(devices=1, seed=0, **kwargs):
    """Parameters with numbers that depend on the seed only."""
    params = ParameterDict()
    rng = np.random.default_rng(seed)
    for name, shape in SHAPES.items():
        params.get(name, shape=shape, **kwargs)
    params.initialize("ones", device=[cpu(i) for i in range(devices)])
    for parameter in params.values():
        parameter.set_data(rng.normal(size=parameter.shape))
    return params


def scalar(name="w", **kwargs):
    made = Parameter(name, shape=1, init="zeros")
    made.initialize(**kwargs)
    return made


def gradients(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def train(params, made, seeds, batch_size=4):
    for seed in seeds:
        for name, grad in gradients(seed).items():
            params[name].add_grad(grad)
        made.step(batch_size)


def bits(params, device=None):
    return {name: p.data(device).tobytes() for name, p in params.items()}


# What a step does


@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS)
def test_steps_are_updates_by_hand_with_the_sums_over_all_devices(name, arguments):
    many, by_hand = model(devices=3), model()
    trainer = Trainer(many, name, {**arguments, "rescale_grad": 3.0})
    updater = optimizer.get_updater(optimizer.create(name, rescale_grad=0.75, **arguments))
    for step in range(4):
        parts = [gradients(10 * step + i) for i in range(3)]
        for i, key in enumerate(sorted(SHAPES)):
            for device, part in enumerate(parts):
                many[key].add_grad(part[key], cpu(device))
            updater(i, parts[0][key] + parts[1][key] + parts[2][key], by_hand[key].data())
        trainer.step(4)
        for device in range(3):
            assert bits(many, cpu(device)) == bits(by_hand)


def test_a_shared_parameter_is_updated_once_with_the_sum_of_its_gradients():
    weight, other = scalar(), scalar("v")
    made = Trainer([weight, other, weight], "sgd", {"learning_rate": 1.0})
    for _ in range(2):
        for grad in (1.0, 2.0, 4.0):
            weight.add_grad([grad])
        other.grad()
        made.step()
    assert weight.data().tolist() == [-14]
    assert made.optimizer.num_update == 2
    assert made.optimizer.idx2name == {0: "w", 1: "v"}


def test_multipliers_of_parameters_are_live_and_names_do_not_matter():
    params = ParameterDict()
    bias = params.get("fc_bias", shape=1, wd_mult=2.0)
    weight = params.get("fc_weight", shape=1, lr_mult=0.5)
    params.initialize("ones")
    made = Trainer(params, "sgd", {"learning_rate": 0.25, "wd": 0.5})

    def step():
        for parameter in (bias, weight):
            parameter.set_data([1])
            parameter.set_grad([1])
        made.step(1)
        return bias.data()[0], weight.data()[0]

    assert step() == (1 - 0.25 * (1 + 1), 1 - 0.125 * 1.5)
    bias.wd_mult, weight.lr_mult = 0, 0
    assert step() == (0.75, 1)
    params.setattr("lr_mult", 2)
    assert step() == (0.5, 0.25)


# Rates


def test_the_rate_is_that_of_the_optimizer():
    made = Trainer(model(), "sgd", {"learning_rate": 0.5})
    for assign in (made.set_learning_rate, partial(setattr, made, "learning_rate")):
        made.optimizer.lr = 1
        assign(0.25)
        assert made.learning_rate == made.optimizer.lr == 0.25
        with pytest.raises(ValueError, match="learning_rate must be a finite number"):
            assign(-1)
    schedule = lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    scheduled = Trainer(model(), "sgd", {"lr_scheduler": schedule})
    assert scheduled.learning_rate == 1
    for assign in (scheduled.set_learning_rate, partial(setattr, scheduled.optimizer, "lr")):
        with pytest.raises(UserWarning, match="the learning rate comes from lr_scheduler"):
            assign(1)


# Stale gradients


@pytest.mark.parametrize("give", [
    lambda p: p.add_grad(np.ones(p.shape)), lambda p: p.set_grad(np.ones(p.shape)),
    Parameter.grad, Parameter.list_grad,
])  # fmt: skip
def test_each_way_to_a_gradient_makes_it_fresh_for_one_step(give):
    params = model()
    made = Trainer(params)
    for _ in range(2):
        for parameter in params.values():
            give(parameter)
        made.step(1)
    params["a_weight"].add_grad(np.ones((2, 3)))
    params["b"].zero_grad()
    params["c"].data()
    before = bits(params)
    with pytest.raises(StaleGradientError, match="gradient of Parameter 'b' is stale"):
        made.step(1)
    assert issubclass(StaleGradientError, RuntimeError)
    assert bits(params) == before


def test_stale_gradients_and_parameters_without_gradient_are_left_out():
    params = model()
    params.update({"constant": Constant([1.0])})
    params["constant"].initialize()
    params.get("aa_unused", shape=(0,), grad_req="null")
    made = Trainer(params)
    for fresh in (SHAPES, ["b"]):
        before = bits({name: params[name] for name in SHAPES})
        for name in fresh:
            params[name].set_grad(np.ones(SHAPES[name]))
        made.step(1, ignore_stale_grad=fresh == ["b"])
        after = bits({name: params[name] for name in SHAPES})
        assert {name for name in SHAPES if before[name] != after[name]} == {*fresh}
    assert made.optimizer._index_update_count == {0: 1, 2: 2, 3: 1}


def test_a_parameter_that_is_not_initialized_is_an_error_or_left_out():
    waiting = Parameter("w", shape=(0,), allow_deferred_init=True)
    made = Trainer([waiting])
    with pytest.raises(RuntimeError, match="'w' is not initialized; call"):
        made.step(1)
    waiting.initialize()
    with pytest.raises(DeferredInitializationError, match="'w' is not initialized yet"):
        made.step(1)
    made.step(1, ignore_stale_grad=True)


def test_every_device_must_have_a_fresh_gradient_or_only_fresh_ones_count():
    """And sums over devices can be worked on before the update."""
    weight = scalar(device=[cpu(0), cpu(1)])
    made = Trainer([weight], "sgd", {"learning_rate": 1.0})
    weight.add_grad([3], cpu(0))
    weight.add_grad([5], cpu(1))
    made.allreduce_grads()
    made.allreduce_grads()
    for grad in weight.list_grad():
        assert grad.tolist() == [8]
        grad /= 2
    made.update(2)
    weight.set_grad([5], cpu(1))
    with pytest.raises(UserWarning, match="'w' is stale"):
        made.step(1)
    made.step(1, ignore_stale_grad=True)
    assert [a.tolist() for a in weight.list_data()] == [[-7], [-7]]


def test_a_failing_step_changes_nothing_and_can_be_repeated():
    params, good = model(), model()
    made = Trainer(params, "adam")
    train(good, Trainer(good, "adam"), [1], 2)
    before = bits(params)
    for name, grad in gradients(1).items():
        params[name].add_grad(grad)
    params["c"].lr_mult = -1.0
    for size, words in (2, r"\(c\): learning rate must"), (0, "batch_size must"), ("2", "a number"):
        with pytest.raises((ValueError, TypeError), match=words):
            made.step(size)
    assert bits(params) == before
    assert (made.optimizer.rescale_grad, made.optimizer.num_update) == (1, 0)
    params["c"].lr_mult = 1.0
    made.step(2)
    assert bits(params) == bits(good)


# Rows


def test_row_sparse_parameters_are_trained_and_pulled_by_rows():
    stypes = {"stype": "row_sparse", "grad_stype": "row_sparse"}
    parameter = Parameter("table", shape=(1000, 2), **stypes)
    parameter.initialize("ones", device=[cpu(0), cpu(1)])
    made = Trainer([parameter], "sgd", {"learning_rate": 0.25, "wd": 1.0})
    for _ in range(2):
        parameter.add_grad((np.ones((2, 2)), [7, 3]), cpu(0))
        parameter.add_grad((np.ones((1, 2)), [7]), cpu(1))
        made.step(1)
    expected = np.ones((1000, 2))  # other rows do not decay
    expected[[3, 7]] = [[0.125, 0.125], [-0.3125, -0.3125]]
    other, copied = copy.deepcopy((parameter, made))
    assert copy.copy(made).updater is made.updater is not copied.updater
    for pulled in (parameter, other):
        for rows in pulled.list_row_sparse_data(np.arange(1000)):
            np.testing.assert_array_equal(rows.to_dense(), expected)


# Half precision


def test_values_that_are_set_reach_the_master_of_a_half_precision_weight(half):
    weight = Parameter("w", shape=1, dtype=half)
    weight.initialize("ones")
    made = Trainer([weight], "sgd", {"learning_rate": 1.0, "multi_precision": True})

    def step(grad):
        weight.add_grad([grad])
        made.step(1)
        return float(weight.data()[0])

    assert step(0.5) == 0.5
    weight.set_data(np.array([4.0 + 2**-12]))
    assert step(0) == 4
    assert step(4) == 2**-12
    weight.initialize("ones", force_reinit=True)
    assert step(0.25) == 0.75


# States


@pytest.mark.parametrize("order", [list, lambda values: list(reversed(values))])
@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS)
def test_training_resumes_from_a_file_in_whatever_order_parameters_come(
    name, arguments, order, tmp_path
):
    params, other = model(), model(seed=1)
    made, resumed = Trainer(params, name, arguments), Trainer(order(other.values()), name)
    train(params, made, range(3))
    made.save_states(tmp_path / "states")
    params.save(tmp_path / "params")
    resumed.load_states(tmp_path / "states")
    other.load(tmp_path / "params")
    for trained, of in ((params, made), (other, resumed)):
        trained["b"].lr_mult = 0.5
        train(trained, of, range(3, 6))
    assert bits(params) == bits(other)
    assert resumed.optimizer.num_update == 6
    names = resumed.optimizer.idx2name
    assert resumed.optimizer.param_dict == {index: other[name] for index, name in names.items()}


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_trains_the_copied_parameters_with_their_multipliers(twin):
    params, arguments = model(), {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.5}
    params["b"].lr_mult, params["a_weight"].wd_mult = 0.5, 0.0
    made = Trainer(params, "sgd", arguments)
    train(params, made, range(2))
    other, copied = twin((params, made))
    alone = twin(made)
    for trained, of in ((params, made), (other, copied)):
        train(trained, of, range(2, 4))
        trained["b"].lr_mult = 2.0
        train(trained, of, range(4, 6))
    assert bits(params) == bits(other)
    assert copied.optimizer.param_dict == dict(enumerate(other[n] for n in sorted(SHAPES)))
    assert alone.optimizer.param_dict[0] is not params["a_weight"]
    assert [p.lr_mult for p in alone.optimizer.param_dict.values()][:2] == [1.0, 0.5]


# Making a trainer


def test_parameters_of_dicts_are_numbered_by_sorted_name_and_of_lists_in_order():
    params = model()
    by_name, in_order = {0: "a_weight", 1: "b", 2: "c"}, {0: "b", 1: "a_weight", 2: "c"}
    for these, names in (params, by_name), ({**params}, by_name), (params.values(), in_order):
        assert Trainer(these).optimizer.idx2name == names
    assert Trainer({"x": params["b"]}).optimizer.idx2name == {0: "x"}


def test_an_optimizer_an_updater_and_its_options_may_be_passed():
    scaler, updater = LossScaler(), optimizer.Updater("sgd")
    assert Trainer(model(), updater.optimizer, comm=updater).updater is updater
    made = Trainer(model(), loss_scaler=scaler, clip_global_norm=2.0).updater
    assert (made.loss_scaler, made.clip_global_norm) == (scaler, 2.0)


SGD = optimizer.SGD()
UPDATER = optimizer.Updater(SGD)
PARAMS = "TypeError: params must be a dict or a list of Parameters"
WRONG = {
    "Trainer(Parameter())": PARAMS,
    "Trainer([np.ones(3)])": "TypeError: params must hold Parameters|arrays are updated by",
    "Trainer({'w': 1})": "TypeError: params must hold Parameters",
    "Trainer([], 1)": "TypeError: optimizer must be an Optimizer or its name, got 1",
    "Trainer([], SGD, {'wd': 0.1})":
        "ValueError: optimizer_params is for an optimizer given by name",
    "Trainer([], optimizer.SGD(), comm=UPDATER)": "ValueError: comm is an updater, so optimizer",
    "Trainer([], SGD, comm=UPDATER, clip_global_norm=1.0)":
        "ValueError: loss_scaler and clip_global_norm are its own",
}  # fmt: skip


@pytest.mark.parametrize("code", WRONG)
def test_wrong_arguments_are_refused(code):
    check_refused(code, WRONG[code], globals())
