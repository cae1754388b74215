"""Steps whose CUDA kernels run from their PTX on the CPU, next to the same steps of the CPU.

``python steps.py CASE ...`` prints as JSON, for each case, the number of bits that differ in
weights, states, averages, codes and scales, or the error of the driver; and then the kernels that
ran. ``test_steps.py`` starts it with the driver that executes kernels.
"""

import ctypes
import json
import os
import sys
from functools import partial

import ml_dtypes
import numpy as np
from numba import cuda

from fastopt import EMA, SWA, Lookahead, RowSparse, optimizer
from fastopt.amp import LossScaler
from fastopt.lr_scheduler import CosineScheduler
from helpers.cases import CASES as FORMS
from helpers.cases import FIRST, SAMPLE
from helpers.device_arrays import Foreign, host, leaves, on_device
from ptx import executor

STEPS = 3
WEIGHT, GRADIENT = 0x6010, 0x6020
"""Streams that wait for no other stream unless they are made to."""

kept = []
"""Gradients that were copied on their stream, and the copies."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16}


def dense(*shapes, dtype=np.float32):
    """Weights and gradients of these shapes."""

    def arrays(rng):
        def normal():
            return [rng.normal(size=shape).astype(dtype) for shape in shapes]

        return normal(), [normal() for _ in range(STEPS)]

    return arrays


def rows(height, width, count, often=0.0):
    """A weight and row-sparse gradients, in which one row has a share of all positions."""

    def arrays(rng):
        def grad():
            ids = rng.integers(0, height, count)
            ids[rng.random(count) < often] = 7
            values = (
                rng.integers(-9, 9, (count, width)) / 8
                if often
                else rng.normal(size=(count, width))
            )
            return [RowSparse(values.astype(np.float32), ids, (height, width))]

        weight = rng.normal(size=(height, width)).astype(np.float32)
        return [weight], [grad() for _ in range(STEPS)]

    return arrays


def made(name, options=None, **kwargs):
    """A function that makes an updater; `options` are its own, and not the optimizer's."""
    return lambda: optimizer.Updater(optimizer.create(name, **kwargs), **(options or {}))


def scheduled():
    """An updater whose schedule reads the update counts."""
    adam = optimizer.Adam(lr_scheduler=CosineScheduler(9))
    return optimizer.Updater(adam, clip_global_norm=1.0)


def scaled():
    """An updater with a loss scaler of its own."""
    return optimizer.Updater(optimizer.Adam(), LossScaler(4.0))


def two_dtypes(rng):
    """Weights that need two tables, and whose squares are added in the order of the list."""
    kinds = np.float32, np.float64, np.float32

    def normal():
        return [rng.normal(size=300 + k).astype(kind) for k, kind in enumerate(kinds)]

    return normal(), [normal() for _ in range(STEPS)]


def not_finite(rng):
    """Gradients of which those of the second step are not finite, which skips it."""
    weights, grads = dense((30, 41), (700,))(rng)
    grads[1][1][13] = np.inf
    return weights, grads


def masters(dtype, name="adam", **kwargs):
    return made(name, multi_precision=True, **kwargs), dense((4001,), dtype=dtype)


def dense_steps(forms, dtype=np.float32):
    """Cases of forms of optimizers, whose weights have whole packs and a single element."""
    return {
        str(form): (
            partial(form.updater, wd=form.wd, clip_gradient=1.5),
            dense((41, 5) if form.shape[1:] else (205,), dtype=dtype),
        )
        for form in forms
    }


def row_steps(forms):
    """Cases of lazy updates of forms of optimizers."""
    return {str(form): (partial(form.updater, wd=form.wd), rows(300, 5, 90)) for form in forms}


KINDS = {
    "float16 with master": ({"multi_precision": True}, HALVES["float16"]),
    "bfloat16 with master": ({"multi_precision": True}, HALVES["bfloat16"]),
    "bfloat16 split": ({"multi_precision": True, "master": "split"}, HALVES["bfloat16"]),
    "float16 rounded at random": ({"rounding": "stochastic"}, HALVES["float16"]),
    "bfloat16 state": ({"state_dtype": "bfloat16"}, np.float32),
    "8 bits": ({"state_dtype": "int8", "state_min_size": 1}, np.float32),
    "standard rows": ({"lazy_update": False}, None),
}
"""What all rules are compiled for besides float32, float64 and lazy rows: arguments of the
optimizers, and the dtype of weights."""


def kind_steps(kind):
    """Cases of one form of each rule."""
    kwargs, dtype = KINDS[kind]
    found = {}
    for form in {form.make().rule: form for form in FORMS}.values():
        shape = (17, 31) if form.shape[1:] else (527,)
        arrays = rows(300, 5, 90) if dtype is None else dense(shape, dtype=dtype)
        found[str(form)] = partial(form.updater, wd=form.wd, **kwargs), arrays
    return found


def is_refused(make, arrays):
    """Whether an optimizer does not take such arguments or arrays on a device."""
    try:
        weights, grads = arrays(np.random.default_rng(0))
        moved = [grad_on_device("", grad) for grad in grads[0]]
        make()(list(range(len(weights))), moved, list(map(on_device, weights)))
    except (TypeError, ValueError, NotImplementedError, UserWarning):
        return True
    return False


LATER = [form for form in FORMS if form is not FIRST[form.name]]
FEW = [form for form in FORMS if str(form) in SAMPLE]

CASES = {
    "dense": {
        "Adam": (made("adam", wd=0.01), dense((4,), (10_007,))),
        "Adam, float64": (made("adam"), dense((3001,), dtype=np.float64)),
        "offset": (made("adam"), dense((3001,))),
        "strided gradient": (made("adam"), dense((33, 40))),
        "GroupAdaGrad": (made("groupadagrad"), dense((60, 70))),
        "SGLD": (made("sgld"), dense((3001,))),
        "any shape": (made("adam"), dense((), (1,), (0,), (3, 0), (300,), (2, 3, 4))),
        "any shape of LAMB": (made("lamb"), dense((), (1,), (0,), (3, 0), (300,), (2, 3, 4))),
    },
    "half": {
        **{
            f"{dtype} with master, {name}": masters(HALVES[dtype], name)
            for dtype in HALVES
            for name in ("adam", "sgd", "lamb", "lars", "ftrl", "sgld")
        },
        "split": masters(BFLOAT16, master="split"),
        "bfloat16 state": (made("adam", state_dtype="bfloat16"), dense((4001,))),
        "bfloat16 state of rows": (made("groupadagrad", state_dtype="bfloat16"), dense((60, 70))),
        **{
            f"stochastic {name}": (
                made("sgd", momentum=0.9, rounding="stochastic"),
                dense((4001,), dtype=dtype),
            )
            for name, dtype in HALVES.items()
        },
    },
    "int8": {
        "whole blocks": (made("adam", state_dtype="int8"), dense((8, 1024))),
        **{
            name: (made(name, state_dtype="int8", state_min_size=1, **kwargs), dense((2, 140)))
            for name, kwargs in (
                *((name, {}) for name in ("lion", "rmsprop", "ademamix", "adamax", "adopt")),
                ("sgd", {"momentum": 0.9}),
            )
        },
        "ragged blocks": (made("adam", state_dtype="int8", state_min_size=1), dense((37, 31))),
        "split": (
            made("adam", multi_precision=True, master="split", state_dtype="int8"),
            dense((8, 1024), dtype=BFLOAT16),
        ),
        **{
            f"rows, lazy {lazy}": (
                made("adam", state_dtype="int8", state_min_size=1, lazy_update=lazy),
                rows(300, 140, 90),
            )
            for lazy in (True, False)
        },
    },
    "reductions": {
        "LAMB": (made("lamb"), dense((120, 301))),
        "LARS": (made("lars", momentum=0.9), dense((50, 301), (34_001,))),
    },
    "lists": {
        "60 weights": (made("adam"), dense(*[(3, 41 + k % 3) for k in range(60)])),
        "weight decay of some": (
            made("adam", wd=0.1, param_idx2name={0: "a_weight", 1: "b_bias"}),
            dense((301,), (500,)),
        ),
    },
    "rows": {
        "lazy": (made("adam"), rows(3000, 17, 400)),
        "several tiles": (made("adam"), rows(3000, 8, 2500)),
        "a row often": (made("adam"), rows(400, 8, 600, often=0.7)),
        "indices on the host": (made("adam"), rows(3000, 8, 700)),
        "standard": (made("adam", lazy_update=False), rows(900, 8, 700)),
        "GroupAdaGrad": (made("groupadagrad"), rows(900, 40, 300)),
        **{f"width {n}": (made("adagrad"), rows(9, n, 3)) for n in (1, 3, 33, 130)},
        **{
            f"a row often, {name}": (made(name, lazy_update=False), rows(12, 5, 200, often=0.8))
            for name in ("sgd", "adam", "groupadagrad")
        },
        "decay caught up": (made("adamw", wd=0.01, sparse_decay="catch_up"), rows(900, 8, 700)),
        "decay of all": (made("adamw", wd=0.01, sparse_decay="dense"), rows(900, 8, 700)),
    },
    "clip": {
        "dense": (made("adam", {"clip_global_norm": 1.0}), dense((30, 101), (7,), (2049,))),
        "rows": (made("adam", {"clip_global_norm": 1.0}), rows(900, 8, 300)),
        "LAMB": (made("lamb", {"clip_global_norm": 1.0}), dense((30, 101), (7,))),
        "bfloat16 state": (
            made("adam", {"clip_global_norm": 1.0}, state_dtype="bfloat16"),
            dense((401,), (7,)),
        ),
        "two dtypes": (made("adamw", {"clip_global_norm": 1.0}), two_dtypes),
        "schedule": (scheduled, dense((301,), (7,))),
        "not finite": (made("adam", {"clip_global_norm": 1.0}), not_finite),
        "not finite, LAMB": (made("lamb", {"clip_global_norm": 1.0}), not_finite),
        "not finite, 8 bits": (
            made("adam", {"clip_global_norm": 1.0}, state_dtype="int8", state_min_size=1),
            not_finite,
        ),
        "loss scaler": (scaled, not_finite),
        "streams": (made("adam", {"clip_global_norm": 1.0}), dense((3001,), (70,))),
    },
    "averages": {
        f"{average}, {name}": (made(name, {"average": average}), dense((30, 101)))
        for average in (EMA(0.5), EMA(0.5, bias_correction=True), SWA(2, 2), Lookahead(2))
        for name in ("adam", "lamb")
    },
    "graphs": {
        "graph": (made("adam"), dense((301,), (7,))),
        "graph of SGD": (made("sgd", momentum=0.9), dense((301,), dtype=np.float64)),
        "graph of LAMB": (made("lamb"), dense((30, 101), (7,))),
        "graph, bfloat16 state": (made("adam", state_dtype="bfloat16"), dense((401,))),
        "graph, clip": (made("adam", {"clip_global_norm": 1.0}), dense((301,), (7,))),
        "graph, not finite": (made("adam", {"clip_global_norm": 1.0}), not_finite),
        "graph, two dtypes": (made("adamw", {"clip_global_norm": 1.0}), two_dtypes),
    },
    "streams": {
        "streams": (made("adam"), dense((3001,), (70,))),
        "streams, rows": (made("adam"), rows(900, 8, 300)),
        "streams, rows, summed": (made("adam", {"accumulate": 2}), rows(900, 8, 300)),
    },
    "accumulation": {
        "dense": (made("adam", {"accumulate": 2}), dense((30, 101))),
        "LAMB": (made("lamb", {"accumulate": 2}), dense((30, 101))),
        "rows": (made("adam", {"accumulate": 2}), rows(300, 5, 90)),
    },
    "every optimizer": dense_steps(FIRST.values()),
    "every optimizer, rows": row_steps(FIRST.values()),
    "other forms": dense_steps(LATER),
    "other forms, rows": row_steps(LATER),
    **{f"every rule, {kind}": kind_steps(kind) for kind in KINDS},
    "float64": dense_steps(FEW, np.float64),
    "float64, other forms": dense_steps([form for form in FORMS if form not in FEW], np.float64),
}


def weight_on_device(name, weight):
    if name == "offset":
        return cuda.to_device(np.concatenate([np.zeros(1, weight.dtype), weight]))[1:]
    return on_device(weight)


def written_on_a_stream(array):
    """An array on the device that is written by its stream, later."""
    source, target = on_device(array), on_device(np.zeros_like(array))
    addresses = (ctypes.c_uint64(a.device_ctypes_pointer.value) for a in (target, source))
    driver.cuMemcpyDtoDAsync(*addresses, ctypes.c_size_t(array.nbytes), ctypes.c_uint64(GRADIENT))
    kept.append((source, target))
    return Foreign(target, stream=GRADIENT)


def overwrite():
    """Overwrite all gradients of streams, on their stream."""
    for _, array in kept:
        address = ctypes.c_uint64(array.device_ctypes_pointer.value)
        size = ctypes.c_size_t(array.nbytes)
        driver.cuMemsetD8Async(address, 0, size, ctypes.c_uint64(GRADIENT))


def grad_on_device(name, grad):
    if name.startswith("streams, rows"):
        values, ids = written_on_a_stream(grad.values), written_on_a_stream(grad.indices)
        return RowSparse(values, ids, grad.shape)
    if name == "streams":
        return written_on_a_stream(grad)
    if name == "offset":
        return weight_on_device(name, grad)
    if name == "indices on the host":
        return RowSparse(on_device(grad.values), grad.indices, grad.shape)
    if name == "strided gradient":
        wide = on_device(np.concatenate([grad, grad], axis=1))
        return Foreign(wide, shape=grad.shape, strides=(2 * grad.strides[0], grad.strides[1]))
    return on_device(grad)


def different(device, expected):
    """Bytes of arrays that differ."""
    pairs = list(zip(leaves(host(device)), leaves(expected), strict=True))
    return sum(
        int((np.atleast_1d(one).view(np.uint8) != np.atleast_1d(other).view(np.uint8)).sum())
        for one, other in pairs
    )


class Graph:
    """Steps, of which those after the second are launches of a graph."""

    def __init__(self, updater, indices, weights):
        self.updater, self.indices, self.weights = updater, indices, weights
        self.grads, self.graph, self.steps = [], ctypes.c_uint64(), 0

    def __call__(self, grads):
        """Update with gradients on the host."""
        stream = ctypes.c_uint64(WEIGHT)
        if not self.grads:
            self.memory = [on_device(grad) for grad in grads]
            self.grads = [Foreign(each, stream=WEIGHT) for each in self.memory]
        cuda.synchronize()
        for memory, grad in zip(self.memory, grads, strict=True):
            memory.copy_to_device(grad)
        self.steps += 1
        if self.steps < 3:
            self.updater(self.indices, self.grads, self.weights)
            return
        if not self.graph:
            assert driver.cuStreamBeginCapture(stream, 0) == 0
            self.updater(self.indices, self.grads, self.weights)
            assert driver.cuStreamEndCapture(stream, ctypes.byref(self.graph)) == 0
        assert driver.cuGraphLaunch(self.graph, stream) == 0


def check_infos(device, expected):
    """Outcomes are equal; the norm of row-sparse gradients is summed in another order.

    Calls that need Python are counted on the host alone.
    """
    norms = [info.global_norm or 0 for info in (device, expected)]
    expected = expected._replace(global_norm=None, slow=device.slow)
    assert device._replace(global_norm=None) == expected
    np.testing.assert_allclose(*norms, rtol=1e-14)


def stepped(name, make, arrays):
    """Updaters and weights of the device and of the CPU after the steps of a case."""
    here, there = make(), make()
    weights, grads = arrays(np.random.default_rng(0))
    devices = [weight_on_device(name, weight) for weight in weights]
    streams = name.startswith(("streams", "graph"))
    targets = [Foreign(weight, stream=WEIGHT) for weight in devices] if streams else devices
    indices = list(range(len(weights)))
    replayed = Graph(there, indices, targets) if name.startswith("graph") else None
    for listed in grads * 2 if replayed else grads:
        if replayed is not None:
            here(indices, listed, weights)
            replayed(listed)
            continue
        moved = [grad_on_device(name, grad) for grad in listed]
        here(indices, listed, weights)
        there(indices, moved, targets)
        overwrite()
    if name.startswith("decay"):
        here.flush(0)
        there.flush(0)
    cuda.synchronize()
    if replayed is None:
        check_infos(there.info, here.info)
    assert repr(there.loss_scaler) == repr(here.loss_scaler)
    assert there.optimizer._index_update_count == here.optimizer._index_update_count
    assert there.optimizer.num_update == here.optimizer.num_update
    return there, devices, here, weights


def pairs(there, devices, here, weights):
    """Weights, averages and states of both sides."""
    averages = [(there.averages[k], here.averages[k]) for k in here.averages]
    states = [(there.states[k], here.states[k]) for k in here.states]
    return [(devices, weights), *averages, *states]


def run(name, make, arrays):
    """Return the bytes that differ after the steps of a case, or the error."""
    try:
        return sum(different(*pair) for pair in pairs(*stepped(name, make, arrays)))
    except Exception as error:
        return driver.executor_message().decode() or repr(error)


if __name__ == "__main__":
    driver = ctypes.CDLL("libcuda.so.1")
    driver.executor_message.restype = ctypes.c_char_p
    driver.executor_set(1, int(os.environ.get("PTX_REVERSED", "0")))
    executor.install()
    executor.record_launches()
    found, refused = {}, []
    for listed in sys.argv[1:]:
        family, _, name = listed.partition("/")
        for each in [name] if name else CASES[family]:
            if family.startswith("every rule") and is_refused(*CASES[family][each]):
                refused.append(each)
            else:
                found[f"{family}/{each}"] = run(each, *CASES[family][each])
    kernels = {
        "kernels": sorted(executor.executed),
        "compiled": sorted(executor.compiled),
        "launched": sorted(executor.launched),
    }
    json.dump({"different": found, "refused": refused, **kernels}, sys.stdout)
