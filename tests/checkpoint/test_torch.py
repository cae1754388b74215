"""States go to torch's optimizers and back, or are refused; equal formulas take the next steps."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from fastopt import lr_scheduler, optimizer
from fastopt.checkpoint import CheckpointError, Skipped, from_torch_state_dict, to_torch_state_dict
from fastopt.distributed import ShardedUpdater, run_threads
from helpers.tensor_lists import everything

SHAPES = [(3, 4), (5,), ()]
PAIRS = [
    ("SGD", {"weight_decay": 0.1}, optimizer.SGD),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, optimizer.SGD),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, optimizer.NAG),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1, "maximize": True}, optimizer.SGD),
    ("Adam", {"eps": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.1}, optimizer.Adam),
    ("Adam", {"eps": 0.1, "betas": (0.8, 0.95), "maximize": True}, optimizer.Adam),
    ("AdamW", {"eps": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.1}, optimizer.AdamW),
    ("Adam", {"eps": 0.1, "betas": (0.8, 0.95), "amsgrad": True}, optimizer.Adam),
    ("AdamW", {"eps": 0.1, "betas": (0.8, 0.95), "amsgrad": True}, optimizer.AdamW),
    ("Adagrad", {"eps": 0.1, "weight_decay": 0.1}, optimizer.AdaGrad),
    ("RMSprop", {"eps": 0.1, "alpha": 0.8, "weight_decay": 0.1}, optimizer.RMSProp),
    ("RMSprop", {"eps": 0.1, "alpha": 0.8, "centered": True, "momentum": 0.5}, optimizer.RMSProp),
    ("RMSprop", {"eps": 0.1, "alpha": 0.8, "centered": True}, optimizer.RMSProp),
    ("Adadelta", {"lr": 1, "rho": 0.8, "eps": 1e-3}, optimizer.AdaDelta),
    ("Adamax", {"eps": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.1}, optimizer.Adamax),
    ("NAdam", {"eps": 0.1, "betas": (0.8, 0.95), "momentum_decay": 0.01, "weight_decay": 0.1},
     optimizer.Nadam),
]  # fmt: skip
ids = [f"{klass.__name__}-{'-'.join(options)}" for _, options, klass in PAIRS]


@pytest.fixture
def torch():
    made = pytest.importorskip("torch")
    before = made.get_default_dtype()
    made.set_default_dtype(made.float64)  # so that torch's scalars are float64 too
    yield made
    made.set_default_dtype(before)


def gradients(step):
    rng = np.random.default_rng(step)
    return [np.asarray(rng.normal(size=shape)) for shape in SHAPES]


start = partial(gradients, 99)


def tensors(torch, value):
    """Dict with tensors in place of arrays."""
    if isinstance(value, dict):
        return {key: tensors(torch, part) for key, part in value.items()}
    if isinstance(value, list):
        return [tensors(torch, part) for part in value]
    return torch.tensor(value) if isinstance(value, np.ndarray) else value


class Peer:
    """An optimizer of torch and its parameters."""

    def __init__(self, torch, name, weights, groups=None, **options):
        self.torch = torch
        self.parameters = [torch.nn.Parameter(torch.tensor(weight)) for weight in weights]
        groups = [
            {**group, "params": [self.parameters[k] for k in group["params"]]}
            for group in groups or [{"params": range(len(weights))}]
        ]
        self.optimizer = getattr(torch.optim, name)(groups, **{"lr": 0.05, **options})

    def train(self, steps):
        for step in steps:
            for parameter, gradient in zip(self.parameters, gradients(step), strict=True):
                parameter.grad = self.torch.tensor(gradient)
            self.optimizer.step()

    def weights(self):
        return [parameter.detach().numpy().copy() for parameter in self.parameters]


def train(updater, weights, steps):
    for step in steps:
        updater([0, 1, 2], gradients(step), weights)


def assert_close(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-12)


@pytest.mark.parametrize(("name", "options", "klass"), PAIRS, ids=ids)
def test_a_run_goes_on_in_the_other_library_and_back(name, options, klass, torch):
    whole, peer = (Peer(torch, name, start(), **options) for _ in range(2))
    whole.train(range(9))
    peer.train(range(3))
    weights, updater = peer.weights(), optimizer.get_updater(klass())
    state = peer.optimizer.state_dict()
    assert from_torch_state_dict(updater, state) == Skipped([], [])
    if name != "SGD":
        assert updater.optimizer._index_update_count == {0: 3, 1: 3, 2: 3}
    train(updater, weights, range(3, 5))
    back, again = to_torch_state_dict(updater), optimizer.get_updater(klass())
    from_torch_state_dict(again, back)
    kept = {index: state for index, state in updater.states.items() if state is not None}
    np.testing.assert_equal(again.states, kept)
    for index in range(3):
        assert again.optimizer._get_lr(index) == pytest.approx(updater.optimizer._get_lr(index))
        assert again.optimizer._get_wd(index) == pytest.approx(updater.optimizer._get_wd(index))
    peer = Peer(torch, name, weights)
    peer.optimizer.load_state_dict(tensors(torch, back))
    peer.train(range(5, 7))
    weights = peer.weights()
    from_torch_state_dict(again, peer.optimizer.state_dict())
    train(again, weights, range(7, 9))
    assert_close(weights, whole.weights())


@pytest.mark.parametrize("klass", [optimizer.SGD, optimizer.NAG])
def test_torch_continues_a_momentum_that_has_the_rate(klass, torch):
    """As in the formula of MXNet."""
    updater, weights = optimizer.get_updater(klass(learning_rate=0.05, momentum=0.9)), start()
    train(updater, weights, range(3))
    peer = Peer(torch, "SGD", weights)
    peer.optimizer.load_state_dict(tensors(torch, to_torch_state_dict(updater)))
    train(updater, weights, range(3, 6))
    peer.train(range(3, 6))
    assert_close(weights, peer.weights())


def test_groups_become_multipliers_and_back(torch):
    groups = [
        {"params": [0, 2], "lr": 0.02, "weight_decay": 0.3},
        {"params": [1], "lr": 0.08, "weight_decay": 0.0},
    ]
    peer = Peer(torch, "Adam", start(), groups, eps=0)
    peer.train(range(2))
    names = {0: "a_weight", 1: "b_bias", 2: "c_bias"}
    schedule = lr_scheduler.FactorScheduler(9, 1.0, base_lr=0.08)
    made = optimizer.Adam(lr=None, lr_scheduler=schedule, param_idx2name=names)
    kept = {"^b": {"wd_mult": 0.0}, "c_": {"wd": 5.0}}
    updater = optimizer.get_updater(made, groups=kept)
    from_torch_state_dict(updater, peer.optimizer.state_dict(), indices=[0, 2, 1])
    assert made.lr_scheduler is schedule
    weights = peer.weights()
    train(updater, weights, range(2, 4))
    peer.train(range(2, 4))
    assert_close(weights, peer.weights())
    state = to_torch_state_dict(updater)
    assert [group["params"] for group in state["param_groups"]] == [[0, 2], [1]]
    peer.optimizer.load_state_dict(tensors(torch, state))
    train(updater, weights, range(4, 6))
    peer.train(range(4, 6))
    assert_close(weights, peer.weights())


def test_groups_of_an_updater_are_groups_of_torch(torch):
    groups = {"1": {"lr": 0.5, "wd": 0.0, "betas": (0.5, 0.9)}, "2": {"frozen": True}}
    made = optimizer.AdamW(lr=0.1, wd=0.01, formula="torch")
    updater, weights = optimizer.get_updater(made, groups=groups), start()
    train(updater, weights, range(3))
    state = to_torch_state_dict(updater, [0, 1, 2])
    assert [group["params"] for group in state["param_groups"]] == [[0, 2], [1]]
    peer = Peer(torch, "AdamW", weights, [{"params": [0, 2]}, {"params": [1]}])
    peer.optimizer.load_state_dict(tensors(torch, state))
    train(updater, weights, range(3, 6))
    peer.train(range(3, 6))
    assert_close(weights[:2], peer.weights()[:2])


@pytest.mark.parametrize(("name", "klass"), [("Adagrad", "AdaGrad"), ("RMSprop", "RMSProp")])
@pytest.mark.parametrize("size", [0.0, 1e-12, 1e4])
def test_epsilon_in_the_root_agrees_where_it_is_small_or_alone(name, klass, size, torch):
    """So a run with the formula of MXNet goes on in torch with the root of its epsilon."""
    weight, first = np.ones(3), np.ones(3)
    updater = optimizer.get_updater(getattr(optimizer, klass)(lr=0.1, eps=1e-12))
    updater(0, np.zeros(3), first)
    state = to_torch_state_dict(updater)
    assert state["param_groups"][0]["eps"] == pytest.approx(1e-6)
    peer = Peer(torch, name, [weight])
    peer.optimizer.load_state_dict(tensors(torch, state))
    updater(0, np.full(3, size), weight)
    peer.parameters[0].grad = torch.full((3,), size)
    peer.optimizer.step()
    np.testing.assert_allclose(weight - 1, peer.weights()[0] - 1, 1e-5)


# Refusals

ADAM = {"eps": 1e-8, "betas": (0.9, 0.999)}
EPS = {"eps": 1e-8}
NESTEROV = {"momentum": 0.9, "nesterov": True}
REFUSED = [
    (optimizer.Adam, [{**ADAM, "amsgrad": 0.5}], r"cannot have \['amsgrad=0.5'\]"),
    (optimizer.Nadam, [{**EPS, "amsgrad": True, "momentum_decay": 0.1}], "amsgrad=True"),
    (optimizer.Adam, [{**ADAM, "decoupled_weight_decay": True}], "decoupled_weight_decay=True"),
    (optimizer.AdamW, [{**ADAM, "decoupled_weight_decay": False}], "decoupled_weight_decay=False"),
    (optimizer.Adam, [{**ADAM, "maximize": None}], "maximize must be True or False, got None"),
    (optimizer.Adam, [{**ADAM, "betas": (0.9,)}], "not the state_dict"),
    (optimizer.Adam, [{**ADAM, "lr": "high"}], "not the state_dict|lr"),
    (optimizer.Adam, [{**ADAM, "params": [0, 0]}], "a parameter comes twice"),
    (optimizer.Adam, [ADAM, {**ADAM, "params": [1], "eps": 1e-6}], "the groups differ in eps"),
    (optimizer.SGD, [{"momentum": 0.9, "nesterov": False, "dampening": 0.5}],
     r"cannot have \['dampening=0.5'\]"),
    (optimizer.SGD, [NESTEROV], "nesterov=True"),
    (optimizer.NAG, [{**NESTEROV, "nesterov": False}], "nesterov=False"),
    (optimizer.AdaGrad, [{**EPS, "lr_decay": -0.1}], "lr_decay"),
    (optimizer.AdaDelta, [{**EPS, "rho": 0.9, "lr": 0.5}], "lr=0.5"),
    (optimizer.SGD, [{}], r"its groups must have \['momentum'\]$"),
    (optimizer.Adam, [{**ADAM, "momentum_decay": 0.1}], "momentum_decay=0.1"),
    (optimizer.Adamax, [{**ADAM, "amsgrad": False}], "amsgrad=False"),
    (optimizer.Ftrl, [EPS], "Ftrl cannot continue a run of torch: torch has no Ftrl$"),
    (optimizer.Adam, [], "not the state_dict of an optimizer of torch"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("klass", "groups", "words"), REFUSED, ids=[f"{k.__name__}-{o}" for k, o, _ in REFUSED]
)
def test_options_without_a_counterpart_are_refused(klass, groups, words):
    groups = [{"lr": 1, "weight_decay": 0, "params": [0], **options} for options in groups]
    updater = optimizer.get_updater(klass())
    before = updater.optimizer.__getstate__()
    with pytest.raises(CheckpointError, match=words):
        from_torch_state_dict(updater, {"state": {}, "param_groups": groups})
    assert updater.optimizer.__getstate__() == before


GROUP = {"lr": 0.1, "weight_decay": 0.0, **ADAM, "params": [0]}
F32 = np.ones((6, 2), np.float32)


def saved(*groups, **entry):
    """A dict of torch's Adam, of one step with the entry, or of groups."""
    states = {0: {"step": 1, "exp_avg": F32, "exp_avg_sq": F32, **entry}} if entry else {}
    return {"state": states, "param_groups": [{**GROUP, **group} for group in groups or ({},)]}


UNFIT = [
    *((wrong, None, "not the state_dict of an optim") for wrong in (None, [], {}, {"state": 3})),
    *((saved(), wrong, "indices must have length 1, one for") for wrong in ([1, 2], [], "a", 3)),
    *((saved(), wrong, "list of the updater's indices in the order") for wrong in ({"a": 0}, {3})),
    (
        saved({}, {"params": [1], "lr": 0.2}),
        None,
        "index 0: torch's lr is 0.1, but .* makes it 0.2",
    ),
    (saved(exp_avg_sq=F32[:5]), None, r"shapes \(6, 2\) and \(5, 2\)"),
    *((saved(exp_avg=wrong), None, "state of index 0 must have dtype") for wrong in (F32 > 0, "x")),
    (saved(step=-1), None, "must be at least 0, got -1"),
    (saved(step=np.inf), None, "cannot convert float infinity"),
    (saved(step=2.0**80), None, "num_update must be at most"),
    *((saved({"betas": wrong}), None, "beta. must be a fin") for wrong in ((0.9, 1.0), (-1, 0.9))),
]


@pytest.mark.parametrize(("given", "indices", "words"), UNFIT)
def test_what_does_not_fit_is_refused_and_changes_nothing(given, indices, words):
    """Dicts, indices, multipliers of live parameters, and states."""
    live = {0: SimpleNamespace(lr_mult=1.0, wd_mult=1.0)}
    updater = optimizer.get_updater(optimizer.Adam(param_dict=live))
    before = everything(updater, None)
    with pytest.raises(TypeError if "list" in words else CheckpointError, match=words):
        from_torch_state_dict(updater, given, indices)
    assert everything(updater, None) == before


@pytest.mark.parametrize(
    ("group", "export", "load"),
    [
        ({"optimizer": optimizer.Lion()}, "index 0: torch has no Lion", r"\['optimizer'\]"),
        ({"optimizer": optimizer.AdamW(formula="torch")}, "one class .* Adam, not AdamW", "optim"),
        (
            {"cautious": True},
            "index 0: torch has no Adam with cautious",
            r"\['cautious'\]",
        ),
        ({"wd": 0.1, "beta2": 0.9}, None, r"index 0: its group in the updater has \['beta2'\]"),
        ({"lr_mult": 2}, None, "index 0: torch's lr is 0.1, but a group .* makes it 0.4: change"),
        ({"wd": 0.0}, None, "index 0: torch's weight_decay is 0.1, but"),
    ],
)
def test_groups_that_the_other_library_cannot_have_are_refused(group, export, load):
    updater = optimizer.get_updater(optimizer.Adam(), groups={"0": group})
    if export:
        with pytest.raises(ValueError, match=export):
            to_torch_state_dict(updater, [0])
    before = everything(updater, None)
    with pytest.raises(CheckpointError, match=load):
        from_torch_state_dict(updater, saved({"weight_decay": 0.1}, {"params": [1], "lr": 0.2}))
    assert everything(updater, None) == before


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (optimizer.Ftrl(), "torch has no Ftrl"),
        (optimizer.AdamW(eta=0.5), "torch has no AdamW unless it has"),
        (optimizer.AdamW(correct_bias=False), "unless"),
        (optimizer.AdamW(cautious=True, stable=True), "no AdamW with cautious and stable"),
        (optimizer.SGD(momentum=0.9, cautious=True), "torch has no SGD with cautious"),
        (optimizer.Nadam(per_parameter=True, amsgrad=True), "unless"),
        (optimizer.RMSProp(clip_weights=1.0), "unless"),
        (optimizer.Nadam(), "has {'formula': 'torch', .*} or .*'per_parameter': True, .*}"),
        (optimizer.AdaGrad(wd=0.1), "wd must be 0, got 0.1"),
        (optimizer.AdaDelta(wd=0.1), "wd must be 0, got 0.1"),
    ],
)
def test_optimizers_without_a_counterpart_are_refused(made, words):
    updater = optimizer.get_updater(made)
    updater.states[0] = made.create_state(0, np.ones(2))
    with pytest.raises(ValueError, match=words):
        to_torch_state_dict(updater)


def test_states_that_torch_cannot_have_are_refused():
    updater = optimizer.get_updater(optimizer.SGD(momentum=0.9, learning_rate=0.0))
    updater(0, np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="index 0: the momentum cannot be divided by a rate of 0"):
        to_torch_state_dict(updater)
    updater.states[0] = (np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="the state has 2 arrays"):
        to_torch_state_dict(updater)


def test_an_updater_of_one_rank_has_a_state_dict_of_torch():
    def program(comm):
        updater = ShardedUpdater(optimizer.Adam(), comm, groups={"0": {"lr": 0.5}})
        updater(0, np.ones(2), np.ones(2))
        return to_torch_state_dict(updater)["param_groups"][0]["lr"]

    assert run_threads(1, program) == [0.5]


def test_texts_as_indices_need_an_order():
    updater = optimizer.get_updater(optimizer.Adam())
    for index in ("b", "a"):
        updater(index, np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match=r"the order of index '[ab]' is not known"):
        to_torch_state_dict(updater)
    state = to_torch_state_dict(updater, ["a", "b", "c"])
    assert list(state["state"]) == [0, 1]
    assert state["param_groups"][0]["params"] == [0, 1, 2]
    new = optimizer.get_updater(optimizer.Adam())
    from_torch_state_dict(new, state, ["a", "b", "c"])
    assert set(new.states) == {"a", "b"}
