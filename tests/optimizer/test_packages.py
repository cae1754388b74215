"""Optimizers of matrices: steps of other packages, and the papers' formulas."""

import json
import math

import numpy as np
import pytest

from fastopt import optimizer
from fastopt.optimizer.kron import balanced, spectral_bound
from helpers.matrix_rules import check_recorded, single
from helpers.paths import GOLDEN

CASES = json.loads((GOLDEN / "packages.json").read_text())["cases"]
F32, F64 = np.float32, np.float64


def named(case):
    return f"{case['name']}-{'x'.join(map(str, case['shape'])) or 'number'}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize(("dtype", "rtol"), [(F32, 3e-5), (F64, 1e-8)])
def test_each_step_is_that_of_the_package(case, dtype, rtol):
    arguments = {"coefficients": "quintic"} if case["name"] == "scion" else {}
    made = optimizer.create(case["name"], **arguments, **case["arguments"])
    if case.get("drawn"):
        drawn = iter(np.array(case["drawn"], dtype))
        name = "noise" if case["name"] == "kron" else "basis"
        vars(made)[name] = lambda *_: next(drawn)
    check_recorded(made, case["data"], case["weights"], dtype, rtol)


def factored(var, square, beta):
    """The second moment of rows and columns, whose averages are in the list `var`."""
    for k, axis in enumerate((-1, -2)):
        var[k] = beta * var[k] + (1 - beta) * square.mean(axis, keepdims=True)
    return var[0] * var[1] / var[0].mean(-2, keepdims=True)


def came(weight, gradients, lr, wd):
    """arXiv:2307.02047, algorithm 2."""
    mean, var, rest = 0.0, [0.0, 0.0], [0.0, 0.0]
    for grad in gradients:
        step = grad / np.sqrt(factored(var, grad**2 + 1e-30, 0.999))
        step = step / max(1.0, np.sqrt(np.mean(step**2)))
        mean = 0.9 * mean + 0.1 * step
        stable = np.sqrt(factored(rest, (step - mean) ** 2 + 1e-16, 0.9999))
        weight = (1 - lr * wd) * weight - lr * mean / stable
        yield weight


def adammini(weight, gradients, lr, wd):
    """arXiv:2406.16793, algorithm 1, with a block for each slice along the first axis."""
    mean = var = 0.0
    axes = tuple(range(1, weight.ndim))
    for t, grad in enumerate(gradients, 1):
        mean = 0.9 * mean + 0.1 * grad
        var = 0.999 * var + 0.001 * np.mean(grad**2, axes, keepdims=True)
        step = mean / (1 - 0.9**t) / (np.sqrt(var / (1 - 0.999**t)) + 1e-8)
        weight = (1 - lr * wd) * weight - lr * step
        yield weight


def scion(weight, gradients, lr, wd):
    """arXiv:2502.07529, algorithm 1 and table 2, with the polynomials of Polar Express."""
    mean, (rows, columns) = 0.0, (len(weight), weight.shape[1])
    for grad in gradients:
        mean = 0.9 * mean + 0.1 * grad
        flat = optimizer.orthogonalize(mean.reshape(rows, -1)).reshape(weight.shape)
        step = 50 * math.sqrt(rows / columns) / math.prod(weight.shape[2:]) * flat
        weight = (1 - lr * wd) * weight - lr * step
        yield weight


def projected(weight, gradients, lr, wd, project, lift):
    """Adam of projections that change every second step; a wide matrix is transposed."""
    shape = weight.shape
    flat = weight.reshape(len(weight), -1)
    wide = flat.shape[0] < flat.shape[1]
    mean = var = 0.0
    basis = None
    for t, grad in enumerate(gradients, 1):
        matrix = grad.reshape(flat.shape)
        matrix = matrix.T if wide else matrix
        basis = project(matrix, basis, t) if t % 2 else basis
        low = matrix @ basis
        mean = 0.9 * mean + 0.1 * low
        var = 0.999 * var + 0.001 * low**2
        bias = math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        step = bias * lift(matrix, low, mean / (np.sqrt(var) + 1e-6), basis)
        flat = (1 - lr * wd) * (flat - lr * (step.T if wide else step))
        yield flat.reshape(shape)


def galore(weight, gradients, lr, wd):
    """arXiv:2403.03507, algorithm 2."""

    def project(matrix, before, t):
        found = np.linalg.eigh(matrix.T @ matrix)[1][:, :-3:-1]
        return found if before is None else found * np.sign(np.sum(found * before, axis=0))

    def lift(matrix, low, step, basis):
        return 0.25 * step @ basis.T

    return projected(weight, gradients, lr, wd, project, lift)


def apollo(weight, gradients, lr, wd):
    """arXiv:2412.05270, algorithm 1."""
    length = None

    def project(matrix, before, t):
        drawn = np.random.Generator(np.random.Philox(key=[0, t]))
        return drawn.standard_normal((matrix.shape[1], 2)) / math.sqrt(2)

    def lift(matrix, low, step, basis):
        nonlocal length
        own, other = (np.sqrt(np.sum(each**2, axis=1, keepdims=True)) for each in (step, low))
        scaled = matrix * own / (other + 1e-8)
        size = np.linalg.norm(scaled)
        if length is not None and size > 1.01 * (length + 1e-8):
            scaled *= 1.01 * (length + 1e-8) / size
        length = np.linalg.norm(scaled)
        return scaled

    return projected(weight, gradients, lr, wd, project, lift)


def kron(weight, gradients, lr, wd):
    """arXiv:1512.04202, with a factor for rows and one for columns."""
    made, mean = optimizer.Kron(), 0.0
    left, right = (np.eye(length) for length in weight.shape)
    for t, grad in enumerate(gradients, 1):
        noise = made.noise(t, grad)
        mean = 0.9 * mean + 0.1 * grad
        ahead = mean / (1 - 0.9**t)
        first = left @ ahead @ right.T
        second = np.linalg.inv(left).T @ noise @ np.linalg.inv(right)
        terms = ((first @ first.T, second @ second.T), (first.T @ first, second.T @ second))
        left, right = (
            factor - 0.1 * np.triu(a - b) @ factor / spectral_bound(a + b)
            for factor, (a, b) in zip((left, right), terms, strict=True)
        )
        step = left.T @ left @ ahead @ right.T @ right
        step *= min(1.0, 1.1 / (np.sqrt(np.mean(step**2)) + 1e-6))
        weight = (1 - lr * wd) * weight - lr * step
        yield weight


LOW = {"rank": 2, "update_interval": 2}
MORE = {"galore": LOW, "apollo": LOW}
FORMULAS = {each.__name__: each for each in (galore, apollo, came, adammini, scion, kron)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("shape", [(4, 6), (9, 2), (3, 4, 2)], ids=str)
def test_each_step_is_that_of_the_paper(name, shape, rng):
    """Gradients are rescaled, and weights decayed."""
    if name == "kron" and len(shape) > 2:
        pytest.skip("recorded steps have more axes")
    weight, gradients = single(rng, shape, steps=6, dtype=F64)
    made = optimizer.create(name, lr=0.05, wd=0.2, rescale_grad=0.5, **MORE.get(name, {}))
    steps = FORMULAS[name](weight, [0.5 * grad for grad in gradients], 0.05, 0.2)
    expected = np.array(list(steps))
    check_recorded(made, (weight, gradients), expected, F64, 1e-10)


@pytest.mark.parametrize("name", ["q_proj", "mlp"])
def test_the_rows_of_a_head_share_a_second_moment(name, rng):
    weight, (grad, *_) = single(rng, (6, 4), dtype=F64)
    made = optimizer.AdamMini(heads={"q_proj": 2}, param_idx2name={0: name, 1: "q_proj"})
    updater = optimizer.get_updater(made)
    updater(0, grad, weight)
    blocks = grad.reshape((2, 12) if name == "q_proj" else (6, 4))
    squares = np.repeat(np.mean(blocks**2, axis=1), 6 // len(blocks))
    np.testing.assert_allclose(updater.states[0][1].ravel(), 0.001 * squares, rtol=1e-12)


def test_a_constrained_step_stays_in_the_ball(rng):
    """Whatever the gradients are, as a convex combination of the weight and a point of it."""
    weight, gradients = single(rng, (5, 4), steps=40, dtype=F64)
    made = optimizer.Scion(0.3, radius=2.0, wd=1, norms={"": ("sign", 2.0)})
    updater = optimizer.get_updater(made)
    for grad in gradients:
        updater(0, grad, weight)
    assert np.abs(weight).max() <= 2.0 / 4 * (1 + 1e-6)


@pytest.mark.parametrize("kind", [optimizer.GaLore, optimizer.APOLLO])
def test_ranks_are_at_most_the_shorter_side_and_nan_reaches_the_weight(kind, rng):
    updater = optimizer.get_updater(kind(0.1))
    weights = {0: np.ones((3, 5)), 1: np.ones((4, 2, 1)), 2: np.ones((0, 3))}
    for index, weight in weights.items():
        updater(index, np.ones(weight.shape), weight)
        small, large = sorted((weight.shape[0], weight[:1].size if weight.size else 3))
        shapes = [array.shape for array in updater.states[index][:3]]
        assert shapes == [(large, small), (large, small), (small, small)]
    grad = np.ones((3, 5))
    grad[1, 1] = np.nan
    updater(3, grad, weight := np.ones((3, 5)))
    assert np.isnan(weight).all() or kind is optimizer.APOLLO
    assert np.isnan(weight).any()


def test_norms_of_factors_are_bounded_and_balanced(rng):
    for size in (1, 2, 9):
        matrix = rng.normal(size=(size, size))
        exact = np.linalg.norm(matrix @ matrix.T, 2)
        assert 0.5 * exact < spectral_bound(matrix @ matrix.T) < 1.0001 * exact
    factors = [rng.normal(size=(3, 3)), 100 * rng.normal(size=4)]
    found = balanced(factors)
    sizes = [np.abs(factor).max() for factor in found]
    np.testing.assert_allclose(sizes[0], sizes[1])
    product = np.multiply.outer(*factors)
    np.testing.assert_allclose(np.multiply.outer(*found), product)


def test_preconditioners_are_updated_at_the_rate_of_the_step():
    made = optimizer.Kron()
    assert [made.probability(t) for t in (1, 501)] == [1.0, 1.0]
    assert made.probability(2501) == pytest.approx(math.exp(-2))
    assert made.probability(10**5) == 0.03
    made = optimizer.Kron(precondition_probability=0.4)
    updater, weight, counts = optimizer.get_updater(made), np.ones((2, 3)), []
    for _ in range(302):
        updater(0, np.ones((2, 3)), weight)
        counts.append(int(updater.states[0][1][1]))
    assert counts[:7] == [0, 0, 1, 1, 1, 2, 2]
    assert counts[-1] == 100


@pytest.mark.parametrize("diagonal", [None, "one_diag", "smart_one_diag", "all_diag"])
def test_diagonal_factors(diagonal):
    made = optimizer.Kron(diagonal=diagonal, max_precond_dim=5)
    found = {shape: made.triangular(shape) for shape in ((3, 4), (4, 4), (2, 1), (2, 6), (3,))}
    usual = {None: [1, 1], "one_diag": [1, 0], "smart_one_diag": [1, 0], "all_diag": [0, 0]}
    assert found[3, 4] == usual[diagonal]
    assert (
        sum(found[4, 4]) == {None: 2, "one_diag": 1, "smart_one_diag": 2, "all_diag": 0}[diagonal]
    )
    assert found[2, 1][1] == found[2, 6][1] == found[3,][0] == 0


def test_random_projections_depend_on_the_seed_alone(rng):
    weight, gradients = single(rng, (5, 4))
    ends = []
    for seed in (1, 1, 2):
        updater, other = optimizer.get_updater(optimizer.APOLLO(rank=1, seed=seed)), weight.copy()
        for grad in gradients:
            updater(0, grad, other)
        ends.append(other)
    np.testing.assert_array_equal(ends[0], ends[1])
    assert np.abs(ends[0] - ends[2]).max() > 1e-3


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: optimizer.CAME(beta3=1), ValueError, "beta3 must be a finite number"),
        (lambda: optimizer.CAME(clip_threshold=0), ValueError, "clip_threshold must be a finite"),
        (lambda: optimizer.GaLore(rank=0), ValueError, "rank must be at least 1"),
        (lambda: optimizer.APOLLO(scale_by="row"), ValueError, "scale_by must be"),
        (lambda: optimizer.AdamMini(heads={"q": 0}), ValueError, r"heads\['q'\] must be"),
        (lambda: optimizer.AdamMini(heads=["q"]), TypeError, "heads must map regular expressions"),
        (lambda: optimizer.AdamMini(heads={"(": 2}), ValueError, "is not a regular expression"),
        (lambda: optimizer.Scion(norms={"q": "sign"}), TypeError, "such as {'head': "),
        (lambda: optimizer.Scion(norms={"q": ("L1", 1)}), ValueError, r"norms\['q'\] must be"),
        (lambda: optimizer.Scion(adjust="none"), ValueError, "adjust must be"),
    ],
)
def test_wrong_arguments_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("made", "shape", "words"),
    [
        (optimizer.AdamMini(heads={".": 4}), (6, 2), "0: 6 rows .* among 4 heads"),
        (optimizer.Scion(norms={".": ("sign", 1)}), (3,), "'sign' needs weights of two or more"),
        (optimizer.Scion(split={".": (2, 2)}), (3, 2), "0: 3 rows of shape .* cannot be split"),
    ],
)
def test_weights_that_do_not_fit_are_refused(made, shape, words):
    updater, weight = optimizer.get_updater(made), np.ones(shape)
    with pytest.raises(ValueError, match=words):
        updater(0, np.ones(shape), weight)
    np.testing.assert_array_equal(weight, 1)
    assert updater.optimizer.num_update == 0
