"""Updates that Python has checked, of an updater whose weights are on devices, all or some.

Tests: ``tests/kernels/test_cuda_driver.py``, ``tests/gpu/test_cuda_groups.py``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fastopt._engine.clip import squares, times
from fastopt._engine.contract import batches_of
from fastopt._engine.device_call import DeviceCall
from fastopt._engine.parameters import Parameters
from fastopt._engine.per_index import Index
from fastopt._kernels.devices import is_cuda

Entry = tuple[Index, Any, Any]
"""Index, weight and gradient."""


def update(
    updater: Any,
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


def _update_here(updater: Any, entries: Sequence[Entry], factor: float, share: float) -> None:
    """Update the weights of a call that are on the host, with measured gradients."""
    indices, weights, grads = ([entry[k] for entry in entries] for k in range(3))
    updater.records.take(updater, indices, grads, weights, False, share, factor)
