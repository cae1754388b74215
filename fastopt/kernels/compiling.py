"""Compilation of kernels, with numba's cache on disk kept honest."""

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit

from fastopt.kernels.rule import Rule
from fastopt.kernels.threads import prefer_tbb

__all__ = ["compiled", "compiled_kernels", "log_uncached", "name_entry"]

log = logging.getLogger("fastopt")

compiled_kernels: list[Any] = []
"""Every kernel that this process has made; its signatures are compiled when they are needed."""


def compiled(
    kernel: Callable, rule: Rule | None, parallel: bool, nogil: bool = True, **more: Any
) -> Callable:
    """Compile `kernel` on first use, from numba's disk cache where possible.

    `more` are options of numba's.
    """
    name_entry(kernel, rule, "parallel" if parallel else "serial")
    if parallel:
        prefer_tbb()
    options = {"parallel": parallel, "error_model": "numpy", "nogil": nogil, **more}
    try:
        made = njit(cache=True, **options)(kernel)
    except RuntimeError:
        log_uncached()
        made = njit(**options)(kernel)
    compiled_kernels.append(made)
    return made


def name_entry(kernel: Callable, rule: Rule | None, variant: str) -> None:
    """Name a kernel, and with it its entry in numba's cache on disk.

    Numba notices a change of the file that holds the kernel, but not of the files that hold the
    rule and the functions that it calls. Their digest becomes part of the name.
    """
    name, digest = (rule.name, rule.digest) if rule else ("any", "")
    kernel.__qualname__ = f"{kernel.__name__}.{name}.{variant}.{digest}{_engine_digest()}"


@cache
def _engine_digest() -> str:
    text = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(text)).hexdigest()[:16]


@cache
def log_uncached() -> None:
    """Tell the log, once, that kernels cannot be kept on disk."""
    log.info(
        "kernels are compiled anew in every process: no cache directory can be written; "
        "set NUMBA_CACHE_DIR to one that can"
    )
