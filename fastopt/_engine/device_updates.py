"""Updates of an updater whose weights are on devices, all or some of a list.

:func:`again` makes those whose parameters have records, :func:`update` those that Python has
checked; both with the settings of the updater.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_groups.py``.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import numpy as np

from fastopt._engine.clip import STEPPED, UNCHANGED, overflow, scale_of, squares, times
from fastopt._engine.contract import OptimizerLike, batches_of
from fastopt._engine.device_call import DeviceCall
from fastopt._engine.parameters import Parameters
from fastopt._engine.per_index import Index
from fastopt._engine.updating import Updating
from fastopt._interrupts import uninterrupted
from fastopt._kernels.devices import is_cuda
from fastopt._kernels.record_words import OK
from fastopt.amp import StepInfo

Entry = tuple[Index, Any, Any]
"""Index, weight and gradient."""


def update(
    updater: Updating,
    entries: Sequence[Entry],
    single: bool,
    share: float = 1.0,
    finish: Callable[[], None] | None = None,
) -> None:
    """Update parameters, with gradients times `share`; then call `finish`.

    Weights on the host are updated when those on devices have been counted, before these are
    launched.
    """
    parameters, devices = updater.parameters, updater.devices
    here = [entry for entry in entries if not is_cuda(entry[1])]
    calls = updater._with_states([entry for entry in entries if is_cuda(entry[1])])
    accumulates = batches_of(updater.optimizer) is not None
    call = devices.prepare(calls, single) if parameters.folds and not accumulates else None
    indices = [index for index, *_ in entries]
    sums = partial(_squares, call, calls, entries)
    info, factor = updater.settings.measured(updater.optimizer, indices, sums, share)
    if info.stepped:
        between = partial(_update_here, updater, here, factor, share) if here else None
        if call is None and not accumulates:
            call = devices.prepare(_scaled(parameters, calls, factor * share), single)
        if call is not None:
            step = partial(call.step, factor * share, between)
            remember = partial(devices.remember, call, [weight for _, weight, *_ in calls])
            updater._commit(call, calls, step, remember, finish)
        else:
            calls = [(*each[:2], times(each[2], factor * share), each[3]) for each in calls]
            devices.update_all(calls, single, between=between)
            updater._keep(calls)
    elif call is not None:
        call.release()
    if finish is not None:
        finish()
    updater._report(parameters.stepped(info, indices))


def _squares(
    call: DeviceCall | None, calls: Sequence[Any], entries: Sequence[Entry], down: float
) -> np.ndarray[Any, Any]:
    """Return the sum of squares of each gradient times `down`, in the order of the list."""
    if call is None or down != 1:
        return squares([grad for *_, grad in entries], down)
    there = iter(call.squares().tolist())
    own = ((weight, grad) for _, weight, grad in entries)
    return np.array([next(there) if is_cuda(of) else squares([grad])[0] for of, grad in own])


def _scaled(parameters: Parameters, calls: Sequence[Any], factor: float) -> list[Any]:
    """Return calls whose gradients are multiplied, where the rule does not do it."""
    return [
        (i, w, grad if parameters.optimizer_of(i).folds else times(grad, factor), state)
        for i, w, grad, state in calls
    ]


def _update_here(updater: Updating, entries: Sequence[Entry], factor: float, share: float) -> None:
    """Update the weights of a call that are on the host, with measured gradients."""
    indices, weights, grads = ([entry[k] for entry in entries] for k in range(3))
    updater.records.take(updater, indices, grads, weights, False, share, factor)


# Calls of an updater whose parameters have records


def again(updater: Updating, index: Any, grad: Any, weight: Any) -> bool:
    """Update parameters that have records; if the result is False, nothing has changed.

    The caller holds the lock of the optimizer.
    """
    devices, optimizer = updater.devices, updater.optimizer
    if optimizer.updating.locked() or updater.settings.clip_adaptive is not None:
        return False
    if type(grad) is list and type(weight) is list:
        grad, weight = tuple(grad), tuple(weight)  # another thread may change the lists
    with optimizer.updating:
        if updater.settings.measures:
            devices.follow()
            with uninterrupted:
                return devices.folds and _measured_again(updater, index, grad, weight)
        call = devices.call_of(index, grad, weight)
        if call is None:
            if not _mixed_again(updater, index, grad, weight):
                return False
        else:
            updater._check_names(call.indices)
            call.step()
            devices.note(call, (weight,) if call.single else weight)
        info = STEPPED._replace(stepped=False) if updater.parameters.skips else STEPPED
        if updater._info is not info:
            updater._info = info
    return True


class Refused(Exception):
    """The part of a call that is on the host does not fit."""


def _mixed_again(updater: Updating, *arguments: Any) -> bool:
    """Like :func:`again`, for lists with some of the parameters on the host, without a measure."""
    devices, records, index = updater.devices, updater.records, arguments[0]
    if not records.quick or records.live or records.version != updater.optimizer.version:
        return False
    if not all(type(each) in (list, tuple) and len(each) == len(index) for each in arguments):
        return False
    if not {*map(type, index)} <= {int, str}:
        return False
    there = [k for k, each in enumerate(index) if each in devices.known]
    here = [k for k, each in enumerate(index) if each not in devices.known]
    if not (there and here):
        return False
    own = [tuple(each[k] for k in here) for each in arguments]
    others = [tuple(each[k] for k in there) for each in arguments]
    call = devices.call_of(*others) if records.admits(*own) >= 0 else None
    if call is None:
        return False

    def between() -> None:
        status = records.enter(records.context, *own)
        if status != OK:
            status = records.resolve(updater, status, *own)
        if status < 0:
            raise Refused

    try:
        call.step(between=between)
    except Refused:
        return False
    devices.note(call, others[2])
    return True


def _measured_again(updater: Updating, index: Any, grad: Any, weight: Any) -> bool:
    """Like :func:`again`, with gradients that are measured or accumulated."""
    devices, windows = updater.devices, updater._windows
    listed = type(index) in (list, tuple)
    indices = index if listed else [index]
    adding, phase, target = None, 0, grad
    if windows is not None:
        if not {*map(type, indices)} <= {int, str}:
            return False
        phase, sums = windows.phase(indices), [windows.sums.get(each) for each in indices]
        if phase < 0:
            return False
        target = sums if listed else sums[0]
        adding = windows.adders[phase > 0].devices.call_of(index, grad, target)
        if adding is None:
            return False
    call = devices.call_of(index, target, weight)
    if call is None:
        return False
    updater._check_names(call.indices)
    if adding is None:
        _step(updater, call)
    else:
        _add_and_step(updater, adding, call, phase)
    devices.note(call, weight if listed else (weight,))
    return True


def _add_and_step(updater: Updating, adding: DeviceCall, call: DeviceCall, phase: int) -> None:
    """Add gradients to their sums; when these are complete, update."""
    windows, indices = updater._windows, call.indices
    finish = partial(windows.finish, indices, windows.after(indices))
    last, share = phase + 1 == windows.every, 1 / windows.every
    steady = call.filled and call.settled
    before = {} if steady or not last else windows.before(indices)
    adding.done = call.done = False
    try:
        adding.step()
        if last:
            _step(updater, call, share)
        finish()
    except BaseException:
        if last and steady and adding.done and not call.done:
            _step(updater, call, share)  # no sum was copied: complete the call
        if call.done or (adding.done and not last):
            finish()
        else:
            windows.put_back(before)
        raise
    if not last:
        call.release()
        updater._info = UNCHANGED


def _step(updater: Updating, call: DeviceCall, share: float = 1.0) -> None:
    """Update with the arrays that have been entered, and gradients times `share`."""
    if _deferred(updater, call, share):
        return
    sums = lambda down: call.squares()  # noqa: E731
    info, factor = updater.settings.measured(updater.optimizer, call.indices, sums, share)
    if info.stepped:
        call.step(factor * share)
    else:
        call.release()
    updater._report(info)


def _deferred(updater: Updating, call: DeviceCall, share: float) -> bool:
    """Update without waiting for the norm, whose outcome is reported later.

    Returns False, with nothing changed, if the host must know the norm first.
    """
    settings, optimizer = updater.settings, updater.optimizer
    scaler, limit = settings.loss_scaler, settings.clip_global_norm
    if scaler is None and limit is None:
        return False
    if scaler is not None and call.captured:
        raise RuntimeError(
            "a loss scaler adapts its scale on the host, which a CUDA graph does not reach: "
            "call the updater outside of the capture, or scale by a fixed rescale_grad"
        )
    indices, names = call.indices, optimizer.idx2name
    awaited = StepInfo(stepped=False, skipped=False)
    own = ref(scaler) if scaler is not None else lambda: None
    owner = ref(updater)  # weakly, like the scaler: both keep the pending step

    def finish(norm: float, sums: Callable[[], Any] | None) -> None:
        info = StepInfo(stepped=True, skipped=False, global_norm=norm)
        if not math.isfinite(norm):
            info = overflow(sums() if sums else np.empty(0), indices, names, norm)
        updater, scaler = owner(), own()
        if updater is not None and updater._info is awaited:
            vars(updater)["_info"] = info
        if scaler is not None:
            scaler.update(overflow=info.skipped)

    rescale_grad = float(optimizer.rescale_grad)
    bound = math.inf if limit is None else limit
    if not call.deferred((rescale_grad * share, scale_of(scaler), bound, share), finish):
        return False
    vars(updater)["_info"] = awaited
    if scaler is not None:
        scaler._awaited = partial(settle, optimizer)
    return True


def settle(optimizer: OptimizerLike) -> None:
    """Wait for the outcomes of steps that a device has counted."""
    counts = optimizer._index_update_count
    if counts.ahead:
        with optimizer.call_lock:
            counts.settle()
