"""The sharded updater: data-parallel training with state that exists once over all ranks."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
from mpi4py import MPI

from fastopt.amp import LossScaler
from fastopt.arguments import choice, count
from fastopt.checkpoint.errors import CheckpointError
from fastopt.checkpoint.files import PathLike
from fastopt.checkpoint.parameters import Skipped
from fastopt.checkpoint.placement import Placement
from fastopt.checkpoint.shards import Saved
from fastopt.engine.mixed_precision import round_into
from fastopt.engine.validate import check_index, check_like, label
from fastopt.kernels.layout import bfloat16
from fastopt.mpi.agreement import Facts, agree, attempt
from fastopt.mpi.collectives import gathered
from fastopt.mpi.exchange import Exchange
from fastopt.mpi.gate import Stopped
from fastopt.mpi.job import private
from fastopt.mpi.listed import Listed
from fastopt.mpi.plan import Plan, flat
from fastopt.mpi.planning import Planning
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array, Index
from fastopt.sparse import HALVES, RowSparse

__all__ = ["ShardedUpdater"]

Found = tuple[Plan, list[Any], dict[Index, Placement]]

CHECK_EVERY = 100
"""Calls in which all weights are compared once, unless the user says otherwise."""


class ShardedUpdater(Planning):
    r"""Updater for data-parallel training on many processes, each of which keeps a share of state.

    All ranks have all weights, and gradients of their own part of a batch. In a call

    .. math::
        g &= \textstyle\sum_r g_r \\
        (w_r, s_r) &\leftarrow \mathrm{update}(w_r, g_{(r)}, s_r)

    the gradients of all ranks are summed in the order of the ranks, each rank updates its slices
    :math:`w_r` of the weights with its share :math:`s_r` of the state, and all ranks receive the
    new weights. Sums are those of the arithmetic: float32 for weights of half precision. Their bits
    depend neither on the MPI library nor on the buckets. To divide by a batch, `rescale_grad` of
    the optimizer is one over the number of examples on all ranks together.

    Tensors of one dtype are laid out in lines of about a bucket, each of which is cut into equal
    shares, one for each rank; GroupAdaGrad's are cut between rows, and an optimizer with an
    ``update()`` in NumPy has whole tensors, each on one rank. Gradients travel in buckets: while
    one is summed, another is packed and a third updated, unless all must be there first, as for the
    norms of LARS, LAMB and LANS, `clip_global_norm` or `loss_scaler`. Arrays of
    :func:`~fastopt.mpi.flat_like` need not be packed.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", SC 2020, arXiv:1910.02054, stage 1.

    Parameters
    ----------
    optimizer : Optimizer
        Decides how to update; the same on all ranks.
    comm : mpi4py.MPI.Comm
        The ranks; all of them make the updater, and call it, together.
    loss_scaler : fastopt.amp.LossScaler, optional
        See :class:`~fastopt.optimizer.Updater`; all ranks skip a step or none does.
    clip_global_norm : float, optional
        Largest norm of the gradients, which have been summed.
    bucket_bytes : int, optional
        Bytes of gradients in a bucket. Default 4 MiB, or 256 KiB for each rank if that is more,
        and 1 GiB at most.
    timeout : float, optional
        Seconds that a rank waits for others before it raises. Default: the environment variable
        ``FASTOPT_MPI_TIMEOUT``, or 1800.
    check_every : int
        Calls in which every weight is compared between ranks once: each call compares checksums of
        a share of the weights. 0 compares new and loaded weights only. Default 100.
    wire : {'float16', 'bfloat16'}, optional
        Round dense gradients to this dtype before they are sent, which halves their bytes; they are
        still summed in the precision of the arithmetic. float16 gradients beyond 65,504 become
        infinite, so that it needs a `loss_scaler`. Default: that of the arithmetic.
    overlap : bool
        Have :meth:`begin`, by which gradients are sent while others are still computed. It takes
        a communicator of the updater's own. Default False.

    Attributes
    ----------
    info : fastopt.amp.StepInfo
        What the last call did, the same on all ranks.
    states : dict
        State of this rank's slice of each parameter.
    seconds : dict
        Time that the last call spent on ``packing``, ``communication`` and ``update``.

    Raises
    ------
    TypeError, ValueError
        An argument is not what it must be.

    Examples
    --------
    On one rank; ``mpiexec -n 4`` shares the work among four.

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
    ) -> None:
        size = None if bucket_bytes is None else count("bucket_bytes", bucket_bytes)
        every = count("check_every", check_every, least=0)
        kind = None if wire is None else _half(choice("wire", wire, *HALVES))
        limits = loss_scaler, clip_global_norm, size, timeout, every
        super().__init__(optimizer, comm, *limits, kind, bool(overlap))
        self.seconds: dict[str, float] = {}
        self._gradient_comm: Any = private(comm).another() if overlap else None
        self._exchanging: Exchange | None = None
        self._begun: dict[int, Array] = {}
        self._last: Plan | None = None

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update weights with the sums of all ranks' gradients.

        Parameters
        ----------
        index : int, str or bytes, or a list of them
            The parameters, the same on all ranks.
        grad : numpy.ndarray, or a list of them
            Gradients of this rank; they are not changed. Those that list rows, in the forms that
            :class:`~fastopt.optimizer.Updater` takes, go to the ranks that have the rows' state:
            each rank sums the rows that it lists, and their owners add these sums in the order of
            the ranks. Rows of half precision are added by the owners alone, in float32.
        weight : numpy.ndarray, or a list of them
            The weights, equal on all ranks. Changed in place.

        Raises
        ------
        TypeError, ValueError
            The arguments do not fit together on some rank, or differ between ranks, or an index
            comes twice. All ranks raise it, and no weight, state or count changes.
        TimeoutError
            Other ranks did not come within `timeout`; the message names them.
        RuntimeError
            Another rank has ended or failed after the ranks had agreed; the message names it. After
            this and a TimeoutError the updater cannot be used any more.
        """
        with self.optimizer.lock:
            self._update(index, grad, weight)

    def begin(self, index: Any, grad: Any) -> None:
        """Begin to send the gradient of a parameter, while others are still computed.

        The update follows with a call of the updater, with the list of parameters of the call
        before and all gradients, these among them. Gradients are sent when those of all
        neighbours in the list are ready, the last parameters of the list first. Nothing waits, and
        no weight changes. Before the first call, and on one rank, there is nothing to send.

        Parameters
        ----------
        index : int, str or bytes
            The parameter, of the last call of the updater.
        grad : numpy.ndarray
            Its gradient, which must not be written to until the updater has been called. One that
            lists rows is sent by the call.

        Raises
        ------
        TypeError, ValueError
            The updater was made without `overlap`, the last call did not update the parameter,
            its gradient was given before, or does not fit. Only this rank raises it, and the call
            of the updater can follow.
        RuntimeError
            An earlier call has failed on some ranks while others were waiting.

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
            raise ValueError("begin() needs an updater that was made with overlap=True")
        with self.optimizer.lock:
            self._ranks.begin(f"begin() of updater {self._number}", self.timeout)
            index, plan = check_index(index), self._plan
            if plan is None:
                return
            words, place = label(index, self.optimizer.idx2name), plan.places.get(index)
            if place is None:
                raise ValueError(f"{words}: begin() takes the parameters of the last call")
            if place in self._begun:
                raise ValueError(f"{words}: begin() has a gradient of it already")
            checked = self._check(index, grad, plan.weights[place])
            if place not in plan.group_of or isinstance(checked, RowSparse):
                return
            self._begun[place] = grad
            if self._exchanging is None:
                self._exchanging = Exchange(self.shard.sums, plan, self._gradient_comm)
            self._exchanging.put(place, flat(checked))

    def _check_begun(self, plan: Plan, grads: Any) -> None:
        """Raise ValueError unless a call is the one that gradients were sent for."""
        if not self._begun:
            return
        if self._exchanging is None or plan is not self._exchanging.plan:
            raise ValueError(
                "begin() was called for the parameters of the last call, this call has others"
            )
        given = [*grads] if isinstance(grads, (list, tuple)) else [grads]
        for place, grad in self._begun.items():
            if not _is_same(grad, given[place]):
                words = label(plan.indices[place], self.optimizer.idx2name)
                raise ValueError(f"{words}: begin() had another gradient")

    def _discard(self) -> None:
        """Complete what any rank has begun to send for a call in which all have failed."""
        if self._ranks.broken:  # operations under way still use their memory
            return
        exchange, self._exchanging = self._exchanging, None
        self._begun = {}
        if self._gradient_comm is None or self.ranks == 1:
            return
        begun = np.array([exchange.begun if exchange else 0])
        self._ranks.wait(self._ranks.comm.Iallreduce(MPI.IN_PLACE, begun, MPI.MAX))
        if begun[0]:
            if exchange is None or not exchange.begun:
                plan = cast(Plan, self._last)
                exchange = Exchange(self.shard.sums, plan, self._gradient_comm)
            exchange.discard(int(begun[0]))

    @contextmanager
    def join(self) -> Iterator[None]:
        """Context for a loop of calls of which some ranks make fewer than others.

        A rank that leaves it takes part in the calls that others still make, with gradients that
        are zero, until all ranks have left it. All calls inside are of this updater, with the same
        list of parameters.

        Raises
        ------
        ValueError
            A rank that leaves has made no call yet, while others have more, or they call with other
            parameters. All ranks raise it.

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
        yield
        with self.optimizer.lock:
            while self.ranks > 1 and self._shadow():
                pass

    def _shadow(self) -> bool:
        """Take part in a call of others; False if there is none."""
        plan = self._plan
        if plan is None:
            return self._update(None, None, None, active=False)
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
        return self._update(plan.indices, grads, plan.weights, active=False)

    def _update(self, index: Any, grad: Any, weight: Any, active: bool = True) -> bool:
        """Update as :meth:`__call__` does; False if no rank has work of its own."""
        self._begin("update")
        if index is None and not active:
            error: Exception | None = ValueError("join() ends here, before the first update")
            found = None
        else:
            found, error = attempt(self._planned, index, grad, weight)
            if found is not None and self._begun:
                _, error = attempt(self._check_begun, found[0], grad)
        plan, grads, new = cast(Found, found or (None, [], {}))
        gate = self._gate(lambda: self._facts(plan, new), active)
        try:
            if error is not None or self._needs_early(plan, new):
                gate.enter(error)
            with self._updating(lambda: gate.passed):
                self._prepare(plan, new)
                exchange = self._exchanging or Exchange(self.shard.sums, plan, self._gradient_comm)
                exchange.grads = grads
                self._exchanging = exchange
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

    def _needs_early(self, plan: Plan, new: dict[Index, Placement]) -> bool:
        """Whether the ranks must agree before the updater begins, not at its first operation."""
        optimizer = self.optimizer
        in_python = optimizer.accumulates or not optimizer.native
        skips = optimizer.may_skip and optimizer.skips()
        early = new or plan.listed or self._masters or in_python or skips or not plan.indices
        return bool(early)

    def _prepare(self, plan: Plan, new: dict[Index, Placement]) -> None:
        """Compile what is new, and have slices of what was given or loaded as a whole."""
        optimizer = self.optimizer
        if new:
            self._compile(
                (i, plan.placements[k], plan.weights[k].dtype, k in plan.listed)
                for k, i in enumerate(plan.indices)
                if i in new
            )
        if plan is not self._plan:
            for index, placement in zip(plan.indices, plan.placements, strict=True):
                self.shard.planner.offsets[index] = placement.cut(self.rank)
        for index in self._masters.keys() & (self.placements | new).keys():
            optimizer.masters_given[index] = (self.placements | new)[index].slice_of(
                flat(self._masters[index]), self.rank
            )
        for index in new.keys() & self.uncut.keys():
            for name, value in self._cut(index, new[index]).items():
                if name == "states":
                    self.shard.states[index] = value
                    self.shard.states_synced[index] = False
                else:
                    vars(optimizer)[name][index] = value
        plan.refresh(self.rank)

    def _listed(self, plan: Plan, grads: list[Any]) -> Listed | None:
        """Rows that gradients list, where they belong."""
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
        """Update the slices of this rank, and all weights with those of the others."""
        optimizer, gate, problem = self.optimizer, self.shard.gate, None
        grads = plan.gradients(given)
        if rows:
            for k, grad in zip(plan.listed, rows.grads, strict=True):
                grads[k] = grad
        before = None if optimizer.native else self._snapshot()
        launching = self._launching(exchange.launch, exchange.receive)
        with self._updating(lambda: gate.launched), launching:
            if optimizer.accumulates or not optimizer.native:
                exchange.receive()  # it may launch kernels with gradients of its own
            try:
                self.shard(plan.indices, grads, plan.slices)
            except Exception as error:
                if not self._is_in_python(error):
                    raise
                problem = error  # of the user's code, on the rank that has the tensor
            gate.launched = True
            exchange.receive()
            self._exchanging, self._begun = None, {}
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
        self.seconds = exchange.seconds
        self._plan = self._last = plan

    def _is_in_python(self, error: Exception) -> bool:
        """Whether an error is of an ``update()`` in NumPy, which comes after all sums of ranks."""
        if self.optimizer.native or isinstance(error, Stopped) or self._ranks.broken:
            return False
        return self.shard.gate.added or not self.shard.planner.measures

    def _spread(self, plan: Plan, rows: Listed | None) -> None:
        """Give all ranks the rows of row-sparse gradients, and the copies their values."""
        if rows:
            weights, slices = (
                [each[k] for k in plan.listed] for each in (plan.weights, plan.slices)
            )
            rows.spread(weights, slices, [self._touches_all(plan.indices[k]) for k in plan.listed])
        self._follow(plan)

    def _touches_all(self, index: Index) -> bool:
        """Whether an update changes rows that its gradient does not list."""
        optimizer, rule = self.optimizer, self.optimizer.rule_for(index)
        lazy = optimizer.lazy_update or bool(rule and rule.row)
        return not lazy or optimizer.sparse_decay == "dense"

    def _follow(self, plan: Plan) -> None:
        """Round the copies of weights, and forget masters that have been taken over."""
        for index in self._masters.keys() & self.states.keys():
            del self._masters[index]
        for index in self._copies.keys() & set(plan.indices):
            round_into(self._copies[index], plan.weights[plan.indices.index(index)])

    def save(self, path: PathLike, weights: Mapping[Any, Array] | None = None) -> None:
        """Write all that a later run needs to go on; all ranks call. See :meth:`load`.

        Each rank writes a file of its own next to `path`; the file `path`, which lists them, comes
        last and takes the place of an older one, whose files are then removed. A job that ends at
        any moment leaves the old checkpoint or the new one; a save that fails leaves the old one.

        Parameters
        ----------
        path : str or os.PathLike
            A safetensors file in a directory that all ranks share, the same on all ranks.
        weights : mapping of index to numpy.ndarray, optional
            Weights that are saved too, so that they are of the same step as the states: those that
            this updater has updated. Each rank writes its slices.

        Raises
        ------
        TypeError
            See :meth:`Updater.save <fastopt.optimizer.Updater.save>`.
        ValueError
            A weight was not updated yet, or has another shape or dtype.
        OSError
            A file cannot be written on some rank, or rank 0 does not see the files of others. All
            ranks raise it; the old checkpoint is as it was.

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
        Skipped(missing=[], extra=[])
        >>> other
        array([0.999, 0.999])
        """

        def slices() -> dict[Index, Array]:
            chosen = {check_index(index): array for index, array in (weights or {}).items()}
            for index, array in chosen.items():
                self._check_saved(index, array)
            return {
                index: np.ascontiguousarray(self.placements[index].slice_of(flat(array), self.rank))
                for index, array in chosen.items()
            }

        self._save(path, slices)

    def load(
        self, path: PathLike, strict: bool = True, weights: Mapping[Any, Array] | None = None
    ) -> Skipped:
        """Take up what :meth:`save` wrote on any number of ranks; all ranks call.

        It also loads files of :meth:`fastopt.optimizer.Updater.save`, which loads those of ranks.
        Each rank keeps their states whole until the first update of a weight. Weights are compared
        between ranks in the first update after a load.

        Parameters
        ----------
        path : str or os.PathLike
            From :meth:`save`.
        strict : bool
            Refuse a checkpoint that lacks parameters of this updater or has others. Else those that
            it lacks begin anew, and the others are left out. Default True.
        weights : mapping of index to numpy.ndarray, optional
            Arrays to write the weights of the checkpoint to.

        Returns
        -------
        fastopt.checkpoint.Skipped
            Names or indices of the parameters ``missing`` in the checkpoint, and of the ``extra``
            ones.

        Raises
        ------
        fastopt.checkpoint.CheckpointError, OSError
            A file is missing, damaged, of another run, or cannot be read, on some rank, or lacks
            one of `weights`. All ranks raise it, and nothing changes.
        """
        chosen = dict(weights or {})
        slices: dict[Index, Array] = {}

        def check(saved: Saved) -> None:
            slices.update(saved.weights)
            for index, array in chosen.items():
                words = label(check_index(index), self.optimizer.idx2name)
                if index not in saved.weights or index not in saved.placements:
                    raise CheckpointError(f"{os.fspath(path)}: it has no weight of {words}")
                placement = saved.placements[index]
                check_like(words, "weight", array, (placement.dtype,), placement.shape)

        with self.optimizer.lock:
            skipped = self._load(path, strict, check)
            for index, array in chosen.items():
                elements, _ = gathered(self._ranks, slices[index].reshape(-1))
                array[...] = elements.reshape(array.shape)
        return skipped

    def _check_saved(self, index: Index, array: Any) -> None:
        """Raise unless a weight to save is one that has been updated."""
        words, placement = label(index, self.optimizer.idx2name), self.placements.get(index)
        if placement is None:
            raise ValueError(f"{words}: a weight is saved after its first update")
        check_like(words, "weight", array, (placement.dtype,), placement.shape, written=False)

    def _take_up(self, saved: Saved) -> None:
        super()._take_up(saved)
        self._plan = None
        self._unsure.update(self.placements)

    def flush(self, index: Any, weight: Array | None = None) -> None:
        """Give all rows the decay that they have missed; all ranks call.

        See :meth:`fastopt.optimizer.Updater.flush`.

        Parameters
        ----------
        index : int, str or bytes
            The parameter.
        weight : numpy.ndarray, optional
            Its weight. Default: the one of the last call.

        Raises
        ------
        ValueError
            No weight is given, and the last call did not update one.
        """
        with self.optimizer.lock:
            self._begin("flush")
            found, error = attempt(self._known, index, weight)
            self._agree(Facts(index=repr(found[0]) if found else ""), error)
            known, weight, own = found
            self.shard.flush(known, own)
            elements, _ = gathered(self._ranks, own.reshape(-1))
            weight[...] = elements.reshape(weight.shape)

    def _known(self, index: Any, weight: Array | None) -> tuple[Index, Array, Array]:
        """Index, weight and own slice of a parameter that has been updated."""
        index, plan = check_index(index), self._plan
        words = label(index, self.optimizer.idx2name)
        if weight is None and plan is not None and index in plan.indices:
            weight = plan.weights[plan.indices.index(index)]
        if weight is None or index not in self.placements:
            raise ValueError(f"{words}: flush needs the weight, and an update before it")
        self._check(index, np.zeros_like(weight), weight)
        own = self.placements[index].slice_of(flat(weight), self.rank)
        return index, weight, np.ascontiguousarray(own)

    # Masters and copies

    def set_master(self, index: Any, array: Array) -> None:
        """Give the float32 master of a half-precision weight its values, on all ranks.

        See :meth:`fastopt.optimizer.Updater.set_master`.

        Parameters
        ----------
        index : int, str or bytes
            The parameter, of an optimizer with ``multi_precision=True``.
        array : numpy.ndarray
            The exact values of the whole weight, float32, equal on all ranks; they are copied.

        Raises
        ------
        TypeError, ValueError
            The optimizer keeps no masters, or the array does not fit. Nothing changes.

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
        words, placement = label(index, self.optimizer.idx2name), self.placements.get(index)
        check_like(words, "master", array, ("float32",), np.shape(array), written=False)
        if placement is None or index not in self.states:
            if not self.optimizer.multi_precision:
                raise ValueError(f"{words}: a master needs an optimizer with multi_precision=True")
            self._masters[index] = array.copy()
            return
        if array.shape != placement.shape:
            raise ValueError(
                f"{words}: master must have shape {placement.shape}, got {array.shape}"
            )
        self.shard.set_master(index, placement.slice_of(flat(array), self.rank))

    def set_copy(self, index: Any, array: Array | None) -> None:
        """Keep a half-precision copy of a float32 weight on this rank: each update writes it too.

        See :meth:`fastopt.optimizer.Updater.set_copy`.

        Parameters
        ----------
        index : int, str or bytes
            The parameter.
        array : numpy.ndarray or None
            The copy, float16 or bfloat16, of the weight's shape. None ends it.

        Raises
        ------
        TypeError, ValueError
            `array` is of another kind, or read-only; or, at the next update, does not have the
            weight's shape.
        """
        index = check_index(index)
        if array is None:
            self._copies.pop(index, None)
            return
        words = label(index, self.optimizer.idx2name)
        check_like(words, "copy", array, HALVES, np.shape(array))
        self._copies[index] = array


def _is_same(one: Any, other: Any) -> bool:
    """Whether two gradients are the same memory."""
    if one is other:
        return True
    one, other = np.asarray(one), np.asarray(other)
    places = [each.__array_interface__["data"] for each in (one, other)]
    header = (one.shape, one.dtype, one.strides) == (other.shape, other.dtype, other.strides)
    return header and places[0] == places[1]


def _half(name: str) -> np.dtype[Any]:
    """Dtype of half precision of this name."""
    return np.dtype(np.float16) if name == "float16" else np.dtype(bfloat16())
