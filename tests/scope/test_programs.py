"""Programs on scopes: layers and networks that share their parameters, and train."""

import numpy as np

from fastopt.parameter import ParameterDict
from fastopt.scope import current_scope, get_parameter, name_scope
from fastopt.trainer import Trainer


def fresh(name="net", **kwargs):
    return name_scope(name, params=ParameterDict(), **kwargs)


class FullyConnected:
    """Sigmoid of a linear map; layers of the same name share their parameters."""

    def __init__(self, inputs, outputs, name=None):
        scope = current_scope()
        with name_scope(name or scope.unique_name("fc"), reuse="auto" if name else False):
            self.weight = get_parameter("w", (inputs, outputs))
            self.bias = get_parameter("b", outputs, initializer="zeros")

    def forward(self, x):
        self.x, self.y = x, 1 / (1 + np.exp(-x @ self.weight.data() - self.bias.data()))
        return self.y

    def backward(self, grad):
        grad = grad * self.y * (1 - self.y)
        self.weight.add_grad(self.x.T @ grad)
        self.bias.add_grad(grad.sum(axis=0))
        return grad @ self.weight.data().T


class Chain:
    """Layers one after the other."""

    def __init__(self, *layers):
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, grad):
        for layer in reversed(self.layers):
            grad = layer.backward(grad)
        return grad


def test_layers_of_one_name_share_weights_and_others_do_not():
    with fresh("net") as net:
        shared = [FullyConnected(3, 3, name="FC") for _ in range(2)]
        own = [FullyConnected(3, 3) for _ in range(2)]
    assert shared[0].weight is shared[1].weight
    assert shared[0].bias is shared[1].bias
    assert own[0].weight is not own[1].weight
    assert list(net.params) == [f"net/{fc}/{p}" for fc in ("FC", "fc0", "fc1") for p in "wb"]


def test_a_layer_used_twice_is_updated_once_with_the_sum_of_its_gradients(rng):
    x, target = rng.normal(size=(2, 4, 3))
    with fresh("net", dtype="float64") as net:
        chain = Chain(FullyConnected(3, 3, name="FC"), FullyConnected(3, 3, name="FC"))
    net.params.initialize("xavier")
    weight = net.params["net/FC/w"].data()

    def loss_with(i, value):
        start, weight[i] = weight[i], value
        loss = ((chain.forward(x) - target) ** 2).sum() / 2
        weight[i] = start
        return loss

    slopes, eps = np.empty((3, 3)), 1e-5
    for i in np.ndindex(3, 3):
        slopes[i] = loss_with(i, weight[i] + eps) - loss_with(i, weight[i] - eps)
    before = weight.copy()
    trainer = Trainer(net.params, "sgd", {"learning_rate": 0.1})
    chain.backward(chain.forward(x) - target)
    trainer.step(batch_size=1)
    np.testing.assert_allclose(before - weight, 0.1 * slopes / (2 * eps), rtol=1e-6)
    assert trainer.optimizer.num_update == 1
