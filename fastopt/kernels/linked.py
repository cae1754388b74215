"""Functions that kernels call, whose code is optimized and emitted as a part of the kernels alone.

Numba does both for each of the dozens of functions that a kernel calls, before it inlines them, and
again for the kernel: a fifth of the time of a compilation.

Tests: ``tests/kernels/test_compiling.py``.
"""

from typing import Any

from llvmlite.binding import Linkage, ModuleRef, parse_assembly
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class LinkedCode(JITCodeLibrary):  # type: ignore[misc]
    """Code that is linked into that of its callers, and cannot be entered from elsewhere."""

    def _optimize_functions(self, ll_module: ModuleRef) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._emit_environments()
        self._finalized = True

    def _emit_environments(self) -> None:
        """Emit the variables that numba sets to the Python objects of a function, for ``print``."""
        for variable in self._final_module.global_variables:
            known = self._codegen._engine.is_symbol_defined(variable.name)
            if variable.linkage == Linkage.common and not known:
                self._codegen._add_module(
                    parse_assembly(f'@"{variable.name}" = common global i64 0')
                )

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0, as for a function that does not exist."""
        self._ensure_finalized()
        return 0


class LinkedCompiler(Compiler):  # type: ignore[misc]
    """Compiler of functions without entry points, for numba's option ``pipeline_class``."""

    def define_pipelines(self) -> Any:
        """Return the passes, after choosing the kind of code that they make."""
        state = self.state
        if state.library is None:
            state.library = LinkedCode(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()
