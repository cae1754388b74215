"""Steps on a driver without a device: prints the calls of each as JSON; see test_cuda_driver.py."""

import ctypes
import gc
import json
import sys
import weakref
from itertools import cycle

import numpy as np
import pytest
from numba import cuda

from fastopt import RowSparse, optimizer
from fastopt._kernels import cuda_driver
from fastopt._kernels.cuda_table import CudaTable
from fastopt.amp import LossScaler
from fastopt.lr_scheduler import CosineScheduler
from helpers.device_arrays import Foreign

WARM = 6
"""Calls before the one whose calls of the driver count."""

CAPTURED = [
    *((None, None, 0x6010, calls) for calls in (0, WARM)),
    *((0x6010, 0x6020, 0x6020, calls) for calls in (0, WARM)),
    *((0x6010, 0x6020, 0x6010, calls) for calls in (0, WARM)),
    (0x6010, 0x6010, 0x6010, 0),
]
"""Streams of the weight and of the gradient, the one that is captured, and earlier calls."""

lib = ctypes.CDLL("libcuda.so.1")
lib.fake_text.restype = ctypes.c_char_p
lib.fake_torn.restype = ctypes.c_long


def on_device(*shape, dtype=np.float32, value=1):
    return cuda.to_device(np.full(shape, value, dtype))


def logged(call):
    """Calls of the driver that a call makes."""
    lib.fake_log(1)
    call()
    found = lib.fake_text().decode().splitlines()
    lib.fake_log(0)
    return found


def warm(call):
    for _ in range(WARM):
        call()
    return logged(call)


def adam(loss_scaler=None, clip_global_norm=None, **kwargs):
    made = optimizer.Adam(**kwargs)
    return optimizer.Updater(made, loss_scaler, clip_global_norm=clip_global_norm)


def repeated(updater, weight, *grads):
    """Calls of the driver in the last of several calls, which have the gradients in turn."""
    index = list(range(len(weight))) if isinstance(weight, list) else 0
    turns = cycle(grads)
    return warm(lambda: updater(index, next(turns), weight))


def single(make=on_device, fresh=False, updater=None, shape=(1000,)):
    grads = [make(*shape) for _ in range(2 * WARM if fresh else 1)]
    return repeated(updater or adam(), make(*shape), *grads)


def other_stream():
    """The weight's stream waits for the gradient's, and then this for it, without the host."""
    return repeated(adam(), *(Foreign(on_device(9), stream=each) for each in (0x5010, 0x5020)))


def channels_last():
    """A convolution's weight whose channels are its last axis in memory."""
    updater, strides = adam(), (72, 4, 24, 8)
    both = [Foreign(on_device(72), shape=(4, 2, 3, 3), strides=strides) for _ in range(2)]
    calls = repeated(updater, *both)
    assert updater.states[0][0].strides == strides
    return calls


def strided_gradient():
    """A gradient that is copied, as its elements do not lie like those of the weight."""
    grad = Foreign(on_device(6, 16), shape=(6, 8), strides=(64, 8))
    return repeated(adam(), on_device(6, 8), grad)


def listed(count):
    return [on_device(30) for _ in range(count)]


def many(count, fresh=False, updater=None):
    lists = [listed(count) for _ in range(WARM + 2 if fresh else 1)]
    return repeated(updater or adam(), listed(count), *lists)


def new_weights(count):
    """Weights that are other objects at other addresses in each call."""
    updater, grads = adam(), listed(count)
    turns = iter([listed(count) for _ in range(WARM + 1)])
    return warm(lambda: updater(list(range(count)), grads, next(turns)))


def first(count):
    """The first step of a list, whose states are allocated and filled with zeros."""
    updater, weights, grads = adam(), listed(count), listed(count)
    single(shape=(30,))  # compiles
    return logged(lambda: updater(list(range(count)), grads, weights))


def sparse(ids, place=cuda.to_device):
    return RowSparse(on_device(len(ids), 8), place(np.array(ids)), (100, 8))


def rows(ids, place=cuda.to_device, **kwargs):
    return repeated(adam(**kwargs), on_device(100, 8), sparse(ids, place))


def varying_rows():
    """Device arrays that a table keeps after gradients with 50 rows, and after ones with fewer."""
    updater = adam(clip_global_norm=1.0)
    weight, kept = on_device(100, 8), []
    gc.collect()  # tables of other steps
    for count in (50, 10, 20, 30):
        updater(0, sparse(range(count)), weight)
        tables = [each for each in gc.get_objects() if isinstance(each, CudaTable)]
        own = [table for table in tables if table.arrays[0].shape == (100, 8)]
        kept.append(sum(len(table.memory.spaces) for table in own))
    return kept


def dropped():
    """What is freed with an updater, at once: its state, and all tables with their memory.

    The second time, as numba's compilation leaves frames of the first calls in cycles.
    """
    kinds = {
        "dense": (0, lambda: on_device(9, 2), on_device(9, 2)),
        "list": ([0, 1], lambda: listed(2), listed(2)),
        "rows": (0, lambda: sparse([0, 1, 2]), on_device(100, 8)),
    }
    settings = {
        "plain": dict,
        "clip": lambda: {"clip_global_norm": 1.0},
        "scaler": lambda: {"loss_scaler": LossScaler()},
    }

    def tables():
        return sum(isinstance(each, CudaTable) for each in gc.get_objects())

    def run(kind, name):
        gc.collect()
        before = tables()
        gc.disable()
        updater, (index, grads, weight) = adam(**settings[name]()), kinds[kind]
        for _ in range(3):
            updater(index, grads(), weight)
        state = weakref.ref(updater.states[0][0])
        del updater
        gc.enable()
        return [state() is None, tables() - before]

    cases = [(kind, name) for kind in kinds for name in settings] * 2
    return {f"{kind}, {name}": run(kind, name) for kind, name in cases}


def two_classes(fresh=False, clip_global_norm=None):
    """Every other tensor has no weight decay."""
    names = {k: f"{k}_{'bias' if k % 2 else 'weight'}" for k in range(1000)}
    made = adam(clip_global_norm=clip_global_norm, param_idx2name=names, wd=0.01)
    return many(1000, fresh, made)


def clipped(name, loss_scaler=None, count=3):
    made = optimizer.create(name)
    return many(count, updater=optimizer.Updater(made, loss_scaler, clip_global_norm=1.0))


def clips_ahead():
    """Calls of 20 steps, and the counts before and after the host asks for the outcome."""
    lib.fake_defer(1)
    updater = adam(clip_global_norm=1.0)
    counts = updater.optimizer._index_update_count
    weights, grads = ([on_device(1000) for _ in range(3)] for _ in range(2))
    updater([0, 1, 2], grads, weights)
    before = updater.info
    calls = logged(lambda: [updater([0, 1, 2], grads, weights) for _ in range(20)])
    counted, infos = int(counts.counted[1]), []
    asked = logged(lambda: infos.append(updater.info))
    lib.fake_defer(0)
    return [calls, counted, asked, [*infos, before], updater.optimizer.num_update]


def stochastic():
    updater = optimizer.get_updater(optimizer.SGD(rounding="stochastic"))
    return single(lambda *shape: on_device(*shape, dtype=np.float16), updater=updater)


def torn():
    """Uploads whose pinned memory was written to before the device had read it."""
    lib.fake_defer(1)
    updater, weight = optimizer.get_updater(optimizer.LAMB()), on_device(1000)
    grads = [on_device(1000) for _ in range(3)]
    for k in range(100):
        updater(0, grads[k % 3], weight)
    calls = logged(lambda: updater(0, grads[0], weight))
    cuda.synchronize()
    lib.fake_defer(0)
    return [calls, lib.fake_torn()]


def captured():
    """A capture is refused by the first call for a weight, and if other streams take part.

    Nothing has changed then.
    """
    found = []
    for weight_on, grad_on, stream, calls in CAPTURED:
        updater = adam()
        weight, grad = (Foreign(on_device(9), stream=each) for each in (weight_on, grad_on))
        for _ in range(calls):
            updater(0, grad, weight)
        lib.cuStreamBeginCapture(ctypes.c_uint64(stream), 0)
        lib.fake_log(1)
        with pytest.raises(RuntimeError, match="is being captured for a CUDA graph"):
            updater(0, grad, weight)
        found.append([lib.fake_text().decode(), updater.optimizer.num_update - calls])
        lib.cuStreamEndCapture(ctypes.c_uint64(stream), ctypes.byref(ctypes.c_uint64()))
        updater(0, grad, weight)
        found[-1].append(updater.optimizer.num_update - calls)
    return found


def held():
    """Whether an object is alive before, and after, the device is done with what was launched."""

    class Object:
        pass

    cuda_driver.hold(None, 0)  # frees what earlier steps held, which would wait for the device
    gc.collect()
    cuda.current_context().deallocations.clear()
    lib.fake_defer(1)
    memory = cuda_driver.Memory((4,), np.float64)
    cuda_driver.upload(memory, np.ones(4), 0)
    object_ = Object()
    seen = weakref.ref(object_)
    cuda_driver.hold(object_, 0)
    del object_
    cuda_driver.hold(None, 0)
    before = seen() is not None
    cuda.synchronize()
    cuda_driver.hold(None, 0)
    gc.collect()
    lib.fake_defer(0)
    return [before, seen() is not None]


def second_device():
    with cuda.gpus[1]:
        weight, grad = on_device(9), on_device(9)
    updater = adam()
    calls = repeated(updater, weight, grad)
    return [calls, [int(a.gpu_data.context.device.id) for a in updater.states[0]]]


STEPS = {
    "single": single,
    "single, new gradient": lambda: single(fresh=True),
    "single, schedule": lambda: single(updater=adam(lr_scheduler=CosineScheduler(100))),
    "single, stream of its own": lambda: single(lambda *s: Foreign(on_device(*s), stream=0x5010)),
    "single, gradient of another stream": other_stream,
    "single, stochastic rounding": stochastic,
    "channels last": channels_last,
    "strided gradient": strided_gradient,
    "list of 1000": lambda: many(1000),
    "list of 200, new gradients": lambda: many(200, fresh=True),
    "list of 200, new weights": lambda: new_weights(200),
    "list of 1000, two classes": two_classes,
    "list of 1000, two classes, new gradients": lambda: two_classes(fresh=True),
    "first of 1000": lambda: first(1000),
    "rows": lambda: rows([3, 5, 7]),
    "rows, indices on the host": lambda: rows([3, 5, 7], np.array),
    "rows, repeated, indices on the host": lambda: rows([7, 3] * 100, np.array),
    "rows, standard": lambda: rows([3, 5, 7], lazy_update=False),
    "varying rows": varying_rows,
    "dropped": dropped,
    "LAMB": lambda: many(3, updater=optimizer.get_updater(optimizer.LAMB())),
    "LAMB with clip": lambda: clipped("lamb"),
    "clip": lambda: clipped("adam"),
    "clip of 1000, two classes": lambda: two_classes(clip_global_norm=1.0),
    "clips ahead": clips_ahead,
    "loss scaler": lambda: clipped("adam", LossScaler()),
    "GroupAdaGrad": lambda: single(
        shape=(10, 8), updater=optimizer.get_updater(optimizer.GroupAdaGrad())
    ),
    "torn": torn,
    "captured": captured,
    "held": held,
    "second device": second_device,
}

json.dump({name: step() for name, step in STEPS.items()}, sys.stdout)
