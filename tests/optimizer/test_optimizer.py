"""The base class: registry, arguments, counts, rates, multipliers, copies."""

import copy
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import fastopt
from fastopt import lr_scheduler, optimizer
from fastopt.arguments import Integer, Real, TableOf, arg, kept
from fastopt.optimizer import Optimizer


def step(made, index=0, times=1):
    for _ in range(times):
        made.update(index, np.ones(2), np.ones(2), None)


@pytest.mark.parametrize("name", ["sgd", "SGD", "SgD"])
def test_create_ignores_case(name):
    assert type(optimizer.create(name)) is optimizer.SGD
    assert type(Optimizer.create_optimizer(name)) is optimizer.SGD


@pytest.mark.parametrize("name", ["nosuch", ""])
def test_an_unknown_optimizer_is_refused(name):
    with pytest.raises(ValueError, match=r"Cannot find optimizer.*adam.*sgd"):
        optimizer.create(name)


def test_an_optimizer_of_torch_is_refused_with_the_module_for_it():
    of_torch = type("Adam", (), {"__module__": "torch.optim.adam"})()
    with pytest.raises(TypeError, match=r"got .*; fastopt\.torch has optimizers"):
        fastopt.Updater(of_torch)


@pytest.mark.parametrize("name", [None, 3])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(TypeError, match=f"must be an Optimizer or its name, got {name}"):
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


def test_importing_the_package_imports_no_optimizer(run_python):
    code = """
import sys
import fastopt
loaded = {name for name in sys.modules if name.startswith("fastopt.optimizer.")}
assert "fastopt.optimizer.adam" not in loaded and "fastopt.optimizer.sgd" not in loaded
assert fastopt.optimizer.create("ADAM").beta1 == 0.9
assert "fastopt.optimizer.layerwise" not in sys.modules
assert fastopt.optimizer.ccSGD.__module__ == fastopt.SGD.__module__ == "fastopt.optimizer.sgd"
assert fastopt.optimizer.lamb.LAMB is fastopt.LAMB
print(len(fastopt.optimizer.opt_registry))
"""
    kinds = optimizer.opt_registry.values()  # other tests register classes of their own
    own = [kind for kind in kinds if kind.__module__.startswith("fastopt.optimizer.")]
    assert int(run_python(code)) == len(own)


def test_a_class_is_in_the_module_of_its_name():
    """Otherwise its name would be unknown until all optimizers are imported."""
    for name, klass in optimizer.opt_registry.items():
        if klass.__module__.startswith("fastopt."):
            assert klass is getattr(optimizer.opt_registry.module(name), klass.__name__)


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


VALUES = [
    *(("sgd", name, math.nan) for name in ("learning_rate", "wd", "clip_gradient", "momentum")),
    *(("sgd", "learning_rate", rate) for rate in (-1.0, math.inf)),
    ("sgd", "begin_num_update", -1),
    ("sgd", "seed", -1),
    ("adam", "beta1", 1.0),
    ("adam", "beta2", -0.1),
    ("adam", "epsilon", -1.0),
    ("rmsprop", "gamma1", 1.0),
    ("rmsprop", "clip_weights", math.nan),
    *(("rmsprop", "initial_accumulator_value", wrong) for wrong in (-1.0, math.nan)),
    ("adadelta", "rho", math.nan),
    ("ftrl", "beta", -1.0),
    ("lamb", "lower_bound", -1.0),
    ("lars", "eps", -1.0),
    ("lbsgd", "batch_scale", 0),
    *(("signum", "wd_lh", wrong) for wrong in (-0.1, math.nan)),
    ("nadam", "schedule_decay", -1.0),
    *((name, "formula", "keras") for name in ("sgd", "adam", "adagrad", "rmsprop", "nadam")),
]
TYPES = [
    *(("sgd", "lr_scheduler", kind) for kind in (0.1, lr_scheduler.CosineScheduler)),
    *(("sgd", "param_idx2name", names) for names in (["a"], {0: None})),
    ("sgd", "learning_rate", "0.1"),
    ("sgd", "begin_num_update", 0.5),
    ("sgd", "rescale_grad", None),
    ("sgd", "param_dict", 5),
    ("rmsprop", "initial_accumulator_value", "one"),
]


@pytest.mark.parametrize(
    ("error", "name", "argument", "wrong"),
    [(ValueError, *row) for row in VALUES] + [(TypeError, *row) for row in TYPES],
)
def test_wrong_arguments_are_named(error, name, argument, wrong):
    with pytest.raises(error, match=f"^{argument}\\b.* must "):
        optimizer.create(name, **{argument: wrong})


@pytest.mark.parametrize(
    "name",
    ["learning_rate", "wd", "momentum", "clip_gradient", "rescale_grad", "begin_num_update"],
)
def test_integers_that_no_float_or_count_can_hold_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got 1000+"):
        optimizer.SGD(**{name: 10**400})


@pytest.mark.parametrize("name", ["lr_scheduler", "lr_mult"])
def test_integers_that_no_float_can_hold_change_nothing(name):
    made = optimizer.SGD(**{"lr_scheduler": lambda n: 10**400} if name == "lr_scheduler" else {})
    if name == "lr_mult":
        made.lr_mult = {0: 10**400}
    with pytest.raises(ValueError, match="must be a finite number"):
        step(made)
    assert made.num_update == 0


def test_updates_are_counted_from_at_most_the_half_of_64_bits():
    made = optimizer.SGD(begin_num_update=2**62)
    step(made)
    assert made.num_update == 2**62 + 1
    with pytest.raises(ValueError, match="begin_num_update must be at most"):
        optimizer.SGD(begin_num_update=2**62 + 1)


@pytest.mark.parametrize(("name", "t"), [("adam", 51), ("adopt", 1), ("galore", 1)])
def test_formulas_go_on_from_the_initial_count_but_not_what_is_first(name, t):
    more = {"beta1": 0.9, "beta2": 0.99} if name != "adopt" else {}
    updater = optimizer.get_updater(
        optimizer.create(name, learning_rate=0.1, begin_num_update=50, **more)
    )
    weight, grad = np.zeros((2, 1)), np.array([[1.0], [-1.0]])
    updater(0, grad, weight)
    size = 0.1 * 0.1 / np.sqrt(0.01) * np.sqrt(1 - 0.99**t) / (1 - 0.9**t)
    size *= {"adam": 1, "adopt": 0, "galore": 0.25}[name]
    np.testing.assert_allclose(weight, -size * grad, rtol=1e-4)


def test_the_base_class_updates_nothing():
    with pytest.raises(NotImplementedError, match="neither a rule nor an update"):
        step(Optimizer())


def test_counts_belong_to_the_index_and_num_update_is_their_maximum():
    made = optimizer.SGD(begin_num_update=10)
    step(made, 0, times=3)
    step(made, 1)
    assert made._index_update_count == {0: 13, 1: 11}
    assert made.num_update == 13


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batch_scale", [1, 2])
def test_lbsgd_without_an_updater_updates_the_master_that_it_makes(momentum, batch_scale):
    """The state is nested as in MXNet, where create_state() makes the master."""
    arguments = {"learning_rate": 1e-4, "momentum": momentum, "batch_scale": batch_scale}
    made, other = (optimizer.LBSGD(multi_precision=True, **arguments) for _ in range(2))
    weight, expected = np.ones((2, 3, 1), np.float16)[:2]
    state, updater = made.create_state(0, weight), optimizer.get_updater(other)
    mom, master = state
    for _ in range(100):
        made.update(0, weight, np.ones((3, 1), np.float16), state)
        updater(0, np.ones((3, 1), np.float16), expected)
    assert master.dtype == np.float32
    assert (mom is None) == (momentum == 0)
    np.testing.assert_array_equal(master, updater.states[0][0])
    np.testing.assert_array_equal(weight, expected)
    assert (weight < 1).all()


def test_lbsgd_makes_no_master_that_is_not_asked_for():
    weight = np.ones(2, np.float16)
    assert optimizer.LBSGD().create_state(0, weight) is None
    assert optimizer.LBSGD(multi_precision=True).create_state(0, np.ones(2)) is None
    made = optimizer.LBSGD(multi_precision=True)
    with pytest.raises(ValueError, match="index 0"):
        made.update(0, np.ones(2), np.ones(2), (None, np.ones(2, np.float32)))


def test_lbsgd_reads_the_schedule_before_it_counts():
    seen = []
    made = optimizer.LBSGD(lr_scheduler=lambda n: seen.append(n) or 0.1)
    step(made, 0, times=2)
    assert seen == [0, 1]


def test_a_learning_rate_becomes_the_base_rate_of_the_schedule():
    schedule = lr_scheduler.FactorScheduler(10, 0.5)
    made = [
        optimizer.SGD(lr_scheduler=schedule),
        optimizer.SGD(lr_scheduler=schedule, learning_rate=0.2),
        optimizer.Adam(lr_scheduler=schedule),
    ]
    assert [one.learning_rate for one in made] == [0.01, 0.2, 0.001]
    assert schedule.base_lr == 0.01
    assert made[0].lr_scheduler is schedule
    assert optimizer.SGD().learning_rate == 0.01


SCHEDULE_TRAPS = {
    "the default rate replaces a base_lr": (
        optimizer.Adam,
        {},
        lambda: lr_scheduler.FactorScheduler(10, base_lr=0.3),
        0.001,
        "learning_rate=0.001 of Adam replaces base_lr=0.3 of FactorScheduler; "
        "learning_rate=None keeps base_lr",
    ),
    "a rate replaces a base_lr": (
        optimizer.SGD,
        {"learning_rate": 0.2},
        lambda: lr_scheduler.PlateauScheduler(base_lr=0.3),
        0.2,
        "learning_rate=0.2 of SGD replaces base_lr=0.3 of PlateauScheduler",
    ),
    "a rate has no effect": (
        optimizer.Adam,
        {"learning_rate": 0.05},
        lambda: lr_scheduler.CosineScheduler(1000),
        0.01,
        "learning_rate=0.05 of Adam has no effect: CosineScheduler keeps its base_lr=0.01",
    ),
    "warm-up ends elsewhere": (
        optimizer.SGD,
        {"learning_rate": 0.2},
        lambda: lr_scheduler.FactorScheduler(10, warmup_steps=5, warmup_begin_lr=0.005),
        0.005,
        "learning_rate=0.2 of SGD replaces base_lr=0.01 .* after warm-up, which still ends at 0.01",
    ),
}


@pytest.mark.parametrize("case", SCHEDULE_TRAPS.values(), ids=SCHEDULE_TRAPS.keys())
def test_a_rate_and_a_schedule_that_differ_warn_once_of_the_one_that_holds(case):
    klass, arguments, make, rate, words = case
    schedule = make()
    before = dict(vars(schedule))
    with pytest.warns(UserWarning, match=f"^{words}") as record:
        made = klass(lr_scheduler=schedule, **arguments)
    assert [warning.filename for warning in record] == [__file__]
    assert made.learning_rate == rate
    assert vars(schedule) == before


@pytest.mark.parametrize(
    ("klass", "arguments", "schedule", "rate"),
    [
        (
            optimizer.Adam,
            {"learning_rate": None},
            lr_scheduler.FactorScheduler(9, base_lr=0.3),
            0.3,
        ),
        (optimizer.Adam, {}, lr_scheduler.CosineScheduler(9, base_lr=0.3), 0.3),
        (optimizer.SGD, {"learning_rate": 0.3}, lr_scheduler.CosineScheduler(9, base_lr=0.3), 0.3),
        (optimizer.SGD, {"learning_rate": 0.3}, lr_scheduler.FactorScheduler(9), 0.3),
        (optimizer.SGD, {"learning_rate": 0.3}, lambda n: 0.1, 0.1),
    ],
)
def test_one_rate_beside_a_schedule_does_not_warn(klass, arguments, schedule, rate):
    assert klass(lr_scheduler=schedule, **arguments).learning_rate == rate


def test_optimizers_share_a_schedule_whose_state_advances():
    plateau = lr_scheduler.PlateauScheduler(0.5, patience=1)
    made = [optimizer.SGD(lr_scheduler=plateau, learning_rate=rate) for rate in (None, 0.2, 0.4)]
    for loss in (1.0, 1.0):
        plateau.step(loss)
    assert [one.learning_rate for one in made] == [0.005, 0.1, 0.2]


def test_a_users_schedule_with_base_lr_is_copied_too():
    class Halving:
        base_lr = 0.4

        def __call__(self, num_update):
            return self.base_lr / 2**num_update

    schedule = Halving()
    with pytest.warns(UserWarning, match="replaces base_lr=0.4 of Halving"):
        made = optimizer.SGD(lr_scheduler=schedule, learning_rate=0.2)
    step(made)
    assert (made.learning_rate, schedule.base_lr) == (0.1, 0.4)


def test_the_rate_cannot_be_set_beside_a_schedule():
    made = optimizer.SGD(lr_scheduler=lambda n: 0.1)
    with pytest.raises(optimizer.ScheduledRateError, match="lr_scheduler") as raised:
        made.set_learning_rate(0.2)
    assert isinstance(raised.value, RuntimeError)
    assert isinstance(raised.value, UserWarning)
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


@pytest.mark.parametrize("bad", [float("nan"), -1.0])
def test_a_decay_that_became_invalid_is_refused(bad):
    made = optimizer.SGD(wd=1.0)
    with pytest.raises(ValueError, match=rf"^wd must be a finite number, at least 0, got {bad}"):
        made.wd = bad
    assert made.wd == 1
    made.wd_mult[0] = bad
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


def test_names_of_other_libraries_decay_too():
    words = ["weight", "gamma", "kernel", "bias", "beta"]
    names = [f"layer{separator}{word}" for word in words for separator in "_./"]
    made = optimizer.SGD(wd=1.0, param_idx2name=dict(enumerate([*names, "W1", "weightnorm"])))
    assert [made._get_wd(i) for i in range(17)] == [1] * 9 + [0] * 8
    made = optimizer.LARS(wd=1.0, param_idx2name=dict(enumerate(names)))
    assert [made._get_wd(i) for i in range(15)] == [1] * 3 + [0] * 3 + [1] * 3 + [0] * 6


def updates(updater, *calls):
    """Update arrays of ones under each index, or list of indices, in turn."""
    for call in calls:
        if isinstance(call, list):
            updater(call, [np.ones(2) for _ in call], [np.ones(2) for _ in call])
        else:
            updater(call, np.ones(2), np.ones(2))


def test_decay_that_reaches_no_name_warns_once_with_the_rule():
    made = optimizer.Adam(wd=0.1, param_idx2name={0: "W1", 1: "b1"})
    words = r"wd=0.1 decays none of the parameters \['W1', 'b1'\]: .* _weight, .* /kernel"
    with pytest.warns(UserWarning, match=words) as record:
        updates(optimizer.get_updater(made), [0, 1], [0, 1], 0)
    assert [warning.filename for warning in record] == [__file__]


@pytest.mark.parametrize(
    "arguments",
    [
        {"wd": 0.1, "param_idx2name": {0: "a.weight", 1: "b1"}},
        {"wd": 0.1},
        {"param_idx2name": {0: "W1", 1: "b1"}},
        {
            "wd": 0.1,
            "param_idx2name": {0: "W1"},
            "param_dict": {0: SimpleNamespace(lr_mult=1, wd_mult=1)},
        },
    ],
)
def test_decay_that_reaches_a_parameter_does_not_warn(arguments):
    updates(optimizer.get_updater(optimizer.SGD(**arguments)), [0, 1], [0, 1])


def test_a_name_that_is_given_a_decay_by_hand_does_not_warn():
    made = optimizer.SGD(wd=0.1, param_idx2name={0: "W1", 1: "b1"})
    made.set_wd_mult({"W1": 1.0})
    updates(optimizer.get_updater(made), [0, 1], [0, 1])


LOST = {
    "a list": ({}, [[0, 1]]),
    "single calls, with names": ({"param_idx2name": {0: "a_weight", 1: "b_bias"}}, [0, 1]),
    "single calls, without names": ({}, [0, 1, 0]),
    "text as indices": ({}, ["a_weight", "b_bias", "a_weight"]),
}


@pytest.mark.parametrize("case", LOST.values(), ids=LOST.keys())
@pytest.mark.parametrize("attribute", ["lr_mult", "wd_mult"])
def test_multipliers_that_no_parameter_has_warn_once_all_names_are_known(case, attribute):
    arguments, calls = case
    made = optimizer.SGD(**arguments)
    known = {0: 1.0} if 0 in calls or [0, 1] in calls else {"a_weight": 1.0}
    getattr(made, f"set_{attribute}")({"typo_weight": 3.0, 7: 2.0} | known)
    updater = optimizer.get_updater(made)
    updates(updater, *calls[:-1])
    with pytest.warns(UserWarning, match=f"^{attribute} of 'typo_weight', 7 has no effect") as seen:
        updates(updater, calls[-1])
    assert len(seen) == 1
    assert not made.unchecked
    updates(updater, *calls, *calls)


@pytest.mark.parametrize("calls", [[0, 0], [[0]] * 2, [[0, 1]], ["a", "a"]])
def test_multipliers_are_checked_in_the_first_round_only(calls):
    made = optimizer.SGD()
    updates(optimizer.get_updater(made), *calls)
    assert not made.unchecked


def test_multipliers_of_indices_names_objects_and_symbols_do_not_warn():
    symbol = SimpleNamespace(
        attr_dict=lambda: {"data": {"__lr_mult__": 2}}, list_arguments=lambda: ["data"]
    )
    made = optimizer.SGD(
        sym=symbol,
        param_idx2name={0: "a_weight", 1: "b_bias"},
        param_dict={5: SimpleNamespace(lr_mult=1, wd_mult=1)},
    )
    made.set_lr_mult({0: 1.0, "b_bias": 2.0, 5: 2.0, "data": 1.0})
    updates(optimizer.get_updater(made), 0, 1, [0, 1])


def test_a_warning_that_is_an_error_changes_nothing():
    made = optimizer.SGD()
    made.set_lr_mult({"typo": 2.0})
    weight = np.ones(2)
    updater = optimizer.get_updater(made)
    with pytest.raises(UserWarning, match="typo"):
        updater([0, 1], [np.ones(2), np.ones(2)], [weight, np.ones(2)])
    assert (weight.tolist(), made.num_update, updater.states) == ([1, 1], 0, {})
    updater(0, np.ones(2), weight)


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


class Noting(optimizer.Adam):
    """A class of the user with a property for an argument, and attributes of its own."""

    def __init__(self, **given):
        self.before = "before"
        super().__init__(**given)
        self.after = self.lr

    @property
    def wd(self):
        return self.__dict__["halved"]

    @wd.setter
    def wd(self, value):
        self.__dict__["halved"] = value / 2


class Watching(optimizer.SGD):
    """A class of the user that sees each assignment."""

    def __setattr__(self, name, value):
        self.__dict__.setdefault("assigned", []).append(name)
        super().__setattr__(name, value)


def test_constructors_assign_as_users_classes_want():
    made = Noting(lr=0.5, wd=0.5)
    assert (made.before, made.after, made.wd) == ("before", 0.5, 0.25)
    assert {"lr", "wd", "momentum", "rescale_grad", "lr_mult"} <= {*Watching(momentum=0.5).assigned}
    with pytest.raises(ValueError, match="wd must be"):
        Watching(wd=-1.0)
    for kind in (Noting, Watching):
        first = kind(lr=0.5)
        again = pickle.loads(pickle.dumps(first))
        for one in (first, again, copy.deepcopy(first)):
            version = one.version
            one.rescale_grad = 0.5
            assert one.version != version


def test_a_change_in_the_constructor_of_a_subclass_is_used():
    class Doubled(optimizer.SGD):
        def __init__(self, **given):
            super().__init__(**given)
            self.lr = 2 * self.lr
            self.lr_mult["bias"] = 0.5
            self.learning_rate *= 2

    updater = optimizer.Updater(Doubled(lr=0.125))
    weights = {"kernel": np.ones(1), "bias": np.ones(1)}
    updater.step({"kernel": np.ones(1), "bias": np.ones(1)}, weights)
    assert (weights["kernel"], weights["bias"]) == (0.5, 0.75)


@fastopt.rule(hyper=("lr", "inverse_width"))
def by_width(weight, grad, state, h):
    return weight - h.lr * h.inverse_width * grad, ()


class ByWidth(optimizer.Optimizer):
    """Its steps depend on the number of columns."""

    rule = by_width
    scale: float = arg(default=1.0, check=Real())
    widths: dict[int | str, int] = kept(factory=dict, check=TableOf(Integer()))

    def create_state(self, index, weight):
        self.widths[index] = weight.shape[-1]
        return super().create_state(index, weight)

    def fields_of(self, index):
        return {"inverse_width": self.scale / self.widths[index]}


class Doubled(ByWidth):
    """Its rates are asked for in Python."""

    def _get_lr(self, index):
        return 2 * super()._get_lr(index)


def test_fields_of_a_parameter_are_those_of_its_shape():
    weights, grads = [np.zeros((1, 4)), np.zeros((1, 2))], [np.ones((1, 4)), np.ones((1, 2))]
    updater = optimizer.get_updater(ByWidth(lr=1.0))
    path = [0.0, 0.0]
    for change in ({}, {}, {"scale": 2.0}, {"lr": 0.5}, {"lr_scheduler": lambda n: 1 / n}):
        for name, value in change.items():
            setattr(updater.optimizer, name, value)
        updater([0, 1], grads, weights)
        made = updater.optimizer
        path = [
            at - made.learning_rate * made.scale / w for at, w in zip(path, (4, 2), strict=True)
        ]
        assert [weight[0, 0] for weight in weights] == path
    updater(1, grads[1], weights[1])
    assert weights[1][0, 0] == path[1] - updater.optimizer.learning_rate
    with pytest.raises(KeyError, match="2"):
        updater.optimizer.fields_of(2)


@pytest.mark.parametrize(
    ("make", "groups", "steps"),
    [
        (ByWidth, {"b": {"lr": 0.5}}, [0.25, 0.25]),
        (ByWidth, {"b": {"scale": 3.0}}, [0.25, 1.5]),
        (Doubled, None, [0.5, 1.0]),
    ],
)
def test_groups_and_rates_of_ones_own_have_fields_of_parameters_too(make, groups, steps):
    weights, grads = [np.zeros((1, 4)), np.zeros((1, 2))], [np.ones((1, 4)), np.ones((1, 2))]
    updater = optimizer.get_updater(make(lr=1.0), groups=groups)
    updater(["a", "b"], grads, weights)
    assert [-weight[0, 0] for weight in weights] == steps
    other = optimizer.get_updater(make(lr=1.0), groups=groups)
    other.load_state_dict(updater.state_dict())
    other(["a", "b"], grads, weights)
    assert [-weight[0, 0] for weight in weights] == [2 * step for step in steps]
