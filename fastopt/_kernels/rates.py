"""Hyper-parameters as functions of the learning rate, for compiled code that is given the rate.

``hyper()`` is Python. Called with an :class:`Expression` in the place of the rate, it returns the
arithmetic that it does, which is the same in compiled code, operation by operation.

Tests: ``tests/test_in_numba.py``.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from fastopt._kernels.intrinsics import intrinsic

Program = str | int | tuple[Any, ...]
"""``"lr"``, the position of a constant, or an operation with two programs."""


def _recording(operation: str, swapped: bool = False) -> Any:
    def record(self: "Expression", other: object) -> "Expression":
        if not isinstance(other, (int, float, Expression)):
            return NotImplemented
        return Expression(operation, *((other, self) if swapped else (self, other)))

    return record


class Expression:
    """A learning rate other than 0, or what Python has computed from it by ``+ - * /``.

    Anything else that reads it raises TypeError.

    Parameters
    ----------
    operation : str
        Name of an instruction, or "lr".
    *operands : float or Expression
        Its operands.
    """

    def __init__(self, operation: str, *operands: Any) -> None:
        self.operation, self.operands = operation, operands

    __add__, __radd__ = _recording("fadd"), _recording("fadd", True)
    __sub__, __rsub__ = _recording("fsub"), _recording("fsub", True)
    __mul__, __rmul__ = _recording("fmul"), _recording("fmul", True)
    __truediv__, __rtruediv__ = _recording("fdiv"), _recording("fdiv", True)
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if other != 0:
            raise TypeError("a learning rate may only be compared with 0")
        return False

    def program(self, constants: list[float]) -> Program:
        """Return the operations, and append the numbers that they read to `constants`."""
        if self.operation == "lr":
            return "lr"
        return self.operation, *(_program(operand, constants) for operand in self.operands)


def _program(value: Any, constants: list[float]) -> Program:
    if isinstance(value, Expression):
        return value.program(constants)
    constants.append(float(value))
    return len(constants) - 1


def filler(count: int, rated: tuple[int, ...], programs: tuple[Program, ...]) -> Callable:
    """Return ``(numbers, lr, row)``, which writes `count` hyper-parameters to the only row.

    They are ``numbers[1:]``. If `lr` is a number, field ``rated[k]`` follows from ``programs[k]``,
    whose constants are the last numbers; for a rate of 0 it is a number between these and those.
    """

    @intrinsic
    def fill(typingctx, numbers, lr, row):
        def codegen(context, builder, signature, args):
            source, target = (
                context.make_array(signature.args[k])(context, builder, args[k]).data
                for k in (0, 2)
            )

            def number(k):
                return builder.load(builder.gep(source, [ir.IntType(64)(1 + k)]))

            def emit(program):
                if isinstance(program, tuple):
                    return getattr(builder, program[0])(*map(emit, program[1:]))
                return rate if program == "lr" else number(count + len(rated) + program)

            values = [number(k) for k in range(count)]
            if isinstance(lr, types.Number):
                rate = context.cast(builder, args[1], lr, types.float64)
                rests = builder.fcmp_ordered("==", rate, rate.type(0))
                for k, (field, program) in enumerate(zip(rated, programs, strict=True)):
                    values[field] = builder.select(rests, number(count + k), emit(program))
            for k, value in enumerate(values):
                builder.store(value, builder.gep(target, [ir.IntType(64)(k)]))
            return context.get_dummy_value()

        return types.none(numbers, lr, row), codegen

    return fill
