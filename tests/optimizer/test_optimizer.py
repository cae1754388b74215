"""The base class: registry, arguments, counts, rates, multipliers, copies, ascent."""

import copy
import math
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.arguments import Integer, Real, TableOf, arg, kept
from fastopt.lr_scheduler import CosineScheduler, FactorScheduler, PlateauScheduler
from fastopt.optimizer import SGD, Adam, Optimizer
from helpers.refusals import check_refused, each
from helpers.users import Doubled, InNumPy, Unscaled  # noqa: F401


def step(made, index=0, times=1):
    for _ in range(times):
        made.update(index, np.ones(2), np.ones(2), None)


class Hasty(Optimizer):
    """A class that does not initialize its base."""

    def __init__(self):
        pass


OfTorch = type("Adam", (), {"__module__": "torch.optim.adam"})
REFUSED = {
    "optimizer.create('nosuch')": "ValueError: Cannot find optimizer.*adam.*sgd",
    "optimizer.create('')": "ValueError: Cannot find optimizer.*adam.*sgd",
    "optimizer.create(None)": "TypeError: must be an Optimizer or its name, got None",
    "optimizer.create('sgd', momentun=0.9)": "TypeError: SGD does not take momentun",
    "fastopt.Updater(3)": "TypeError: optimizer must be an Optimizer or its name, got 3",
    "fastopt.Updater(OfTorch())": r"TypeError: got .*; fastopt\.torch has optimizers",
    "fastopt.Updater(Hasty())": r"TypeError: Hasty.__init__ must call super\(\).__init__\(\)",
    "fastopt.Updater(optimizer.GroupAdaGrad(wd=0.1))(0, np.ones((2, 2)), np.ones((2, 2)))": (
        r"ValueError: index 0: GroupAdaGrad has no weight decay, got 0\.1"
    ),
    "optimizer.adam_": "AttributeError: adam_",
    "optimizer.register(dict)": "TypeError: subclasses of Optimizer",
    "step(Optimizer())": "NotImplementedError: neither a rule nor an update",
    "optimizer.SGD(begin_num_update=2**62 + 1)": "ValueError: begin_num_update must be at most",
    "optimizer.SGD(lr_scheduler=lambda n: 0.1).set_learning_rate(0.2)": "UserWarning: lr_scheduler",
    "optimizer.Adam(lr_scheduler=lambda n: 1.0).set_learning_rate(1)": "RuntimeError: lr_scheduler",
    "optimizer.SGD().set_learning_rate(-1)": "ValueError: learning_rate must be",
    "InNumPy(maximize=True)": r"ValueError: InNumPy has an update\(\) in Python: negate the grad",
    "fastopt.Updater(Unscaled(maximize=True))(0, np.ones(2), np.ones(2))": (
        "ValueError: reads no rescale_grad, so it cannot maximize"
    ),
    "optimizer.SGD().set_lr_scale({})": "DeprecationWarning: set_lr_mult",
    "optimizer.SGD().set_wd_mult({0: math.nan})": "ValueError: wd_mult",
    "optimizer.SGD().set_lr_mult(2.0)": "TypeError: lr_mult",
    "optimizer.AdamW(grams=True, cautious=True)": "ValueError: cautious has no effect: use one of",
    "optimizer.create('schedulefreeadamw', cautious=True)": "TypeError: does not take cautious",
    "optimizer.create('lamb', cautious=True)": "TypeError: does not take cautious",
    "optimizer.Adam(cautious_decay=True)": "TypeError: does not take cautious_decay",
    "optimizer.AdaBelief(stable=True)": "TypeError: does not take stable",
    "optimizer.Prodigy(cautious_decay=True, decouple=False)": "ValueError: needs decoupled decay",
    "optimizer.Lion(cautious_decay=True, sparse_decay='catch_up')": (
        "ValueError: cautious_decay=True decays by the gradient's sign"
    ),
    "optimizer.LAMB(corrected_decay=0.1)": (
        "ValueError: corrected_decay=0.1 needs decoupled decay; .*: AdamW has such a decay"
    ),
    "optimizer.SGD(corrected_decay=0.1)": "ValueError: decoupled decay; .*: pass decouple=True",
    **each(
        "optimizer.AdamW({})",
        "ValueError: must be the largest learning rate, above 0, or None",
        *("corrected_decay=0.0", "corrected_decay=-1.0"),
    ),
    **each(
        "optimizer.AdamW(formula='torch', {})",
        "ValueError: formula='torch' needs correct_bias=True and eta=None",
        *("eta=0.5", "correct_bias=False"),
    ),
    "optimizer.AdaGrad(sparse_decay='catch_up', formula='torch')": (
        "ValueError: needs decoupled decay; that of AdaGrad"
    ),
    "optimizer.Prodigy(state_dtype='bfloat16')": "ValueError: state_dtype must be None",
    "optimizer.Prodigy(sparse_decay='dense')": "ValueError: must be 'touched', got 'dense'",
    **each(
        "fastopt.Updater('prodigy', groups={{'a': {{'{}': 0.5}}}})",
        "TypeError: is the same in all groups",
        *("learning_rate", "d0", "beta2"),
    ),
    "fastopt.Updater('muon', average=fastopt.EMA())": r"TypeError: Muon overrides update\(\)",
    "fastopt.Updater('adam', groups={'a': {'optimizer': 'muon'}}, average=fastopt.EMA())": (
        r"TypeError: groups\['a'\]: average is computed in the pass of a rule, and Muon overrides"
    ),
    "fastopt.Updater('muon', groups={'a': {'momentun': 0.5}})": "TypeError: did you mean momentum",
    "fastopt.Updater('muon', groups={'a': {'momentum': 2.0}})": (
        r"ValueError: groups\['a'\]: momentum must be"
    ),
}


@pytest.mark.parametrize("code", REFUSED)
def test_mistakes_are_refused(code):
    check_refused(code, REFUSED[code], globals())


def test_a_registered_class_is_an_attribute_and_replaces_one_of_its_name(registries):
    with pytest.warns(UserWarning, match=r"optimizer .*Adam replaces fastopt.optimizer.adam.Adam"):
        own = optimizer.register(type("Adam", (Optimizer,), {}))
    assert optimizer.opt_registry["adam"] is own
    fresh = optimizer.register(type("Fresh", (Optimizer,), {}))
    assert optimizer.Fresh is fresh


def test_importing_the_package_imports_no_optimizer(run_python):
    run_python("""
import sys
import fastopt
loaded = {name for name in sys.modules if name.startswith("fastopt.optimizer.")}
assert "fastopt.optimizer.adam" not in loaded and "fastopt.optimizer.sgd" not in loaded
assert fastopt.optimizer.create("ADAM").beta1 == 0.9
assert "fastopt.optimizer.layerwise" not in sys.modules
assert fastopt.optimizer.ccSGD.__module__ == fastopt.SGD.__module__ == "fastopt.optimizer.sgd"
assert fastopt.optimizer.lamb.LAMB is fastopt.LAMB
""")


VALUES = [
    *(("sgd", name, math.nan) for name in ("learning_rate", "wd", "clip_gradient", "momentum")),
    *(("sgd", "learning_rate", rate) for rate in (-1.0, math.inf)),
    ("sgd", "begin_num_update", -1),
    ("sgd", "seed", -1),
    ("sgd", "rounding", "up"),
    ("sgd", "master", "float64"),
    ("adam", "state_dtype", "float16"),
    *(("sgd", name, 10**400) for name in ("learning_rate", "wd", "momentum", "clip_gradient")),
    *(("sgd", name, 10**400) for name in ("rescale_grad", "begin_num_update")),
    ("adam", "beta1", 1.0),
    ("adam", "epsilon", -1.0),
    ("rmsprop", "gamma1", 1.0),
    *(("rmsprop", "initial_accumulator_value", wrong) for wrong in (-1.0, math.nan)),
    ("adadelta", "rho", math.nan),
    ("lamb", "lower_bound", -1.0),
    ("lbsgd", "batch_scale", 0),
    *(("signum", "wd_lh", wrong) for wrong in (-0.1, math.nan)),
    *((name, "formula", "keras") for name in ("sgd", "adam", "adagrad", "rmsprop", "nadam")),
]
TYPES = [
    *(("sgd", "lr_scheduler", kind) for kind in (0.1, CosineScheduler)),
    *(("sgd", "param_idx2name", names) for names in (["a"], {0: None})),
    ("sgd", "learning_rate", "0.1"),
    ("sgd", "begin_num_update", 0.5),
    ("sgd", "rescale_grad", None),
    ("sgd", "param_dict", 5),
    ("sgd", "maximize", 1),
    ("rmsprop", "initial_accumulator_value", "one"),
]


@pytest.mark.parametrize(
    ("error", "name", "argument", "wrong"),
    [(ValueError, *row) for row in VALUES] + [(TypeError, *row) for row in TYPES],
)
def test_wrong_arguments_are_named(error, name, argument, wrong):
    with pytest.raises(error, match=f"^{argument}\\b.* must .*, got "):
        optimizer.create(name, **{argument: wrong})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lr_scheduler", lambda n: 10**400, "rate of lr_scheduler must be a finite"),
        ("lr_scheduler", lambda n: None, "lr_scheduler must return a number, got None"),
        ("lr_scheduler", lambda n: "fast", "must return a number, got 'fast'"),
        ("lr_mult", {0: 10**400}, "must be a finite number"),
        ("wd_mult", {0: math.nan}, "index 0: weight decay must be a finite number"),
        ("wd_mult", {0: -1.0}, "index 0: weight decay must be a finite number"),
    ],
)
def test_a_rate_or_a_decay_that_is_no_number_changes_nothing(name, value, words):
    made = optimizer.SGD(wd=1.0)
    setattr(made, name, value)
    with pytest.raises((TypeError, ValueError), match=words):
        step(made)
    assert made.num_update == 0


@pytest.mark.parametrize(
    ("name", "t", "size"), [("adam", 51, 1), ("adopt", 1, 0), ("galore", 1, 0.25)]
)
def test_formulas_go_on_from_the_initial_count_but_not_what_is_first(name, t, size):
    more = {"beta1": 0.9, "beta2": 0.99} if name != "adopt" else {}
    made = optimizer.create(name, learning_rate=0.1, begin_num_update=50, **more)
    weight, grad = np.zeros((2, 1)), np.array([[1.0], [-1.0]])
    optimizer.get_updater(made)(0, grad, weight)
    size *= 0.1 * 0.1 / np.sqrt(0.01) * np.sqrt(1 - 0.99**t) / (1 - 0.9**t)
    np.testing.assert_allclose(weight, -size * grad, rtol=1e-4)


@pytest.mark.parametrize("begun", [10, 2**62])
def test_counts_belong_to_the_index_and_num_update_is_their_maximum(begun):
    made = optimizer.SGD(begin_num_update=begun)
    step(made, 0, times=3)
    step(made, 1)
    assert made._index_update_count == {0: begun + 3, 1: begun + 1}
    assert made.num_update == begun + 3


@pytest.mark.parametrize(("momentum", "batch_scale"), [(0.0, 2), (0.9, 1)])
def test_lbsgd_without_an_updater_updates_the_master_that_it_makes(momentum, batch_scale):
    """The state is nested as in MXNet, where create_state() makes the master."""
    arguments = {"learning_rate": 1e-4, "momentum": momentum, "batch_scale": batch_scale}
    made, other = (optimizer.LBSGD(multi_precision=True, **arguments) for _ in range(2))
    weight, expected = np.ones((2, 3, 1), np.float16)
    state, updater = made.create_state(0, weight), optimizer.get_updater(other)
    for _ in range(100):
        made.update(0, weight, np.ones((3, 1), np.float16), state)
        updater(0, np.ones((3, 1), np.float16), expected)
    mom, master = state
    assert master.dtype == np.float32
    assert (mom is None) == (momentum == 0)
    np.testing.assert_array_equal(master, updater.states[0][0])
    np.testing.assert_array_equal(weight, expected)
    assert (weight < 1).all()


def test_lbsgd_reads_the_schedule_before_it_counts():
    seen = []
    made = optimizer.LBSGD(lr_scheduler=lambda n: seen.append(n) or 0.1)
    step(made, 0, times=2)
    assert seen == [0, 1]


class Halving:
    """A schedule of the user."""

    def __init__(self):
        self.base_lr = 0.4

    def __call__(self, num_update):
        return self.base_lr / 2**num_update


RATES = [
    (Adam, {}, FactorScheduler(10, base_lr=0.3), 0.001, "learning_rate=0.001 of Adam replaces "
     "base_lr=0.3 of FactorScheduler; learning_rate=None keeps base_lr"),
    (Adam, {"lr": 0.05}, CosineScheduler(1000), 0.01,
     "learning_rate=0.05 of Adam has no effect: CosineScheduler keeps its base_lr=0.01"),
    (SGD, {"lr": 0.2}, FactorScheduler(10, warmup_steps=5, warmup_begin_lr=0.005), 0.005,
     "learning_rate=0.2 of SGD replaces base_lr=0.01 .* after warm-up, which still ends at 0.01"),
    (SGD, {"lr": 0.2}, Halving(), 0.2, "learning_rate=0.2 of SGD replaces base_lr=0.4 of Halving"),
    (Adam, {"lr": None}, FactorScheduler(9, base_lr=0.3), 0.3, None),
    (Adam, {}, CosineScheduler(9, base_lr=0.3), 0.3, None),
    (SGD, {"lr": 0.3}, CosineScheduler(9, base_lr=0.3), 0.3, None),
    (SGD, {"lr": 0.3}, FactorScheduler(9), 0.3, None),
    (Adam, {}, FactorScheduler(9), 0.001, None),
    (SGD, {"lr": 0.3}, lambda n: 0.1, 0.1, None),
]  # fmt: skip
"""Class, arguments, schedule, the rate that holds, and the warning of two that differ."""


@pytest.mark.parametrize(("klass", "arguments", "schedule", "rate", "words"), RATES)
def test_a_rate_and_a_schedule_that_differ_warn_once_of_the_one_that_holds(
    klass, arguments, schedule, rate, words, recwarn
):
    before = dict(vars(schedule))
    made = klass(lr_scheduler=schedule, **arguments)
    assert [warning.filename for warning in recwarn] == [__file__] * (words is not None)
    assert words is None or re.match(words, str(recwarn.pop().message))
    assert made.learning_rate == rate
    assert vars(schedule) == before


def test_optimizers_share_a_schedule_whose_state_advances():
    plateau = PlateauScheduler(0.5, patience=1)
    made = [optimizer.SGD(lr_scheduler=plateau, learning_rate=rate) for rate in (None, 0.2, 0.4)]
    for loss in (1.0, 1.0):
        plateau.step(loss)
    assert [one.learning_rate for one in made] == [0.005, 0.1, 0.2]


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


@pytest.mark.parametrize(("kind", "decaying"), [
    (optimizer.SGD, ("weight", "gamma", "kernel")), (optimizer.LARS, ("weight", "kernel")),
])  # fmt: skip
def test_names_decide_about_decay(kind, decaying):
    words = "weight", "gamma", "kernel", "bias", "beta"
    expected = {f"layer{by}{word}": word in decaying for word in words for by in "_./"}
    expected |= {"W1": False, "weightnorm": False}
    made = kind(wd=1.0, param_idx2name=dict(enumerate(expected)))
    assert [made._get_wd(i) for i in range(len(expected))] == [*expected.values()]
    assert kind(wd=1.0)._get_wd(1) == 1


def updates(updater, *calls):
    """Update arrays of ones under each index, or list of indices, in turn."""
    for call in calls:
        if isinstance(call, list):
            updater(call, [np.ones(2) for _ in call], [np.ones(2) for _ in call])
        else:
            updater(call, np.ones(2), np.ones(2))


UNRULED = {0: "W1", 1: "b1"}
"""Names that no rule of decay knows."""


@pytest.mark.parametrize(
    ("wd", "names", "multipliers", "warns"),
    [
        (0.1, UNRULED, {}, True),
        (0.1, {0: "a.weight", 1: "b1"}, {}, False),
        (0.0, UNRULED, {}, False),
        (0.1, UNRULED, {"W1": 1.0}, False),
    ],
)
def test_decay_that_reaches_no_name_warns_once_with_the_rule(
    wd, names, multipliers, warns, recwarn
):
    made = optimizer.Adam(wd=wd, param_idx2name=names)
    made.set_wd_mult(multipliers)
    updates(optimizer.get_updater(made), [0, 1], [0, 1], 0)
    words = r"wd=0.1 decays none of the parameters \['W1', 'b1'\]: .* _weight, .* /kernel"
    assert [warning.filename for warning in recwarn] == [__file__] * warns
    assert not warns or re.match(words, str(recwarn.pop().message))


def test_names_of_indices_that_step_does_not_use_warn():
    updater = optimizer.Updater(optimizer.SGD(param_idx2name={0: "a_weight", 1: "b_bias"}))
    with pytest.warns(UserWarning, match=r"names \[0, 1\], but these calls update \['0', '1'\]"):
        updater.step([np.ones(2)] * 2, [np.ones(2), np.ones(2)])


NAMES = {0: "a_weight", 1: "b_bias"}
LOST = [({}, [[0, 1]]), (NAMES, [0, 1]), ({}, [0, 1, 0]), ({}, ["a_weight", "b_bias", "a_weight"])]
"""Names of indices, and calls of which the last one knows all."""


@pytest.mark.parametrize(("names", "calls"), LOST)
@pytest.mark.parametrize("attribute", ["lr_mult", "wd_mult"])
def test_multipliers_that_no_parameter_has_warn_once_all_names_are_known(names, calls, attribute):
    made = optimizer.SGD(param_idx2name=names)
    known = {"a_weight": 1.0} if "a_weight" in calls else {0: 1.0}
    getattr(made, f"set_{attribute}")({"typo_weight": 3.0, 7: 2.0} | known)
    updater = optimizer.get_updater(made)
    updates(updater, *calls[:-1])
    with pytest.warns(UserWarning, match=f"^{attribute} of 'typo_weight', 7 has no effect") as seen:
        updates(updater, calls[-1])
    assert len(seen) == 1
    assert not made.unchecked
    updates(updater, *calls, *calls)


def test_a_symbol_lends_its_attributes_and_names_that_an_optimizer_knows_do_not_warn():
    symbol = SimpleNamespace(
        attr_dict=lambda: {
            "a_weight": {"__lr_mult__": "2", "__wd_mult__": 3},
            "data": {"__lr_mult__": 2},
        },
        list_arguments=lambda: ["a_weight", "data", "missing"],
    )
    known = {"param_idx2name": NAMES, "param_dict": {5: SimpleNamespace(lr_mult=1, wd_mult=1)}}
    made = optimizer.SGD(sym=symbol, learning_rate=1.0, wd=1.0, **known)
    assert (made._get_lr(0), made._get_wd(0)) == (2, 3)
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


@pytest.mark.parametrize("clip", [None, 0, -1.0])
def test_no_clipping_means_no_clipping(clip):
    made, weight = optimizer.SGD(learning_rate=1.0, clip_gradient=clip), np.zeros(1)
    made.update(0, weight, np.full(1, 100.0), None)
    assert weight == -100


def test_a_pickle_lacks_param_dict():
    made = optimizer.SGD(param_dict={0: SimpleNamespace(lr_mult=2.0, wd_mult=1.0)})
    assert pickle.loads(pickle.dumps(made)).param_dict == {}
    assert set(made.param_dict) == {0}


def test_nadams_product_belongs_to_all_parameters_unless_asked():
    made, single = optimizer.Nadam(), optimizer.Nadam(per_parameter=True)
    for one in (made, single):
        updates(optimizer.get_updater(one), 0, 1, 0)
    momentum = [0.9 * (1 - 0.5 * 0.96 ** (t * 0.004)) for t in (1, 2)]
    assert made.m_schedule == pytest.approx(momentum[0] ** 2 * momentum[1])
    assert single.m_schedule == 1
    assert single._m_schedules == pytest.approx({0: momentum[0] * momentum[1], 1: momentum[0]})


def test_ccsgd_says_that_it_is_deprecated():
    with pytest.warns(DeprecationWarning, match="use SGD"):
        assert isinstance(Optimizer.create_optimizer("ccSGD", momentum=0.5), SGD)


class Own(optimizer.SGD):
    """A class of the user with a property for an argument, and changes of its own."""

    def __init__(self, **given):
        self.before = "before"
        super().__init__(**given)
        self.lr = 2 * self.lr
        self.lr_mult["bias"] = 0.5
        self.learning_rate *= 2

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
    made, weights = Own(lr=0.125, wd=0.5), {"kernel": np.ones(1), "bias": np.ones(1)}
    assert (made.before, made.lr, made.wd) == ("before", 0.5, 0.25)
    made.wd = 0.0
    optimizer.Updater(made).step({"kernel": np.ones(1), "bias": np.ones(1)}, weights)
    assert (weights["kernel"], weights["bias"]) == (0.5, 0.75)
    assert {"lr", "wd", "momentum", "rescale_grad", "lr_mult"} <= {*Watching(momentum=0.5).assigned}
    with pytest.raises(ValueError, match="wd must be"):
        Watching(wd=-1.0)
    for first in (Own(lr=0.5), Watching(lr=0.5)):
        for one in (first, pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
            version = one.version
            one.rescale_grad = 0.5
            assert one.version != version


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


def matrices():
    """Weights of two widths, and their gradients."""
    return [np.zeros((1, 4)), np.zeros((1, 2))], [np.ones((1, 4)), np.ones((1, 2))]


def test_fields_of_a_parameter_are_those_of_its_shape():
    (weights, grads), updater = matrices(), optimizer.get_updater(ByWidth(lr=1.0))
    made, path = updater.optimizer, np.zeros(2)
    for change in ({}, {}, {"scale": 2.0}, {"lr": 0.5}, {"lr_scheduler": lambda n: 1 / n}):
        for name, value in change.items():
            setattr(made, name, value)
        updater([0, 1], grads, weights)
        path -= made.learning_rate * made.scale / np.array([4, 2])
        assert [weight[0, 0] for weight in weights] == [*path]
    updater(1, grads[1], weights[1])
    assert weights[1][0, 0] == path[1] - made.learning_rate
    with pytest.raises(KeyError, match="2"):
        made.fields_of(2)


@pytest.mark.parametrize(
    ("make", "groups", "steps"),
    [
        (ByWidth, {"b": {"lr": 0.5}}, [0.25, 0.25]),
        (ByWidth, {"b": {"scale": 3.0}}, [0.25, 1.5]),
        (Doubled(ByWidth), None, [0.5, 1.0]),
    ],
)
def test_groups_and_rates_of_ones_own_have_fields_of_parameters_too(make, groups, steps):
    weights, grads = matrices()
    updater, other = (optimizer.get_updater(make(lr=1.0), groups=groups) for _ in range(2))
    for count in (1, 2):
        updater(["a", "b"], grads, weights)
        assert [-weight[0, 0] for weight in weights] == [count * step for step in steps]
        other.load_state_dict(updater.state_dict())
        updater = other


def test_an_argument_that_a_rule_does_not_read_is_refused():
    weight = np.ones(2)
    for name, value in {"wd": 0.1, "clip_gradient": 1.0, "rescale_grad": 0.5}.items():
        for average in (None, fastopt.EMA(0.9), fastopt.SWA(), fastopt.Lookahead()):
            updater = fastopt.Updater(Unscaled(**{name: value}), average=average)
            with pytest.raises(ValueError, match=f"reads no {name}, so that it has no effect"):
                updater(0, np.ones(2), weight)
    np.testing.assert_array_equal(weight, 1)
