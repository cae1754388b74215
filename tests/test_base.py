"""The base class: registry, arguments, counts, rates, multipliers, copies."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from fastopt import lr_scheduler, optimizer
from fastopt.optimizer import Optimizer


def step(made, index=0, times=1):
    for _ in range(times):
        made.update(index, np.ones(2), np.ones(2), None)


@pytest.mark.parametrize("name", ["sgd", "SGD", "SgD"])
def test_create_ignores_case(name):
    assert type(optimizer.create(name)) is optimizer.SGD
    assert type(Optimizer.create_optimizer(name)) is optimizer.SGD


@pytest.mark.parametrize("name", ["nosuch", "", None, 3])
def test_an_unknown_optimizer_is_refused(name):
    with pytest.raises(ValueError, match=r"Cannot find optimizer.*adam.*sgd"):
        optimizer.create(name)


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="SGD does not take momentun"):
        optimizer.create("sgd", momentun=0.9)


def test_registering_a_name_again_warns():
    with pytest.warns(UserWarning, match=r"optimizer .*Adam replaces fastopt.optimizer.adam.Adam"):

        @optimizer.register
        class Adam(Optimizer):
            pass

    try:
        assert optimizer.opt_registry["adam"] is Adam
    finally:
        optimizer.opt_registry["adam"] = optimizer.Adam


def test_a_registered_class_is_an_attribute_of_the_package():
    @optimizer.register
    class Fresh(Optimizer):
        pass

    try:
        assert optimizer.Fresh is Fresh
        with pytest.raises(AttributeError, match="fresh"):
            optimizer.fresh  # noqa: B018
    finally:
        del optimizer.opt_registry["fresh"]


def test_only_optimizers_can_be_registered():
    with pytest.raises(TypeError, match="subclasses of Optimizer"):
        optimizer.register(dict)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"learning_rate": float("nan")}, ValueError),
        ({"learning_rate": -1.0}, ValueError),
        ({"learning_rate": float("inf")}, ValueError),
        ({"learning_rate": "0.1"}, TypeError),
        ({"wd": float("nan")}, ValueError),
        ({"clip_gradient": float("nan")}, ValueError),
        ({"momentum": float("nan")}, ValueError),
        ({"lr_scheduler": 0.1}, TypeError),
        ({"lr_scheduler": lr_scheduler.CosineScheduler}, TypeError),
        ({"rescale_grad": None}, TypeError),
        ({"param_dict": 5}, TypeError),
        ({"param_idx2name": ["a"]}, TypeError),
        ({"param_idx2name": {0: None}}, TypeError),
        ({"begin_num_update": -1}, ValueError),
        ({"begin_num_update": 0.5}, TypeError),
        ({"seed": -1}, ValueError),
    ],
)
def test_bad_arguments_are_named(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        optimizer.SGD(**arguments)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("adam", {"beta1": 1.0}),
        ("adam", {"beta2": -0.1}),
        ("adam", {"epsilon": -1.0}),
        ("rmsprop", {"gamma1": 1.0}),
        ("rmsprop", {"clip_weights": float("nan")}),
        ("adadelta", {"rho": float("nan")}),
        ("ftrl", {"beta": -1.0}),
        ("lamb", {"lower_bound": -1.0}),
        ("lars", {"eps": -1.0}),
        ("lbsgd", {"batch_scale": 0}),
        ("signum", {"wd_lh": float("nan")}),
        ("nadam", {"schedule_decay": -1.0}),
    ],
)
def test_hyper_parameters_out_of_range_are_named(name, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        optimizer.create(name, **arguments)


def test_the_base_class_updates_nothing():
    with pytest.raises(NotImplementedError, match="neither a rule nor an update"):
        step(Optimizer())


def test_counts_belong_to_the_index_and_num_update_is_their_maximum():
    made = optimizer.SGD(begin_num_update=10)
    step(made, 0, times=3)
    step(made, 1)
    assert made._index_update_count == {0: 13, 1: 11}
    assert made.num_update == 13


def test_the_schedule_gets_the_count_that_includes_this_update():
    seen = []
    made = optimizer.SGD(lr_scheduler=lambda n: seen.append(n) or 0.1)
    step(made, 0, times=2)
    step(made, 1)
    assert seen == [1, 2, 2]


def test_lbsgd_reads_the_schedule_before_it_counts():
    seen = []
    made = optimizer.LBSGD(lr_scheduler=lambda n: seen.append(n) or 0.1)
    step(made, 0, times=2)
    assert seen == [0, 1]


def test_a_given_rate_becomes_the_schedules():
    schedule = lr_scheduler.FactorScheduler(10, 0.5, base_lr=0.4)
    assert optimizer.SGD(lr_scheduler=schedule).learning_rate == 0.4
    assert optimizer.SGD(lr_scheduler=schedule, learning_rate=0.2).learning_rate == 0.2
    assert optimizer.Adam(lr_scheduler=schedule).learning_rate == 0.001
    assert optimizer.SGD().learning_rate == 0.01


def test_the_rate_cannot_be_set_beside_a_schedule():
    made = optimizer.SGD(lr_scheduler=lambda n: 0.1)
    with pytest.raises(UserWarning, match="lr_scheduler"):
        made.set_learning_rate(0.2)
    plain = optimizer.SGD()
    plain.set_learning_rate(0.2)
    assert plain.learning_rate == 0.2
    with pytest.raises(ValueError, match="learning_rate"):
        plain.set_learning_rate(-1)
    assert plain.learning_rate == 0.2


@pytest.mark.parametrize("rate", [None, "fast"])
def test_a_schedule_that_returns_no_number_is_named(rate):
    made = optimizer.SGD(lr_scheduler=lambda n: rate)
    with pytest.raises(TypeError, match=f"lr_scheduler must return a number, got {rate!r}"):
        step(made)
    assert made.num_update == 0


def test_a_decay_that_became_nan_is_refused():
    made = optimizer.SGD()
    made.wd = float("nan")
    with pytest.raises(ValueError, match="index 0: weight decay must be a finite number"):
        step(made)


def test_a_class_must_initialize_its_base():
    class Hasty(optimizer.Optimizer):
        def __init__(self):
            pass

    with pytest.raises(TypeError, match=r"Hasty.__init__ must call super\(\).__init__\(\)"):
        optimizer.get_updater(Hasty())


def test_set_lr_scale_is_gone():
    with pytest.raises(DeprecationWarning, match="set_lr_mult"):
        optimizer.SGD().set_lr_scale({})


def test_multipliers_come_from_param_dict_then_index_then_name():
    made = optimizer.SGD(
        learning_rate=1.0,
        wd=1.0,
        param_idx2name={0: "a_weight", 1: "b_weight", 2: "c_weight", 3: "d_weight"},
        param_dict={0: SimpleNamespace(lr_mult=2.0, wd_mult=20.0)},
    )
    made.set_lr_mult({0: 3.0, 1: 3.0, "a_weight": 4.0, "b_weight": 4.0, "c_weight": 4.0})
    made.set_wd_mult({0: 3.0, 1: 3.0, "a_weight": 4.0, "b_weight": 4.0, "c_weight": 4.0})
    assert [made._get_lr(i) for i in range(5)] == [2, 3, 4, 1, 1]
    assert [made._get_wd(i) for i in range(5)] == [20, 3, 4, 1, 1]


def test_names_decide_about_decay():
    names = {0: "a_weight", 1: "a_bias", 2: "bn_gamma", 3: "bn_beta"}
    assert [optimizer.SGD(wd=1.0, param_idx2name=names)._get_wd(i) for i in names] == [1, 0, 1, 0]
    assert [optimizer.LARS(wd=1.0, param_idx2name=names)._get_wd(i) for i in names] == [1, 0, 0, 0]
    assert optimizer.SGD(wd=1.0)._get_wd(1) == 1


def test_setting_multipliers_forgets_the_old_ones():
    made = optimizer.SGD(param_idx2name={0: "a_weight", 1: "a_bias"}, wd=1.0)
    made.set_wd_mult({"a_bias": 1.0})
    made.set_wd_mult({"a_weight": 0.5})
    assert made.wd_mult == {"a_bias": 0.0, "a_weight": 0.5}
    made.set_lr_mult({0: 2.0})
    made.set_lr_mult({1: 2.0})
    assert made.lr_mult == {1: 2.0}
    with pytest.raises(ValueError, match="wd_mult"):
        made.set_wd_mult({0: float("nan")})
    with pytest.raises(TypeError, match="lr_mult"):
        made.set_lr_mult(2.0)


def test_a_symbol_lends_its_attributes():
    symbol = SimpleNamespace(
        attr_dict=lambda: {"a_weight": {"__lr_mult__": "2", "__wd_mult__": 3}, "other": {}},
        list_arguments=lambda: ["a_weight", "other", "missing"],
    )
    made = optimizer.SGD(sym=symbol, param_idx2name={0: "a_weight"}, learning_rate=1.0, wd=1.0)
    assert (made._get_lr(0), made._get_wd(0)) == (2, 3)


@pytest.mark.parametrize("clip", [None, 0, -1.0])
def test_no_clipping_means_no_clipping(clip):
    made, weight = optimizer.SGD(learning_rate=1.0, clip_gradient=clip), np.zeros(1)
    made.update(0, weight, np.full(1, 100.0), None)
    assert weight == -100


def test_a_pickle_lacks_param_dict():
    made = optimizer.SGD(param_dict={0: SimpleNamespace(lr_mult=2.0, wd_mult=1.0)})
    assert pickle.loads(pickle.dumps(made)).param_dict == {}
    assert set(made.param_dict) == {0}


def test_adamw_skips_an_update_without_a_usable_scale():
    for scale in (0.0, float("inf"), float("nan")):
        updater = optimizer.get_updater(optimizer.AdamW(rescale_grad=scale, wd=0.1))
        weight = np.ones(3)
        updater(0, np.ones(3), weight)
        np.testing.assert_array_equal(weight, 1)
        np.testing.assert_array_equal(updater.states[0], np.zeros((2, 3)))


def test_nadams_product_belongs_to_all_parameters_unless_asked():
    def products(**kwargs):
        made = optimizer.Nadam(**kwargs)
        updater = optimizer.get_updater(made)
        for index in (0, 1, 0):
            updater(index, np.ones(2), np.ones(2))
        return made

    momentum = [0.9 * (1 - 0.5 * 0.96 ** (t * 0.004)) for t in (1, 2)]
    assert products().m_schedule == pytest.approx(momentum[0] ** 2 * momentum[1])
    single = products(per_parameter=True)
    assert single.m_schedule == 1
    assert single._m_schedules == pytest.approx({0: momentum[0] * momentum[1], 1: momentum[0]})


def test_groupadagrad_refuses_what_it_has_no_formula_for():
    updater = optimizer.get_updater(optimizer.GroupAdaGrad(wd=0.1))
    with pytest.raises(ValueError, match=r"index 0: GroupAdaGrad has no weight decay, got 0\.1"):
        updater(0, np.ones((2, 2)), np.ones((2, 2)))
    with pytest.raises(ValueError, match="two dimensions"):
        updater(1, np.ones(2), np.ones(2))
    assert updater.states == {}
    assert updater.optimizer._index_update_count == {}


def test_ccsgd_says_that_it_is_deprecated():
    with pytest.warns(DeprecationWarning, match="use SGD"):
        assert isinstance(optimizer.create("ccsgd", momentum=0.5), optimizer.SGD)
