"""Network of the demo, computed in NumPy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastopt import initializer
from fastopt.parameter import Parameter, ParameterDict
from fastopt.scope import get_parameter, name_scope

Array = NDArray[Any]


class Perceptron:
    """Hidden ReLU layers, then a softmax over the ten digits.

    Images are float32 even if weights are half-precision, so that NumPy computes in float32;
    ``add_grad`` rounds gradients to the weights' dtype.

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
    >>> losses = list(train(model, trainer.step, [(images, digits)] * 50))
    >>> losses[-1] < losses[0], model.accuracy(images, digits)
    (True, 1.0)
    """

    def __init__(
        self, dtype: str, rng: np.random.Generator, hidden: Sequence[int] = (128,)
    ) -> None:
        self.sizes = [64, *hidden, 10]
        names = [f"hidden{k}" for k in range(1, len(hidden) + 1)] + ["output"]
        self.layers: list[tuple[Parameter, Parameter]] = []
        with name_scope("perceptron", params=ParameterDict(), dtype=dtype) as scope:
            for name, (inputs, outputs) in zip(names, pairwise(self.sizes), strict=True):
                with name_scope(name):
                    weight = get_parameter("weight", (outputs, inputs))
                    bias = get_parameter("bias", outputs, initializer="zeros")
                self.layers.append((weight, bias))
        self.params = scope.params
        self.params.initialize(initializer.HeNormal(rng=rng))

    @property
    def weights(self) -> list[Array]:
        """Arrays of the parameters."""
        return [parameter.data() for parameter in self.params.values()]

    def forward(self, images: Array) -> tuple[Array, list[Array]]:
        """Return the scores of the digits, and the inputs of each layer."""
        scores, inputs = images, list[Array]()
        for weight, bias in self.layers:
            inputs.append(np.maximum(scores, 0))  # images have no negative values
            scores = inputs[-1] @ weight.data().T + bias.data()
        return scores, inputs

    def backward(self, images: Array, digits: Array) -> float:
        """Accumulate gradients of the summed cross-entropy of a batch; return the sum."""
        scores, inputs = self.forward(images)
        scores -= scores.max(axis=1, keepdims=True)
        log_likelihood = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        rows = np.arange(len(digits))
        grad = np.exp(log_likelihood)
        grad[rows, digits] -= 1
        for (weight, bias), x in reversed([*zip(self.layers, inputs, strict=True)]):
            weight.add_grad(grad.T @ x)
            bias.add_grad(grad.sum(axis=0))
            grad = (grad @ weight.data()) * (x > 0)  # derivative of the ReLU before the layer
        return -float(log_likelihood[rows, digits].sum())

    def accuracy(self, images: Array, digits: Array) -> float:
        """Return the share of images whose digit has the highest score."""
        return float((self.forward(images)[0].argmax(axis=1) == digits).mean())


def train(
    model: Perceptron,
    step: Callable[[int], object],
    batches: Iterable[tuple[Array, Array]],
    comm: Any = None,
) -> Iterator[float]:
    """Call `step` with the size of each batch of images and digits, and yield the mean loss.

    Each rank of `comm`, a communicator of mpi4py, takes a part of every batch.
    """
    mine = slice(comm.rank, None, comm.size) if comm else slice(None)
    for images, digits in batches:
        loss = model.backward(images[mine], digits[mine])
        step(len(digits))
        yield (comm.allreduce(loss) if comm else loss) / len(digits)
