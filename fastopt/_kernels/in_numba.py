"""Functions that users' compiled code calls: their types for numba, and their code.

The type of a :class:`Function` says what is compiled, and its numbers are data. So one compiled
caller serves all learning rates, and numba's cache on disk, whose keys have the types of arguments,
finds callers again in other processes. A caller that reads a function from a global variable has
the numbers as constants, which a :class:`Guard` compares when numba loads the caller.

Tests: ``tests/test_in_numba.py``.
"""

import inspect
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.imputils import lower_constant
from numba.extending import NativeValue, models, register_model, unbox

from fastopt._kernels.compiling import compiled, garbage_left, switched_on
from fastopt._kernels.whole_calls import Spec, init_of, update_of, update_rows_of
from fastopt.kernels.linked import LinkedCompiler

INIT, UPDATE, UPDATE_ROWS = "init", "update", "update_rows"

PARAMETERS = {
    INIT: ("weight",),
    UPDATE: ("grad", "weight", "state"),
    UPDATE_ROWS: ("values", "indices", "table", "state"),
}
"""Names of the arguments of each function; the last two also take a learning rate."""


SPECS: dict[str, Spec] = {}
"""Specifications by digest."""


def __getattr__(name: str) -> Any:
    """Return the class of states of a digest, which pickles name."""
    if not name.startswith("State_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    make: Any = namedtuple
    kind = make("State", ("arrays", "hyper", "count"))
    kind.__module__, kind.__qualname__ = __name__, name
    return globals().setdefault(name, kind)


def state_class(digest: str) -> Any:
    """Return the class of the states of a specification, a named tuple."""
    return getattr(sys.modules[__name__], f"State_{digest}")


class Function:
    """A function of an optimizer, for users' compiled code.

    Parameters
    ----------
    kind : str
        INIT, UPDATE or UPDATE_ROWS.
    digest : str
        Digest of its specification.
    numbers : sequence of float
        Of INIT: the numbers of new states, the elements of their arrays, and the update count.
    """

    def __init__(self, kind: str, digest: str, numbers: Sequence[float] = ()) -> None:
        self.kind, self.digest, self.numbers = kind, digest, tuple(numbers)
        self._memory = np.array([*numbers, 0.0])
        self.address = self._memory.ctypes.data
        self._numba_type_ = FunctionType(kind, digest)

    def __call__(self, *args: Any) -> Any:
        """Call the function from Python, with the same result."""
        try:
            return _from_python()(self, *args)
        except NotImplementedError as error:
            raise TypeError(f"{self.kind}: numba has no {error}; pass a float") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Function, (self.kind, self.digest, self.numbers)

    def __repr__(self) -> str:
        arguments = ", ".join(PARAMETERS[self.kind])
        return f"<{self.kind}({arguments}) of {self._numba_type_.spec.rule.name}>"


@cache
def _from_python() -> Callable[..., Any]:
    def call(function, *args):
        return function(*args)

    return compiled(call, None, parallel=False)


class FunctionType(types.Callable):  # type: ignore[misc]
    """Type of a :class:`Function`."""

    def __init__(self, kind: str, digest: str) -> None:
        self.kind, self.digest = kind, digest
        super().__init__(f"fastopt.{kind}({digest})")

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionType, (self.kind, self.digest)

    @property
    def spec(self) -> Spec:
        """The specification."""
        if self.digest not in SPECS:
            raise TypeError(
                f"{self.kind} is from another process: call fastopt.jit_functions(optimizer) here"
            )
        return SPECS[self.digest]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the arguments without the learning rate."""
        return PARAMETERS[self.kind]

    @property
    def signature(self) -> inspect.Signature:
        """The arguments."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        arguments = [inspect.Parameter(name, kind) for name in self.parameters]
        rate = inspect.Parameter("lr", kind, default=None)
        return inspect.Signature(arguments if self.kind == INIT else [*arguments, rate])

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        """Compile the function for the types of arguments; return its signature."""
        kinds = self.signature.bind(*args, **kws).arguments
        kinds = {name: types.unliteral(kind) for name, kind in kinds.items()}
        if not isinstance(kinds.get("lr", types.float64), (types.Integer, types.Float)):
            raise TypeError(
                f"{self.kind}: lr must be a real number, got {kinds['lr']}: pass an element of an "
                "array, such as state.count[0]; without lr, the optimizer's own is used"
            )
        if "lr" in kinds and self.spec.programs is None:
            raise TypeError(
                f"{self.kind}: hyper() of this optimizer must be called in Python: no lr"
            )
        code = implementation(self, *(kinds[name] for name in self.parameters))
        with garbage_left():
            function, pysig, args, kws = code.get_call_template((self, *kinds.values()), {})
        sig = function(context).apply(args, kws)
        params = list(pysig.parameters.values())[1:]
        return sig.replace(args=sig.args[1:], recvr=self, pysig=pysig.replace(parameters=params))

    def get_call_signatures(self) -> tuple[list[Any], bool]:
        """Return the signatures, for numba's error messages."""
        return [], True

    def get_impl_key(self, sig: Any) -> Any:
        """Return the compiled code."""
        return implementation(self, *sig.args[1 : 1 + len(self.parameters)]).get_overload(sig.args)


@register_model(FunctionType)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    """The address of the numbers."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.DoubleType().as_pointer())


@unbox(FunctionType)
def _unbox(kind, value, c):
    address = c.pyapi.object_getattr_string(value, "address")
    number = c.pyapi.long_as_longlong(address)
    c.pyapi.decref(address)
    return NativeValue(c.builder.inttoptr(number, ir.DoubleType().as_pointer()))


_in_code: list[Function] = []
"""Functions whose numbers compiled code has the addresses of."""


@lower_constant(FunctionType)
def _constant(context, builder, kind, value):
    """Return the address of the numbers, which are constants of the code if a key has them."""
    pointer, description = ir.DoubleType().as_pointer(), context.fndesc
    guards = [Guard(*place, value) for place in _places(value, description)]
    # Numba's key in the cache on disk has the variables of closures.
    if value.kind == INIT and not guards and "<locals>" not in description.qualname:
        _in_code.append(value)
        address = context.add_dynamic_addr(builder, value.address, "numbers of an optimizer")
        return builder.bitcast(address, pointer)
    context.active_code_library._reload_init.update(guards)
    numbers = ir.Constant.literal_array([ir.DoubleType()(n) for n in (*value.numbers, 0.0)])
    place = cgutils.global_constant(builder, ".fastopt.numbers", numbers)
    return builder.bitcast(place, pointer)


class OutdatedError(OSError):
    """Code in numba's cache on disk has other numbers: numba compiles it again."""


@dataclass(frozen=True)
class Guard:
    """Checks that a global variable still has the function whose numbers are constants of code.

    Numba keeps it with the code, and calls it after loading both.
    """

    module: str
    name: str
    function: Function

    def __call__(self) -> None:
        """Do nothing: unpickling has checked."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _checked, (self.module, self.name, self.function)


def _checked(module: str, name: str, function: Function) -> Guard:
    value = getattr(sys.modules.get(module), name, None)
    inside = value if isinstance(value, tuple) else (value,)
    same = (item for item in inside if isinstance(item, Function) and item.kind == function.kind)
    if not any((item.digest, item.numbers) == (function.digest, function.numbers) for item in same):
        raise OutdatedError(f"{module}.{name} has other numbers")
    return Guard(module, name, function)


def _places(value: Function, description: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of global variables with a function, and of those of imported modules."""
    if value.kind != INIT:  # the types of states say which code updates them
        return
    if description.modname in sys.modules:
        variables: Mapping[str, Any] = description.lookup_globals()
        modules = [sys.modules[description.modname]]
        modules += [module for module in variables.values() if isinstance(module, ModuleType)]
    else:  # a part of a function that numba has taken out, to run on several threads
        modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    for module in dict.fromkeys(modules):
        for name, member in list(vars(module).items()):
            # An object may warn when it is asked for its class, like torch.distributed.reduce_op.
            inside = member if issubclass(type(member), tuple) else (member,)
            if any(item is value for item in inside):
                yield module.__name__, name


@cache
def implementation(of: FunctionType, *kinds: types.Type) -> Any:
    """Return the code of a function for the types of its first arguments."""
    for name, kind in zip(of.parameters, kinds, strict=True):
        if name != "state":
            _check(of.kind, name, kind)
    function: Callable[..., Any]
    if of.kind == INIT:
        function = init_of(of.spec, state_class(of.digest), *kinds)
    else:
        make, weight = (update_of, kinds[1]) if of.kind == UPDATE else (update_rows_of, kinds[2])
        _check_state(of, kinds[-1], weight)
        function = make(of.spec, weight, kinds[0])
    with switched_on():
        return njit(
            error_model="numpy",
            no_cpython_wrapper=True,
            no_cfunc_wrapper=True,
            pipeline_class=LinkedCompiler,
        )(function)


def _check(function: str, name: str, kind: types.Type) -> None:
    """Raise TypeError for an argument that is not an array, or one of another type."""
    changes, array = name in ("weight", "table"), isinstance(kind, types.Array)
    if name == "indices":
        wanted = "integers with one axis"
        fits = array and isinstance(kind.dtype, types.Integer) and kind.ndim == 1
    else:
        wanted = "float32 or float64"
        fits = array and kind.dtype in (types.float32, types.float64)
    if changes:
        orders = "C" if name == "table" else "CF"
        wanted = f"{wanted}, {' or '.join(orders)}-contiguous and writeable"
        fits = fits and kind.layout in orders and kind.mutable
    if not fits:
        pairs = array and isinstance(kind.dtype, types.Complex) and name != "indices"
        cure = "; pass x.view(np.float64), for complex64 x.view(np.float32)" if pairs else ""
        raise TypeError(f"{function}: {name} must be an array of {wanted}, got {kind}{cure}")


def _check_state(of: FunctionType, state: types.Type, weight: types.Array) -> None:
    """Raise TypeError for a state that is not that of a weight of this type."""
    order = weight.layout if of.spec.rule.elementwise else "C"
    slots, kind = len(of.spec.rule.state), state_class(of.digest)
    fits = getattr(state, "instance_class", None) is kind
    for k, array in enumerate(state[0] if fits else ()):
        fits = fits and array.dtype == weight.dtype and array.mutable
        fits = fits and (array.layout == order or array.ndim < 2 or k >= slots)
    if not fits:
        raise TypeError(f"{of.kind}: state must be what init(weight) returned, got {state}")
