"""Compilation of kernels, with safeguards for numba's disk cache."""

import gc
import hashlib
import inspect
import logging
import os
import pickle
import secrets
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, typeof, types
from numba.core import config
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.core.typing.templates import Signature

from fastopt._kernels.signals import undisturbed
from fastopt._kernels.threads import in_forked_child, start_layer
from fastopt.kernels.rule import Rule, admit_plain, digest_of

log = logging.getLogger("fastopt")


class KernelFiles(IndexDataCacheFile):  # type: ignore[misc]
    """Files of a kernel in numba's cache, with names that are unique to a process, and checksums.

    Numba numbers the files of a kernel's specializations. Two processes that compile different
    specializations at once take the same number, and a later process would run one in place of the
    other. A file that a power loss or a full disk has damaged is replaced: it would end the program
    or, with a wrong bit in its machine code, run.
    """

    def _data_name(self, number: int) -> str:
        return f"{Path(self._index_name).stem}.{os.getpid()}-{secrets.token_hex(4)}.{number}.nbc"

    @contextmanager
    def _open_for_write(self, path: str) -> Iterator[BytesIO]:
        yield (content := BytesIO())
        data = content.getvalue()
        with super()._open_for_write(path) as file:
            file.write(_checksum(data) + data)

    def _load_index(self) -> dict[Any, str]:
        try:
            file = BytesIO(_checked(self._index_path))
            if pickle.load(file) != self._version:
                return {}
            stamp, names = pickle.load(file)
        except FileNotFoundError:
            return {}
        except Exception as error:
            log_failure(self._cache_path, error)
            return {}
        return names if stamp == self._source_stamp else {}

    def _load_data(self, name: str) -> Any:
        return pickle.loads(_checked(self._data_path(name)))


def _checksum(data: bytes | memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def _checked(path: str) -> memoryview:
    """Return the content of a file after its checksum."""
    data = memoryview(Path(path).read_bytes())
    if _checksum(data[4:]) != data[:4]:
        raise ValueError(f"{path} is damaged")
    return data[4:]


def _keep_apart(kernel: Any) -> None:
    """Give a kernel :class:`KernelFiles`, and compile it if they cannot be read or written."""
    cache = kernel._cache
    place = cache._impl.locator

    @contextmanager
    def failing() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log_failure(place.get_cache_path(), error)

    def load_overload(*signature: object) -> Any:
        if (overload := load(*signature)) is None:
            log_compiling()
        return overload

    load, cache.load_overload = cache.load_overload, load_overload
    cache._guard_against_spurious_io_errors = failing  # around both reading and writing
    cache._cache_file = KernelFiles(
        cache_path=place.get_cache_path(),
        filename_base=cache._impl.filename_base,
        source_stamp=place.get_source_stamp(),
    )


compiled_kernels: list[Any] = []
"""Every kernel that this process has created; signatures are compiled when they are needed."""


def compiled(
    kernel: Callable,
    rule: Rule | None,
    parallel: bool,
    nogil: bool = True,
    also: Sequence[Any] = (),
    **more: object,
) -> Callable:
    """Compile `kernel` on first use, or load it from numba's disk cache.

    `also` are functions that it calls besides the rule's, and `more` are options for ``njit``.
    """
    variant = "parallel" if parallel else "serial" if nogil else "whole"
    name_entry(kernel, rule, f"{variant}{digest_of([f for f in also if f])}")
    if parallel:
        start_layer()
    options = {"parallel": parallel, "error_model": "numpy", "nogil": nogil}
    options |= {"no_cfunc_wrapper": True, **more}
    return created(njit, kernel, **options)


def created(jit: Callable[..., Any], kernel: Callable, **options: object) -> Callable:
    """Return a kernel that is compiled on first use, or loaded from numba's disk cache.

    `jit` is numba's decorator of a target.
    """
    with undisturbed(), switched_on():
        try:
            dispatcher = jit(cache=True, **options)(kernel)
            _keep_apart(dispatcher)
        except (RuntimeError, OSError):
            log_uncached()
            dispatcher = jit(**options)(kernel)
    for name in ("compile", "_compile_for_args"):  # the latter calls the former
        setattr(dispatcher, name, _protected(getattr(dispatcher, name)))
    compiled_kernels.append(dispatcher)
    return dispatcher


def _protected(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel's method that compiles or loads it, with all signals deferred."""

    def protected(*types: object) -> Any:
        with undisturbed(), garbage_left(), switched_on():
            defer_blas()
            return compile(*types)

    return protected


@contextmanager
def switched_on() -> Iterator[None]:
    """Compile also with ``NUMBA_DISABLE_JIT``, which users set to debug functions of their own.

    Numba reads the switch when a decorator is applied, which it does itself while it compiles. The
    lock is that of its compiler: no other thread sets the switch back in between.
    """
    with global_compiler_lock:
        disabled, config.DISABLE_JIT = config.DISABLE_JIT, 0
        try:
            yield
        finally:
            config.DISABLE_JIT = disabled


def address_of(
    function: Callable,
    signature: Signature,
    rule: Rule | None,
    variant: str = "",
    also: Sequence[Any] = (),
    parallel: bool = False,
) -> int:
    """Compile a function of words and numbers, and return the address of its C form."""
    function.__name__ = f"{function.__name__}{variant}"
    options = {"no_cfunc_wrapper": False, "no_cpython_wrapper": True}
    kernel = compiled(function, rule, parallel, also=also, **options)
    # the compiler may be adding a library in another thread
    with undisturbed(), global_compiler_lock:
        result = _specialized(kernel, signature.args)
        name = result.fndesc.llvm_cfunc_wrapper_name
        address: int = result.library.get_pointer_to_function(name)
    return address


ON_WORDS = types.void(*[types.int64] * 5)
"""Signature of functions of five words that compiled code calls by address."""


@cache
def entry_of(function: Callable[..., None]) -> int:
    """Return the address of the C form of a function of five words."""
    return address_of(function, ON_WORDS, None)


def _specialized(kernel: Any, signature: tuple[Any, ...]) -> Any:
    """Return a kernel that is compiled for these argument types."""
    if signature not in kernel.overloads:
        kernel.compile(signature)
    return kernel.overloads[signature]


def bind_to(kernel: Callable, *signature: types.Type) -> Callable:
    """Return the compiled function for arguments of these numba types."""
    entry: Callable = _specialized(kernel, signature).entry_point
    return entry


def bind(kernel: Callable, *arguments: object) -> Callable:
    """Return the compiled function for these argument types, without numba's type dispatch.

    It must only be called with arguments of exactly these types.
    """
    return bind_to(kernel, *map(type_of, arguments))


_types: dict[Any, Any] = {}


def type_of(argument: object) -> Any:
    """Return numba's type of an argument; that of an array depends on its form alone.

    Numba builds the type of an array of records again each time.
    """
    if type(argument) is not np.ndarray:
        return typeof(argument)
    flags = argument.flags
    form = argument.dtype, argument.ndim, flags.c_contiguous, flags.f_contiguous, flags.aligned
    key = *form, flags.writeable
    known = _types.get(key)
    if known is None:
        known = _types[key] = typeof(argument)
    return known


@cache
def defer_blas() -> None:
    """Load numba's functions of arrays without scipy.linalg, half of the time of a first step.

    Numba imports scipy.linalg there to learn whether there is a BLAS, and again in each function
    that it compiles to a call of BLAS.
    """
    name = "numba.np.arraymath"
    if name in sys.modules or "scipy.linalg" in sys.modules or find_spec("scipy") is None:
        return
    linalg: Any = import_module("numba.np.linalg")
    ensure = getattr(linalg, "ensure_blas", None)
    if ensure is None:
        return
    try:
        linalg.ensure_blas = lambda: None
        vars(import_module(name))["ensure_blas"] = ensure
    finally:
        linalg.ensure_blas = ensure


@contextmanager
def garbage_left() -> Iterator[None]:
    """Disable garbage collection during a compilation.

    The compiler creates some hundred thousand objects that live until it ends. Repeated garbage
    collections take a fifth of its time, and more in a large program.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def number_functions() -> None:
    """Make numba number the functions that it compiles from a random start.

    Numba counts from 1 in each process, and only the number distinguishes the symbols of functions
    with equal names and argument types. Kernels compiled by two processes would call each other's
    functions once a third process has loaded both from the cache.
    """
    FunctionIdentity._unique_ids = count(secrets.randbits(62))


number_functions()
in_forked_child(number_functions)


def name_entry(kernel: Callable, rule: Rule | None, variant: str) -> None:
    """Name a kernel, and with it its entry in numba's cache on disk.

    Numba notices a change of the file that holds the kernel, but not of the files that hold the
    rule and the functions that it calls. Their digest becomes part of the name.
    """
    name, digest = (rule.name, rule.digest) if rule else ("any", "")
    if config.DISABLE_JIT and rule:
        admit_plain(rule.functions)
    kernel.__qualname__ = f"{kernel.__name__}.{name}.{variant}.{digest}{engine_digest()}"


@cache
def engine_digest() -> str:
    folders = Path(__file__).parent, Path(inspect.getfile(Rule)).parent
    files = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    text = [path.read_bytes() for path in files]
    return hashlib.sha256(b"\0".join(text)).hexdigest()[:16]


@cache
def log_compiling() -> None:
    """Log once that kernels are compiled, as the first steps then take seconds."""
    log.info("compiling kernels, which takes seconds; on disk they are kept for later processes")


@cache
def log_uncached() -> None:
    """Log once that kernels cannot be cached on disk."""
    log.info(
        "kernels are compiled again in every process, as no cache directory is writable; set "
        "NUMBA_CACHE_DIR to a writable directory"
    )


_failed: set[str] = set()


def log_failure(directory: str, error: Exception) -> None:
    """Log once for each directory that cached kernels could not be read or written."""
    if directory not in _failed:
        _failed.add(directory)
        log.info(
            "kernels in %s could not be read or written and are compiled again, %s: %s",
            directory,
            type(error).__name__,
            error,
        )
