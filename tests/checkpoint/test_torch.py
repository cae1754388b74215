"""States go to torch's optimizers and back; where formulas agree, so do the next steps."""

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.checkpoint import Skipped, from_torch_state_dict, to_torch_state_dict

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
each_pair = pytest.mark.parametrize(("name", "options", "klass"), PAIRS, ids=ids)


@pytest.fixture
def torch():
    made = pytest.importorskip("torch")
    before = made.get_default_dtype()
    made.set_default_dtype(made.float64)  # so that torch's scalars are float64 too
    yield made
    made.set_default_dtype(before)


def start():
    rng = np.random.default_rng(0)
    return [np.asarray(rng.normal(size=shape)) for shape in SHAPES]


def gradients(step):
    rng = np.random.default_rng(step)
    return [np.asarray(rng.normal(size=shape)) for shape in SHAPES]


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
        groups = groups or [{"params": self.parameters}]
        for group in groups:
            group["params"] = [
                self.parameters[p] if isinstance(p, int) else p for p in group["params"]
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
        for index, (weight, gradient) in enumerate(zip(weights, gradients(step), strict=True)):
            updater(index, gradient, weight)


def assert_close(got, expected, rtol=1e-9):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol, 1e-12)


@each_pair
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
    updater = optimizer.get_updater(optimizer.Adam(param_idx2name=names))
    from_torch_state_dict(updater, peer.optimizer.state_dict(), indices=[0, 2, 1])
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
