"""Minimization of functions with the optimizers, in the interface of scipy.optimize."""

import copy
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count as counted
from itertools import repeat
from typing import Any

import numpy as np

from fastopt._engine.validate import Array
from fastopt._foreign import as_gradient
from fastopt._structure import items, mapped, named, rebuilt
from fastopt._updater.averaged import evaluates
from fastopt._updater.updater import Updater
from fastopt.arguments import brief, count, flag, number
from fastopt.averages import Average
from fastopt.optimizer import Optimizer, create
from fastopt.sparse import RowSparse

__all__ = ["minimize", "scipy_method"]


WINDOW = 20
"""Default number of losses in a mean."""

SCIPY_NAMES = {
    "method": "optimizer takes it",
    "maxiter": "steps takes it",
    "disp": "progress takes it",
    "options": "pass what they hold as arguments, with steps for maxiter",
}
"""Arguments of SciPy and what to pass instead."""

RUN_NAMES = frozenset(("steps", "batches", "average", "tol", "window", "progress"))
"""Arguments of :func:`minimize` that may be options of SciPy."""

CONVERGED, LIMITED, NOT_FINITE, INTERRUPTED, STOPPED = 0, 1, 2, 3, 99
"""Values of ``status``; 99 is SciPy's."""


def minimize(
    fun: Callable[..., Any],
    x0: object,
    args: object = (),
    jac: bool | Callable[..., Any] = True,
    optimizer: str | Optimizer | Updater = "adam",
    steps: int = 1000,
    batches: Iterable[Any] | Callable[[int], Any] | None = None,
    callback: Callable[..., Any] | None = None,
    tol: float | None = None,
    average: Average | None = None,
    bounds: object = None,
    progress: bool | None = None,
    window: int | None = None,
    **options: Any,
) -> Any:
    r"""Minimize a function of arrays with an optimizer; it needs SciPy for its result.

    Step :math:`k` evaluates :math:`f_k, g_k` at :math:`x_k`, updates
    :math:`x_{k+1} = P(\text{optimizer}(x_k, g_k))`, where :math:`P` projects on the bounds, and
    with `tol` the run ends as soon as the mean of the last :math:`m` losses, :math:`m` being
    `window`, has decreased by less than `tol` in :math:`m` steps:

    .. math::
        \frac{1}{m} \sum_{i=k-2m+1}^{k-m} f_i - \frac{1}{m} \sum_{i=k-m+1}^{k} f_i < \text{tol}

    Parameters
    ----------
    fun : callable
        ``fun(x, *args, *batch)`` returns the loss and its gradient, or with a function as `jac`
        the loss. It gets a copy of `x`, which it may keep.
    x0 : array_like, or nested dict, list, tuple or dataclass of them
        Start. Arrays may have any shape; the gradient is nested like `x0`. If `x0` is a vector, a
        gradient of one row, of shape ``(1, n)``, is flattened. float32 and complex64 arrays keep
        their dtype; other numbers become float64 or complex128. It is not written to. Gradients
        of complex numbers: see :doc:`complex weights </complex-weights>`.
    args : tuple
        Constant arguments of `fun`; another value is one argument.
    jac : True or callable
        True: `fun` returns ``(loss, gradient)``. A function: ``jac(x, *args, *batch)`` returns the
        gradient. Default True.
    optimizer : str, Optimizer or Updater
        Name, or an optimizer, which is copied. An updater is used as it is, with its groups and
        clips, and continues from its states. Default ``"adam"``.
    steps : int
        Number of steps; `fun` is evaluated once more, at the last `x`. Default 1000.
    batches : iterable or callable, optional
        Further arguments of `fun` for each step. An iterable is iterated again at its end, an
        iterator or generator once; a function is called with the number of the step, from 0. A
        tuple or list is unpacked into several arguments, anything else is one.
    callback : callable, optional
        Called after each step with a copy of `x`, or, if its only parameter is named
        ``intermediate_result``, with an OptimizeResult of ``x``, ``fun`` and ``nit``. It may raise
        StopIteration to stop.
    tol : float, optional
        See above; an absolute difference. Default None: all steps.
    average : EMA, SWA or Lookahead, optional
        Return the average of the iterates, see :mod:`fastopt.averages`.
    bounds : scipy.optimize.Bounds, or sequence of pairs, optional
        Limits of `x`: a Bounds, whose limits are broadcast, or a pair ``(min, max)`` for each
        number, with None for no limit. For a nested `x0` one Bounds, or a structure like `x0` of
        them, where None or an absent key stands for no limits. `x0` is projected too. Averages are
        those of the iterates before projection, and are projected at the end.
    progress : bool, optional
        Show a progress bar with tqdm. Default None: no.
    window : int, optional
        Number of losses in a mean. Default: the length of `batches` if it has one, else 20.
    **options
        Arguments of the optimizer, such as ``lr=0.1``.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x``: nested like `x0`. Without `batches` the one with the lowest loss, and ``fun`` its
        loss. With `batches`, whose losses are not comparable, the last one, and ``fun`` the mean
        of the last `window` losses. ``jac``: the gradient there. ``history``: all losses.
        ``nit``: steps. ``nfev``, ``njev``: evaluations. ``status`` and ``message``: 0 all steps or
        `tol` reached, 1 `tol` not reached in `steps`, 2 a loss, gradient or result is not finite,
        3 KeyboardInterrupt, 99
        StopIteration of `callback`. ``success``: whether ``status`` is 0. With 2 and 3, ``x`` has
        the lowest loss so far, or with `batches` the lowest mean.

    Raises
    ------
    ImportError
        SciPy is not installed, or tqdm with ``progress=True``.
    TypeError
        `x0` holds something other than numbers, bounds are those of complex numbers, `fun` does not
        return what `jac` says, such as None as the gradient, or the optimizer does not have an
        option.
    ValueError
        An argument is out of range, bounds do not match `x0`, `batches` is empty, a gradient does
        not have the shape of `x0`, or the optimizer has ``maximize=True``.

    Examples
    --------
    >>> import numpy as np
    >>> import fastopt
    >>> def fun(x):
    ...     return np.sum((x - 3) ** 2), 2 * (x - 3)
    >>> result = fastopt.minimize(fun, np.zeros(2), lr=0.1, steps=500)
    >>> result.x.round(3), result.nit, result.success
    (array([3., 3.]), 500, True)

    Nested arrays and minibatches:

    >>> rng = np.random.default_rng(0)
    >>> inputs = rng.normal(size=(64, 3))
    >>> targets = inputs @ np.array([1.0, -2.0, 0.5]) + 3
    >>> def loss(params, x, y):
    ...     error = x @ params["w"] + params["b"] - y
    ...     return error @ error / len(x), {"w": 2 * error @ x / len(x), "b": 2 * error.mean()}
    >>> batches = [(inputs[k : k + 16], targets[k : k + 16]) for k in range(0, 64, 16)]
    >>> x0 = {"w": np.zeros(3), "b": np.zeros(())}
    >>> result = fastopt.minimize(loss, x0, batches=batches, lr=0.05, tol=1e-6)
    >>> result.x["w"].round(2), result.x["b"].round(2), result.success
    (array([ 1. , -2. ,  0.5]), np.float64(3.0), True)
    """
    for name in SCIPY_NAMES.keys() & options.keys():
        raise TypeError(f"minimize does not take {name}; {SCIPY_NAMES[name]}")
    if isinstance(args, (Optimizer, Updater)) or str(args) in Optimizer.opt_registry:
        raise TypeError(f"args are more arguments of fun, got {brief(args)}: write optimizer=...")
    result = _result_class()
    objective = _Objective(fun, jac, args if isinstance(args, tuple) else (args,))
    steps = count("steps", steps, least=0)
    tol = None if tol is None else number("tol", tol, least=0)
    x = mapped(_weight, _with_arrays(x0))
    if not any(_is_array(leaf) for _, leaf in named("", x)):
        raise TypeError(f"x0 must hold numbers, got {brief(x0)}")
    updater = _updater(optimizer, average, options)
    for used in updater.parameters.optimizers():
        if used.maximize:
            raise ValueError(
                f"minimize cannot use {type(used).__name__}(maximize=True), which ascends: return "
                "the negative loss and gradient, without maximize"
            )
    if bounds is not None and evaluates(updater):
        raise ValueError(
            f"bounds cannot be combined with {type(updater.optimizer).__name__}, whose state has "
            "averages of the weights; pass average=EMA() with another optimizer"
        )
    if window is None:
        window = max(len(batches), 1) if isinstance(batches, Sized) else WINDOW
    limits, noisy = _limits(bounds, x), batches is not None
    run = _Run(objective, x, updater, limits, count("window", window), noisy)
    notify = _notifier(callback, result)
    with ExitStack() as stack:
        bar = stack.enter_context(_bar(steps)) if progress and flag("progress", progress) else None
        status, message = run.run(steps, _batches(batches), notify, tol, bar)
    status, message, x, value, grads = run.finished(status, message)
    return result(
        x=x,
        fun=value,
        jac=grads,
        history=np.array(run.history),
        nit=run.nit,
        nfev=objective.calls,
        njev=objective.calls,
        status=status,
        success=status == CONVERGED,
        message=message,
    )


def scipy_method(optimizer: str | Optimizer | Updater = "adam", **options: Any) -> Any:
    """Return an optimizer as a ``method`` of :func:`scipy.optimize.minimize`.

    Parameters
    ----------
    optimizer : str, Optimizer or Updater
        See :func:`minimize`. Each minimization starts with a new state, except with an updater.
    **options
        Arguments of the optimizer, and `steps`, `batches`, `average`, `tol`, `window` and
        `progress` of :func:`minimize`.

    Returns
    -------
    callable
        The method. SciPy's ``options`` may have ``maxiter`` (`steps`; a float is rounded up),
        ``disp`` (the message is printed, and with tqdm `progress` is shown) and all of `options`
        but ``eps``, which in SciPy is a step of finite differences: it and unknown names are
        ignored with an OptimizeWarning, as by SciPy's methods. ``jac`` must be True or a function;
        ``bounds`` and ``callback`` are those of :func:`minimize`; ``hess`` and ``hessp`` are
        ignored with a RuntimeWarning. The result is that of :func:`minimize`; unlike those of
        SciPy's methods, it is a success after ``maxiter`` steps without `tol`.

    Raises
    ------
    TypeError, ValueError
        The optimizer is unknown, or does not have an option. When the method is called: see
        :func:`minimize`; or constraints are given, or no ``jac``.

    Examples
    --------
    >>> import fastopt
    >>> from scipy.optimize import minimize, rosen, rosen_der
    >>> method = fastopt.scipy_method("adam", lr=0.05)
    >>> result = minimize(rosen, [-1.0, 1.0], jac=rosen_der, method=method,
    ...                   options={"maxiter": 2000})
    >>> result.x.round(2), result.nit
    (array([1., 1.]), 2000)
    """
    return _Method(optimizer, options)


class _Method:
    """An optimizer with the signature that SciPy calls its methods with."""

    def __init__(self, optimizer: str | Optimizer | Updater, options: dict[str, Any]) -> None:
        settings = {name: value for name, value in options.items() if name not in RUN_NAMES}
        _updater(optimizer, options.get("average"), settings)  # mistakes are errors here
        self.optimizer, self.options = optimizer, options

    def __repr__(self) -> str:
        options = "".join(f", {name}={brief(value)}" for name, value in self.options.items())
        return f"scipy_method({self.optimizer!r}{options})"

    def __call__(
        self,
        fun: Callable[..., Any],
        x0: object,
        args: object = (),
        jac: Any = None,
        hess: object = None,
        hessp: object = None,
        bounds: object = None,
        constraints: object = (),
        callback: Callable[..., Any] | None = None,
        maxiter: float | None = None,
        disp: bool = False,
        **options: Any,
    ) -> Any:
        """Minimize `fun`; see :func:`scipy_method`."""
        if constraints:
            raise ValueError(f"{self!r} takes bounds but no constraints, got {brief(constraints)}")
        if hess is not None or hessp is not None:
            message = f"{self!r} does not use second derivatives: hess and hessp are ignored"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        options = {**self.options, **self._known(options)}
        if maxiter is not None:
            steps = number("maxiter", maxiter, least=0, infinite=True)
            options["steps"] = math.ceil(min(steps, sys.maxsize))
        if disp:
            options.setdefault("progress", find_spec("tqdm") is not None)
        result = minimize(
            fun, x0, args, jac, self.optimizer, callback=callback, bounds=bounds, **options
        )
        if disp:
            print(f"{result.message} fun: {result.fun:.6g}, nfev: {result.nfev}")
        return result

    def _known(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of SciPy that the run or the optimizer takes; warn of the others."""
        optimizer = self.optimizer
        kind = type(optimizer.optimizer if isinstance(optimizer, Updater) else create(optimizer))
        known = RUN_NAMES | kind.__signature__.parameters.keys() - {"eps"}
        if unknown := options.keys() - known:
            from scipy.optimize import OptimizeWarning

            names = ", ".join(sorted(unknown))
            warnings.warn(f"Unknown solver options: {names}", OptimizeWarning, stacklevel=4)
        return {name: value for name, value in options.items() if name in known}


class _Objective:
    """Evaluates the loss and its gradient."""

    def __init__(self, fun: object, jac: object, args: tuple[Any, ...]) -> None:
        if not callable(fun):
            raise TypeError(f"fun must be a function, got {brief(fun)}")
        if jac is not True and not callable(jac):
            raise ValueError(
                "jac must be True, if fun returns (loss, gradient), or a function that returns the "
                f"gradient, got {brief(jac)}; for finite differences pass "
                "jac=lambda x: scipy.optimize.approx_fprime(x, fun)"
            )
        self.fun, self.jac, self.args = fun, jac, args
        self.calls = 0

    def __call__(self, x: object, batch: tuple[Any, ...]) -> tuple[float, Any]:
        """Return the loss and the gradient at `x`; the functions get copies of it."""
        self.calls += 1
        value = self.fun(_copies(x), *self.args, *batch)
        if self.jac is not True:
            grads = self.jac(_copies(x), *self.args, *batch)
        elif isinstance(value, (tuple, list)) and len(value) == 2:
            value, grads = value
        else:
            raise TypeError(
                f"jac=True: fun must return (loss, gradient), got {brief(value)}; pass a function "
                "that returns the gradient as jac"
            )
        return _loss(value), _gradient(x, grads)


@dataclass(eq=False)
class _Run:
    """State of a minimization."""

    objective: _Objective
    x: Any
    updater: Updater
    limits: list[tuple[int, Array, Array]]
    window: int
    noisy: bool
    nit: int = 0
    history: list[float] = field(default_factory=list)
    best: tuple[float, Any, Any] | None = None
    """Lowest loss, or mean of losses if they are noisy, its x and its gradient."""
    grads: Any = None
    """The last gradient."""

    def __post_init__(self) -> None:
        self._project(self.x)

    def run(
        self, steps: int, batches: Iterator[Any], notify: Any, tol: float | None, bar: Any
    ) -> tuple[int, str]:
        """Evaluate and update until the end; return status and message."""
        try:
            for batch in batches:
                grads = self._evaluate(batch)
                if not math.isfinite(self.history[-1]):
                    return NOT_FINITE, f"The loss is {self.history[-1]} after {self.nit} steps."
                if notify is not None and self.nit:
                    try:
                        notify(_copies(self.x), self.history[-1], self.nit)
                    except StopIteration:
                        return STOPPED, "`callback` raised `StopIteration`."
                if tol is not None and self._settled(tol):
                    return CONVERGED, f"The mean loss decreases by less than tol={tol}."
                if self.nit == steps:
                    break
                if self.updater.loss_scaler is None and not _is_finite(grads):
                    return NOT_FINITE, f"The gradient is not finite after {self.nit} steps."
                self.updater.step(grads, self.x)
                self._project(self.x)
                self.nit += 1
                if bar is not None:
                    bar.set_postfix(loss=f"{self.history[-1]:.5g}", refresh=False)
                    bar.update()
        except KeyboardInterrupt:
            return INTERRUPTED, f"KeyboardInterrupt after {self.nit} steps."
        if tol is not None:
            return LIMITED, f"The mean loss still decreases by tol={tol} after {self.nit} steps."
        if self.nit < steps:
            return CONVERGED, f"`batches` ended after {self.nit} of {steps} steps."
        return CONVERGED, f"All {self.nit} steps are done; no tol was given."

    def finished(self, status: int, message: str) -> tuple[int, str, Any, float, Any]:
        """Return status, message, x, and the loss and gradient of the result."""
        if status in (CONVERGED, LIMITED) and self.nit and self.updater.info.skipped:
            status, message = NOT_FINITE, "The gradient of the last step is not finite."
        if status in (CONVERGED, LIMITED, STOPPED):
            x, value, grads = self.x, self._mean() if self.history else math.nan, self.grads
            if self.nit and (self.updater.average is not None or evaluates(self.updater)):
                with self.updater.averaged():
                    x = _copies(self.x)
                self._project(x)
                if not self.noisy:
                    value, grads = self.objective(x, ())
            elif not self.noisy and self.best is not None:
                value, x, grads = self.best
                if len(self.history) > 1 and value == self.history[0]:
                    message += " No step lowered the loss: is the sign of the gradient wrong?"
            if all(np.isfinite(leaf).all() for _, leaf in named("", x) if _is_array(leaf)):
                return status, message, x, value, grads
            status, message = NOT_FINITE, f"x is not finite after {self.nit} steps."
        last = self.history[-1] if self.history else math.nan
        value, x, grads = self.best or (last, self.x, self.grads)
        return status, message, x, value, grads

    def _evaluate(self, batch: tuple[Any, ...]) -> Any:
        """Record the loss, and x if it is the best; return the gradient."""
        value, grads = self.objective(self.x, batch)
        self.history.append(value)
        mean = self._mean()
        if math.isfinite(value) and (self.best is None or mean < self.best[0]):
            self.best = mean, _copies(self.x), _copies(grads)
        self.grads = grads
        return grads

    def _mean(self) -> float:
        """Return the last loss, or the mean of the last ones if they are noisy."""
        recent = self.history[-self.window :] if self.noisy else self.history[-1:]
        return math.fsum(recent) / len(recent)

    def _settled(self, tol: float) -> bool:
        """Whether the mean loss has decreased by less than `tol` in the last window."""
        m = self.window
        if len(self.history) < 2 * m:
            return False
        recent, earlier = self.history[-m:], self.history[-2 * m : -m]
        return (math.fsum(earlier) - math.fsum(recent)) / m < tol

    def _project(self, x: object) -> None:
        """Clip x to its bounds, in place."""
        leaves = [leaf for _, leaf in named("", x)] if self.limits else []
        for k, low, high in self.limits:
            np.clip(leaves[k], low, high, out=leaves[k])


def _result_class() -> Any:
    try:
        from scipy.optimize import OptimizeResult
    except ImportError as error:
        raise ImportError(
            f"fastopt.minimize returns SciPy's OptimizeResult ({error}): pip install scipy; "
            "without SciPy, call updater.step(grads, params) in a loop"
        ) from error
    return OptimizeResult


def _updater(
    optimizer: str | Optimizer | Updater, average: Average | None, options: dict[str, Any]
) -> Updater:
    """Return the updater of an optimizer."""
    if isinstance(optimizer, Updater):
        if options or average is not None:
            names = ", ".join([*options, *["average"] * (average is not None)])
            raise ValueError(f"{names} cannot be passed with an Updater, which has its own")
        return optimizer
    opt = create(optimizer, **options)
    if opt is optimizer:
        if opt.num_update != opt.begin_num_update:
            raise ValueError(
                f"optimizer has counted {opt.num_update} updates: pass a new one, or its Updater "
                "to continue"
            )
        opt = copy.deepcopy(opt)
    return Updater(opt, average=average)


def _batches(batches: object) -> Iterator[tuple[Any, ...]]:
    """Yield the further arguments of each step."""
    if batches is None:
        yield from repeat(())
    elif isinstance(batches, Iterable):
        for epoch in counted():
            batch = None
            for batch in batches:
                yield _arguments(batch)
            if batch is None and not epoch:
                raise ValueError("batches is empty")
            if batch is None or isinstance(batches, Iterator):
                return
    elif callable(batches):
        yield from (_arguments(batches(step)) for step in counted())
    else:
        raise TypeError(f"batches must be an iterable or a function, got {brief(batches)}")


def _arguments(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if type(batch) in (tuple, list) else (batch,)


def _notifier(callback: object, result: type) -> Any:
    """Return a function of x, loss and step that calls `callback` by SciPy's convention."""
    if callback is None:
        return None
    if not callable(callback):
        raise TypeError(f"callback must be a function, got {brief(callback)}")
    try:
        names = {*inspect.signature(callback).parameters}
    except ValueError:  # some functions in C
        names = set()
    if names == {"intermediate_result"}:
        return lambda x, fun, nit: callback(intermediate_result=result(x=x, fun=fun, nit=nit))
    return lambda x, fun, nit: callback(x)


def _bar(steps: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(f"progress=True needs tqdm ({error}): pip install tqdm") from error
    return tqdm(total=steps, unit="step")


def _loss(value: object) -> float:
    try:
        return float(_not_text(np.asarray(value)).item())
    except (TypeError, ValueError):
        raise TypeError(f"fun must return a real number as loss, got {brief(value)}") from None


def _gradient(x: object, grads: Any) -> Any:
    """Return what a function returned as the gradient at `x`, as arrays."""
    if all(leaf is None for _, leaf in named("", grads)):
        raise TypeError(f"fun or jac must return the gradient, got {brief(grads)}")
    if type(x) is np.ndarray:
        wide = complex if x.dtype.kind == "c" else float
        grads = np.asarray(grads, wide) if _is_numeric(grads) else grads
        if getattr(grads, "shape", ()) == (1, *x.shape):  # a Jacobian of one row
            return grads[0]
    return grads


def _not_text(array: Array) -> Array:
    """Return an array; raise TypeError for strings and dates, which NumPy converts to numbers."""
    objects = array.flat if array.dtype.kind == "O" else ()
    if array.dtype.kind in "SUmM" or any(isinstance(item, (str, bytes)) for item in objects):
        raise TypeError
    return array


def _is_finite(grads: object) -> bool:
    """Whether all numbers of nested gradients are finite."""
    for _, leaf in named("", grads):
        values = as_gradient(leaf)
        values = values.values if isinstance(values, RowSparse) else values
        if _is_array(values) and values.dtype.kind in "fc" and not np.isfinite(values).all():
            return False
    return True


# Arrays and bounds


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray)


def _copies(x: object) -> Any:
    """Return a copy of a structure and its arrays."""
    return mapped(lambda leaf: leaf.copy() if _is_array(leaf) else leaf, x)


def _is_numeric(value: object) -> bool:
    """Whether a value is a number, an array of integers, or nested lists of numbers."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and not hasattr(value, "_fields") and all(map(_is_numeric, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iu"
    return isinstance(value, (int, float, complex, np.number)) and not isinstance(value, bool)


def _with_arrays(value: object) -> Any:
    """Return a structure with arrays instead of numbers and lists of numbers."""
    if _is_numeric(value):
        return np.asarray(value)
    below = items("", value)
    if below is None:
        return value
    return rebuilt(value, {key: _with_arrays(item) for key, item in below.values()})


def _weight(leaf: object) -> Any:
    """Return a new array, in single or double precision, for the values of a leaf of x0."""
    if leaf is None or isinstance(leaf, (str, bytes, bool)) or callable(leaf):
        return leaf
    array = np.asarray(leaf)
    wide: Any = np.complex128 if array.dtype.kind == "c" else np.float64
    try:
        return _not_text(array).astype(array.dtype if array.dtype.char in "fF" else wide)
    except (TypeError, ValueError):
        raise TypeError(f"x0 must hold numbers, got {brief(leaf)}") from None


def _limits(bounds: object, x: object) -> list[tuple[int, Array, Array]]:
    """Return position, lower and upper limits of each leaf of x with bounds."""
    bounds_at = dict(_bounds_of("", bounds, x))
    limits = []
    for k, (path, leaf) in enumerate(named("", x)):
        if bounds_at.get(path) is None or not _is_array(leaf):
            continue
        of = bounds_at[path]
        at = f" of {path!r}" if path else ""
        if leaf.dtype.kind == "c":
            raise TypeError(
                f"bounds{at} are for real numbers, got {leaf.dtype}: minimize over x0.view(float)"
            )
        pairs = (of.lb, of.ub) if hasattr(of, "lb") else _pairs(at, of, leaf.size)
        try:
            low, high = (
                limit.reshape(leaf.shape)
                if limit.size == leaf.size
                else np.broadcast_to(limit, leaf.shape)
                for limit in (np.asarray(limit, leaf.dtype) for limit in pairs)
            )
        except ValueError:
            shapes = " and ".join(str(np.shape(limit)) for limit in pairs)
            raise ValueError(
                f"bounds{at} must have limits of shape {leaf.shape}, got {shapes}"
            ) from None
        if not (low <= high).all():
            raise ValueError(f"bounds{at} must have lower limits that are at most the upper ones")
        limits.append((k, low, high))
    return limits


def _bounds_of(path: str, bounds: object, x: object) -> Iterator[tuple[str, Any]]:
    """Yield the bounds of each leaf of x."""
    below = items(path, x)
    if below is None or bounds is None or hasattr(bounds, "lb"):
        yield from ((at, bounds) for at, _ in named(path, x))
        return
    beside = items(path, bounds)
    if beside is None or beside.keys() - below.keys():
        names = list(beside or ())
        raise ValueError(
            f"bounds must be a Bounds, or nested like x0 with the names {list(below)}, got "
            f"{names or brief(bounds)}"
        )
    for name, (_, item) in below.items():
        _, of = beside.get(name, (None, None))
        yield from _bounds_of(f"{path}.{name}" if path else name, of, item)


def _pairs(at: str, bounds: Any, size: int) -> tuple[Array, Array]:
    """Return the limits in a sequence of pairs."""
    try:
        pairs = [(low, high) for low, high in bounds]
    except (TypeError, ValueError):
        pairs = []
    if len(pairs) != size:
        raise ValueError(
            f"bounds{at} must be a scipy.optimize.Bounds, or {size} pairs (min, max), got "
            f"{brief(bounds)}"
        )
    lows = [-math.inf if low is None else low for low, _ in pairs]
    highs = [math.inf if high is None else high for _, high in pairs]
    return np.array(lows, float), np.array(highs, float)
