"""Steps on a driver without a device: prints the calls of each as JSON; see test_cuda_driver.py."""

import ctypes
import gc
import json
import sys
import weakref
from itertools import cycle
from types import SimpleNamespace

import numpy as np
from numba import cuda

from fastopt import RowSparse, optimizer
from fastopt._engine.validate import leaves
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
lib.fake_word.restype = ctypes.c_uint64
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


def adam(**kwargs):
    return optimizer.get_updater(optimizer.Adam(**kwargs))


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


def strided_gradient(fresh=False):
    """A gradient that is copied, as its elements do not lie like those of the weight."""
    arrays = [on_device(6, 16) for _ in range(2 * WARM if fresh else 1)]
    grads = [Foreign(each, shape=(6, 8), strides=(64, 8)) for each in arrays]
    return repeated(adam(), on_device(6, 8), *grads)


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


def lists_in_turn(count):
    """Lists of which each has other weights."""
    updater = adam()
    lists = [([2 * k, 2 * k + 1], listed(2), listed(2)) for k in range(count)]
    for _ in range(2):
        for each in lists:
            updater(*each)
    return logged(lambda: updater(*lists[0]))


def first(count):
    """The first step of a list, whose states are allocated and filled with zeros."""
    updater, weights, grads = adam(), listed(count), listed(count)
    single(shape=(30,))  # compiles
    return logged(lambda: updater(list(range(count)), grads, weights))


def rows(ids, on_host=False, **kwargs):
    indices = np.array(ids) if on_host else cuda.to_device(np.array(ids))
    grad = RowSparse(on_device(len(ids), 8), indices, (100, 8))
    return repeated(adam(**kwargs), on_device(100, 8), grad)


def varying_rows():
    """Device arrays that a table keeps after gradients with 50 rows, and after ones with fewer."""
    updater = optimizer.Updater(optimizer.Adam(), clip_global_norm=1.0)
    weight, kept = on_device(100, 8), []
    gc.collect()  # tables of other steps
    for count in (50, 10, 20, 30):
        rows = cuda.to_device(np.arange(count))
        updater(0, RowSparse(on_device(count, 8), rows, (100, 8)), weight)
        tables = (
            o
            for o in gc.get_objects()
            if isinstance(o, CudaTable) and o.arrays[0].shape == (100, 8)
        )
        kept.append(sum(len(table.memory.spaces) for table in tables))
    return kept


def dropped():
    """What is freed with an updater, at once: its state, and all tables with their memory.

    The second time, as numba's compilation leaves frames of the first calls in cycles.
    """

    def grads(kind):
        if kind == "rows":
            return RowSparse(on_device(3, 2), cuda.to_device(np.arange(3)), (9, 2))
        return [on_device(9), on_device(9)] if kind == "list" else on_device(9, 2)

    def tables():
        return sum(isinstance(each, CudaTable) for each in gc.get_objects())

    def run(kind, settings):
        gc.collect()
        before = tables()
        gc.disable()
        updater = optimizer.Updater(optimizer.Adam(), **settings)
        index, weight = 0, on_device(9, 2)
        if kind == "list":
            index, weight = [0, 1], [on_device(9), on_device(9)]
        for _ in range(3):
            updater(index, grads(kind), weight)
        state = weakref.ref(updater.states[0][0])
        settings.clear()  # a scaler keeps the steps whose outcome its scale depends on
        del updater
        gc.enable()
        return [state() is None, tables() - before]

    settings = {
        "plain": dict,
        "clip": lambda: {"clip_global_norm": 1.0},
        "scaler": lambda: {"loss_scaler": LossScaler()},
    }
    cases = [(kind, name) for kind in ("dense", "list", "rows") for name in settings] * 2
    return {f"{kind}, {name}": run(kind, settings[name]()) for kind, name in cases}


def two_classes(fresh=False, clip_global_norm=None, **kwargs):
    """Every other tensor has no weight decay."""
    names = {k: f"{k}_{'bias' if k % 2 else 'weight'}" for k in range(1000)}
    adam = optimizer.Adam(param_idx2name=names, wd=0.01, **kwargs)
    return many(1000, fresh, optimizer.Updater(adam, clip_global_norm=clip_global_norm))


def clipped(name, loss_scaler=None, count=3):
    made = optimizer.create(name)
    return many(count, updater=optimizer.Updater(made, loss_scaler, clip_global_norm=1.0))


def clips_ahead():
    """Calls of 20 steps, and the counts before and after the host asks for the outcome."""
    lib.fake_defer(1)
    updater = optimizer.Updater(optimizer.Adam(), clip_global_norm=1.0)
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
        try:
            updater(0, grad, weight)
            found.append("no error")
        except RuntimeError as error:
            found.append(str(error))
        found.append([lib.fake_text().decode(), updater.optimizer.num_update - calls])
        lib.cuStreamEndCapture(ctypes.c_uint64(stream), ctypes.byref(ctypes.c_uint64()))
        updater(0, grad, weight)
        found.append(updater.optimizer.num_update - calls)
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


def arguments():
    """Arguments of a launch as numba passes them, and as we do."""

    @cuda.jit
    def kernel(chunks, table, hyper, number):
        table[0, 0] = chunks[0, 0] + hyper[0] + hyper[1] + number

    numbers = np.array([1.5, -2.0], np.float32)
    memories = [cuda_driver.Memory((2, 3), np.int64), cuda_driver.Memory((1, 7), np.float64)]
    count = 2 * (5 + 2 * 2) + 2 + 1
    lib.fake_watch(count)
    kernel[400, 32](*(memory.array for memory in memories), tuple(numbers), -7)
    words = [[lib.fake_word(k) for k in range(count)]]
    by_value = cuda_driver.values(numbers.dtype, 2)(numbers.view(np.uint32).tolist())
    cuda_driver.launch(kernel, 400, 32, 0, *memories, by_value, -7)
    words.append([lib.fake_word(k) for k in range(count)])
    lib.fake_watch(0)
    for found in words:
        found[-3:-1] = [word & 0xFFFFFFFF for word in found[-3:-1]]  # 4 bytes each
    return words


def second_device():
    with cuda.gpus[1]:
        weight, grad = on_device(9), on_device(9)
    updater = adam()
    calls = repeated(updater, weight, grad)
    return [calls, [int(a.gpu_data.context.device.id) for a in updater.states[0]]]


def torch_state():
    """Where torch allocates memory for a weight, and addresses of its states; here on the host."""
    try:
        import torch
    except ImportError:
        return None

    class Tensor(torch.Tensor):
        is_cuda = True

    made, empty = [], torch.empty
    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=0)
    torch.empty = lambda *args, **kwargs: made.append(empty(*args, **kwargs)) or made[-1]
    weight, grad = (torch.ones(10, dtype=torch.float16).as_subclass(Tensor) for _ in range(2))
    updater, saved = adam(multi_precision=True), adam(multi_precision=True)
    updater(0, grad, weight)
    saved.set_states(updater.get_states())
    saved(0, grad, weight)
    states = (*leaves(updater.states[0]), *leaves(saved.states[0]))
    return [
        [(memory.data_ptr(), memory.nbytes) for memory in made],
        [state.device_ctypes_pointer.value for state in states],
    ]


STEPS = {
    "single": single,
    "single, new gradient": lambda: single(fresh=True),
    "single, schedule": lambda: single(updater=adam(lr_scheduler=CosineScheduler(100))),
    "single, stream of its own": lambda: single(lambda *s: Foreign(on_device(*s), stream=0x5010)),
    "single, gradient of another stream": other_stream,
    "single, stochastic rounding": stochastic,
    "channels last": channels_last,
    "strided gradient": strided_gradient,
    "strided gradient, new": lambda: strided_gradient(fresh=True),
    "list of 1000": lambda: many(1000),
    "list of 200, new gradients": lambda: many(200, fresh=True),
    "list of 200, new weights": lambda: new_weights(200),
    "20 lists in turn": lambda: lists_in_turn(20),
    "list of 1000, two classes": two_classes,
    "list of 1000, two classes, schedule": lambda: two_classes(lr_scheduler=CosineScheduler(100)),
    "list of 1000, two classes, new gradients": lambda: two_classes(fresh=True),
    "first of 1000": lambda: first(1000),
    "rows": lambda: rows([3, 5, 7]),
    "rows, indices on the host": lambda: rows([3, 5, 7], on_host=True),
    "rows, repeated, indices on the host": lambda: rows([7, 3] * 100, on_host=True),
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
    "torch": torch_state,
    "torn": torn,
    "captured": captured,
    "held": held,
    "arguments": arguments,
    "second device": second_device,
}

json.dump({name: step() for name, step in STEPS.items()}, sys.stdout)
