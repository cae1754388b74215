"""Sharded updater: data-parallel training with one copy of the state, split over all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from fastopt._engine.averaging import Averages
from fastopt._engine.clip import UNCHANGED
from fastopt._engine.mixed_precision import round_into
from fastopt._engine.overlap import Addresses, addresses
from fastopt._engine.validate import as_lists, check_index, label
from fastopt._kernels.layout import bfloat16
from fastopt.amp import LossScaler
from fastopt.arguments import choice, count, flag
from fastopt.averages import Average, Lookahead
from fastopt.checkpoint.restore.placement import Placement, line_bytes
from fastopt.distributed.agreement import Numbers, agree, attempt, is_agreed
from fastopt.distributed.begun import Begun
from fastopt.distributed.checksum import summer
from fastopt.distributed.exchange import Exchange
from fastopt.distributed.gate import Stopped
from fastopt.distributed.guards import comparer
from fastopt.distributed.job import Lease, Node, leader_first, private
from fastopt.distributed.listed import Listed
from fastopt.distributed.packing import copier
from fastopt.distributed.plan import Plan, flat
from fastopt.distributed.planning import check_apart
from fastopt.distributed.ranks import refuse_forked
from fastopt.distributed.sharded import Shard
from fastopt.distributed.stages import LOCAL, compile_stages
from fastopt.distributed.transport import Direct, Layered, Transport
from fastopt.distributed.weights import WeightKeeper
from fastopt.optimizer import Optimizer
from fastopt.optimizer.accumulation import Entry, Windows, incomplete
from fastopt.optimizer.optimizer import Array, Index
from fastopt.sparse import HALVES, RowSparse

Found = tuple[Plan, list[Any], dict[Index, Placement]]


class Nested(NamedTuple):
    """Arguments of a step with nested weights, in place of indices: errors in them are agreed."""

    grads: Any
    weights: Any
    missing: str


CHECK_EVERY = 100
"""Default of `check_every`."""


class ShardedUpdater(WeightKeeper):
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
    the order of their first ranks. If a node has a single rank, or another number of ranks than
    others, or cannot share memory between them, which takes Linux, all gradients are summed in rank
    order; so are those of a single node, those of row-sparse gradients, and all without
    `hierarchical`. The bits depend neither on the MPI library nor on the buckets.

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
        Bytes of gradients in a bucket. Default 4 MiB, or 256 KiB per rank if that is more, and at
        most 1 GiB.
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
        comm: Any,
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
        calls = count("accumulate", accumulate)
        if calls > 1 and overlap:
            raise ValueError("accumulate sends gradients once in several calls, without overlap")
        kind = None if wire is None else _half(choice("wire", wire, *HALVES))
        clips = clip_adaptive, clip_adaptive_eps
        super().__init__(
            Shard(optimizer, loss_scaler, clip_global_norm, groups, 1, average, *clips),
            comm,
            timeout,
            bucket_bytes=size,
            check_every=every,
            wire=wire,
            overlap=bool(overlap),
            accumulate=calls,
            clip_adaptive=clip_adaptive,
            clip_adaptive_eps=clip_adaptive_eps,
            hierarchical=layered,
        )
        self._windows = Windows(calls) if calls > 1 else None
        self.wire: Any = kind
        self.overlap = bool(overlap)
        self._direct, self._layered = self._transports(private(comm), layered)
        self.bucket_bytes = size or line_bytes(self.ranks)
        self.check_every = every
        self._plans: dict[tuple[Index, ...], Plan] = {}
        self._plan: Plan | None = None
        self._given: Addresses | None = None
        """Addresses of the gradients of the current call, if they fit the plan as they are."""
        self._turns: dict[Index, int] = {}
        self._unsure: set[Index] = set()
        self._copies: dict[Index, Array] = {}
        leader_first(self._node, self._compile_common)
        self.seconds: dict[str, float] = {}
        self._begun = Begun(self.optimizer.idx2name)
        self._last: Plan | None = None
        self._latest: dict[Index, Array] = {}
        """Weight of the last update of each parameter."""

    def _transports(self, node: Node, layered: bool) -> tuple[Direct, Layered | None]:
        """Create the transports of buckets between the ranks; collective."""
        layers = node.layers if layered else None
        self.hierarchical = layers is not None
        self._lease: Lease | None = None
        several = layers is not None and layers.count > 1
        comm = node_comm = None
        if self.overlap or several:
            self._lease = node.lease(self)
            comm, node_comm = self._lease.comm, self._lease.node_comm
        direct = Direct(node.ranks, comm)
        if layers is None or (self.overlap and not several):
            return direct, None
        return direct, Layered(node.ranks, layers, comm, node_comm, self.wire, self.overlap)

    def _choose(self, plan: Plan) -> Transport:
        """Choose the transport of the buckets of a call, once the ranks have agreed on it.

        Within one node, arrays that are contiguous in memory are not copied to its shared memory:
        the sums have the same bits.
        """
        layered = self._layered
        if layered is not None and (layered.layers.count > 1 or self.shard.gate.apart):
            try:
                layered.reserve(plan)
                return layered
            except OSError as error:  # on all ranks of the node
                if layered.layers.count > 1 or isinstance(error, TimeoutError):
                    raise
                self._layered = None
        self._direct.reserve(plan)
        return self._direct

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
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

    def _call_all(self, index: Any, grad: Any, weight: Any, active: bool = True) -> bool:
        """Update or accumulate; return False if no rank has work of its own."""
        if self._windows is None:
            return self._update(index, grad, weight, active)
        return self._accumulate(self._windows, index, grad, weight, active)

    def _unfrozen(self, index: Any, grad: Any, weight: Any) -> tuple[Any, Any, Any]:
        """Return the arguments of a call without the parameters of frozen groups."""
        self._check_free()
        if isinstance(index, Nested):
            index, grad, weight = self.shard._leaves(*index)
        groups = self.shard.parameters.groups
        if groups is None or not groups.freezes:
            return index, grad, weight
        single = not isinstance(index, (list, tuple))
        lists = ([index], [grad], [weight]) if single else as_lists(index, grad, weight)
        taken = groups.select([check_index(each) for each in lists[0]])
        return (index, grad, weight) if taken is None else tuple(map(taken, lists))

    def _accumulate(
        self, windows: Windows, index: Any, grad: Any, weight: Any, active: bool
    ) -> bool:
        """Add the gradients of this rank to its sums, and update with them in the last call."""
        self._begin("accumulate")
        found, error = attempt(self._entries, windows, index, grad, weight, active)
        entries, single = cast(tuple[list[Entry], bool], found or ([], False))
        indices = [each[0] for each in entries]
        before, after = windows.before(indices), windows.after(indices)
        gate = self._gate(lambda: [self._window_facts(windows, indices)], active)
        try:
            if error is None:
                _, error = attempt(windows.add, entries, self.optimizer.idx2name, single)
            gate.enter(error)
            if indices and indices[0] not in after:
                sums = [_times(windows.sums[each], 1 / windows.every) for each in indices]
                self._update(indices, sums, [each[1] for each in entries])
            else:
                vars(self.shard)["_info"] = UNCHANGED  # a loss scaler counts updates alone
        except BaseException as problem:
            windows.put_back(before)
            if not isinstance(problem, Stopped):
                raise
            if problem.error is None:
                return False
            raise problem.error from None
        windows.finish(indices, after)
        self._latest.update((each[0], each[1]) for each in entries)
        return True

    def finish(self, index: Any = None, weight: Any = None) -> None:
        """Update with the gradients that `accumulate` has added so far; all ranks must call it.

        See :meth:`fastopt.optimizer.Updater.finish`.

        Parameters
        ----------
        index : int, str or bytes, or a list of them, optional
            The parameters, the same on all ranks; those without waiting gradients are left out.
            Default: all.
        weight : numpy.ndarray or list of arrays, optional
            Their weights. Default: those of the last calls.

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
            found, error = attempt(self._incomplete, index, weight)
            entries: list[Entry] = found or []
            indices, windows = [each[0] for each in entries], self._windows
            gate = self._gate(lambda: [self._window_facts(windows, indices)])
            try:
                gate.enter(error)
            except Stopped as stopped:
                error = stopped.error
            if error is not None:
                raise error
            if windows is None or not entries:
                vars(self.shard)["_info"] = UNCHANGED
                return
            self._update(indices, [each[2] for each in entries], [each[1] for each in entries])
            windows.finish(indices, windows.without(indices))

    def _incomplete(self, index: Any, weight: Any) -> list[Entry]:
        """Return the tensors of :meth:`finish`, with the means of their gradients."""
        self._check_free()
        windows, entries = self._windows, []
        for each, given in incomplete(windows, index, weight).items():
            if windows is not None and not self.shard._is_frozen(each):
                mean = _times(windows.sums[each], 1 / windows.calls[each])
                entries.append((each, self._latest[each] if given is None else given, mean))
        return entries

    def _window_facts(self, windows: Windows | None, indices: Sequence[Index]) -> Numbers:
        """Return the parameters of a call that accumulates, and their calls since an update."""
        calls = [windows.calls.get(each, 0) if windows else 0 for each in indices]

        def in_words() -> dict[str, str]:
            names = self.optimizer.idx2name
            return {
                f"tensor {k}": f"{label(index, names)} after {count} calls"
                for k, (index, count) in enumerate(zip(indices, calls, strict=True))
            }

        return Numbers([np.frombuffer(f"{indices}{calls}".encode(), np.uint8)], in_words)

    def _entries(
        self, windows: Windows, index: Any, grad: Any, weight: Any, active: bool
    ) -> tuple[list[Entry], bool]:
        """Return the checked tensors of a call that accumulates, and whether it is one tensor."""
        if index is None and not active:
            raise ValueError("join() ends here, before the first update")
        index, grad, weight = self._unfrozen(index, grad, weight)
        single = not isinstance(index, (list, tuple))
        lists = ([index], [grad], [weight]) if single else as_lists(index, grad, weight)
        indices, weights = [check_index(each) for each in lists[0]], lists[2]
        grads = [self._check(i, g, w) for i, g, w in zip(indices, lists[1], weights, strict=True)]
        check_apart(indices, weights, self.optimizer.idx2name)
        if len({windows.is_last(each) for each in indices}) > 1:
            raise ValueError("accumulate takes lists of parameters that had equal numbers of calls")
        return list(zip(indices, weights, grads, strict=True)), single

    def begin(self, index: Any, grad: Any, release: bool = False) -> None:
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
            context, place = label(index, self.optimizer.idx2name), plan.places.get(index)
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
        exchange, self._begun = self._begun.exchange, Begun(self.optimizer.idx2name)
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
            if not is_agreed(error):
                self._ranks.fail(f"left join() by {type(error).__name__}: {error}")
            raise
        with self.optimizer.call_lock:
            while self.ranks > 1 and self._shadow():
                pass

    def _shadow(self) -> bool:
        """Take part in a call of other ranks; return False if no rank makes one."""
        plan = self._plan
        if plan is None:
            return self._call_all(None, None, None, active=False)
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

    def _update(self, index: Any, grad: Any, weight: Any, active: bool = True) -> bool:
        """Update like :meth:`__call__`; return False if no rank has work of its own."""
        self._begin("update")
        if index is None and not active:
            error: Exception | None = ValueError("join() ends here, before the first update")
            found = None
        else:
            found, error = attempt(self._checked, index, grad, weight)
        plan, grads, new = cast(Found, found or (None, [], {}))
        apart = self._layered is not None and (plan is None or plan.is_apart(grads, self._given))
        gate = self._gate(lambda: self._facts(plan, new), active, apart)
        try:
            if error is not None or self._needs_early(plan, new):
                gate.enter(error)
            with self._updating(lambda: gate.passed):
                self._prepare(plan, new)
                exchange = self._begun.exchange or Exchange(self._ranks, plan, self._choose)
                exchange.enter(grads, self._given)
                self._begun.exchange = exchange
                rows = self._listed(plan, grads)
            self._exchange(exchange, plan, grads, new, rows)
            gate.enter()
        except Stopped as stopped:
            if stopped.error is None:
                return False
            error = stopped.error
        if error is not None:
            self._discard()
            raise error
        return True

    def _checked(self, index: Any, grad: Any, weight: Any) -> Found:
        """Plan of a call, with gradients and new placements, after all of it has been checked."""
        index, grad, weight = self._unfrozen(index, grad, weight)
        found = self._planned(index, self._begun.complete(index, grad, weight), weight)
        self._begun.check(found[0], grad)
        return found

    @staticmethod
    def _compile_common() -> None:
        """Compile what the calls of all updaters need."""
        addresses([]), copier(), copier(False), comparer(), summer()
        compile_stages()

    def _needs_early(self, plan: Plan, new: dict[Index, Placement]) -> bool:
        """Whether the ranks must agree before the update starts, not at its first operation."""
        optimizer = self.optimizer
        in_python = optimizer.batches is not None or not optimizer.native
        early = new or plan.listed or self._masters or in_python or not plan.indices
        return bool(early) or not self._fits(plan)

    def _fits(self, plan: Plan) -> bool:
        """Whether there is memory for the buckets of a plan, without which nodes cannot sum."""
        layered = self._layered
        return layered is None or layered.layers.count == 1 or layered.fits(plan)

    def _prepare(self, plan: Plan, new: dict[Index, Placement]) -> None:
        """Compile kernels, provide memory, and slice masters and states that are known whole."""
        optimizer = self.optimizer
        if not self._fits(plan):
            _, error = attempt(cast(Layered, self._layered).reserve, plan)
            self.shard.gate.again(error)
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

    def _listed(self, plan: Plan, grads: list[Any]) -> Listed | None:
        """Send row-sparse gradients to the owners of their rows."""
        if not plan.listed:
            return None
        places = [*plan.listed]
        return Listed(self._ranks, [plan.placements[k] for k in places], [grads[k] for k in places])

    def _exchange(
        self,
        exchange: Exchange,
        plan: Plan,
        given: list[Any],
        new: dict[Index, Placement],
        rows: Listed | None,
    ) -> None:
        """Sum gradients, update the slices of this rank, and gather the new weights."""
        optimizer, gate, problem = self.optimizer, self.shard.gate, None
        grads = plan.gradients(given, self._given is not None)
        if rows:
            for k, grad in zip(plan.listed, rows.grads, strict=True):
                grads[k] = grad
        before = None if optimizer.native else self._snapshot()
        self.shard.exchange = exchange
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
            self._begun = Begun(self.optimizer.idx2name)
            self._expect(False)
            self.placements.update(new)
            for index in new.keys() & self.uncut.keys():
                del self.uncut[index]
            if problem or self.info.stepped:
                exchange.finish()
                self._spread(plan, rows)
        if before is not None and self.ranks > 1:
            try:
                agree(self._ranks, (), problem)
            except BaseException:
                self._put_back(*before)
                raise
        elif problem is not None:
            raise problem
        for index in plan.indices[:1]:
            self._turns[index] = self._turns.get(index, 0) + 1
        self._unsure.difference_update(plan.indices)
        self._unchecked.clear()
        self.seconds, self.shard.exchange = exchange.seconds, LOCAL  # frees the gradients
        self._keep(plan)

    def _is_in_python(self, error: Exception) -> bool:
        """Whether an error comes from an ``update()`` in NumPy, after all sums over the ranks."""
        if self.optimizer.native or isinstance(error, Stopped) or self._ranks.broken:
            return False
        return self.shard.gate.added or not self.shard.settings.measures

    def _spread(self, plan: Plan, rows: Listed | None) -> None:
        """Send the rows that row-sparse gradients changed to all ranks, and update the copies."""
        if rows:
            weights, slices = (
                [each[k] for k in plan.listed] for each in (plan.weights, plan.slices)
            )
            rows.spread(weights, slices, [self._touches_all(plan.indices[k]) for k in plan.listed])
        self._follow(plan)

    def _touches_all(self, index: Index) -> bool:
        """Whether an update has changed rows that its gradient does not index."""
        optimizer, average = self.shard.of(index), self.shard.average
        rule = optimizer.rule_for(index)
        if isinstance(average, Lookahead):  # it resets all rows in some steps
            updates = optimizer._index_update_count[index] - optimizer.begin_num_update
            if average.rate(updates):
                return True
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

    @property
    def average(self) -> Average | None:
        """How weights are averaged."""
        return self.shard.average


def _times(grad: Any, factor: float) -> Any:
    """A gradient times a factor."""
    if isinstance(grad, RowSparse):
        return RowSparse(grad.values * grad.dtype.type(factor), grad.indices, grad.shape)
    return grad * grad.dtype.type(factor)


def _half(name: str) -> np.dtype[Any]:
    """Half-precision dtype with a name."""
    return np.dtype(np.float16) if name == "float16" else np.dtype(bfloat16())
