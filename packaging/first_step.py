"""First steps of a program, as an installed fastopt must do them with its dependencies alone."""

import warnings
from importlib.metadata import files
from importlib.util import find_spec

import numpy as np

warnings.simplefilter("error")
import fastopt  # noqa: E402

assert find_spec("pytest") is find_spec("sklearn") is None, "not a bare environment"
stray = [str(file) for file in files("fastopt") if file.parts[0] in {"tests", "docs"}]
assert not stray, f"installed with the package: {stray}"

updater = fastopt.Updater(fastopt.SGD(lr=0.5))
weight, bias = np.zeros((3, 4)), np.zeros(4)
updater("weight", np.ones((3, 4)), weight)
updater(["weight", "bias"], [np.ones((3, 4)), np.ones(4)], [weight, bias])
updater("weight", (np.ones((1, 4)), np.array([2])), weight)
np.testing.assert_array_equal(weight, np.repeat([[-1.0], [-1.0], [-1.5]], 4, axis=1))
np.testing.assert_array_equal(bias, np.full(4, -0.5))
print(f"fastopt {fastopt.__version__} from {fastopt.__file__}")
