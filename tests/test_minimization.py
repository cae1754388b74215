"""fastopt.minimize and the method for scipy.optimize.minimize."""

import copy
import math
import pickle
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.optimize
from scipy.optimize import Bounds, rosen, rosen_der

import fastopt
from fastopt import minimize, scipy_method
from fastopt.amp import LossScaler
from helpers.refusals import check_refused
from helpers.refusals import each as rows


def square(x, center=3.0):
    """Square of the distance to the center, and its gradient."""
    return np.sum((x - center) ** 2), 2 * (x - center)


def noting(fun):
    """Arguments of the calls, which are appended to, and the function that is called."""
    seen = []
    return seen, lambda *arguments: seen.append(arguments) or fun(*arguments)


@dataclass
class Model:
    weight: np.ndarray
    shift: float
    activation: str = "relu"


# Functions


@pytest.mark.parametrize("x0", [[-1.2, 1.0], np.array([2, -1]), np.full(5, 0.5)])
def test_the_minimum_of_rosenbrock_is_found(x0):
    kept = copy.deepcopy(x0)
    result = minimize(rosen, x0, jac=rosen_der, lr=0.1, steps=4000)
    np.testing.assert_allclose(result.x, 1, atol=0.02)
    assert result.fun == rosen(result.x) == min(result.history)
    assert (result.nit, result.nfev, result.njev, len(result.history)) == (4000, 4001, 4001, 4001)
    assert (result.status, result.success) == (0, True)
    np.testing.assert_array_equal(x0, kept)


def test_many_arrays_of_any_shape_are_minimized_together():
    x0 = {
        "cores": [np.zeros((2, 3, 2)), np.zeros((2, 2), np.float32)],
        "model": Model(np.zeros(3), 5),
        "numbers": [1, 2],
    }

    def fun(x):
        assert (x["model"].activation, x["numbers"].dtype) == ("relu", np.float64)
        arrays = [*x["cores"], x["model"].weight, x["model"].shift, x["numbers"]]
        *cores, weight, shift, numbers = (2 * (array - 1) for array in arrays)
        model = {"weight": weight, "shift": shift, "activation": None}
        nested = {"cores": tuple(cores), "model": model, "numbers": numbers}
        return sum(np.sum((array - 1) ** 2) for array in arrays), nested

    x = minimize(fun, x0, lr=0.1, steps=500).x
    assert [core.dtype.name for core in x["cores"]] == ["float64", "float32"]
    assert [core.shape for core in x["cores"]] == [(2, 3, 2), (2, 2)]
    for array in (*x["cores"], x["model"].weight, x["model"].shift, x["numbers"]):
        np.testing.assert_allclose(array, 1, atol=1e-3)
    assert x0["numbers"] == [1, 2]
    assert not x0["model"].weight.any()


@pytest.mark.parametrize(("x0", "dtype"), [(5, "d"), (np.float32(5), "f"), (np.array([[5]]), "d")])
def test_x_has_the_shape_of_x0(x0, dtype):
    result = minimize(square, x0, lr=0.1, steps=400)
    assert (result.x.shape, result.x.dtype.char) == (np.shape(x0), dtype)
    np.testing.assert_allclose(result.x, 3, atol=1e-3)


def test_the_steps_are_those_of_the_updater():
    own, updater = np.array([1.0, -2.0]), fastopt.Updater(fastopt.Adam(lr=0.1, betas=(0.8, 0.99)))
    for _ in range(5):
        updater.step(square(own)[1], own)
    result = minimize(square, np.array([1.0, -2.0]), lr=0.1, betas=(0.8, 0.99), steps=5)
    assert result.x.tobytes() == own.tobytes()


def test_the_function_may_keep_and_change_its_argument():
    def fun(x):
        loss, grad = square(x)
        x[:] = math.nan
        return loss, grad

    changed, plain = (minimize(each, np.zeros(2), lr=0.1, steps=3) for each in (fun, square))
    assert changed.x.tobytes() == plain.x.tobytes()


def test_arguments_are_constant_and_batches_change():
    seen, fun = noting(lambda x, *_: square(x))
    minimize(fun, np.zeros(1), (1, 2), batches=[3, (4, 5), [6]], steps=3)
    minimize(fun, np.zeros(1), 7, batches=lambda step: 10 * step, steps=2)
    given = [(1, 2, 3), (1, 2, 4, 5), (1, 2, 6), (1, 2, 3), (7, 0), (7, 10), (7, 20)]
    assert [tuple(arguments) for _, *arguments in seen] == given


def test_a_generator_of_batches_is_iterated_once():
    result = minimize(square, np.zeros(1), batches=(k for k in range(3)), steps=10, lr=0.1)
    assert (result.nit, result.nfev, result.success) == (3, 3, True)
    with pytest.raises(ValueError, match="batches is empty"):
        minimize(square, np.zeros(1), batches=[])


def test_with_batches_the_last_x_is_returned_and_the_mean_of_the_last_losses():
    losses = iter([5.0, 1.0, 2.0, 3.0, 4.0])

    def fun(x, _):
        return next(losses), np.ones(1)

    result = minimize(fun, np.zeros(1), batches=[0, 1], steps=4, optimizer="sgd", lr=1.0)
    assert (result.x.tolist(), result.fun) == ([-4], 3.5)
    assert result.history.tolist() == [5, 1, 2, 3, 4]


# Ends


def test_a_small_decrease_of_the_mean_loss_ends_the_run():
    result = minimize(square, np.zeros(2), lr=0.1, tol=1e-6, window=10)
    assert (result.status, result.success, result.nit < 1000) == (0, True, True)
    limited = minimize(square, np.zeros(2), lr=0.001, tol=1e-6, steps=50)
    assert (limited.status, limited.success, limited.nit) == (1, False, 50)
    losses = 0.9 ** np.arange(200)
    means = np.convolve(losses, np.full(10, 0.1), "valid")
    given = iter(losses)
    result = minimize(lambda x: (next(given), 0 * x), np.zeros(2), tol=1e-4, window=10)
    assert len(result.history) == 20 + np.argmax(means[:-10] - means[10:] < 1e-4)


@pytest.mark.parametrize("batches", [None, [()]])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("losses", [[3.0, 1.0, 2.0], []])
def test_a_loss_that_is_not_finite_ends_the_run_at_the_best_x(bad, batches, losses):
    given = [*losses, bad]

    def fun(x):
        return given[int(-x[0])], np.ones(1)

    result = minimize(fun, np.zeros(1), optimizer="sgd", lr=1.0, batches=batches)
    assert (result.status, result.success, result.nit) == (2, False, len(losses))
    assert f"loss is {bad} after {len(losses)} steps" in result.message
    np.testing.assert_equal((result.x[0], result.fun), (-1, 1) if losses else (0, bad))


SETTINGS = {"accumulate": 1, "clip_global_norm": 1.0, "loss_scaler": LossScaler(1.0)}


@pytest.mark.parametrize("row_sparse", [False, True])
@pytest.mark.parametrize("name", ["accumulate", "clip_global_norm", "loss_scaler"])
def test_a_gradient_that_is_not_finite_is_no_success(name, row_sparse):
    """Whatever the loss says, and whether a step leaves x alone."""

    def fun(x):
        grad = np.array([[1.0], [math.nan]])
        return 1.0, (grad, np.arange(2)) if row_sparse else grad

    updater = fastopt.Updater("lion", **{name: SETTINGS[name]})
    result = minimize(fun, np.zeros((2, 1)), optimizer=updater, tol=1e-3)
    assert (result.status, result.success, result.x.tolist()) == (2, False, [[0], [0]])
    assert "gradient" in result.message


@pytest.mark.parametrize("at", [0, 3])
def test_ctrl_c_returns_the_best_x_so_far(at):
    seen = []

    def fun(x):
        if len(seen) == at:
            raise KeyboardInterrupt
        seen.append(x)
        return square(x)

    result = minimize(fun, np.zeros(2), lr=0.1)
    assert (result.success, result.status, result.nit) == (False, 3, at)
    assert "KeyboardInterrupt" in result.message
    assert result.x.tolist() == (seen[-1].tolist() if seen else [0, 0])


# Callbacks


def test_a_callback_gets_copies_of_x_or_intermediate_results():
    seen, results = [], []

    def callback(intermediate_result):
        results.append(intermediate_result)

    for each in (seen.append, callback):
        result = minimize(square, np.zeros(2), lr=0.1, steps=4, callback=each)
    assert len({x.tobytes() for x in seen}) == result.nit == 4
    assert seen[-1].tobytes() == result.x.tobytes()
    assert [each.nit for each in results] == [1, 2, 3, 4]
    assert [each.fun for each in results] == result.history[1:].tolist()
    assert [each.x.tobytes() for each in results] == [x.tobytes() for x in seen]


@pytest.mark.parametrize("through", [minimize, scipy.optimize.minimize])
def test_a_callback_stops_the_run(through):
    def callback(intermediate_result):
        if intermediate_result.fun < 5:
            raise StopIteration

    given = {"lr": 0.1} if through is minimize else {"method": scipy_method("adam", lr=0.1)}
    result = through(square, np.zeros(2), jac=True, callback=callback, **given)
    assert (result.status, result.success) == (99, False)
    assert result.message == "`callback` raised `StopIteration`."
    assert result.fun < 5 < result.history[-2]


# Bounds


BOUNDS = Bounds(-1, 2), Bounds([-1, -1], [2, 2]), [(-1, 2), (None, 2)], np.array([[-1, 2]] * 2)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("through", [minimize, scipy.optimize.minimize])
def test_x_stays_in_its_bounds(bounds, through):
    seen, fun = noting(square)
    given = {"lr": 0.5} if through is minimize else {"method": scipy_method("adam", lr=0.5)}
    result = through(fun, np.array([-9.0, 9.0]), jac=True, bounds=bounds, **given)
    np.testing.assert_array_equal(result.x, 2)
    assert all(-1 <= x[0] <= 2 and x[1] <= 2 for x, *_ in seen)


def test_nested_arrays_have_nested_bounds():
    def fun(x):
        (loss, first), (more, second) = square(x["a"]), square(x["b"])
        return loss + more, {"a": first, "b": second}

    x0 = {"a": np.zeros((2, 2)), "b": np.zeros(3, np.float32)}
    limits = {"a": Bounds(0, np.array([[1, 9], [9, 9]]))}
    result = minimize(fun, x0, bounds=limits, lr=0.1, steps=500)
    np.testing.assert_allclose(result.x["a"], [[1, 3], [3, 3]], atol=1e-3)
    result = minimize(fun, x0, bounds=Bounds(0, 0.1), lr=0.1, steps=50)
    assert [x.max() for x in result.x.values()] == [0.1, np.float32(0.1)]


# Optimizers


def test_an_average_of_the_iterates_is_returned():
    (seen, fun), average = noting(square), fastopt.EMA(decay=0.5)
    result = minimize(fun, np.zeros(1), optimizer="sgd", lr=0.1, steps=3, average=average)
    np.testing.assert_allclose(result.x, np.dot([1, 1, 2, 4], [x for (x,) in seen[:4]]) / 8)
    assert result.fun == square(result.x)[0]


def test_schedule_free_optimizers_return_their_average():
    result = minimize(square, np.zeros(2), optimizer="schedulefreesgd", lr=0.1, steps=300)
    np.testing.assert_allclose(result.x, 3, atol=0.05)
    with pytest.raises(ValueError, match="bounds cannot be combined with ScheduleFreeSGD"):
        minimize(square, np.zeros(2), optimizer="schedulefreesgd", bounds=Bounds(0, 1))


def test_an_optimizer_is_copied_and_an_updater_continues():
    adam = fastopt.Adam(lr=0.1)
    first, second = (minimize(square, np.zeros(2), optimizer=adam, steps=6) for _ in range(2))
    assert first.x.tobytes() == second.x.tobytes()
    assert adam.num_update == 0
    updater = fastopt.Updater(adam)
    half = minimize(square, np.zeros(2), optimizer=updater, steps=3)
    assert minimize(square, half.x, optimizer=updater, steps=3).x.tobytes() == first.x.tobytes()
    with pytest.raises(ValueError, match="optimizer has counted 6 updates: pass a new one, or its"):
        minimize(square, np.zeros(2), optimizer=adam)


A = {"a": np.zeros(2)}
ASCENT = fastopt.SGD(maximize=True)
SQUARE = "minimize(square, np.zeros(2), {})"
FUN = "minimize({}, np.zeros(2))"
BAD = {
    SQUARE.format("jac=None"): "ValueError: jac must be True, .* or a function .*approx_fprime",
    SQUARE.format("steps=-1"): "ValueError: steps must be at least 0",
    SQUARE.format("tol=-1.0"): "ValueError: tol must be",
    SQUARE.format("batches=3"): "TypeError: batches must be an iterable or a function, got 3",
    SQUARE.format("callback=3"): "TypeError: callback must be a function, got 3",
    SQUARE.format("maxiter=5"): "TypeError: minimize does not take maxiter; steps takes it",
    SQUARE.format("options={'maxiter': 5}"): "TypeError: take options; pass what they hold as arg",
    **rows(SQUARE.format("optimizer={}"), r"ValueError: SGD\(maximize=True\), which ascends: re",
           "ASCENT", "fastopt.Updater('sgd', groups={'': {'maximize': True}})",
           "fastopt.Updater('sgd', groups={'': {'optimizer': ASCENT}})"),
    SQUARE.format("optimizer=fastopt.Updater('sgd'), lr=0.1"):
        "ValueError: lr cannot be passed with an Updater, which has its own",
    "scipy.optimize.minimize(square, np.zeros(2), method=scipy_method())":
        "ValueError: jac must be True",
    "scipy.optimize.minimize(square, 1, jac=True, method=scipy_method(), constraints={'type': ''})":
        "ValueError: takes bounds but no constraints",
    FUN.format("lambda x: 1 / 0"): "ZeroDivisionError: division",
    SQUARE.format("bounds=[(0, 1)]"):
        r"ValueError: a scipy.optimize.Bounds, or 2 pairs \(min, max\), got",
    SQUARE.format("bounds=Bounds([0] * 3, 1)"):
        r"ValueError: limits of shape \(2,\), got \(3,\) and",
    SQUARE.format("bounds=[(1, 0), (0, 1)]"):
        "ValueError: lower limits that are at most the upper ones",
    "minimize(square, A, bounds={'b': Bounds(0, 1)})": r"ValueError: names \['a'\], got \['b'\]",
    FUN.format("3"): "TypeError: fun must be a function, got 3",
    FUN.format("rosen"): r"TypeError: jac=True: fun must return \(loss, gradient\), got .*as jac",
    **rows(FUN.format("lambda x: ({}, x)"), "TypeError: fun must return a real number as loss, got",
           "x", "1j", "'1'", "np.array('1', object)"),
    FUN.format("lambda x: (1.0, x[:1])"): r"ValueError: gradient must have shape \(2,\), got",
    FUN.format("lambda x: (1.0, None)"): "TypeError: must return the gradient, got None",
    **rows("minimize(square, {})", "TypeError: x0 must hold numbers", "['a']", "None",
           "np.array([0], 'M8[D]')", "np.array(['1'], 'O')"),
}  # fmt: skip


@pytest.mark.parametrize("code", BAD)
def test_invalid_arguments_are_refused(code):
    check_refused(code, BAD[code], globals())


def test_without_scipy_the_error_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"pip install scipy; without SciPy, call updater.step"):
        minimize(square, np.zeros(2))


# The method of scipy.optimize.minimize


@pytest.mark.parametrize("jac", [True, rosen_der])
def test_scipy_gives_the_result_of_minimize(jac):
    fun = rosen if callable(jac) else lambda x: (rosen(x), rosen_der(x))
    method = scipy_method("adam", lr=0.05)
    options = {"maxiter": 50, "betas": (0.8, 0.99)}
    result = scipy.optimize.minimize(fun, [-1, 1], jac=jac, method=method, options=options)
    own = minimize(rosen, [-1, 1], jac=rosen_der, lr=0.05, steps=50, betas=(0.8, 0.99))
    assert isinstance(result, scipy.optimize.OptimizeResult)
    assert result.x.tobytes() == own.x.tobytes()
    assert (result.nit, result.nfev) == (50, 51)


def test_scipy_passes_args_and_tol():
    method = scipy_method("adam", lr=0.1)
    given = {"args": (1.0,), "jac": True, "method": method, "tol": 1e-6}
    for options in ({}, {"maxiter": np.inf}):
        result = scipy.optimize.minimize(square, np.zeros(2), **given, options=options)
        np.testing.assert_allclose(result.x, 1, atol=1e-2)
        assert result.success
        assert result.nit < 1000


@pytest.mark.parametrize("has_tqdm", [True, False])
@pytest.mark.parametrize("maxiter", [3, 3.0, np.float64(2.5)])
def test_scipy_rounds_iterations_up_and_shows_progress(maxiter, has_tqdm, capsys, monkeypatch):
    if not has_tqdm:
        monkeypatch.setattr(fastopt.minimization, "find_spec", lambda name: None)
    given = {"method": scipy_method("sgd", lr=0.01), "options": {"maxiter": maxiter, "disp": True}}
    result = scipy.optimize.minimize(rosen, [0, 0], jac=rosen_der, **given)
    assert (result.nit, result.success) == (3, True)
    shown = capsys.readouterr()
    assert "All 3 steps are done; no tol was given. fun: " in shown.out
    assert ("3/3" in shown.err) == bool(shown.err) == has_tqdm


def test_steps_that_only_raise_the_loss_say_so():
    sign = lambda s: minimize(lambda x: (x @ x, s * x), np.ones(2), steps=5, lr=0.1)  # noqa: E731
    assert "No step lowered the loss: is the sign" in sign(-1).message
    assert "lowered" not in sign(1).message


@pytest.mark.parametrize(("more", "category", "words"), [
    ({"hess": scipy.optimize.rosen_hess}, RuntimeWarning, "hess and hessp are ignored"),
    ({"options": {"maxiter": 3, "eps": 1e-2, "gtol": 1e-3}}, scipy.optimize.OptimizeWarning,
     "Unknown solver options: eps, gtol$"),
])  # fmt: skip
def test_what_other_methods_take_is_ignored_with_a_warning(more, category, words):
    given = {"jac": rosen_der, "method": scipy_method(), "options": {"maxiter": 3}}
    with pytest.warns(category, match=words) as caught:
        found = scipy.optimize.minimize(rosen, [0, 0], **{**given, **more})
    assert "options" in more or caught[0].filename == __file__
    expected = scipy.optimize.minimize(rosen, [0, 0], **given)
    assert found.x.tobytes() == expected.x.tobytes()


@pytest.mark.parametrize("average", [None, fastopt.EMA(decay=0.5)])
def test_the_result_has_the_gradient_at_x(average):
    given = {"lr": 0.05, "steps": 20, "average": average}
    result = minimize(rosen, [-1.0, 1.0], jac=rosen_der, **given)
    np.testing.assert_array_equal(result.jac, rosen_der(result.x))
    row = minimize(rosen, [-1.0, 1.0], jac=lambda x: rosen_der(x)[np.newaxis], **given)
    assert row.x.tobytes() == result.x.tobytes()
    assert row.jac.shape == (2,)


def test_the_method_is_an_ordinary_object():
    method = pickle.loads(pickle.dumps(scipy_method("adam", lr=0.1)))
    assert repr(method) == "scipy_method('adam', lr=0.1)"
