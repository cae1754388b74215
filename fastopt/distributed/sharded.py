"""Common base of sharded updaters and tables.

Reason: errors are agreed before anything changes, in every call of every object.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import DTypeLike

import fastopt
from fastopt._advice import Advice
from fastopt._engine.extras import refuse_extra
from fastopt._engine.validate import label
from fastopt._kernels.blocks import CODE_BLOCK
from fastopt._kernels.codes import is_worth_codes
from fastopt._kernels.layout import real_of
from fastopt._updater.updater import Updater
from fastopt.amp import LossScaler, StepInfo
from fastopt.arguments import Checked
from fastopt.arguments import flag as boolean
from fastopt.checkpoint.restore.shards import Form, Placement
from fastopt.distributed.agreement import Fact, Facts, Gate, Idle, agree, attempt, is_agreed
from fastopt.distributed.backend import RankBackend
from fastopt.distributed.fingerprint import Fingerprint, described, fingerprints
from fastopt.distributed.job import leader_first, private
from fastopt.distributed.ranks import LIMIT, time_limit
from fastopt.optimizer import Optimizer
from fastopt.optimizer.optimizer import Array, Index
from fastopt.sparse import RowSparse

Result = TypeVar("Result")


class Sharded(Checked):
    """Abstract base of objects whose methods all ranks of a communicator call together.

    Parameters
    ----------
    shard : Updater
        Updater of this rank's slices; the constructor of a subclass makes it one.
    comm : mpi4py.MPI.Comm, torch.distributed.ProcessGroup or Communicator
        Communicator of the ranks.
    timeout : float, optional
        Seconds that a rank waits for the others.
    **arguments
        Other arguments of the constructor, which must be equal on all ranks.
    """

    attribute_advice: ClassVar[Mapping[str, str]] = Advice("RANKS_ATTRIBUTES")
    argument_names: ClassVar[Mapping[str, tuple[str, ...]]] = Advice("RANKS_NAMES")
    argument_advice: ClassVar[Mapping[str, str]] = Advice("RANKS_ARGUMENTS")

    def __init__(
        self, shard: Updater, comm: object, timeout: float | None, **arguments: Any
    ) -> None:
        refuse_extra(shard.parameters.optimizers(), type(self).__name__)
        self.timeout = time_limit(timeout)
        self.shard = shard
        # Kept, as the communicators are freed with the last object of the job.
        self._job = node = private(comm, self.timeout)
        self._ranks, self._node = node.ranks, node.node
        self.rank, self.ranks = self._ranks.rank, self._ranks.size
        self.backend = RankBackend(self._ranks)
        self._number, self._calls = node.updaters, 0
        call = f"creation of updater {self._number} ({type(self).__name__})"
        for ranks in (self._ranks, self._node):
            ranks.begin(call, self.timeout)
        values = {"fastopt": f"version {fastopt.__version__}"}
        values |= {name: str(value) for name, value in arguments.items()}
        agree(self._ranks, [Facts({"call": call, **values})])
        node.updaters += 1
        self._fingerprints: list[Fingerprint] = []
        self._grouped: tuple[Any, str | None] = None, None
        """Groups, and their description."""
        self.placements: dict[Index, Placement] = {}
        self._masters: dict[Index, Array] = {}
        self._unchecked: dict[str, str] = {}
        """Checksums of arrays set on this rank, which ranks compare in the next update or save."""
        self.uncut: dict[Index, Any] = {}
        """States and attributes that were loaded whole, until the weights are known."""

    def __repr__(self) -> str:
        ranks = f"rank={self.rank}, ranks={self.ranks}, states={len(self.states)}"
        return f"{type(self).__name__}({self.optimizer!r}, {ranks})"

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self.shard.optimizer

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The loss scaler."""
        return self.shard.loss_scaler

    @property
    def clip_global_norm(self) -> float | None:
        """Maximum global norm of the gradients of a call."""
        return self.shard.clip_global_norm

    def state_as(self, index: Index, dtype: DTypeLike = np.float32) -> Any:
        """Return the state of this rank's slice of a parameter in another dtype.

        See :meth:`fastopt.optimizer.Updater.state_as`.
        """
        return self.shard.state_as(index, dtype)

    @property
    def info(self) -> StepInfo:
        """Information about the last call, the same on all ranks."""
        return self.shard.info

    @property
    def states(self) -> dict[Index, Any]:
        """State of this rank's slice of each parameter."""
        return self.shard.states

    def _label(self, index: Index) -> str:
        """Name of a parameter in messages."""
        return label(index, self.optimizer.idx2name)

    def _slice(self, index: Index, placement: Placement) -> None:
        """Inform the shard about the position of this rank's slice, and the shape of the tensor."""
        self.shard.parameters.of(index).offset = placement.cut(self.rank)
        self.optimizer.whole_shapes[index] = placement.shape

    def _begin(self, call: str) -> None:
        """Record the start of a collective call."""
        self._calls += 1
        self._call = f"call {self._calls} of updater {self._number} ({call})"
        for ranks in (self._ranks, self._node):
            ranks.begin(self._call, self.timeout)

    def _common(self) -> list[Fact]:
        """Facts that ranks must have in common in every call."""
        scaler, clip = self.loss_scaler, self.clip_global_norm
        scale = {} if scaler is None else {f"loss scaler's {k}": v for k, v in vars(scaler).items()}
        limits = {"call": self._call, **scale, "clip_global_norm": clip}
        limits |= self._settings()
        parameters, groups = self.shard.parameters, self.shard.groups
        if self._grouped[0] is not groups:
            self._grouped = groups, described(groups)
        if parameters.groups is not None:
            parameters.groups.sync()
        if [part.optimizer for part in self._fingerprints] != parameters.optimizers():
            self._fingerprints = fingerprints(self.shard.optimizer, parameters.groups)
        facts = Facts({name: str(described(value)) for name, value in limits.items()})
        facts["groups"] = str(self._grouped[1])
        return [facts, *(fact for part in self._fingerprints for fact in part.facts())]

    def _settings(self) -> dict[str, object]:
        """Settings of the updater that can be changed."""
        return {"average": self.shard.average}

    def _agree(self, facts: Facts, error: Exception | None) -> None:
        """Raise on all ranks if one has an error, or if calls or facts of the ranks differ."""
        self._gate(lambda: [facts]).enter(error)

    def _together(
        self,
        call: str,
        work: Callable[[Any], Result],
        check: Callable[[], Any] = lambda: None,
        facts: Callable[[Any], Mapping[str, str]] = lambda arguments: {},
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Result:
        """Make a collective call that changes no weight before the ranks have agreed.

        Parameters
        ----------
        call : str
            Name of the operation, which errors contain.
        work : callable
            Work of this rank on the checked arguments, which may be collective; an error in it is
            reported to the other ranks.
        check : callable
            Function that returns the checked arguments; an error is raised on all ranks.
        facts : callable
            What must be equal on all ranks, by name, from the checked arguments.
        around : callable
            Function that returns a context for all of these.
        """
        with self._agreed(call, check, facts, around) as arguments, self._updating(lambda: True):
            return work(arguments)

    def _push_together(
        self,
        call: str,
        check: Callable[[], Any],
        facts: Callable[[Any], Mapping[str, str]],
        send: Callable[[Any], Any],
        update: Callable[[Any], None],
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Make a collective call that updates rows on the ranks that own them.

        Parameters
        ----------
        call, check, facts, around
            See :meth:`_together`.
        send : callable
            Function that sends the checked gradients to the owners, and returns those for this
            rank.
        update : callable
            Function that updates this rank's rows with them.
        """
        self.backend.exchange = None
        with self._agreed(call, check, facts, around) as arguments:
            gate = self.backend.gate
            with self._updating(lambda: gate.passed):
                sent = send(arguments)
            with self._updating(lambda: gate.launched):
                update(sent)

    @contextmanager
    def _agreed(
        self,
        call: str,
        check: Callable[[], Any],
        facts: Callable[[Any], Mapping[str, str]],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> Iterator[Any]:
        """Context of a call on whose checked arguments the ranks have agreed, see above."""
        self._begin(call)
        with around():
            arguments, error = attempt(check)
            self._gate(lambda: [Facts(facts(arguments))]).enter(error)
            yield arguments

    def any(self, flag: bool) -> bool:
        """Return whether a flag is true on any rank; all ranks must call it.

        Handlers of signals set a flag on some ranks, or at other steps on each. With this method
        all ranks stop at the same step, and can save a checkpoint.

        Parameters
        ----------
        flag : bool
            The flag of this rank.

        Raises
        ------
        TypeError
            `flag` is not a bool on some rank. All ranks raise the error.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> from fastopt import optimizer
        >>> from fastopt.distributed import ShardedUpdater
        >>> updater = ShardedUpdater(optimizer.SGD(), MPI.COMM_WORLD)
        >>> updater.any(False), updater.any(MPI.COMM_WORLD.rank == 0)
        (False, True)
        """

        def largest(checked: bool) -> bool:
            value = np.array([checked], np.int64)
            self._ranks.wait(self._ranks.comm.all_reduce_max(value))
            return bool(value[0])

        return self._together("any", largest, lambda: boolean("flag", flag))

    def _gate(
        self, facts: Callable[[], Sequence[Fact]], active: bool = True, apart: bool = False
    ) -> Gate:
        """Create the agreement on a call, with `facts` in addition to those of every call."""

        def every() -> Sequence[Fact]:
            call, *optimizer = self._common()
            return [call, *facts(), *optimizer]

        self.backend.gate = Gate(self._ranks, every, active, apart)
        return self.backend.gate

    @contextmanager
    def _updating(self, too_late: Callable[[], bool]) -> Iterator[None]:
        """Context that raises errors of one rank on all ranks, or reports them if `too_late()`."""
        try:
            yield
        except Exception as error:
            if isinstance(error, Idle) or is_agreed(error):
                raise
            if too_late() or self._ranks.broken:
                self._ranks.fail(f"failed: {type(error).__name__}: {error}")
                raise
            self.backend.gate.enter(error)
            raise
        except BaseException as error:
            self._ranks.fail(f"was interrupted: {type(error).__name__}")
            raise

    def _compile(self, kinds: Iterable[tuple[Index, Placement, Any, bool]]) -> None:
        """Compile the kernels of a call on one rank of each node first, then on the others.

        `kinds` yields index, placement, dtype, and whether the gradient is row-sparse, for each new
        tensor.
        """
        if self.ranks == 1 or not self.optimizer.native:
            return
        trials: dict[tuple[Any, ...], Index] = {}
        for index, placement, dtype, sparse in kinds:
            coded = self._is_coded(index, placement.shape)
            optimizer = self.shard.parameters.optimizer_of(index)
            kind = dtype, placement.form, sparse, coded
            trials.setdefault((id(optimizer), optimizer.rule_for(index), *kind), index)

        def compile_all() -> None:
            for (_, _, *kind), index in trials.items():
                self._try_out(index, *kind)

        if trials:
            self._ranks.timeout = max(self._ranks.timeout, LIMIT)  # nodes may compile in turn
        leader_first(self._node, compile_all)

    def _is_coded(self, index: Index, shape: tuple[int, ...]) -> bool:
        """Whether the state of a weight of this shape is stored in 8 bits, in blocks of rows."""
        optimizer = self.shard.parameters.optimizer_of(index)
        return optimizer.state_dtype == "int8" and is_worth_codes(shape, optimizer.state_min_size)

    def _try_out(self, index: Index, dtype: Any, form: Form, sparse: bool, coded: bool) -> None:
        """Compile by updating small tensors; ignore errors, which the update itself will raise."""
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt = copy.deepcopy(self.shard.parameters.optimizer_of(index))
            opt._index_update_count.clear()
            opt.masters_given.clear()
            opt.state_min_size = 1 if coded else None
            width = CODE_BLOCK if coded else 2
            weight = np.zeros((2,) if form == "flat" else (1, width), dtype)
            grad: Any = np.zeros(weight.shape, dtype if sparse else real_of(dtype))
            if sparse:
                grad = RowSparse(grad, np.arange(1), weight.shape)
            average, scaler = self.shard.average, copy.deepcopy(self.loss_scaler)
            alternates = average is not None and average.alternates
            for averaging in (None, average) if alternates else (average,):
                trial = Updater(opt, scaler, self.clip_global_norm, average=averaging)
                trial([index], [grad], [weight])
