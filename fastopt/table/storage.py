"""Memory of a table's rows, weight and state, at fixed addresses, and their initial values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastopt._engine.validate import leaves, mapped
from fastopt._kernels import hashing
from fastopt._kernels.chunks import PARALLEL_FROM
from fastopt._kernels.compiling import bind
from fastopt._kernels.pages import LARGE, huge_pages, reserved
from fastopt._kernels.threads import may_run_parallel, turn
from fastopt.arguments import Integer, OrNone, Real, brief, count
from fastopt.initializer import Constant, Initializer, Normal, One, Uniform, Zero, create
from fastopt.optimizer.optimizer import Optimizer
from fastopt.optimizer.optimizer import create as create_optimizer
from fastopt.table.directory import Array, RecordFile, Rows, record_of
from fastopt.table.index import MOST_ROWS, Ids

Of = TypeVar("Of", bound=Optimizer | None)
"""What stands for an optimizer besides a name."""

Init = str | Initializer | Callable[[Array], ArrayLike]


class Start:
    """Initial values of rows, each a function of its id alone.

    Parameters
    ----------
    init : str, Initializer or callable
        'uniform', 'normal', 'zeros', 'ones', or one of these initializers; or a function that takes
        an array of ids and returns an array with a row for each.
    seed : int, optional
        Seed of the random numbers. Default: drawn from the initializer's generator.

    Raises
    ------
    TypeError, ValueError
        `init` is not one of these.
    """

    def __init__(self, init: Init, seed: int | None = None) -> None:
        self.given: Any = init
        self.scale, self.kind = 0.0, "constant"
        self.function: Callable[[Array], Any] | None = None
        if isinstance(init, str):
            init = self.given = create(init)
        match init:
            case Uniform():
                self.kind, self.scale = "uniform", init.scale
            case Normal():
                self.kind, self.scale = "normal", init.sigma
            case Zero():
                pass
            case One():
                self.scale = 1.0
            case Constant() if np.ndim(init.value) == 0:
                self.scale = float(init.value)
            case Initializer():
                raise TypeError(
                    f"init must be uniform, normal, zeros, ones, a constant, or a function of ids, "
                    f"got {init!r}, whose values depend on the whole array"
                )
            case _ if callable(init) and not isinstance(init, type):
                self.function = init
            case _:
                cure = f": call it, {init.__name__}()" if isinstance(init, type) else ""
                raise TypeError(
                    f"init must be the name of an initializer, an initializer, or a function of "
                    f"ids, got {brief(init)}{cure}"
                )
        if seed is None:
            drawn = self.kind != "constant"
            seed = int(self.given.rng.integers(1 << 63)) if drawn else 0
        self.seed = seed

    @property
    def text(self) -> str | None:
        """Argument for :func:`~fastopt.initializer.create`; None for a function."""
        return None if self.function is not None else self.given.dumps()

    def computed(self, ids: NDArray[Any], dim: int, dtype: np.dtype[Any]) -> Array:
        """Initial values of ids from the user's function, checked.

        Raises
        ------
        TypeError, ValueError
            The function does not return a row of `dim` real numbers for each id.
        """
        assert self.function is not None
        values, shape = np.asarray(self.function(ids)), (len(ids), dim)
        if values.shape != shape:
            raise ValueError(f"init must return an array of shape {shape}, got {values.shape}")
        if values.dtype.kind not in "fiu" and values.dtype != dtype:
            raise TypeError(f"init must return real numbers, got {values.dtype}")
        return values

    def values(self, ids: Ids, like: Array) -> Array:
        """Initial values without a function for an array of rows like `like`."""
        values = np.empty(like.shape, np.float64 if like.dtype == np.float64 else np.float32)
        if self.kind == "constant":
            values[...] = self.scale
        else:
            kernel = hashing.draw(self.kind == "normal")
            kernel(ids, np.int64(self.seed), np.float32(self.scale), values)
        return values


@dataclass
class Form:
    """Arguments that a table is made with, besides its optimizer and its place.

    Raises
    ------
    TypeError, ValueError
        A number has the wrong type or is out of range.
    """

    name: str
    dim: int
    dtype: np.dtype[Any]
    start: Start
    capacity: int | None
    min_count: int
    half_life: float | None

    def __post_init__(self) -> None:
        self.dim = count("dim", self.dim)
        self.capacity = OrNone(Integer(most=MOST_ROWS))("capacity", self.capacity)
        self.min_count = count("min_count", self.min_count)
        half_life = OrNone(Real(least=0))("half_life", self.half_life)
        if half_life == 0:
            raise ValueError(f"half_life must be more than 0, got {self.half_life}")
        self.half_life = half_life


BLOCK = 1 << 15
"""Elements that are initialized at a time, few enough to fit into a cache."""

FEWEST = 1 << 10
"""Fewest rows of the arrays that are passed to the updater."""


def of_rows(optimizer: str | Of) -> Optimizer | Of:
    """Return an optimizer that updates rows for the name of one, anything else as it is."""
    return (
        create_optimizer(optimizer, lazy_update=True) if isinstance(optimizer, str) else optimizer
    )


def check_optimizer(optimizer: Optimizer, in_files: bool = False) -> None:
    """Raise TypeError or ValueError unless an optimizer can update single rows of a table.

    For a table `in_files`, updates must not read or write all rows either.
    """
    name = type(optimizer).__name__
    if not optimizer.native or optimizer.rule_for("") is None:
        raise TypeError(f"optimizer must update by a rule, and {name} has an update() in Python")
    if in_files and optimizer.rule_for("").passes:  # type: ignore[union-attr]
        raise ValueError(
            f"{name} reads the whole weight in each update, which a table in files does not allow; "
            "keep the table in memory, or use an optimizer without such sums, as AdamW"
        )
    if in_files and optimizer.sparse_decay == "dense":
        raise ValueError(
            "sparse_decay='dense' writes to all rows in each update, which a table in files does "
            "not allow; pass 'catch_up'"
        )
    if optimizer.batches is not None:
        raise TypeError(
            f"optimizer must update in each call, and {name} sums the gradients of several: a row "
            "may be evicted in between"
        )
    if not (optimizer.lazy_update or optimizer.rule_for("").row):  # type: ignore[union-attr]
        raise ValueError(
            f"optimizer must update the indexed rows alone, got {name} with lazy_update=False; "
            f"pass {name}(lazy_update=True)"
        )


class Storage:
    """Weight and state of rows, in address space that is reserved for `capacity` rows.

    Rows never move. Pages take memory only once they are written to.

    Parameters
    ----------
    form : Form
        Arguments of the table; its name is its index in the optimizer.
    optimizer : Optimizer
        Optimizer that creates the state.
    capacity : int
        Maximum number of rows.
    file : callable, optional
        Function of a name and a record size that opens a file for all rows. Default: rows are in
        memory.

    Attributes
    ----------
    weight : numpy.ndarray
        All rows; unused rows are zeros and take no memory.
    arrays : list of numpy.ndarray
        Arrays of the state.
    decay : numpy.ndarray or None
        Deferred weight decay applied to each row, if the optimizer defers decay.
    """

    def __init__(
        self,
        form: Form,
        optimizer: Optimizer,
        capacity: int,
        file: Callable[[str, int], RecordFile] | None = None,
    ) -> None:
        self.name, self.optimizer, dim, dtype = form.name, optimizer, form.dim, form.dtype
        optimizer.whole_shapes[self.name] = capacity, dim
        self.nested = optimizer.create_state_multi_precision(self.name, np.zeros((1, dim), dtype))
        self.parts = [(dtype, (dim,))]
        self.parts += [(array.dtype, array.shape[1:]) for array in leaves(self.nested)]
        self.files: list[RecordFile] = []
        decays = optimizer.sparse_decay != "touched"
        self.decay: Array | None = None
        if file is None:
            self.weight, *self.arrays = (
                reserved((capacity, *shape), dtype, number)
                for number, (dtype, shape) in enumerate(self.parts)
            )
            if decays:
                self.decay = reserved((capacity,), np.float64)
        else:
            record = record_of(self.parts)
            self.files = [file("rows", record.itemsize)]
            rows = self.files[0].records.view(record)[:, 0]
            self.weight, *self.arrays = (rows[str(number)] for number in range(len(self.parts)))
            if decays:
                self.files.append(file("decay", 8))
                self.decay = self.files[1].records.view(np.float64)[:, 0]
        whole = dim * dtype.itemsize % 8 == 0
        self._bytes = self.weight.view(np.int64 if whole else np.uint8)
        self._gather: Any = None
        self.used = 0
        """Rows below this number may have been written to."""
        self.height = 0
        """Rows of the arrays passed to the updater; grows in powers of two, so that its records
        stay valid."""

    def grow(self, rows: int) -> bool:
        """Raise :attr:`height` to at least `rows`; return whether it changed."""
        if rows <= self.height:
            return False
        capacity = len(self.weight)
        self.height = min(max(1 << (rows - 1).bit_length(), FEWEST), capacity)
        for file in self.files:
            file.grow(self.height)
        if self.files:
            return True
        for array in (self.weight, *self.arrays):
            if array[: self.height].nbytes >= LARGE:
                huge_pages(array)
        return True

    def state(self) -> Any:
        """State of the rows up to :attr:`height`, nested like the optimizer's state."""
        arrays = iter(self.arrays)
        return mapped(lambda _: next(arrays)[: self.height], self.nested)

    def taken(self, rows: Rows) -> Array:
        """Copies of rows, zeros for negative numbers; in parallel if that is faster."""
        width = self.weight.shape[1]
        if len(rows) * width < PARALLEL_FROM or not may_run_parallel():
            if self.files:  # np.take would copy the whole strided array first
                copies: Array = self.weight[np.maximum(rows, 0)]
            else:
                copies = np.take(self.weight, rows, axis=0, mode="clip")
        else:
            copies = np.empty((len(rows), width), self.weight.dtype)
            arguments = self._bytes, rows, copies.view(self._bytes.dtype)
            if self._gather is None:
                self._gather = bind(hashing.gather(), *arguments)
            with turn():
                self._gather(*arguments)
        if (absent := rows < 0).any():
            copies[absent] = 0
        return copies

    def start(self, rows: Rows, ids: Ids, start: Start, computed: Array | None) -> None:
        """Initialize the weight and state of new rows, with `computed` values if there are any.

        Raises
        ------
        ValueError
            The optimizer creates a different kind of state than before.
        """
        step = max(BLOCK // self.weight.shape[1], 1)
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            appended = len(some) == some[-1] - some[0] + 1 and bool((np.diff(some) == 1).all())
            at: Any = slice(some[0], some[-1] + 1) if appended else some
            fresh = appended and some[0] >= self.used
            block = self.weight[at]
            if computed is None:
                block[...] = start.values(ids[first : first + step], block)
            else:
                block[...] = computed[first : first + step]
            state = leaves(self.optimizer.create_state_multi_precision(self.name, block))
            self._check(state)
            if not appended:
                self.weight[at] = block
            for array, values in zip(self.arrays, state, strict=True):
                if not fresh or values.any():
                    array[at] = values
            if self.decay is not None:
                self.decay[at] = self.optimizer.row_decay.get(self.name, (None, 0.0))[1]
            self.used = max(self.used, int(some.max()) + 1)
        self.mark(rows)

    def mark(self, rows: Rows) -> None:
        """Mark rows as changed in the files."""
        for file in self.files:
            file.mark(rows)

    def clear(self, rows: Rows) -> None:
        """Set the weight of freed rows to zero, and their state if the rule reads all rows."""
        self.weight[rows] = 0
        rule = self.optimizer.rule_for(self.name)
        if rule is not None and rule.passes:
            for array in self.arrays:
                array[rows] = 0
        self.mark(rows)

    def _check(self, state: tuple[Array, ...]) -> None:
        kinds = [(array.dtype.name, array.shape[1:]) for array in state]
        expected = [(array.dtype.name, array.shape[1:]) for array in self.arrays]
        if kinds != expected:
            raise ValueError(
                f"optimizer creates states {brief(kinds)}, but the table was created with "
                f"{brief(expected)}: an argument of the optimizer has changed"
            )
