"""Sharded updater: data-parallel training with one copy of the state, split over all ranks.

Reason: what users call; a call that fails on one rank changes nothing on any.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from time import perf_counter
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from fastopt._arrays import Gradient
from fastopt._engine.averaging import Averages
from fastopt._engine.clip import UNCHANGED, times
from fastopt._engine.contract import batches_of
from fastopt._engine.mixed_precision import check_copy, round_into
from fastopt._engine.overlap import Addresses, Ranges, addresses, bounds
from fastopt._engine.validate import (
    as_lists,
    check,
    check_index,
    check_like,
    label,
    repeated,
    selected,
    weights_by_index,
)
from fastopt._interrupts import between_updates, uninterrupted
from fastopt._structure import as_given, copies
from fastopt._updater.averaged import averages_of, check_fit, evaluates, held, leading
from fastopt._updater.updater import Updater
from fastopt.amp import LossScaler
from fastopt.arguments import choice, count, flag
from fastopt.averages import Average, Lookahead
from fastopt.checkpoint.format.container import can_hold, dtype_of
from fastopt.checkpoint.format.errors import CheckpointError
from fastopt.checkpoint.format.files import PathLike
from fastopt.checkpoint.format.tree import chunks, dumps, loads
from fastopt.checkpoint.restore import shards
from fastopt.checkpoint.restore.describe import copied
from fastopt.checkpoint.restore.parameters import Skipped
from fastopt.checkpoint.restore.shards import Form, Placement, Saved
from fastopt.distributed import agreement
from fastopt.distributed.agreement import Fact, Facts, Idle, Numbers
from fastopt.distributed.backend import compile_stages
from fastopt.distributed.checkpoint import NOTHING, Resumable, listing_of
from fastopt.distributed.exchange import EarlyGradients, Exchange
from fastopt.distributed.job import Layers, Lease, Node, leader_first
from fastopt.distributed.plan import DEPTH, Plan, comparer, flat
from fastopt.distributed.ranks import Ranks, refuse_forked
from fastopt.distributed.rows import SparseGradients
from fastopt.distributed.transport import Layered, Transport, default_buckets
from fastopt.optimizer import Optimizer
from fastopt.optimizer.accumulation import Entry, Windows, incomplete
from fastopt.optimizer.optimizer import Array, Index
from fastopt.sparse import HALVES, RowSparse


class Step(NamedTuple):
    """A checked call: its plan, gradients, placements of new indices, and where gradients are.

    Gradients are flat, unless they fit the plan as they are: then `at` has their addresses.
    """

    plan: Plan
    grads: list[Any]
    new: dict[Index, Placement]
    at: Addresses | None = None


class Nested(NamedTuple):
    """Arguments of a step with nested weights, in place of indices: errors in them are agreed."""

    grads: Any
    weights: Any
    missing: str
    error: Exception | None = None


NONE = object()
"""In place of the arguments of a call that this rank does not make itself."""

CHECK_EVERY = 100
"""Default of `check_every`."""

LISTS = 16
"""Maximum number of lists of several indices whose plans are kept."""


class Slices:
    """Slices of some weights on this rank, from which the whole weights are gathered.

    Parameters
    ----------
    sharded : ShardedUpdater
        The updater.
    weights : mapping of index to numpy.ndarray
        The weights, with the same indices on all ranks.
    own : mapping of index to numpy.ndarray, optional
        Slices of this rank. Default: those of the weights.
    placements : mapping of index to Placement, optional
        Placements of weights that the updater has not updated.
    """

    def __init__(
        self,
        sharded: "ShardedUpdater",
        weights: Mapping[Index, Array],
        parts: Mapping[Index, Array] | None = None,
        placements: Mapping[Index, Placement] = NOTHING,
    ) -> None:
        self.ranks: Ranks = sharded._ranks
        self.limit: int = sharded.bucket_bytes
        self.weights = dict(weights)
        self.copies = {i: sharded._copies[i] for i in weights if i in sharded._copies}
        if parts is None:
            known = {**sharded.placements, **placements}
            cuts = ((i, known[i], flat(weight)) for i, weight in weights.items())
            parts = {i: place.slice_of(array, sharded.rank) for i, place, array in cuts}
        self.own = {index: np.asarray(part, order="C") for index, part in parts.items()}

    def gather(self) -> None:
        """Write the slices of all ranks to the weights and their copies; collective."""
        for group in _batches(self.weights, self.limit):
            flats = [self.own[index].reshape(-1) for index in group]
            elements, _ = agreement.gathered_together(self.ranks, flats)
            for index, array in zip(group, elements, strict=True):
                weight = self.weights[index]
                weight[...] = array.reshape(weight.shape)
        for index, copy in self.copies.items():
            round_into(copy, self.weights[index])

    @contextmanager
    def averaged(self, shard: Updater) -> Iterator[None]:
        """Context in which the weights hold their averages; they are restored without messages."""
        arrays = [*self.weights.values(), *self.copies.values()]
        known = shard._averages.arrays if shard._averages is not None else leading(shard)
        averaged = {index: part for index, part in self.own.items() if index in known}
        with shard.averaged(averaged):
            before = [array.copy() for array in arrays]
            try:
                self.gather()
                yield
            finally:
                with uninterrupted:
                    for array, values in zip(arrays, before, strict=True):
                        array[...] = values


class ShardedUpdater(Resumable):
    r"""Updater for data-parallel training over MPI, with optimizer state sharded over the ranks.

    All ranks have all weights, and gradients of their own part of a batch. In a call

    .. math::
        g &= \textstyle\sum_r g_r \\
        (w_r, s_r) &\leftarrow \mathrm{update}(w_r, g_{(r)}, s_r)

    the gradients of all ranks are summed, each rank updates its slices :math:`w_r` of the weights
    with its shard :math:`s_r` of the state, and all ranks receive the new weights. Sums have the
    precision of the arithmetic: float32 for half-precision weights. To divide by the batch size,
    set the optimizer's `rescale_grad` to one over the number of examples on all ranks together.

    Dense gradients of the ranks of a node are summed in rank order, and the sums of the nodes in
    the order of their first ranks. If each node has a single rank, or one cannot share memory
    between them, which takes Linux, all gradients are summed in rank order; so are those of a
    single node, those of row-sparse gradients, and all without `hierarchical`. The bits depend
    neither on the MPI library nor on the buckets.

    Tensors of one dtype are laid out in lines of about one bucket, and each line is split into
    equal shares, one per rank. With GroupAdaGrad and 8-bit state, tensors are split only between
    rows; with an ``update()`` in NumPy, they are not split, and each is owned by one rank.
    Gradients are sent in buckets: while one bucket is summed, another is packed and a third is
    updated. The update waits for all buckets if it needs all gradients first, for the norms of
    LARS, LAMB and LANS, `clip_global_norm` or `loss_scaler`, and for 8-bit state. Arrays from
    :func:`~fastopt.distributed.flat_like` are not packed on a single node or in rank order.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", SC 2020, arXiv:1910.02054, stage 1.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer, the same on all ranks.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or Communicator
        Communicator. All of its ranks must create and call the updater together.
    loss_scaler : fastopt.amp.LossScaler, optional
        See :class:`~fastopt.optimizer.Updater`; a step is skipped on all ranks or on none.
    clip_global_norm : float, optional
        Maximum global norm of the summed gradients.
    bucket_bytes : int, optional
        Bytes of gradients in a bucket. Default 4 MiB, or 256 KiB per node that sends if that is
        more, if all buckets of a rank take at most 64 MB then, and otherwise less.
    timeout : float, optional
        Seconds that a rank waits for others before it raises an error. Default: the environment
        variable ``FASTOPT_MPI_TIMEOUT``, or 1800.
    check_every : int
        Number of calls in which every weight is compared between ranks once: each call compares
        a checksum of a fraction of the weights, at least 10,000 elements. 0 compares only new and
        loaded weights. Default 100.
    wire : {'float16', 'bfloat16'}, optional
        Dtype to which dense gradients, or their sums over a node if `hierarchical`, are rounded
        before they are sent, which halves the bytes of float32; they are still summed in the
        precision of the arithmetic. float16 numbers beyond 65,504 become infinite, so use a
        `loss_scaler` with it. Default: the dtype of the arithmetic.
    overlap : bool
        Enable :meth:`begin`, which sends gradients while others are still computed. This uses
        another communicator. Default False.
    accumulate : int
        Number of calls per update: gradients of a rank are summed in its memory, and the last call
        sends the sums and updates with their mean. The other calls send no gradient, only that the
        call is valid. All parameters of a call must have had as many calls. Default 1.
    clip_adaptive : float, optional
        See :class:`~fastopt.optimizer.Updater`. Weights of two dimensions or more are then split
        between rows, and each of the others is owned by one rank. Set at creation.
    clip_adaptive_eps : float
        See :class:`~fastopt.optimizer.Updater`. Default 1e-3.
    groups, average
        See :class:`~fastopt.optimizer.Updater`; averages are sharded like the state.
    hierarchical : bool
        Sum dense gradients within each node first, in memory that its ranks share, and then the
        sums of the nodes: see above. Default True.

    Attributes
    ----------
    hierarchical : bool
        Whether gradients are summed within nodes first.
    info : fastopt.amp.StepInfo
        Information about the last call, the same on all ranks.
    states, averages : dict
        State and average of this rank's slice of each parameter.
    groups : mapping or None
        The groups, read-only; assign a new mapping on all ranks to change them.
    seconds : dict
        Time that the last call spent on ``packing``, ``communication`` and ``update``.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid.

    Examples
    --------
    On one rank; ``mpiexec -n 4`` distributes the work over four.

    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from fastopt import optimizer
    >>> from fastopt.mpi import ShardedUpdater
    >>> updater = ShardedUpdater(optimizer.SGD(learning_rate=0.1), MPI.COMM_WORLD)
    >>> weight = np.ones(3, np.float32)
    >>> updater(0, np.full(3, 2, np.float32), weight)
    >>> weight
    array([0.8, 0.8, 0.8], dtype=float32)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        comm: object,
        loss_scaler: LossScaler | None = None,
        clip_global_norm: float | None = None,
        bucket_bytes: int | None = None,
        timeout: float | None = None,
        check_every: int = CHECK_EVERY,
        wire: Literal["float16", "bfloat16"] | None = None,
        overlap: bool = False,
        accumulate: int = 1,
        clip_adaptive: float | None = None,
        clip_adaptive_eps: float = 1e-3,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        average: Average | None = None,
        hierarchical: bool = True,
    ) -> None:
        layered = flag("hierarchical", hierarchical)
        size = None if bucket_bytes is None else count("bucket_bytes", bucket_bytes)
        every = count("check_every", check_every, least=0)
        self.overlap, self._windows = bool(overlap), cast(Windows | None, None)
        self.accumulate = accumulate
        kind = None if wire is None else dtype_of(choice("wire", wire, *HALVES))
        clips = clip_adaptive, clip_adaptive_eps
        super().__init__(
            Updater(optimizer, loss_scaler, clip_global_norm, groups, 1, average, *clips),
            comm,
            timeout,
            bucket_bytes=size,
            check_every=every,
            wire=wire,
            overlap=self.overlap,
            clip_adaptive=clip_adaptive,
            clip_adaptive_eps=clip_adaptive_eps,
            hierarchical=layered,
        )
        self.shard._serve(self.backend)
        self.wire: Any = kind
        layers = self._job.layers if layered else None
        self.hierarchical = layers is not None
        self._direct, self._layered = self._transports(self._job, layers)
        of = (self.ranks, None) if layers is None else (layers.count, layers.least)
        self.bucket_bytes, self._depth = (size, DEPTH) if size else default_buckets(*of)
        self.check_every = every
        self._plans: dict[tuple[Index, ...], Plan] = {}
        self._plan: Plan | None = None
        self._turns: dict[Index, int] = {}
        self._unsure: set[Index] = set()
        self._copies: dict[Index, Array] = {}
        leader_first(self._node, compile_common)
        self.seconds: dict[str, float] = {}
        self._begun = EarlyGradients(self.optimizer.idx2name)
        self._last: Plan | None = None
        self._latest: dict[Index, Array] = {}
        """Weight of the last update of each parameter."""

    def _transports(self, node: Node, layers: Layers | None) -> tuple[Transport, Layered | None]:
        """Create the transports of buckets between the ranks; collective."""
        self._lease: Lease | None = None
        several = layers is not None and layers.count > 1
        comm = node_comm = None
        if self.overlap or several:
            self._lease = node.lease(self)
            comm, node_comm = self._lease.comm, self._lease.node_comm
        direct = Transport(node.ranks, comm)
        if layers is None:
            return direct, None
        layered = Layered(node.ranks, layers, comm, node_comm, self.wire, self.overlap)
        return direct, layered if layered.always or not self.overlap else None

    def _choose(self, plan: Plan) -> Transport:
        """Choose the transport of the buckets of a call, once the ranks have agreed on it.

        Within one node, arrays that are contiguous in memory need not be copied to its shared
        memory: the sums have the same bits.
        """
        layered = self._layered
        if layered is not None and (layered.always or self.backend.gate.apart):
            self._reserve(layered, plan)
            if self._layered is not None:
                return layered
        self._direct.reserve(plan)
        return self._direct

    def _reserve(self, layered: Layered, plan: Plan) -> None:
        """Provide shared memory for the buckets of a plan; a single node can do without."""
        try:
            layered.reserve(plan)
        except OSError as error:  # on all ranks of the node
            if layered.layers.count > 1 or isinstance(error, TimeoutError):
                raise
            self._layered = None

    def __call__(self, index: object, grad: object, weight: object) -> None:
        """Update weights with the gradients of all ranks, summed; all ranks must call it.

        Parameters
        ----------
        index : int, str or bytes, or a list of them
            Indices of the parameters, the same on all ranks.
        grad : numpy.ndarray, or a list of them
            Gradients of this rank; they are not changed. Row-sparse gradients, in the forms that
            :class:`~fastopt.optimizer.Updater` accepts, are sent to the ranks that own the rows'
            state: each rank first sums its repeated rows, and the owners add these sums in rank
            order. Half-precision rows are only summed by the owners, in float32.
        weight : numpy.ndarray, or a list of them
            Weights, equal on all ranks, updated in place.

        Raises
        ------
        TypeError, ValueError
            Arguments are inconsistent on some rank, differ between ranks, or contain an index
            twice. All ranks raise the error, and no weight, state or count changes.
        TimeoutError
            Other ranks did not make the call within `timeout`; the message names them.
        RuntimeError
            Another rank ended, or failed after the ranks had agreed; the message names it. After
            this error or a TimeoutError the updater can no longer be used.
        """
        with self.optimizer.call_lock:
            if not self._repeats(index, grad, weight):
                self._call_all(index, grad, weight)

    def _repeats(self, index: Any, grad: Any, weight: Any) -> bool:
        """Update on a single rank, if the call has the parameters and weights of the last one.

        Otherwise return False.
        """
        plan = self._plan
        if self.ranks > 1 or plan is None or self._windows is not None or self._begun.any:
            return False
        if self._copies or self._masters or self.groups or not self.optimizer.native:
            return False
        refuse_forked("a call of an updater")
        lists = (index, grad, weight)
        if not isinstance(index, (list, tuple)):
            lists = [index], [grad], [weight]
        elif not (type(grad) is type(weight) is list):
            return False
        if not plan.has(lists[0]) or plan.fit(plan.indices, *lists[1:]) is None:
            return False
        self._check_free()
        begun = perf_counter()
        self.shard(plan.indices, plan.gradients(lists[1], True), plan.slices)
        self.seconds["update"] = perf_counter() - begun
        return True

    def step(self, grads: Any, weights: Any, missing: Literal["raise", "skip"] = "raise") -> None:
        """Update nested weights, as :meth:`Updater.step <fastopt.Updater.step>` does.

        All ranks must call it, with gradients of the same weights.

        Parameters
        ----------
        grads, weights, missing
            See :meth:`Updater.step <fastopt.Updater.step>`.

        Raises
        ------
        TypeError, ValueError
            As in a call with lists, and as in :meth:`Updater.step <fastopt.Updater.step>`, on all
            ranks. Nothing changes.
        TimeoutError, RuntimeError
            See :meth:`__call__`.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> from fastopt.distributed import ShardedUpdater, run_threads
        >>> def program(comm):
        ...     updater = ShardedUpdater(optimizer.SGD(learning_rate=0.1), comm)
        ...     weights = {"layers": [np.ones(2), np.ones(1)]}
        ...     updater.step({"layers": [np.full(2, 1.0 + comm.rank), None]}, weights)
        ...     return weights
        >>> run_threads(2, program)[1]
        {'layers': [array([0.7, 0.7]), array([1.])]}
        """
        self(Nested(grads, weights, missing), None, None)

    def updated(self, grads: Any, weights: Any, missing: Literal["raise", "skip"] = "raise") -> Any:
        """Return updated copies of nested weights; the arguments do not change.

        All ranks must call it, with gradients of the same weights. Each call plans its buckets
        again, as its weights are new arrays; :meth:`step` updates in place without that.

        Parameters
        ----------
        grads, weights, missing
            See :meth:`Updater.updated <fastopt.Updater.updated>`, also for the result.

        Raises
        ------
        TypeError, ValueError, TimeoutError, RuntimeError
            See :meth:`step`.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> from fastopt.distributed import ShardedUpdater, run_threads
        >>> old = {"scale": np.ones(2)}
        >>> def program(comm):
        ...     updater = ShardedUpdater(optimizer.SGD(learning_rate=0.1), comm)
        ...     return updater.updated({"scale": np.full(2, 1.0 + comm.rank)}, old)
        >>> run_threads(2, program)[1], old
        ({'scale': array([0.7, 0.7])}, {'scale': array([1., 1.])})
        """
        new, error = agreement.attempt(copies, weights)
        self(Nested(grads, new, missing, error), None, None)
        return as_given(new, weights)

    def _call_all(self, index: object, grad: object, weight: object, active: bool = True) -> bool:
        """Update or accumulate; return False if no rank has work of its own."""
        if self._windows is None:
            return self._update(index, grad, weight, active)
        return self._accumulate(self._windows, index, grad, weight, active)

    def _lists(self, index: Any, grad: Any, weight: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the arguments of a call as lists, without the parameters of frozen groups."""
        if index is NONE:
            raise ValueError("join() ends here, before the first update")
        self._check_free()
        if isinstance(index, Nested):
            if index.error is not None:
                raise index.error
            index, grad, weight = self.shard._leaves(*index[:3])
        single = not isinstance(index, (list, tuple))
        lists = ([index], [grad], [weight]) if single else as_lists(index, grad, weight)
        groups = self.shard.parameters.groups
        if groups is not None and groups.freezes:
            taken = groups.select([check_index(key) for key in lists[0]])
            lists = lists if taken is None else tuple(map(taken, lists))
        return lists

    def _accumulate(
        self, windows: Windows, index: object, grad: object, weight: object, active: bool
    ) -> bool:
        """Add the gradients of this rank to its sums, and update with them in the last call."""
        self._begin("accumulate")
        checked, error = agreement.attempt(self._entries, windows, index, grad, weight)
        entries, single = cast(list[Entry], checked or []), not isinstance(index, (list, tuple))
        indices = [entry[0] for entry in entries]
        before, after = windows.before(indices), windows.after(indices)
        gate = self._gate(lambda: [self._window_facts(windows, indices)], active)
        try:
            if error is None:
                _, error = agreement.attempt(windows.add, entries, self.optimizer.idx2name, single)
            gate.enter(error)
            if indices and indices[0] not in after:
                sums = [times(windows.sums[key], 1 / windows.every) for key in indices]
                self._update(indices, sums, [entry[1] for entry in entries])
            else:
                vars(self.shard)["_info"] = UNCHANGED  # a loss scaler counts updates alone
        except BaseException as problem:
            windows.put_back(before)
            if isinstance(problem, Idle):
                return False
            raise
        windows.finish(indices, after)
        self._latest.update((entry[0], entry[1]) for entry in entries)
        return True

    def finish(self, index: object = None, weight: object = None) -> None:
        """Update with the gradients that `accumulate` has added so far; all ranks must call it.

        See :meth:`fastopt.optimizer.Updater.finish`.

        Parameters
        ----------
        index : int, str or bytes, or a list of them, optional
            The parameters, the same on all ranks; those without waiting gradients are left out.
            Default: all.
        weight : numpy.ndarray, list of arrays, or nested weights, optional
            Their weights; without an index all weights, nested as in :meth:`step`. Default: those
            of the last calls.

        Raises
        ------
        TypeError, ValueError
            The arguments do not match, or differ between ranks. Nothing changes.
        TimeoutError, RuntimeError
            See :meth:`__call__`.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> from fastopt.distributed import ShardedUpdater, run_threads
        >>> def program(comm):
        ...     updater = ShardedUpdater(optimizer.SGD(learning_rate=1.0), comm, accumulate=4)
        ...     weight = np.zeros(1)
        ...     for gradient in (1.0, 2.0):
        ...         updater("w", np.full(1, gradient + comm.rank), weight)
        ...     updater.finish()
        ...     return weight
        >>> run_threads(2, program)[1]
        array([-4.])
        """
        with self.optimizer.call_lock:
            self._begin("finish")
            waiting, error = agreement.attempt(self._incomplete, index, weight)
            entries: list[Entry] = waiting or []
            indices, windows = [entry[0] for entry in entries], self._windows
            self._gate(lambda: [self._window_facts(windows, indices)]).enter(error)
            if windows is None or not entries:
                vars(self.shard)["_info"] = UNCHANGED
                return
            self._update(indices, [entry[2] for entry in entries], [entry[1] for entry in entries])
            windows.finish(indices, windows.without(indices))

    def _incomplete(self, index: object, weight: object) -> list[Entry]:
        """Return the tensors of :meth:`finish`, with the means of their gradients."""
        self._check_free()
        windows, entries = self._windows, []
        is_frozen = self.shard._is_frozen
        of = incomplete(self.optimizer, is_frozen, windows, index, weight)
        for key, array in of.items():
            if windows is not None and not is_frozen(key):
                mean = times(windows.sums[key], 1 / windows.calls[key])
                entries.append((key, self._latest[key] if array is None else array, mean))
        return entries

    def _window_facts(self, windows: Windows | None, indices: Sequence[Index]) -> Numbers:
        """Return the parameters of a call that accumulates, and their calls since an update."""
        calls = [windows.calls.get(index, 0) if windows else 0 for index in indices]

        def in_words() -> dict[str, str]:
            pairs = enumerate(zip(indices, calls, strict=True))
            return {f"tensor {k}": f"{self._label(i)} after {n} calls" for k, (i, n) in pairs}

        return Numbers([np.frombuffer(f"{indices}{calls}".encode(), np.uint8)], in_words)

    def _entries(self, windows: Windows, index: Any, grad: Any, weight: Any) -> list[Entry]:
        """Return the checked tensors of a call that accumulates."""
        keys, grads, weights = self._lists(index, grad, weight)
        indices = [check_index(key) for key in keys]
        grads = [self._check(*tensor) for tensor in zip(indices, grads, weights, strict=True)]
        check_apart(indices, weights, self.optimizer.idx2name)
        if len({windows.is_last(key) for key in indices}) > 1:
            counted = [f"{self._label(key)} {windows.calls.get(key, 0)}" for key in indices]
            raise ValueError(
                f"on ranks, accumulate={windows.every} takes lists of parameters that had equal "
                f"numbers of calls since their updates, got {', '.join(counted)}: pass each in "
                "every call, with zeros where there is no gradient, or in calls of its own"
            )
        return list(zip(indices, weights, grads, strict=True))

    def begin(self, index: Index | bytes, grad: Gradient, release: bool = False) -> None:
        """Start sending the gradient of a parameter while other gradients are still computed.

        Afterwards, call the updater with the same list of parameters as in the previous call and
        all gradients, including those passed here. Gradients of neighbours in the list are sent
        together once all of them are ready, starting with the last parameters of the list. The
        method does not wait and changes no weight. Before the first call, and on a single rank,
        nothing is sent, and gradients are kept for the call.

        Parameters
        ----------
        index : int, str or bytes
            Index of a parameter of the last call.
        grad : numpy.ndarray
            Its gradient, which must not be modified before the updater is called. A row-sparse
            gradient is sent by that call.
        release : bool
            Keep the gradient only until it has been sent, so that a rank need not have memory for
            all gradients at once. The call then has None in place of the gradient. After a call
            that failed, the gradient must be computed again. Default False.

        Raises
        ------
        TypeError, ValueError
            The updater was created without `overlap`, the parameter was not in the last call, or
            its gradient is invalid or was passed before. Only this rank raises the error, and the
            updater can still be called.
        RuntimeError
            An earlier call failed on some ranks while others were waiting.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from fastopt import optimizer
        >>> from fastopt.mpi import ShardedUpdater
        >>> updater = ShardedUpdater(optimizer.SGD(learning_rate=0.5), MPI.COMM_WORLD, overlap=True)
        >>> weights = [np.ones(2), np.ones(3)]
        >>> for step in range(2):
        ...     grads = [np.ones_like(w) / MPI.COMM_WORLD.size for w in weights]
        ...     for index in (1, 0):  # as a backward pass computes them
        ...         updater.begin(index, grads[index])
        ...     updater([0, 1], grads, weights)
        >>> weights
        [array([0., 0.]), array([0., 0., 0.])]
        """
        if not self.overlap:
            raise ValueError("begin() needs an updater with overlap=True")
        with self.optimizer.call_lock:
            self._ranks.begin(f"begin() of updater {self._number}", self.timeout)
            index, plan, begun = check_index(index), self._plan, self._begun
            groups = self.shard.parameters.groups
            if groups is not None and groups.is_frozen(index):
                return
            if plan is None:
                begun.add(index, grad)
                return
            context, place = self._label(index), plan.places.get(index)
            if place is None:
                raise ValueError(f"{context}: begin() accepts only parameters of the previous call")
            checked = self._check(index, grad, plan.weights[place])
            sends = place in plan.group_of and not isinstance(checked, RowSparse)
            begun.add(index, None if release and sends else grad, sends)
            if sends:
                if begun.exchange is None:
                    begun.exchange = Exchange(self._ranks, plan, self._choose)
                    self._expect(True)
                begun.exchange.put(place, flat(checked), release)

    def _discard(self) -> None:
        """Complete the buckets that any rank has started to send for a call that has failed."""
        if self._ranks.broken:  # pending operations still use their memory
            return
        exchange, self._begun = self._begun.exchange, EarlyGradients(self.optimizer.idx2name)
        if not self.overlap or self.ranks == 1:
            return
        begun = np.array([exchange.begun if exchange else 0])
        self._ranks.wait(self._ranks.comm.all_reduce_max(begun))
        if begun[0]:
            if exchange is None or not exchange.begun:
                plan = cast(Plan, self._last)
                exchange = Exchange(self._ranks, plan, self._choose)
            exchange.discard(int(begun[0]))
        self._expect(False)

    def _expect(self, pending: bool) -> None:
        """Record whether :meth:`begin` may have started operations that are not complete."""
        if self._lease is not None:
            self._lease.pending = pending

    @contextmanager
    def join(self) -> Iterator[None]:
        """Context for a loop in which some ranks make fewer calls than others.

        A rank that leaves the context takes part in the remaining calls of other ranks with zero
        gradients, until all ranks have left. All calls in the context must be calls of this updater
        with the same list of parameters.

        Raises
        ------
        ValueError
            A rank leaves before its first call while others still make calls, or others call with
            different parameters. All ranks raise the error.
        RuntimeError
            Another rank left the context by an error of its own, which the message names. The
            updater can no longer be used.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from fastopt import optimizer
        >>> from fastopt.mpi import ShardedUpdater
        >>> updater = ShardedUpdater(optimizer.SGD(learning_rate=0.5), MPI.COMM_WORLD)
        >>> weight, batches = np.ones(2), [np.ones(2)] * (1 + MPI.COMM_WORLD.rank)
        >>> with updater.join():
        ...     for grad in batches:
        ...         updater(0, grad, weight)
        >>> weight
        array([0.5, 0.5])
        """
        try:
            yield
        except BaseException as error:
            if not agreement.is_agreed(error):
                self._ranks.fail(f"left join() by {type(error).__name__}: {error}")
            raise
        with self.optimizer.call_lock:
            while self.ranks > 1 and self._shadow():
                pass

    def _shadow(self) -> bool:
        """Take part in a call of other ranks; return False if no rank makes one."""
        plan = self._plan
        if plan is None:
            return self._call_all(NONE, NONE, NONE, active=False)
        grads: list[Any] = [
            RowSparse(
                np.zeros((0, *weight.shape[1:]), plan.listed[k]),
                np.empty(0, np.int64),
                weight.shape,
            )
            if k in plan.listed
            else np.zeros(weight.shape, weight.dtype)
            for k, weight in enumerate(plan.weights)
        ]
        return self._call_all(plan.indices, grads, plan.weights, active=False)

    def _update(self, index: object, grad: object, weight: object, active: bool = True) -> bool:
        """Update like :meth:`__call__`; return False if no rank has work of its own."""
        self._begin("update")
        planned, error = agreement.attempt(self._planned, index, grad, weight)
        step, plan = cast(Step, planned), cast(Plan, planned and planned.plan)
        layered = self._layered is not None
        apart = layered and (error is not None or plan.is_apart(step.grads, step.at))
        new = dict[Index, Placement]() if planned is None else step.new
        gate = self._gate(lambda: self._facts(plan, new), active, apart)  # it keeps no gradients
        try:
            if error is not None or self._needs_early(step):
                gate.enter(error)
            with self._updating(lambda: gate.passed):
                self._prepare(plan, new)
                exchange = self._begun.exchange or Exchange(self._ranks, plan, self._choose)
                exchange.enter(step.grads, step.at)
                self._begun.exchange = exchange
                rows = SparseGradients(self._ranks, plan, step.grads) if plan.listed else None
            self._exchange(exchange, step, rows)
            gate.enter()
        except Idle:
            return False
        except Exception as problem:
            if agreement.is_agreed(problem):
                self._discard()
            raise
        return True

    def _needs_early(self, step: Step) -> bool:
        """Whether the ranks must agree before the update starts, not at its first operation."""
        optimizer, plan = self.optimizer, step.plan
        in_python = optimizer.batches is not None or not optimizer.native
        early = step.new or plan.listed or self._masters or in_python or not plan.indices
        return bool(early) or not self._fits(plan)

    def _fits(self, plan: Plan) -> bool:
        """Whether there is memory for the buckets of a plan, without which nodes cannot sum."""
        layered = self._layered
        return layered is None or not layered.always or layered.fits(plan)

    def _prepare(self, plan: Plan, new: dict[Index, Placement]) -> None:
        """Compile kernels, provide memory, and slice masters and states that are known whole."""
        optimizer = self.optimizer
        if not self._fits(plan):
            _, error = agreement.attempt(self._reserve, cast(Layered, self._layered), plan)
            self.backend.gate.again(error)
        if new:
            self._compile(
                (i, plan.placements[k], plan.weights[k].dtype, k in plan.listed)
                for k, i in enumerate(plan.indices)
                if i in new
            )
            leader_first(self._node, lambda: plan.compile(self.wire))
        if plan is not self._plans.get(plan.key):
            for index, placement in zip(plan.indices, plan.placements, strict=True):
                self._slice(index, placement)
        for index in self._masters.keys() & (self.placements | new).keys():
            optimizer.masters_given[index] = (self.placements | new)[index].slice_of(
                flat(self._masters[index]), self.rank
            )
        for index in new.keys() & self.uncut.keys():
            for name, value in self._cut(index, new[index]).items():
                if name == "states":
                    self.shard.states[index] = value
                    self.shard.states_synced[index] = False
                elif name == "averages":
                    cast(Averages, self.shard._averages).arrays[index] = value
                else:
                    vars(optimizer)[name][index] = value
        plan.refresh(self.rank)

    def _exchange(self, exchange: Exchange, step: Step, rows: SparseGradients | None) -> None:
        """Sum gradients, update the slices of this rank, and gather the new weights."""
        optimizer, gate, problem = self.optimizer, self.backend.gate, None
        plan, new = step.plan, step.new
        grads = plan.gradients(step.grads, step.at is not None)
        for k, grad in rows.grads.items() if rows else ():
            grads[k] = grad
        before = None if optimizer.native else self._snapshot()
        self.backend.exchange = exchange
        with self._updating(lambda: gate.launched):
            if optimizer.batches is not None or not optimizer.native:
                exchange.receive()  # it may launch kernels with other gradients
            try:
                self.shard(plan.indices, grads, plan.slices)
            except Exception as error:
                if not self._is_in_python(error):
                    raise
                problem = error  # raised by user code, on the rank that owns the tensor
            gate.launched = True
            exchange.receive()
            self._begun = EarlyGradients(self.optimizer.idx2name)
            self._expect(False)
            self.placements.update(new)
            for index in new.keys() & self.uncut.keys():
                del self.uncut[index]
            if problem or self.info.stepped:
                exchange.finish()
                if rows:
                    rows.spread([k for k in rows.grads if self._touches_all(plan.indices[k])])
                self._follow(plan)
        if before is not None and self.ranks > 1:
            try:
                agreement.agree(self._ranks, (), problem)
            except BaseException:
                self._roll_back(*before)
                raise
        elif problem is not None:
            raise problem
        for index in plan.indices[:1]:
            self._turns[index] = self._turns.get(index, 0) + 1
        self._unsure.difference_update(plan.indices)
        self._unchecked.clear()
        self.seconds, self.backend.exchange = exchange.seconds, None  # frees the gradients
        self._keep(plan)

    def _is_in_python(self, error: Exception) -> bool:
        """Whether an error comes from an ``update()`` in NumPy, after all sums over the ranks."""
        if self.optimizer.native or agreement.is_agreed(error) or self._ranks.broken:
            return False
        return self.backend.gate.added or not self.shard.settings.measures

    def _touches_all(self, index: Index) -> bool:
        """Whether an update has changed rows that its gradient does not index."""
        optimizer, average = self.shard.parameters.optimizer_of(index), self.shard.average
        rule = optimizer.rule_for(index)
        if isinstance(average, Lookahead):  # it resets all rows in some steps
            updates = optimizer._index_update_count[index] - optimizer.begin_num_update
            if average.rate(updates):
                return True
        if (batches := batches_of(optimizer)) is not None and batches.completes(index):
            return True  # the rows of earlier calls too
        lazy = optimizer.lazy_update or bool(rule and rule.row)
        return not lazy or optimizer.sparse_decay == "dense"

    def _follow(self, plan: Plan) -> None:
        """Round the weights to their copies, and drop masters that are part of the state now."""
        for index in self._masters.keys() & self.states.keys():
            del self._masters[index]
        for index in self._copies.keys() & set(plan.indices):
            round_into(self._copies[index], plan.weights[plan.indices.index(index)])

    @property
    def groups(self) -> Mapping[str, Mapping[str, Any]] | None:
        """The groups, see :class:`~fastopt.optimizer.Updater`; set them on all ranks."""
        return self.shard.groups

    @groups.setter
    def groups(self, groups: Mapping[str, Mapping[str, Any]] | None) -> None:
        self.shard.groups = groups
        if self._windows is not None:
            self._windows.freeze(self.shard._is_frozen)

    @property
    def average(self) -> Average | None:
        """How weights are averaged."""
        return self.shard.average

    @property
    def accumulate(self) -> int:
        """Number of calls per update; set it on all ranks, while no gradients wait."""
        return 1 if self._windows is None else self._windows.every

    @accumulate.setter
    def accumulate(self, calls: int) -> None:
        windows = Windows.changed(self._windows, calls)
        if windows is not None and self.overlap:
            raise ValueError("accumulate sends gradients once in several calls, without overlap")
        self._windows = windows

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "accumulate": self.accumulate}

    # Plans of calls, and what ranks compare

    def _planned(self, index: object, grad: object, weight: object) -> Step:
        """Return the arguments of a call, checked, with its plan."""
        indices, grads, weights = self._lists(index, grad, weight)
        step = self._step(indices, self._begun.complete(indices, grads, weights), weights)
        self._begun.check(step.plan, grads)
        return step

    def _step(self, indices: list[Any], grads: list[Any], weights: list[Any]) -> Step:
        """See :meth:`_planned`."""
        new, plan = dict[Index, Placement](), self._plan
        if plan is None or not plan.has(indices):
            indices = [check_index(argument) for argument in indices]
            plan = self._plans.get(tuple(indices))
        indices = indices if plan is None else plan.indices
        if plan is not None and not self._copies:
            at = plan.fit(indices, grads, weights)
            if at is not None:
                return Step(plan, grads, new, at)
        known = plan is not None and plan.is_for(indices, weights)
        quick = known and not self._copies
        grads = [
            grad if quick and _fits(grad, weight) else self._check(index, grad, weight)
            for index, grad, weight in zip(indices, grads, weights, strict=True)
        ]
        listed = {k: g.dtype.name for k, g in enumerate(grads) if isinstance(g, RowSparse)}
        if plan is None or not known or plan.listed != listed:
            check_apart(indices, weights, self.optimizer.idx2name)
            new = self._placed(indices, weights, listed)
            places, limit = self.placements | new, self.bucket_bytes
            shape = self.rank, self.ranks, limit
            wire = None if self.hierarchical else self.wire
            more = wire, self.overlap, self._depth
            plan = Plan(indices, weights, places, *shape, listed, *more)
            for index in new.keys() & self.uncut.keys():
                self._cut(index, new[index])  # raises if it does not match
        values = [g.values if isinstance(g, RowSparse) else np.asarray(g) for g in grads]
        if shared := plan.shared(values):
            one, other = (self._label(indices[k]) for k in shared)
            raise ValueError(f"{one}: gradient shares memory with the weight of {other}")
        return Step(plan, [g if k in listed else flat(g) for k, g in enumerate(grads)], new)

    def _check(self, index: Index, grad: Gradient, weight: Array) -> Any:
        """Return the checked gradient; raise TypeError or ValueError for an invalid tensor."""
        context, copy = self._label(index), self._copies.get(index)
        check_numpy(context, "weight", weight)
        grad = check(context, weight, grad, copy)
        check_numpy(context, "gradient", grad.values if isinstance(grad, RowSparse) else grad)
        if isinstance(grad, RowSparse) and not self.optimizer.native:
            grad = self.optimizer.dense_gradient(index, weight, grad)
            grad = grad.to_dense() if isinstance(grad, RowSparse) else grad
        if copy is not None:
            check_copy(context, weight, copy)
        placement = self.placements.get(index)
        if placement and (placement.shape, placement.dtype) != (weight.shape, weight.dtype.name):
            raise ValueError(
                f"{context}: state is kept for shape {placement.shape} and {placement.dtype}, got "
                f"a weight of shape {weight.shape} and {weight.dtype}"
            )
        if isinstance(grad, RowSparse) and weight.ndim < 2 and self.shard.clip_adaptive is not None:
            raise TypeError(
                f"{context}: clip_adaptive needs a dense gradient of a weight of one dimension, "
                "which is one unit"
            )
        if placement and placement.form == "flat" and isinstance(grad, RowSparse):
            raise TypeError(
                f"{context}: the state was sharded by element, as the first gradient was dense; "
                "pass a row-sparse gradient first if later ones can be row-sparse"
            )
        return grad

    def _placed(
        self, indices: Sequence[Index], weights: Sequence[Array], listed: dict[int, str]
    ) -> dict[Index, Placement]:
        """Placements of the indices that do not have one yet."""
        new = (
            (index, weight.shape, weight.dtype.name, self._form(index, weight.shape, k in listed))
            for k, (index, weight) in enumerate(zip(indices, weights, strict=True))
            if index not in self.placements
        )
        return shards.placed(new, self.ranks)

    def _form(self, index: Index, shape: tuple[int, ...], listed: bool) -> Form:
        coded, clips = self._is_coded(index, shape), self.shard.clip_adaptive is not None
        if not self.optimizer.native or (len(shape) < 2 and (coded or clips)):
            return "whole"
        rule = self.shard.parameters.optimizer_of(index).rule_for(index)
        return "rows" if listed or coded or clips or (rule and rule.row) else "flat"

    def _facts(self, plan: Plan, new: dict[Index, Placement]) -> list[Fact]:
        """Facts about a call that all ranks must have in common, besides the optimizer."""
        if plan.facts is None:
            wire = self.wire and self.wire.name
            plan.facts = Facts(tensors=str(len(plan.indices)), bucket_bytes=str(self.bucket_bytes))
            plan.facts |= {"wire": str(wire), "overlap": str(self.overlap)}
            for k, (index, placement) in enumerate(zip(plan.indices, plan.placements, strict=True)):
                listed = plan.listed.get(k)
                rows = f", with a row-sparse gradient of {listed}" if listed else ""
                tensor = f"{self._label(index)} of shape {placement.shape} and {placement.dtype}"
                plan.facts[f"tensor {k}"] = tensor + rows
        facts: list[Fact] = [plan.facts, self._values(plan, new)]
        if self._unchecked:
            facts.append(Facts(self._unchecked))
        if not self.optimizer.native:
            facts.append(self._fingerprints[0].rates(plan.indices))
        return facts

    def _values(self, plan: Plan, new: dict[Index, Placement]) -> Numbers:
        """Checksums of new and loaded weights, and of a fraction of the other weights."""
        unsure = new.keys() | self._unsure
        indices = enumerate(plan.indices if unsure else ())
        spans = plan.whole([k for k, index in indices if index in unsure])
        windows = plan.windows(self.check_every) if self.check_every else []
        if windows:
            turn = self._turns.get(plan.indices[0], 0)
            spans = np.concatenate([spans, windows[turn % len(windows)]])
        sums = plan.checksums(spans)

        def in_words() -> dict[str, str]:
            return {
                f"checksum of values {first} to {last} of {self._label(plan.indices[k])}, which "
                "must be equal on all ranks (broadcast it from rank 0),": hex(number)
                for (k, first, last), number in zip(spans.tolist(), sums.tolist(), strict=True)
            }

        return Numbers([sums], in_words)

    def _keep(self, plan: Plan) -> None:
        """Keep the plan of a call; drop the plan of the oldest list if there are too many."""
        if self._plans.get(plan.key) is not plan:
            lists = [key for key in self._plans if len(key) > 1 and key != plan.key]
            if len(lists) >= LISTS:
                del self._plans[lists[0]]
            self._plans[plan.key] = plan
        if plan is not self._plan:
            self._latest.update(zip(plan.indices, plan.weights, strict=True))
        self._plan = self._last = plan

    # Weights between updates: files, averages, masters and copies

    def save(self, path: PathLike, weights: Any = None) -> None:
        """Write a checkpoint from which a later run can continue; all ranks must call it.

        Each rank writes its own shard next to `path`. The index file `path`, which lists the
        shards, is written last and replaces an older one, whose shards are then removed. A crash at
        any moment leaves either the old checkpoint or the new one; a failed save leaves the old
        one. See :meth:`load`.

        Parameters
        ----------
        path : str or os.PathLike
            A safetensors file in a directory that all ranks share, the same on all ranks.
        weights : nested arrays, or mapping of index to numpy.ndarray, optional
            Weights to save together with the states, so that they belong to the same step. They
            must have been updated by this updater, or belong to a frozen group. Each rank writes
            its slices; all ranks must pass the same indices, and equal frozen weights.

        Raises
        ------
        TypeError
            See :meth:`Updater.save <fastopt.optimizer.Updater.save>`.
        ValueError
            A weight was not updated yet and is not frozen, or has another shape or dtype, or ranks
            disagree.
        OSError
            A file cannot be written on some rank, or rank 0 does not see the files of other ranks.
            All ranks raise the error; the old checkpoint is unchanged, unless only the directory
            could not be synced: then `path` is the new one, and the files of both are kept.

        Examples
        --------
        >>> import tempfile
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from fastopt import optimizer
        >>> from fastopt.mpi import ShardedUpdater
        >>> old, new = (ShardedUpdater(optimizer.Adam(), MPI.COMM_WORLD) for _ in range(2))
        >>> weight, other = np.ones(2), np.zeros(2)
        >>> old(0, np.ones(2), weight)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     old.save(f"{folder}/adam.safetensors", {0: weight})
        ...     new.load(f"{folder}/adam.safetensors", weights={0: other})
        Skipped(nothing)
        >>> other
        array([0.999, 0.999])
        """
        frozen = dict[Index, Placement]()

        def slices() -> dict[Index, Array]:
            self._check_complete()
            chosen = weights_by_index(weights)
            frozen.update(self._placed_frozen(chosen))
            for index in chosen.keys() - frozen.keys():
                self._check_like(index, chosen[index], written=False)
            return Slices(self, chosen, placements=frozen).own

        def compared() -> dict[str, str]:
            arrays = weights_by_index(weights)
            return {
                f"frozen weight of {self._label(i)}": f"{place.dtype} of shape {place.shape} with "
                f"checksum {agreement.checksum(arrays[i]):#x}"
                for i, place in frozen.items()
            }

        self._save(path, slices, frozen, compared)

    def _placed_frozen(self, weights: Mapping[Index, Array]) -> dict[Index, Placement]:
        """Return placements of frozen weights that have none, as no update has sharded them.

        They are those of one file: a later update may need another form.
        """
        flat_form: Form = "flat"
        new = []
        for index in sorted(weights.keys() - self.placements.keys(), key=repr):
            if self.shard._is_frozen(index):
                array, context = weights[index], self._label(index)
                check_numpy(context, "weight", array)
                kind, shape = array.dtype, array.shape
                check_like(context, "weight", array, (kind.name,), shape, written=False)
                if not can_hold(kind):
                    raise TypeError(f"{context}: weight cannot be saved with dtype {kind}")
                new.append((index, shape, kind.name, flat_form))
        return shards.placed(new, self.ranks)

    def load(self, path: PathLike, strict: bool = True, weights: Any = None) -> Skipped:
        """Restore a checkpoint written on any number of ranks; all ranks must call it.

        Checkpoints of :meth:`fastopt.optimizer.Updater.save` can be loaded too; each rank then
        keeps the whole state of a weight until its first update. Conversely,
        :meth:`fastopt.optimizer.Updater.load` reads sharded checkpoints. The first update after a
        load compares the weights between ranks.

        Parameters
        ----------
        path : str or os.PathLike
            File written by :meth:`save`.
        strict : bool
            Raise an error if the checkpoint lacks parameters of this updater, or if names are known
            and it has additional ones. Otherwise missing parameters start from scratch, and
            additional ones are ignored. Default True.
        weights : nested arrays, or mapping of index to numpy.ndarray, optional
            Arrays to which the weights of the checkpoint are written, with the same indices on all
            ranks; other weights of the file are left out. Default: its weights are not read.

        Returns
        -------
        fastopt.checkpoint.Skipped
            Names or indices of the parameters ``missing`` in the checkpoint, and of the ``extra``
            ones.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            On some rank, a file is missing, damaged, of another run, or cannot be read, or lacks
            one of `weights`. All ranks raise the error, and nothing changes.
        ValueError
            Ranks disagree, such as on the indices of `weights`.
        """
        chosen, parts = dict[Index, Array](), dict[Index, Array]()
        checked, error = agreement.attempt(weights_by_index, weights)
        chosen.update(checked or {})
        compared = {"path": os.fspath(path), "weights": listing_of(chosen)}

        def read() -> tuple[str, Saved]:
            if error is not None:
                raise error
            return self._read(path)

        def check(saved: Saved) -> None:
            parts.update((i, part) for i, part in saved.weights.items() if i in chosen)
            for index, array in chosen.items():
                context = self._label(index)
                placement = saved.frozen.get(index) or saved.placements.get(index)
                if index not in saved.weights or placement is None:
                    raise CheckpointError(f"{os.fspath(path)}: it has no weight of {context}")
                check_like(context, "weight", array, (placement.dtype,), placement.shape)

        with self.optimizer.call_lock:
            skipped = self._load("load", read, strict, compared, check)
            with self._updating(lambda: True):
                Slices(self, {index: chosen[index] for index in parts}, parts).gather()
        return skipped

    def _check_complete(self) -> None:
        """Raise ValueError if gradients wait for their update."""
        if self._windows is not None and self._windows.calls:
            raise ValueError(
                f"gradients of {len(self._windows.calls)} parameters wait for their update; "
                "save after the last call of accumulate, or after finish()"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the contents of a checkpoint of one process; all ranks must call it.

        Each rank receives the whole state, which needs memory for two copies of it; :meth:`save`
        needs none. :meth:`load_state_dict` accepts it on any number of ranks, and
        :meth:`fastopt.optimizer.Updater.load_state_dict` in one process.

        Returns
        -------
        dict
            States with the shapes of the whole weights, update counts, hyper-parameters, averages
            and loss scale; equal on all ranks.

        Raises
        ------
        TypeError, ValueError
            See :meth:`save`. All ranks raise the error.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> from fastopt.distributed import ShardedUpdater, run_threads
        >>> def program(comm):
        ...     updater = ShardedUpdater(optimizer.SGD(learning_rate=0.1, momentum=0.9), comm)
        ...     updater("w", np.ones((2, 2)), np.zeros((2, 2)))
        ...     return updater.states["w"], updater.state_dict()["states"]["w"]
        >>> own, whole = run_threads(2, program)[1]
        >>> own, whole.shape
        (array([-0.2, -0.2]), (2, 2))
        """

        def contents() -> tuple[bytes, Any]:
            self._check_complete()
            shard, index = self._contents({}, NOTHING)
            return dumps(shard), index

        def gathered(described: tuple[bytes, Any]) -> dict[str, Any]:
            shard_bytes, index = np.frombuffer(described[0], np.uint8), described[1]
            (data,), (sizes,) = agreement.gathered_together(self._ranks, [shard_bytes])
            parts = np.split(data, np.cumsum(sizes)[:-1])
            index = {"run": "0" * 16, "ranks": self.ranks, **copied(index)}
            read = lambda rank: loads(parts[rank].tobytes(), self.optimizer)  # noqa: E731
            tree: dict[str, Any] = shards.merged(self.optimizer, index, read)
            return tree

        with self.optimizer.call_lock:
            return self._together("state_dict", gathered, contents)

    def load_state_dict(self, states: Mapping[str, Any], strict: bool = True) -> Skipped:
        """Restore the result of :meth:`state_dict`; all ranks must call it with equal contents.

        Parameters
        ----------
        states : dict
            Result of :meth:`state_dict`, or of :meth:`fastopt.optimizer.Updater.state_dict`.
        strict : bool
            See :meth:`load`, also for the result.

        Raises
        ------
        fastopt.checkpoint.CheckpointError
            It does not match the updater. All ranks raise the error, and nothing changes.
        ValueError
            Ranks disagree.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import Adam, Updater
        >>> from fastopt.distributed import ShardedUpdater, run_threads
        >>> one, weight = Updater(Adam()), np.zeros(4)
        >>> one("w", np.ones(4), weight)
        >>> def program(comm):
        ...     updater, own = ShardedUpdater(Adam(), comm), weight.copy()
        ...     skipped = updater.load_state_dict(one.state_dict())
        ...     updater("w", np.full(4, 1 / comm.size), own)
        ...     return own, updater.optimizer.num_update
        >>> run_threads(2, program)[0]
        (array([-0.002, -0.002, -0.002, -0.002]), 2)
        """
        return self._load("load_state_dict", lambda: _as_read(states), strict)

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return the whole states as safetensors bytes; all ranks must call it.

        Parameters
        ----------
        dump_optimizer : bool
            See :meth:`Updater.get_states <fastopt.optimizer.Updater.get_states>`.

        Returns
        -------
        bytes
            Argument for :meth:`set_states`, also that of an :class:`~fastopt.optimizer.Updater`;
            equal on all ranks.

        Raises
        ------
        TypeError, ValueError
            See :meth:`state_dict`; or `dump_optimizer` is not a bool. All ranks raise the error.
        """
        with self.optimizer.call_lock:
            dumps_optimizer = self._together(
                "get_states",
                lambda checked: checked,
                lambda: flag("dump_optimizer", dump_optimizer),
                lambda checked: {"dump_optimizer": str(checked)},
            )
        return self._whole().get_states(dumps_optimizer)

    def set_states(self, states: bytes) -> None:
        """Replace the states by those from :meth:`get_states`; all ranks must call it.

        Parameters
        ----------
        states : bytes
            Result of :meth:`get_states`, also of that of an
            :class:`~fastopt.optimizer.Updater`, equal on all ranks. The parameters are those of
            this updater, unless it has made no update, and the optimizer has the same class.

        Raises
        ------
        fastopt.checkpoint.CheckpointError
            The bytes are damaged, cannot be read, or do not match. All ranks raise the error, and
            nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> from fastopt.distributed import ShardedUpdater, run_threads
        >>> def program(comm):
        ...     old, new = (ShardedUpdater(optimizer.Adam(), comm) for _ in range(2))
        ...     old(0, np.ones(2), np.ones(2))
        ...     new.set_states(old.get_states(dump_optimizer=True))
        ...     return new.get_states() == old.get_states(), new.optimizer.num_update
        >>> run_threads(2, program)[0]
        (True, 1)
        """
        whole = self._whole()

        def read() -> tuple[str, Saved]:
            whole.set_states(states)
            return _as_read(whole.state_dict())

        self._load("set_states", read, strict=True)

    def _whole(self) -> Updater:
        """Return an updater of one process with the whole state; collective."""
        tree, whole = self.state_dict(), deepcopy(self.shard)
        whole.states = {}
        whole.load_state_dict(tree)
        return whole

    def reset(self) -> None:
        """Start again, as with a new updater; all ranks must call it.

        See :meth:`fastopt.optimizer.Updater.reset`. Tensors stay on the ranks that have them.
        Gradients that were passed to :meth:`begin` are discarded.

        Raises
        ------
        RuntimeError
            The call comes from inside an update, or the weights hold their averages.

        Examples
        --------
        >>> import numpy as np
        >>> from fastopt import optimizer
        >>> from fastopt.distributed import ShardedUpdater, run_threads
        >>> def program(comm):
        ...     updater, ends = ShardedUpdater(optimizer.Adam(learning_rate=0.1), comm), []
        ...     for episode in range(2):
        ...         updater.reset()
        ...         weight = np.zeros(2)
        ...         updater(0, np.array([1.0, -2.0]), weight)
        ...         ends.append(weight.round(6))
        ...     return ends, updater.optimizer.num_update
        >>> run_threads(2, program)[0]
        ([array([-0.1,  0.1]), array([-0.1,  0.1])], 1)
        """

        def restart(_: object) -> None:
            self._discard()
            self.shard._reset()
            self.uncut.clear()
            if self._windows is not None:
                self._windows.clear()

        with between_updates(self.optimizer.call_lock, "reset()"):
            self._together("reset", restart, self._check_free)

    def _restore_rest(self, saved: Saved) -> None:
        super()._restore_rest(saved)
        if self._windows is not None:
            self._windows.clear()
        self._plan = None
        self._plans.clear()
        self._unsure.update(self.placements)

    def flush(self, index: Any = None, weight: Any = None) -> None:
        """Apply deferred weight decay to all rows of a weight, or of all; all ranks must call it.

        See :meth:`fastopt.optimizer.Updater.flush`.

        Parameters
        ----------
        index : int, str or bytes, or a list of them, optional
            The parameters. Default: all.
        weight : numpy.ndarray, list of them, or nested weights, optional
            Their weights. Default: those of the last calls.

        Raises
        ------
        ValueError
            The parameter was never updated, or `weight` is missing and was not in the last call.
        """
        with self.optimizer.call_lock:
            self._together(
                "flush",
                self._flush,
                lambda: self._known(index, weight),
                lambda slices: {"indices": repr([*slices.own])},
            )

    def _flush(self, slices: Slices) -> None:
        """Apply deferred decay to this rank's slices of weights, and gather the weights."""
        for index, part in slices.own.items():
            self.shard._flush(index, part)
        slices.gather()

    def _known(self, index: Any, weight: Any) -> Slices:
        """Return the slices of this rank of parameters that have been updated, or of all."""
        self._check_free()
        weights = dict[Index, Any]()
        for known, array in selected("flush", index, weight, self.placements).items():
            weights[known] = self._latest.get(known) if array is None else array
            if weights[known] is None or known not in self.placements:
                raise ValueError(
                    f"{self._label(known)}: flush needs the weight, and an update before it"
                )
            self._check(known, np.zeros_like(weights[known]), weights[known])
        return Slices(self, weights)

    # Averages of the weights

    @property
    def averages(self) -> dict[Index, Array]:
        """Average of this rank's slice of each parameter; see :attr:`Updater.averages`."""
        return self.shard.averages

    @contextmanager
    def averaged(self, weights: Any = None) -> Iterator[None]:
        """Context in which all ranks have the averages in their weights; all ranks must enter it.

        See :meth:`fastopt.optimizer.Updater.averaged`. Each rank restores its weights on exit
        without waiting for others. :meth:`save` inside the context writes the averages as weights,
        and also the replaced values; after loading such a file call :meth:`restore_weights`.

        Parameters
        ----------
        weights : nested arrays, or mapping of index to numpy.ndarray, optional
            Weights that this updater has not updated yet, for example after a load. Default: the
            last updated weight of each index.

        Raises
        ------
        RuntimeError
            Neither the updater nor the optimizer has averages, or the weights already hold them.
        TypeError, ValueError
            An index has no known weight, a weight does not match, or ranks disagree.

        Examples
        --------
        >>> import numpy as np
        >>> import fastopt
        >>> from mpi4py import MPI
        >>> from fastopt.mpi import ShardedUpdater
        >>> sgd, ema = fastopt.SGD(learning_rate=1.0), fastopt.EMA(decay=0.5)
        >>> updater = ShardedUpdater(sgd, MPI.COMM_WORLD, average=ema)
        >>> weight = np.zeros(1)
        >>> updater(0, np.array([-1.0]) / MPI.COMM_WORLD.size, weight)
        >>> with updater.averaged():
        ...     print(weight)
        [0.5]
        >>> weight
        array([1.])
        """
        with between_updates(self.optimizer.call_lock, "averaged()"):
            pass
        with ExitStack() as stack:
            self._together(
                "averaged",
                lambda slices: stack.enter_context(slices.averaged(self.shard)),
                lambda: self._evaluated(weights),
                lambda slices: {"weights": listing_of(slices.weights)},
            )
            yield

    def _evaluated(self, weights: Any) -> Slices:
        """Return this rank's slices of the weights that :meth:`averaged` replaces."""
        shard = self.shard
        if not evaluates(shard):
            averages_of(shard)
        self._check_free()
        latest = {i: array for i, array in self._latest.items() if i in self.placements}
        passed = weights_by_index(weights)
        check_fit(passed, self.placements, shard)
        chosen = {**latest, **passed}
        needed = [index for index in self.placements if not shard._is_frozen(index)]
        for index in needed:
            if index not in chosen:
                raise ValueError(
                    f"{self._label(index)}: its weight was not updated yet by this updater; pass "
                    "it in weights, nested as in step, or as {index: array}"
                )
            self._check_like(index, chosen[index])
        return Slices(self, {index: chosen[index] for index in needed})

    def restore_weights(self, weights: Any) -> None:
        """Restore weights after loading a checkpoint that was saved inside :meth:`averaged`.

        All ranks must call it. See :meth:`fastopt.optimizer.Updater.restore_weights`.

        Parameters
        ----------
        weights : nested arrays, or mapping of index to numpy.ndarray
            The weights, which are overwritten, with the same indices on all ranks.

        Raises
        ------
        RuntimeError
            No state that was saved inside :meth:`averaged` has been loaded.
        TypeError, ValueError
            A weight is missing or does not match, or ranks disagree. Nothing changes.
        """

        def check() -> Slices:
            original, chosen = held(self.shard), weights_by_index(weights)
            for index in original.keys() - chosen.keys():
                raise ValueError(f"{self._label(index)}: pass its weight in weights, as in step")
            for index in self._placed_frozen(chosen):
                del chosen[index]
            for index, weight in chosen.items():
                self._check_like(index, weight)
            return Slices(self, chosen)

        def restore(slices: Slices) -> None:
            self.shard.restore_weights(slices.own)
            slices.gather()

        with self.optimizer.call_lock:
            self._together(
                "restore_weights",
                restore,
                check,
                lambda slices: {"weights": listing_of(slices.weights)},
            )

    def _check_free(self) -> None:
        """Raise RuntimeError while the weights hold their averages."""
        if self.shard._averages is not None:
            self.shard._averages.check_free()

    def _check_like(self, index: Index, array: Array, written: bool = True) -> None:
        """Raise an error unless a weight was updated and still has its shape and dtype."""
        context, placement = self._label(index), self.placements.get(index)
        if placement is None:
            raise ValueError(
                f"{context}: its weight was not updated yet; call the updater with it before"
            )
        check_like(context, "weight", array, (placement.dtype,), placement.shape, written=written)

    # Masters and copies

    def set_master(self, index: Index | bytes, array: Array) -> None:
        """Set the float32 master of a half-precision weight; call it on all ranks.

        See :meth:`fastopt.optimizer.Updater.set_master`.

        Parameters
        ----------
        index : int, str or bytes
            Index of the parameter. The optimizer must have ``multi_precision=True``.
        array : numpy.ndarray
            Exact values of the whole weight, float32, equal on all ranks; they are copied. The next
            update or save compares them between ranks.

        Raises
        ------
        TypeError, ValueError
            The optimizer keeps no masters, or the array does not match. Nothing changes.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from fastopt import optimizer
        >>> from fastopt.mpi import ShardedUpdater
        >>> sgd = optimizer.SGD(learning_rate=1.0, multi_precision=True)
        >>> updater, exact = ShardedUpdater(sgd, MPI.COMM_WORLD), np.full(2, 0.1, np.float32)
        >>> updater.set_master(0, exact)
        >>> updater(0, np.zeros(2, np.float16), exact.astype(np.float16))
        >>> updater.states[0][1]
        array([0.1, 0.1], dtype=float32)
        """
        index = check_index(index)
        context, placement = self._label(index), self.placements.get(index)
        check_like(context, "master", array, ("float32",), np.shape(array), written=False)
        if placement is None or index not in self.states:
            if not self.shard.parameters.optimizer_of(index).multi_precision:
                raise ValueError(
                    f"{context}: a master needs an optimizer with multi_precision=True"
                )
            self._masters[index] = array.copy()
        elif array.shape != placement.shape:
            raise ValueError(
                f"{context}: master must have shape {placement.shape}, got {array.shape}"
            )
        else:
            self.shard.set_master(index, placement.slice_of(flat(array), self.rank))
        self._unchecked[f"checksum of the master of {context}"] = f"{agreement.checksum(array):#x}"

    def set_copy(self, index: Index | bytes, array: Array | None) -> None:
        """Set a half-precision copy of a float32 weight that each update on this rank writes too.

        See :meth:`fastopt.optimizer.Updater.set_copy`.

        Parameters
        ----------
        index : int, str or bytes
            Index of the parameter.
        array : numpy.ndarray or None
            The copy, float16 or bfloat16, in the weight's shape. None removes it.

        Raises
        ------
        TypeError, ValueError
            `array` has another type or dtype, or is read-only; or, at the next update, its shape is
            not that of the weight.
        """
        index = check_index(index)
        if array is None:
            self._copies.pop(index, None)
            return
        check_like(self._label(index), "copy", array, HALVES, np.shape(array))
        self._copies[index] = array


def compile_common() -> None:
    """Compile what the calls of all updaters need."""
    addresses([]), agreement.copier(), agreement.copier(False), comparer(), agreement.summer()
    compile_stages()


def _as_read(states: Mapping[str, Any]) -> tuple[str, Saved]:
    """Return a copy of a checkpoint of one process, with a digest; see ``read_saved()``."""
    tree = copied(states)
    header = next(iter(chunks(tree)))  # it has checksums of all arrays
    return hashlib.blake2b(header, digest_size=8).hexdigest(), shards.of_one(tree)


def _batches(arrays: Mapping[Index, Array], limit: int) -> Iterator[list[Index]]:
    """Indices of arrays in order, in groups of at least `limit` bytes."""
    group: list[Index] = []
    for index in arrays:
        group.append(index)
        if sum(arrays[member].nbytes for member in group) >= limit:
            yield group
            group = []
    if group:
        yield group


def check_numpy(context: str, role: str, array: object) -> None:
    """Raise TypeError for arrays of other libraries, such as those on CUDA devices."""
    if not isinstance(array, (np.ndarray, np.generic)):
        where = "in a sharded updater, which sums and sends memory of the host"
        kind = type(array).__name__
        raise TypeError(f"{context}: {role} must be a NumPy array {where}, got {kind}")


def _fits(grad: object, weight: Array) -> bool:
    """Whether a gradient certainly matches a known weight."""
    return type(grad) is np.ndarray and grad.dtype is weight.dtype and grad.shape == weight.shape


def check_apart(indices: Sequence[Index], weights: Sequence[Array], names: dict[Any, str]) -> None:
    """Raise ValueError if an index is repeated or two weights share memory."""
    if (twice := repeated(indices)) is not None:
        raise ValueError(f"{label(twice, names)} is in the list twice")
    for k, other in Ranges(*bounds(weights)).overlapping():
        if np.shares_memory(weights[k], weights[other]):
            raise ValueError(f"{label(indices[other], names)} shares memory with {indices[k]!r}")
