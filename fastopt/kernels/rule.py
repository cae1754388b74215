"""Update rules: the mathematics of one algorithm, as a pure function of scalars.

A rule never sees an array, an index or a storage format; all kernels are derived from it.
"""

import dis
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from keyword import iskeyword
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba.extending import register_jitable

from fastopt.kernels.linked import LinkedCompiler

__all__ = ["Rule", "rule", "scalar"]

Function = Callable[..., Any]
Reductions = Sequence[tuple[Function, ...]]

SWAPPED = ["grad", "weight"], ["gradient", "weight"], ["g", "w"]
"""First arguments of functions whose author has confused their order."""
F = TypeVar("F", bound=Function)

Scalar = Any
"""A number: a NumPy scalar in plain Python, a register in a kernel."""
State = tuple[Scalar, ...]
Hyper = Any
"""The record ``h`` of hyper-parameters."""
Sums = Any
"""Totals of a reduction: a float64 array."""
Carried = np.ndarray[Any, Any]
"""Numbers that an optimizer carries for a tensor from step to step: a float64 array."""
Step = tuple[Scalar, State]
"""Result of a rule: the new weight and the new state."""

_jitable: set[Function] = set()


class Pass(NamedTuple):
    """A reduction over the tensor."""

    sums: Function
    finish: Function
    by: Function = sum
    """``sum`` or ``max``."""

    @property
    def largest(self) -> bool:
        """Whether it is a maximum."""
        return self.by is max


def scalar(fn: F) -> F:
    """Let rules and kernels call the scalar function `fn`, which stays callable from Python.

    Parameters
    ----------
    fn : callable
        Function with plain Python arithmetic on scalars, like a rule.

    Returns
    -------
    callable
        `fn` itself.

    Raises
    ------
    TypeError
        `fn` is not a Python function, or contains a ``raise`` or ``assert``.

    Examples
    --------
    >>> from fastopt.kernels.rule import scalar
    >>> @scalar
    ... def square(x):
    ...     return x * x
    >>> square(3)
    9
    """
    _check_function(fn)
    if fn in _jitable:
        return fn
    if dis.opmap["RAISE_VARARGS"] in fn.__code__.co_code[::2]:
        raise TypeError(f"{fn.__name__} may not raise or assert: kernels would lose the error")
    keep_pickle(fn)
    _let_kernels_call(fn)
    return fn


def _let_kernels_call(fn: Function) -> None:
    _jitable.add(fn)
    # Python's error model adds a check for zero to every division, which prevents vectorization of
    # the loop around it.
    register_jitable(
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        pipeline_class=LinkedCompiler,
    )(fn)


def admit_plain(functions: Sequence[Function]) -> None:
    """Let kernels call the functions that these call and that no compiler has seen.

    With ``NUMBA_DISABLE_JIT``, numba's decorators return users' functions as they are.
    """
    for fn in functions:
        references = inspect.getclosurevars(fn)
        called = (*references.globals.values(), *references.nonlocals.values())
        plain = [fn for fn in called if isinstance(fn, FunctionType) and _is_foreign(fn)]
        for function in plain:
            _let_kernels_call(function)
        admit_plain(plain)


def _is_foreign(fn: Function) -> bool:
    """Whether kernels cannot call a function yet, which is none of this package."""
    return fn not in _jitable and not fn.__module__.startswith("fastopt.")


def keep_pickle(fn: Function) -> None:
    """Let the pickle of a function be the same in every process, for numba's cache on disk."""
    if _module_text(fn.__code__.co_filename) is None:
        # Numba's cache pickles such a function by value; IPython's file names contain a process id.
        fn.__code__ = fn.__code__.replace(co_filename=f"<{fn.__name__}>")
    elif fn.__globals__.get(fn.__qualname__) is not fn:
        # This one, which its module does not name, is pickled by value too. The pickle depends on
        # which strings are one object, and that differs between code that was just compiled and
        # code that was read from a .pyc file.
        fn.__code__ = _of_file(fn.__code__, fn.__globals__.get("__file__", fn.__code__.co_filename))


@dataclass(frozen=True, eq=False)
class Rule:
    """A scalar update rule with the names of its state slots and hyper-parameters.

    Create it with :func:`rule`. Calling it calls the scalar function in plain Python.
    """

    fn: Function
    state: tuple[str, ...]
    hyper: tuple[str, ...]
    noise: bool
    passes: tuple[Pass, ...]
    row: Function | None
    kept: tuple[str, ...] = ()
    signed: tuple[str, ...] = ()
    nonnegative: tuple[str, ...] = ()
    called: str = ""
    extra: str = ""
    row_state: tuple[str, ...] = ()
    """The last slots of a rule with `row`, which hold one number for each row."""
    rounded: bool = False
    """Whether reductions read a half-precision weight instead of its float32 master."""

    @property
    def name(self) -> str:
        """Name of the scalar function, or the one given to :meth:`with_passes`."""
        return self.called or self.fn.__name__

    def with_passes(
        self, name: str, passes: Reductions, *hyper: str, rounded: bool = False
    ) -> "Rule":
        """Return a rule with the same update, after reductions that change hyper-parameters.

        Parameters
        ----------
        name : str
            Name of the new rule.
        passes : sequence of (sums, finish) or (sums, finish, max)
            See :func:`rule`.
        *hyper : str
            Hyper-parameters of the reductions beside those of the update.
        rounded : bool
            Whether the reductions read a half-precision weight instead of its float32 master.
            Default False.

        Returns
        -------
        Rule

        Raises
        ------
        TypeError
            The rule has reductions or a row term already, or an argument is wrong.

        Examples
        --------
        >>> import math
        >>> import fastopt
        >>> from fastopt.optimizer.sgd import sgd
        >>> def squares(weight, grad, state, h):
        ...     return (grad * grad,)
        >>> def normalize(sums, h):
        ...     h.lr = h.lr / (math.sqrt(sums[0]) + h.epsilon)
        >>> normalized = sgd.with_passes("normalized", ((squares, normalize),), "epsilon")
        >>> normalized.name, normalized.hyper[-1]
        ('normalized', 'epsilon')
        """
        if self.passes or self.row:
            raise TypeError(f"{self!r} has passes or a row term already")
        if not (isinstance(name, str) and name.isidentifier()):
            raise TypeError(f"name must be an identifier, got {name!r}")
        _check_names("hyper", (*self.hyper, *hyper))
        hyper, made = (*self.hyper, *hyper), _passes(passes)
        return _callable(replace(self, hyper=hyper, passes=made, called=name, rounded=rounded))

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the arrays of a state: one for each slot, and one for each name in `kept`."""
        return (*self.state, *self.kept)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the name of each slot with the shape of its array.

        Parameters
        ----------
        shape : tuple of int
            Shape of the weight.

        Returns
        -------
        tuple of (str, tuple of int)
        """
        of_row = (*shape[:1], 1) if shape else shape
        return tuple((slot, of_row if slot in self.row_state else shape) for slot in self.state)

    @property
    def codes(self) -> dict[str, str]:
        """Dtype of the codes of each slot that may be stored in 8 bits."""
        return dict.fromkeys(self.signed, "int8") | dict.fromkeys(self.nonnegative, "uint8")

    @property
    def divisor(self) -> str | None:
        """Slot whose root signed slots are divided by in 8 bits, or None."""
        return min(self.nonnegative, key=self.state.index, default=None)

    @property
    def elementwise(self) -> bool:
        """Whether an element's update depends only on the numbers at its own position."""
        return not (self.noise or self.passes or self.row)

    def __call__(self, *args: Scalar) -> Any:  # noqa: D102
        return self.fn(*args)

    def __repr__(self) -> str:
        return f"<rule {self.name}: state {self.state}, hyper {self.hyper}>"

    @cache  # noqa: B019 - rules live as long as their module
    def record(self, real: type) -> np.dtype:
        """Return the dtype of the record `h`, with one field for each hyper-parameter.

        Parameters
        ----------
        real : dtype_like
            Type of the fields: float32 or float64.
        """
        return np.dtype((np.record, [(name, real) for name in self.hyper]))

    @cached_property
    def rescale(self) -> int:
        """Position of ``rescale_grad`` in :attr:`hyper`, -1 without it."""
        return self.hyper.index("rescale_grad") if "rescale_grad" in self.hyper else -1

    @cached_property
    def computed(self) -> frozenset[str]:
        """Hyper-parameters that the reductions compute."""
        return frozenset(name for stage in self.passes for name in written(stage.finish))

    @property
    def functions(self) -> list[Function]:
        """Functions that the rule consists of."""
        functions = [self.fn, *(f for one in self.passes for f in one[:2])]
        return [*functions, self.row] if self.row else functions

    @cached_property
    def digest(self) -> str:
        """Hash of all source code that the compiled rule depends on."""
        maxima = "".join(str(step) for step, one in enumerate(self.passes) if one.largest)
        rows = len(self.row_state) if self.row and self.row_state != self.state else None
        marks = (f"max{maxima}" if maxima else "") + (f"row{rows}" if rows is not None else "")
        return digest_of(self.functions) + marks

    @cached_property
    def sums(self) -> tuple[int, ...]:
        """Number of values that each reduction sums over the tensor."""
        one = np.float64(1)
        h = np.ones(1, self.record(np.float64))[0]
        with np.errstate(all="ignore"):
            state = (one,) * len(self.state)
            return tuple(len(stage.sums(one, one, state, h)) for stage in self.passes)

    @cached_property
    def reads(self) -> tuple[tuple[bool, ...], ...]:
        """Whether the sums of each reduction depend on weight, gradient, and each state slot.

        This is determined by passing NaN for one of them at a time and comparing the results.
        """
        h, slots = np.ones(1, self.record(np.float64))[0], (1.0,) * len(self.state)
        numbers = np.where(np.eye(2 + len(self.state), dtype=bool), math.nan, 1.0)
        return tuple(
            tuple(sums(w, g, tuple(s), h) != sums(1.0, 1.0, slots, h) for w, g, *s in numbers)
            for sums in (stage.sums for stage in self.passes)
        )


@cache
def written(fn: Function) -> frozenset[str]:
    """Return the fields that a function, or one that it calls, assigns to."""
    stored, loaded = (
        {step.argval for step in dis.get_instructions(fn) if step.opname in kinds}
        for kinds in (("STORE_ATTR",), ("LOAD_GLOBAL", "LOAD_DEREF"))
    )
    used = inspect.getclosurevars(fn)  # by name, which attributes may have too
    known = [value for name, value in {**used.globals, **used.nonlocals}.items() if name in loaded]
    return frozenset(
        stored.union(*(written(value) for value in known if isinstance(value, FunctionType)))
    )


def _of_file(code: CodeType, name: str) -> CodeType:
    """Return the code object, and nested ones, with the object `name` as their file name."""
    inner = (
        _of_file(item, name) if isinstance(item, CodeType) else item for item in code.co_consts
    )
    return code.replace(co_filename=name, co_consts=tuple(inner))


def digest_of(functions: Sequence[Function]) -> str:
    """Return a hash of all source code that these functions depend on; empty without functions."""
    text = {part for f in functions for part in _sources(f, set())}
    return hashlib.sha256("\0".join(sorted(text)).encode()).hexdigest()[:16] if text else ""


def rule(
    *,
    state: Sequence[str] = (),
    hyper: Sequence[str],
    noise: bool = False,
    passes: Reductions = (),
    row: Function | None = None,
    row_state: Sequence[str] | None = None,
    kept: Sequence[str] = (),
    signed: Sequence[str] = (),
    nonnegative: Sequence[str] = (),
    extra: str | None = None,
) -> Callable[[Function], Rule]:
    """Declare a scalar function as an update rule.

    The function takes ``(weight, grad, state, h)``: two numbers, a tuple with one number for
    each name in `state`, and the record of hyper-parameters. It returns
    ``(new_weight, new_state)``. It must be plain Python arithmetic on scalars: ``math``
    functions, comparisons, ``if`` and calls of other functions declared with
    :func:`~fastopt.kernels.rule.scalar`. An integer or float literal next to a float32 promotes
    the arithmetic to float64, which is slower: compute such constants in
    :meth:`Optimizer.hyper`.

    Parameters
    ----------
    state : sequence of str
        Names of the state slots, none by default.
    hyper : sequence of str
        Names of the fields of ``h`` that the rule reads. ``lr``, ``wd``, ``rescale_grad`` and
        ``clip_gradient`` are set by :class:`~fastopt.optimizer.Optimizer`, the others by the
        class's ``hyper`` method.
    noise : bool
        The function takes a fifth argument: a standard normal number that depends only on the
        optimizer's seed, the index, the step and the element's position.
    passes : sequence of (sums, finish) or (sums, finish, max)
        Reductions over the tensor before the update. ``sums(weight, grad, state, h)`` returns a
        tuple of numbers that are summed over the tensor in float64, in an order that does not
        depend on the number of threads. ``finish(sums, h)`` then writes fields of ``h`` before the
        next reduction. With Python's ``max`` as the third element, ``finish`` gets the largest
        numbers instead of their sums; the numbers must be at least 0, and one NaN makes the result
        NaN.
    row : callable
        ``row(grad, h)``; its mean over the row is the function's fifth argument. Cannot be
        combined with `noise` or `passes`.
    row_state : sequence of str
        With `row`, the last names of `state`, whose slots hold one number for each row; the others
        hold one for each element. Each element of a row finds the same number, and what the
        function returns for the last one is kept: let it depend on the row's numbers alone.
        Default: all of `state`.
    kept : sequence of str
        Names of numbers that the state holds once for each tensor, none by default. The `finish`
        functions then take a tuple of them as a third argument, and return the new ones.
    signed, nonnegative : sequence of str
        State slots that ``state_dtype="int8"`` stores in 8 bits, none by default: moving averages
        of numbers of both signs, and of nonnegative numbers, by whose root signed ones are divided
        before they are stored if a rule has both. Other slots keep the dtype of the
        arithmetic: 8 bits freeze a sum that grows by small steps, and lose the digits that
        differences of weights or of averages need. Cannot be combined with `row`.
    extra : str
        State slot that the caller sets in each call, ``updater(index, grad, weight, extra=array)``,
        such as a second gradient. The function finds the array's number in ``state``, and what it
        returns for the slot is overwritten in the next call. Default: none. Cannot be combined
        with `row`.

    Returns
    -------
    callable
        Decorator that turns the function into a :class:`Rule`.

    Raises
    ------
    TypeError
        A name is not an identifier, is repeated, or is an attribute of NumPy's records; `row` is
        combined with `noise` or `passes`; `row_state` is given without `row`, or is not the end of
        `state`; `kept` is given without `passes`; `signed` or
        `nonnegative` has a name that is not in `state` or is in both, or is combined with `row`;
        `extra` is not in `state`, or is one of `signed` or `nonnegative`; or the function takes
        another number of arguments, or contains a ``raise`` or ``assert``.

    Examples
    --------
    >>> import fastopt
    >>> @fastopt.rule(state=("mom",), hyper=("lr", "momentum"))
    ... def heavy_ball(weight, grad, state, h):
    ...     (mom,) = state
    ...     mom = h.momentum * mom - h.lr * grad
    ...     return weight + mom, (mom,)
    >>> import numpy as np
    >>> h = np.ones(1, heavy_ball.record(np.float32))[0]
    >>> heavy_ball(np.float32(3), np.float32(0.5), (np.float32(0),), h)
    (np.float32(2.5), (np.float32(-0.5),))
    """
    fields = {"state": state, "hyper": hyper, "kept": kept}
    fields |= {"signed": signed, "nonnegative": nonnegative}
    for kind, names in fields.items():
        _check_names(kind, names)
    slots: dict[str, Any] = {kind: tuple(names) for kind, names in fields.items()}
    for name in (*signed, *nonnegative):
        if name not in state or (name in signed and name in nonnegative):
            raise TypeError(f"{name!r} must be in state, and in one of signed and nonnegative")

    reductions = _passes(passes)
    if row and (noise or passes):
        raise TypeError("row cannot be combined with noise or passes, which are for each element")
    if row and (signed or nonnegative):
        raise TypeError(
            "row cannot be combined with signed or nonnegative, as rows have one number"
        )
    rows = _row_state(row, state, row_state)
    if extra is not None and (row or extra not in set(state) - {*signed, *nonnegative}):
        raise TypeError(
            f"extra must be a state slot of a rule without row, stored exactly, got {extra!r}"
        )
    if kept and not passes:
        raise TypeError("kept needs passes, whose functions finish(sums, h, kept) change it")
    takes = 4 + bool(noise or row)

    def declare(fn: Function) -> Rule:
        _check_function(fn)
        signature = inspect.signature(fn)
        if len(signature.parameters) != takes:
            raise TypeError(
                f"{fn.__name__} must take {takes} arguments (weight, grad, state, h, ...), "
                f"not {signature}"
            )
        if (names := [*signature.parameters])[:2] in SWAPPED or names[2:4] == ["h", "state"]:
            raise TypeError(
                f"{fn.__name__} takes (weight, grad, state, h, ...) in this order, got {signature}"
            )
        if fields := written(fn):
            raise TypeError(
                f"{fn.__name__} must not assign to h.{min(fields)}, which other elements read too: "
                "return what changes, or compute it in hyper()"
            )
        # Numba's cache pickles the function in a kernel's closure. With this name it is found in
        # its module, so it is pickled by reference and the cache hits.
        fn.__qualname__ = f"{fn.__qualname__}.fn"
        made = Rule(
            fn, **slots, noise=noise, passes=reductions, row=row, extra=extra or "", row_state=rows
        )
        return _callable(made)

    return declare


def _callable(made: Rule) -> Rule:
    """Let kernels call the functions of a rule."""
    for function in made.functions:
        scalar(function)
    return made


def _row_state(row: object, state: Sequence[str], named: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of slots with one number for each row."""
    if named is None:
        return tuple(state) if row else ()
    _check_names("row_state", named)
    if not row:
        raise TypeError("row_state needs row, whose mean the function takes")
    last = tuple(state[len(state) - len(named) :])
    if tuple(named) != last:
        raise TypeError(f"row_state must be the last names of state {tuple(state)}, got {named!r}")
    return last


def _check_function(fn: object) -> None:
    if not isinstance(fn, FunctionType):
        raise TypeError(f"a rule is made of functions of scalars, got {fn!r}")


def _passes(passes: Reductions) -> tuple[Pass, ...]:
    for stage in passes:
        whole = isinstance(stage, (tuple, list)) and len(stage) in (2, 3)
        if not whole or (len(stage) == 3 and stage[2] not in (sum, max)):
            raise TypeError(
                "passes must be pairs of functions (sums, finish), or (sums, finish, max) for the "
                f"largest numbers instead of sums, got {passes!r}"
            )
    return tuple(Pass(*stage) for stage in passes)


def _check_names(kind: str, names: Sequence[str]) -> None:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"{kind} must be a sequence of names, got {names!r}")
    for name in names:
        if not (isinstance(name, str) and name.isidentifier() and not iskeyword(name)):
            raise TypeError(f"{kind} must hold identifiers, got {name!r}")
        if kind == "hyper" and hasattr(np.recarray, name):
            raise TypeError(f"hyper name {name!r} is an attribute of NumPy records, use another")
    if len(set(names)) != len(names):
        raise TypeError(f"{kind} repeats a name: {tuple(names)}")


def _sources(fn: object, seen: set[Any]) -> Iterator[str]:
    """Yield the source of the module of `fn`, and of all functions and constants it refers to."""
    if isinstance(fn, ModuleType):
        yield _module_text(getattr(fn, "__file__", None) or "") or ""
    if isinstance(fn, Rule):
        fn = fn.fn
    if not isinstance(fn, FunctionType) or fn in seen:
        return
    seen.add(fn)
    yield _module_text(fn.__code__.co_filename) or repr(code_of(fn.__code__))
    references = inspect.getclosurevars(fn)
    for name, value in sorted({**references.globals, **references.nonlocals}.items()):
        if constant := frozen_text(value):
            yield f"{name}={constant}"
        yield from _sources(value, seen)


def frozen_text(value: object) -> str:
    """Return text that identifies a value frozen in compiled code; empty for other objects."""
    if isinstance(value, tuple):
        return f"({', '.join(map(frozen_text, value))})"
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str}{value.shape}{value.tobytes().hex()}"
    frozen = int, float, complex, str, np.generic, np.dtype, type
    return repr(value) if isinstance(value, frozen) else ""


@cache
def _module_text(filename: str) -> str | None:
    try:
        return Path(filename).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # typed into a REPL or a notebook


def code_of(code: CodeType) -> tuple[Any, ...]:
    """Return what the bytecode of a function does, without its file and lines."""
    return code.co_code, _constants(code.co_consts), code.co_names, code.co_varnames


def _constants(value: object) -> Any:
    """Return a constant of bytecode with the same text in every process."""
    if isinstance(value, CodeType):
        return code_of(value)
    if isinstance(value, frozenset):  # its order is that of randomized hashes
        return sorted(map(repr, value))
    return tuple(map(_constants, value)) if isinstance(value, tuple) else value
