"""Hyper-parameters that do not depend on the step number are computed once.

``Optimizer.hyper(t, lr, wd)`` returns hyper-parameters of a rule; arguments of the class that they
are named after need not be returned, see :func:`named`. If it is marked with :func:`constant` or
:func:`corrected`, the kernels compute the part that depends on `t`, with the same function and
therefore the same bits; an unmarked method is called in every step. A marked method must not read
``rescale_grad``, which changes with the loss scale and norm clipping.

Tests: ``tests/kernels/test_advance.py``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import filterfalse
from math import inf
from typing import Any, NamedTuple, TypeVar

from fastopt._advice import choices, closest
from fastopt._engine.contract import OptimizerLike
from fastopt._kernels.advance import step
from fastopt.arguments import as_float
from fastopt.kernels.rule import Rule, scalar, written

Method = TypeVar("Method", bound=Callable[..., Mapping[str, float]])


GIVEN = ("rate", "lr", "wd", "rescale_grad", "clip_gradient", "direction")
"""Fields of every optimizer."""


class Hyper(NamedTuple):
    """How the hyper-parameters of a step are computed."""

    compute: Callable[..., Mapping[str, float]]
    """``compute(optimizer, t, lr, wd)`` returns the fields before :attr:`correct`."""
    constant: bool
    """Whether `compute` does not depend on `t`."""
    correct: Callable[..., None] | None = None
    """``correct(t, h, carried)`` writes the fields that depend on the step."""
    extra: tuple[str, ...] = ()
    """Fields of `h` that the rule does not have."""
    carries: bool = False
    """Whether `correct` uses a number that each parameter carries from step to step."""
    shares: bool = False
    """Whether all parameters carry the same number, and so are counted in the order of a list."""


def constant(hyper: Method) -> Method:
    """Mark a ``hyper`` method whose result does not depend on `t`, so that it is cached.

    The result must not depend on ``rescale_grad`` either.

    Parameters
    ----------
    hyper : callable
        The method, which is returned.

    Examples
    --------
    >>> from fastopt import optimizer
    >>> class Slow(optimizer.SGD):
    ...     @optimizer.constant
    ...     def hyper(self, t, lr, wd):
    ...         return {"momentum": self.momentum, "lr": lr / 10}
    >>> Slow().hyper(1, 0.5, 0.0)
    {'momentum': 0.0, 'lr': 0.05}
    """
    hyper.marked = Hyper(hyper, True)  # type: ignore[attr-defined]
    return hyper


def corrected(
    correct: Callable[..., None],
    *extra: str,
    carries: bool = False,
    when: Callable[[Any], bool] = lambda optimizer: True,
    shares: Callable[[Any], bool] = lambda optimizer: False,
) -> Callable[[Method], Method]:
    """Mark a ``hyper`` method whose result depends on `t` only through `correct`.

    The method returns fields before the correction; the decorated method returns all fields that
    the rule and `correct` read, corrected.

    Parameters
    ----------
    correct : callable
        ``correct(t, h, carried)``: a scalar function, see :func:`~fastopt.kernels.rule.scalar`.
        It writes fields of `h`, in float64; `t` is a float. ``carried[0]`` is a number that the
        parameter carries from step to step.
    *extra : str
        Fields of `h` that `correct` reads and the rule does not.
    carries : bool
        Whether `correct` reads or writes ``carried[0]``. The decorated method then returns the
        fields uncorrected.
    when : callable, optional
        Whether an optimizer needs the correction. Default: always.
    shares : callable, optional
        Whether the number is the same one for all parameters, each of which changes it in turn.
        Default: never.

    Examples
    --------
    >>> from fastopt import optimizer
    >>> def halved(t, h, carried):
    ...     h.lr = h.lr * 0.5**t
    >>> class Halved(optimizer.SGD):
    ...     @optimizer.corrected(halved)
    ...     def hyper(self, t, lr, wd):
    ...         return {"momentum": self.momentum}
    >>> Halved().hyper(2, 0.4, 0.0)["lr"]
    0.1
    """
    scalar(correct)

    def mark(method: Method) -> Method:
        @wraps(method)
        def hyper(self: Any, t: int, lr: float, wd: float) -> Mapping[str, float]:
            fields = completed(self, extra, method(self, t, lr, wd))
            if carries or not when(self):
                return fields
            return step(t, {"lr": lr, "wd": wd, **fields}, correct, ())

        hyper.marked = Hyper(method, True, correct, extra, carries)  # type: ignore[attr-defined]
        hyper.when, hyper.shares = when, shares  # type: ignore[attr-defined]
        return hyper  # type: ignore[return-value]

    return mark


def named(
    optimizer: OptimizerLike, rule: Rule, names: Iterable[str], returned: Mapping[str, float]
) -> dict[str, float]:
    """Return fields of these names that ``hyper()`` need not return.

    These are arguments of the class, 1 minus an argument or what it has `returned` for it after
    ``one_minus_``, and 1 for what the reductions of the rule, or a correction, compute.
    """
    kind: Any = type(optimizer)
    fields = {}
    for name in names:
        argument = name.removeprefix("one_minus_")
        if argument in returned:
            fields[name] = 1 - returned[argument]
            continue
        declared = kind.declared.get(argument)
        if declared is not None and declared.names:
            argument, declared = declared.names[0], kind.declared[declared.names[0]]
        value = declared and getattr(optimizer, declared.stored or argument, None)
        if isinstance(value, (int, float)) and argument not in ("learning_rate", "wd"):
            fields[name] = 1 - value if name.startswith("one_minus_") else value
        elif name in rule.computed or any(name in written(of.correct) for of in _corrected(kind)):
            fields[name] = 1.0
    return fields


def _corrected(kind: type) -> Iterator[Hyper]:
    """Yield the corrected ``hyper()`` of a class and of its bases."""
    for base in kind.__mro__:
        marked = getattr(vars(base).get("hyper"), "marked", None)
        if marked is not None and marked.correct is not None:
            yield marked


def check_returned(
    optimizer: OptimizerLike,
    names: Sequence[str],
    rates: Mapping[str, float],
    returned: Mapping[str, float],
) -> None:
    """Raise TypeError if ``hyper()`` returns text, or what the only rule of a class does not read.

    Arguments of the class may be returned, and what a correction reads that is not due.
    """
    kind: Any = type(optimizer)
    one_rule = isinstance(kind.rule, Rule) or isinstance(kind.base_rule, Rule)
    known = {name for name, declared in kind.declared.items() if not declared.names}
    known.update(names, GIVEN, rates, ("average_rate",), *(of.extra for of in _corrected(kind)))
    for name, value in returned.items():
        if one_rule and name not in known:
            advice = choices(closest(name, names), names)
            raise TypeError(
                f"{kind.__name__}.hyper() returns {name!r}, which its rule does not read; {advice}"
            )
        if isinstance(value, (str, bytes)):  # which float() takes
            raise TypeError(f"{kind.__name__}.hyper(): {name} must be a number, got {value!r}")


def completed(
    optimizer: OptimizerLike, extra: Sequence[str], fields: Mapping[str, float]
) -> Mapping[str, float]:
    """Return the fields that ``hyper()`` has returned, and those that it need not return."""
    rule = optimizer.rule
    if rule is None:
        return fields
    names = [name for name in (*rule.hyper, *extra) if name not in (*fields, *GIVEN)]
    return {**named(optimizer, rule, names, fields), **fields}


def hyper_of(optimizer: OptimizerLike) -> Hyper:
    """Return how the hyper-parameters of `optimizer` are computed."""
    method: Any = type(optimizer).hyper
    marked: Hyper | None = getattr(method, "marked", None)
    if marked is None:
        for base in type(optimizer).__mro__:  # an overridden hyper() still carries numbers
            inherited: Any = vars(base).get("hyper")
            above: Hyper | None = getattr(inherited, "marked", None)
            if above is not None and above.carries:
                hyper = above._replace(compute=method, constant=False)
                return hyper._replace(shares=inherited.shares(optimizer))
        return Hyper(method, False)
    if marked.correct is None:
        return marked
    if not method.when(optimizer):
        return Hyper(marked.compute, marked.constant)
    return marked._replace(shares=method.shares(optimizer))


class _Unread:
    """Argument of functions that are expected not to read it: whatever reads it raises."""

    __slots__ = ()

    def _read(self, *arguments: Any) -> Any:
        raise TypeError("the argument was read")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _read
    __str__ = __repr__ = __format__ = _read


_UNREAD = _Unread()


def reads_no_rates(hyper: Hyper, optimizer: OptimizerLike, known: Mapping[str, float]) -> bool:
    """Whether the fields `known` do not depend on the learning rate and the weight decay.

    Only the package's own methods are asked, as those of users may do more than compute.
    """
    if not hyper.compute.__module__.startswith("fastopt."):
        return False
    try:
        fields = hyper.compute(optimizer, 0, _UNREAD, _UNREAD)
        return fields.keys() == known.keys() and all(fields[name] == known[name] for name in known)
    except (TypeError, AttributeError):
        return False


def values_of(
    optimizer: OptimizerLike,
    rule: Rule,
    names: Sequence[str],
    rates: Mapping[str, float],
    hyper: Mapping[str, float],
) -> list[float]:
    """Return the values of the hyper-parameters `names` of a rule.

    `rates` holds the learning rate ``lr``, the weight decay ``wd``, and the learning rate
    before multipliers, ``rate``.
    """
    turned = "rescale_grad" in names or ("direction" in names and "direction" not in hyper)
    if optimizer.maximize and not turned:
        raise ValueError(f"rule {rule.name} reads no rescale_grad, so it cannot maximize")
    if not hyper or hyper.keys() == {"average_rate"}:  # else a class's hyper() may have read them
        settings = {
            "wd": rates.get("wd"),
            "clip_gradient": optimizer.clip_gradient,
            "rescale_grad": optimizer.rescale_grad != 1,
        }
        for name in filterfalse(names.__contains__, settings):
            if settings[name]:
                raise ValueError(
                    f"rule {rule.name} reads no {name}, so that it has no effect: name it in "
                    "hyper=(...) and use h." + name
                )
    fields = {
        **rates,
        "rescale_grad": optimizer.rescale_grad,
        "clip_gradient": optimizer.clip_gradient or inf,
        "direction": -1.0 if optimizer.maximize else 1.0,
    }
    try:
        fields.update(hyper)
        if optimizer.maximize:
            fields["rescale_grad"] = -fields["rescale_grad"]
        if not fields["clip_gradient"] > 0:
            fields["clip_gradient"] = inf
        if others := list(filterfalse(fields.__contains__, names)):
            fields.update(named(optimizer, rule, others, hyper))
        values = list(map(fields.__getitem__, names))
    except KeyError as error:
        missing = f"{error}, which rule {rule.name} reads"
        raise TypeError(
            f"{type(optimizer).__name__}.hyper() does not return {missing}: return it, or declare "
            "it as an argument of the class"
        ) from None
    except (TypeError, ValueError):
        bound("clip_gradient", optimizer.clip_gradient)  # it may have been set without its check
        raise TypeError(
            f"{type(optimizer).__name__}.hyper() must return a dict of numbers, got {hyper!r}"
        ) from None
    try:
        return list(map(float, values))
    except (TypeError, ValueError):
        raise TypeError(
            f"rule {rule.name} needs numbers for {tuple(names)}, got {tuple(values)}"
        ) from None


def bound(name: str, limit: float | None) -> float:
    """Return the limit of a clip as a float; None, 0 and negative limits mean no clipping."""
    if limit is None:
        return inf
    exact = as_float(name, limit)
    return inf if exact <= 0 else exact
