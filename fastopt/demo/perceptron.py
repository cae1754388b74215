"""The network of the digits demo: NumPy computes it, a Trainer updates its parameters."""

from collections.abc import Iterable, Iterator

import numpy as np

from fastopt import initializer
from fastopt.demo.team import Team
from fastopt.parameter import ParameterDict
from fastopt.plain import Array
from fastopt.scope import get_parameter, name_scope
from fastopt.trainer import Trainer

__all__ = ["Layer", "Perceptron", "train"]


class Layer:
    """A fully connected layer.

    Images have float32 numbers also where weights have 16 bits, so that NumPy widens the weights
    and computes in float32; ``add_grad`` rounds gradients to the weights' dtype.
    """

    def __init__(self, name: str, inputs: int, outputs: int) -> None:
        with name_scope(name):
            self.weight = get_parameter("weight", (outputs, inputs))
            self.bias = get_parameter("bias", outputs, initializer="zeros")

    def forward(self, x: Array) -> Array:
        """Outputs for each row of `x`."""
        self.x = x
        y: Array = x @ self.weight.data().T + self.bias.data()
        return y

    def backward(self, grad: Array) -> Array:
        """Add to the gradients, given that of the outputs, and return that of the inputs."""
        self.weight.add_grad(grad.T @ self.x)
        self.bias.add_grad(grad.sum(axis=0))
        back: Array = grad @ self.weight.data()
        return back


class Perceptron:
    """A hidden layer of rectified units, then a softmax over the ten digits.

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

    def __init__(self, dtype: str, rng: np.random.Generator) -> None:
        with name_scope("perceptron", params=ParameterDict(), dtype=dtype) as scope:
            self.hidden = Layer("hidden", 64, 128)
            self.output = Layer("output", 128, 10)
        self.params = scope.params
        self.params.initialize(initializer.HeNormal(rng=rng))

    @property
    def weights(self) -> list[Array]:
        """The arrays of the parameters."""
        return [parameter.data() for parameter in self.params.values()]

    def forward(self, images: Array) -> Array:
        """Scores of the digits."""
        self.active = np.maximum(self.hidden.forward(images), 0)
        return self.output.forward(self.active)

    def backward(self, images: Array, digits: Array) -> float:
        """Add the gradients of the cross-entropy, summed over a batch, and return its mean."""
        scores = self.forward(images)
        scores -= scores.max(axis=1, keepdims=True)
        log_likelihood = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        rows = np.arange(len(digits))
        grad = np.exp(log_likelihood)
        grad[rows, digits] -= 1
        self.hidden.backward(self.output.backward(grad) * (self.active > 0))
        return -float(log_likelihood[rows, digits].mean())

    def accuracy(self, images: Array, digits: Array) -> float:
        """Share of the images whose digit has the highest score."""
        return float((self.forward(images).argmax(axis=1) == digits).mean())


def train(
    model: Perceptron,
    trainer: Trainer,
    batches: Iterable[tuple[Array, Array]],
    team: Team | None = None,
) -> Iterator[float]:
    """Do a step with each batch of images and digits, and yield its loss.

    The ranks of a team share each batch out among them.
    """
    team = team or Team()
    for images, digits in batches:
        mine = digits[team.part]
        loss = model.backward(images[team.part], mine)
        trainer.step(batch_size=len(digits))
        yield team.mean(loss, len(mine), len(digits))
