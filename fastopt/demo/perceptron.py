"""Network of the digits demo, computed in NumPy and updated by a Trainer."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from fastopt import initializer
from fastopt.demo.team import Team
from fastopt.parameter import ParameterDict
from fastopt.reference import Array
from fastopt.scope import get_parameter, name_scope
from fastopt.trainer import Trainer


class Layer:
    """A fully connected layer.

    Images are float32 even if weights are half-precision, so that NumPy computes in float32;
    ``add_grad`` rounds gradients to the weights' dtype.
    """

    def __init__(self, name: str, inputs: int, outputs: int) -> None:
        with name_scope(name):
            self.weight = get_parameter("weight", (outputs, inputs))
            self.bias = get_parameter("bias", outputs, initializer="zeros")

    def forward(self, x: Array) -> Array:
        """Return the outputs for each row of `x`."""
        self.x = x
        y: Array = x @ self.weight.data().T + self.bias.data()
        return y

    def backward(self, grad: Array) -> Array:
        """Accumulate weight gradients from the output gradient; return the input gradient."""
        self.weight.add_grad(grad.T @ self.x)
        self.bias.add_grad(grad.sum(axis=0))
        back: Array = grad @ self.weight.data()
        return back


class Perceptron:
    """Hidden ReLU layers, then a softmax over the ten digits.

    Parameters
    ----------
    dtype : str
        Dtype of weights and gradients.
    rng : numpy.random.Generator
        Draws the initial weights.
    hidden : sequence of int
        Sizes of the hidden layers. Default: one layer of 128 units.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import Trainer
    >>> from fastopt.demo.perceptron import Perceptron, train
    >>> rng = np.random.default_rng(0)
    >>> model = Perceptron("float32", rng)
    >>> trainer = Trainer(model.params, "adam", {"learning_rate": 0.01})
    >>> images, digits = rng.random((10, 64), np.float32), np.arange(10)
    >>> losses = list(train(model, trainer, [(images, digits)] * 50))
    >>> losses[-1] < losses[0], model.accuracy(images, digits)
    (True, 1.0)
    """

    def __init__(
        self, dtype: str, rng: np.random.Generator, hidden: Sequence[int] = (128,)
    ) -> None:
        self.sizes = [64, *hidden, 10]
        names = [f"hidden{k}" for k in range(1, len(hidden) + 1)] + ["output"]
        with name_scope("perceptron", params=ParameterDict(), dtype=dtype) as scope:
            self.layers = [
                Layer(name, inputs, outputs)
                for name, (inputs, outputs) in zip(names, pairwise(self.sizes), strict=True)
            ]
        self.params = scope.params
        self.params.initialize(initializer.HeNormal(rng=rng))

    @property
    def weights(self) -> list[Array]:
        """Arrays of the parameters."""
        return [parameter.data() for parameter in self.params.values()]

    def forward(self, images: Array) -> Array:
        """Return the scores of the digits."""
        *hidden, output = self.layers
        for layer in hidden:
            images = np.maximum(layer.forward(images), 0)
        return output.forward(images)

    def backward(self, images: Array, digits: Array) -> float:
        """Accumulate gradients of the summed cross-entropy of a batch; return its mean."""
        scores = self.forward(images)
        scores -= scores.max(axis=1, keepdims=True)
        log_likelihood = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        rows = np.arange(len(digits))
        grad = np.exp(log_likelihood)
        grad[rows, digits] -= 1
        for layer in reversed(self.layers[1:]):
            grad = layer.backward(grad) * (layer.x > 0)  # derivative of the ReLU before the layer
        self.layers[0].backward(grad)
        return -float(log_likelihood[rows, digits].mean())

    def accuracy(self, images: Array, digits: Array) -> float:
        """Return the share of images whose digit has the highest score."""
        return float((self.forward(images).argmax(axis=1) == digits).mean())


def train(
    model: Perceptron,
    trainer: Trainer,
    batches: Iterable[tuple[Array, Array]],
    team: Team | None = None,
) -> Iterator[float]:
    """Do a step with each batch of images and digits, and yield its loss.

    Each batch is split among the ranks of a team.
    """
    team = team or Team()
    for images, digits in batches:
        mine = digits[team.part]
        loss = model.backward(images[team.part], mine)
        trainer.step(batch_size=len(digits))
        yield team.mean(loss, len(mine), len(digits))
