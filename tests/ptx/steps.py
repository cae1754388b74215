"""Steps whose CUDA kernels run from their PTX on the CPU, next to the same steps of the CPU.

``python steps.py CASE ...`` prints as JSON, for each case, the number of elements that differ in
weights, states, averages, codes and scales, or the error of the driver; and then the kernels that
ran. ``test_steps.py`` starts it with the driver that executes kernels.
"""

import ctypes
import json
import os
import sys
from functools import partial
from itertools import cycle

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
WEIGHT, OTHER, GRADIENT = 0x6010, 0x6020, 0x6030
"""Streams that wait for no other stream unless they are made to."""

kept = []
"""Gradients that were copied on their stream, and the copies."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def dense(*shapes, dtypes=(np.float32,)):
    """Weights and gradients of these shapes, and of the dtypes in turn."""

    def arrays(rng):
        def normal():
            pairs = zip(shapes, cycle(dtypes), strict=False)
            return [rng.normal(size=shape).astype(dtype) for shape, dtype in pairs]

        return normal(), [normal() for _ in range(STEPS)]

    return arrays


def rows(height, width, count, often=0.0):
    """A weight and row-sparse gradients, in which one row has a share of all positions."""

    def arrays(rng):
        def grad():
            ids = np.where(rng.random(count) < often, 7, rng.integers(0, max(height, 1), count))
            values = rng.normal(size=(count, width))
            values = np.round(8 * values) / 8 if often else values
            return [RowSparse(values.astype(np.float32), ids, (height, width))]

        return dense((height, width))(rng)[0], [grad() for _ in range(STEPS)]

    return arrays


def made(name, options=None, **kwargs):
    """A function that makes an updater; `options` are its own, and not the optimizer's."""
    return lambda: optimizer.Updater(optimizer.create(name, **kwargs), **(options or {}))


def not_finite(rng):
    """Gradients of which those of the second step are not finite, which skips it."""
    weights, grads = dense((30, 41), (700,))(rng)
    grads[1][1][13] = np.inf
    return weights, grads


MASTERS, CODES = {"multi_precision": True}, {"state_dtype": "int8", "state_min_size": 1}
SPLIT = MASTERS | {"master": "split"}
KINDS = {
    "float16 with master": (MASTERS, np.float16),
    "bfloat16 with master": (MASTERS, BFLOAT16),
    "bfloat16 split": (SPLIT, BFLOAT16),
    "float16 rounded at random": ({"rounding": "stochastic"}, np.float16),
    "bfloat16 state": ({"state_dtype": "bfloat16"}, np.float32),
    "8 bits": (CODES, np.float32),
    "standard rows": ({"lazy_update": False}, None),
    "lazy rows": ({}, None),
}
"""What all rules are compiled for besides float32 and float64: arguments of the optimizers, and the
dtype of weights."""


def steps_of(forms, dtype=np.float32, **kwargs):
    """Cases of forms of optimizers: of rows where there is no dtype, or else of elements.

    These are whole packs and a single one.
    """
    found = {}
    for form in forms:
        shape = (13, 33) if form.shape[1:] else (429,)
        arrays = rows(300, 5, 90) if dtype is None else dense(shape, dtypes=[dtype])
        found[str(form)] = partial(form.updater, wd=form.wd, clip_gradient=1.5, **kwargs), arrays
    return found


def kind_steps(kind, forms):
    kwargs, dtype = KINDS[kind]
    return steps_of(forms, dtype, **kwargs)


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
RULES = {form.make().rule: form for form in FORMS}.values()
"""One form of each rule."""

CLIP, TWO = {"clip_global_norm": 1.0}, dense((301,), (7,))
CLIPPED = made("adam", CLIP)
TWO_DTYPES = dense((300,), (301,), (302,), dtypes=[np.float32, np.float64])
ANY_SHAPE = dense((), (1,), (0,), (3, 0), (300,), (2, 3, 4))
LARGE = lambda dtype=np.float32: dense((512, 512), dtypes=[dtype])  # noqa: E731
NAMES = {k: f"{k}{'.bias' if k % 2 else '.weight'}" for k in range(40)}
HALF = "adam", "lamb", "lars", "ftrl"
CODED = "lion", "rmsprop", "ademamix", "adamax", "adopt"
IN_GROUPS = {"groups": {"bias": {"learning_rate": 0.5}}}
AVERAGES = EMA(0.5), EMA(0.5, bias_correction=True), SWA(2, 2), Lookahead(2)

CASES = {
    "dense": {
        "Adam": (made("adam", wd=0.01), dense((4,), (10_007,))),
        "Adam, float64": (made("adam"), dense((3001,), dtypes=[np.float64])),
        "Muon's fallback": (made("muon", lr=0.1, fallback="adam"), dense((301,))),
        "offset": (made("adam"), dense((3001,))),
        "strided gradient": (made("adam"), dense((33, 40))),
        "GroupAdaGrad": (made("groupadagrad"), dense((60, 70))),
        "SGLD": (made("sgld"), dense((3001,))),
        "any shape": (made("adam"), ANY_SHAPE),
        "any shape of LAMB": (made("lamb"), ANY_SHAPE),
    },
    "half": {
        f"{kind}, {name}": case
        for kind in list(KINDS)[:5]
        for name, case in kind_steps(kind, [FIRST[name] for name in HALF]).items()
    },
    "int8": {
        "whole blocks": (made("adam", state_dtype="int8"), dense((8, 1024))),
        "ragged blocks": (made("adam", **CODES), dense((37, 31))),
        "split": (made("adam", **SPLIT, **CODES), dense((8, 1024), dtypes=[BFLOAT16])),
        "rows": (made("adam", **CODES), rows(300, 140, 90)),
        "standard rows": (made("adam", **CODES, lazy_update=False), rows(300, 140, 90)),
        **kind_steps("8 bits", [FIRST[name] for name in CODED]),
    },
    "reductions": {
        "LAMB": (made("lamb"), dense((120, 301))),
        "LARS": (made("lars", momentum=0.9), dense((50, 301), (34_001,))),
    },
    "lists": {
        "60 weights": (made("adam"), dense(*[(3, 41 + k % 3) for k in range(60)])),
        "weight decay of some": (made("adam", wd=0.1, param_idx2name=NAMES), TWO),
        "groups": (made("adam", IN_GROUPS, param_idx2name=NAMES), dense(*[(2,)] * 40)),
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
        **{
            f"{height} rows of {width}, {name}": (made(name, CLIP), rows(height, width, height))
            for height, width in ((0, 3), (3, 0))
            for name in ("adam", "lamb", "groupadagrad")
        },
        "decay caught up": (made("adamw", wd=0.01, sparse_decay="catch_up"), rows(900, 8, 700)),
        "decay of all": (made("adamw", wd=0.01, sparse_decay="dense"), rows(900, 8, 700)),
    },
    "clip": {
        "dense": (CLIPPED, dense((30, 101), (7,), (2049,))),
        "rows": (CLIPPED, rows(900, 8, 300)),
        "LAMB": (made("lamb", CLIP), dense((30, 101), (7,))),
        "bfloat16 state": (made("adam", CLIP, state_dtype="bfloat16"), dense((401,), (7,))),
        "two dtypes": (made("adamw", CLIP), TWO_DTYPES),
        "schedule": (made("adam", CLIP, lr_scheduler=CosineScheduler(9)), TWO),
        "not finite": (CLIPPED, not_finite),
        "not finite, LAMB": (made("lamb", CLIP), not_finite),
        "not finite, 8 bits": (made("adam", CLIP, **CODES), not_finite),
        "loss scaler": (lambda: optimizer.Updater("adam", LossScaler(4.0)), not_finite),
        "streams": (CLIPPED, dense((3001,), (70,))),
    },
    "averages": {
        "sums of rows": (made("adam", {"accumulate": 2}), rows(300, 5, 90)),
        **{
            f"{options}, {name}": (made(name, options), dense((30, 101)))
            for options in (*({"average": each} for each in AVERAGES), {"accumulate": 2})
            for name in ("adam", "lamb")
        },
    },
    "graphs": {
        "graph": (made("adam"), TWO),
        "graph of SGD": (made("sgd", momentum=0.9), dense((301,), dtypes=[np.float64])),
        "graph of LAMB": (made("lamb"), dense((30, 101), (7,))),
        "graph, bfloat16 state": (made("adam", state_dtype="bfloat16"), dense((401,))),
        "graph, clip": (CLIPPED, TWO),
        "graph, not finite": (CLIPPED, not_finite),
        "graph, two dtypes": (made("adamw", CLIP), TWO_DTYPES),
    },
    "streams": {
        "streams": (made("adam"), dense((3001,), (70,), (5,))),
        "streams, LAMB": (made("lamb"), dense((3001,), (70,))),
        "streams, masters": (made("sgd", **MASTERS), dense((3001,), dtypes=[np.float16])),
        "streams, rows": (made("adam"), rows(900, 8, 300)),
        "streams, rows, summed": (made("adam", {"accumulate": 2}), rows(900, 8, 300)),
    },
    "counts": {
        "Adam, float32": (made("adam"), LARGE()),
        "Adam, float16 with master": (made("adam", **MASTERS), LARGE(np.float16)),
        "Adam, split bfloat16": (made("adam", **SPLIT), LARGE(BFLOAT16)),
        "Adam, bfloat16 state": (made("adam", state_dtype="bfloat16"), LARGE()),
        "Adam, 8-bit state": (made("adam", state_dtype="int8"), LARGE()),
        "LAMB, float32": (made("lamb"), LARGE()),
        "LAMB, float16 with master": (made("lamb", **MASTERS), LARGE(np.float16)),
        "norm, float32": (made("sgd", CLIP), LARGE()),
        "norm, float16": (made("sgd", CLIP, **MASTERS), LARGE(np.float16)),
        "rows": (made("sgd"), rows(100_000, 1, 1 << 16)),
    },
    "every optimizer": steps_of(FIRST.values()),
    "every optimizer, rows": kind_steps("lazy rows", FIRST.values()),
    "other forms": steps_of(LATER),
    "other forms, rows": kind_steps("lazy rows", LATER),
    **{f"every rule, {kind}": kind_steps(kind, RULES) for kind in KINDS},
    "float64": steps_of(FEW, np.float64),
    "float64, other forms": steps_of([form for form in FORMS if form not in FEW], np.float64),
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
        return RowSparse(*map(written_on_a_stream, (grad.values, grad.indices)), grad.shape)
    if name.startswith("streams"):
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
    """Number of elements that differ."""
    pairs = zip(leaves(host(device)), leaves(expected), strict=True)
    bits = ([np.atleast_1d(each).view(f"u{each.itemsize}") for each in pair] for pair in pairs)
    return sum(int((one != other).sum()) for one, other in bits)


def replay(updater, indices, weights, grads):
    """Make steps, of which those after the second are launches of a graph."""
    memory = [on_device(grad) for grad in grads[0]]
    given = [Foreign(each, stream=WEIGHT) for each in memory]
    stream, graph = ctypes.c_uint64(WEIGHT), ctypes.c_uint64()
    for count, listed in enumerate(grads):
        cuda.synchronize()
        for target, grad in zip(memory, listed, strict=True):
            target.copy_to_device(grad)
        if count == 2:
            assert driver.cuStreamBeginCapture(stream, 0) == 0
        if count <= 2:
            updater(indices, given, weights)
        if count == 2:
            assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
        if count >= 2:
            assert driver.cuGraphLaunch(graph, stream) == 0


def check_infos(device, expected):
    """Outcomes are equal; the norm of row-sparse gradients is summed in another order.

    Calls that need Python are counted on the host alone.
    """
    norms = [info.global_norm or 0 for info in (device, expected)]
    expected = expected._replace(global_norm=None, slow=device.slow)
    assert device._replace(global_norm=None) == expected
    np.testing.assert_allclose(*norms, rtol=1e-14)


def stepped(name, make, arrays):
    """Weights, averages and states, of the device and of the CPU, after the steps of a case."""
    here, there = make(), make()
    weights, grads = arrays(np.random.default_rng(0))
    devices, indices = [weight_on_device(name, w) for w in weights], [*range(len(weights))]
    is_graph, targets = name.startswith("graph"), devices
    if name.startswith(("streams", "graph")):
        own = [WEIGHT, WEIGHT if is_graph else OTHER]
        targets = [Foreign(each, stream=own[k % 2]) for k, each in enumerate(devices)]
    grads = grads * 2 if is_graph else grads
    for listed in grads:
        here(indices, listed, weights)
        if not is_graph:
            there(indices, [grad_on_device(name, grad) for grad in listed], targets)
            overwrite()
    if is_graph:
        replay(there, indices, targets, grads)
    if name.startswith("decay"):
        here.flush(0)
        there.flush(0)
    cuda.synchronize()
    if not is_graph:
        check_infos(there.info, here.info)
    assert repr(there.loss_scaler) == repr(here.loss_scaler)
    assert there.optimizer._index_update_count == here.optimizer._index_update_count
    assert there.optimizer.num_update == here.optimizer.num_update
    more = (there.averages, here.averages), (there.states, here.states)
    return [(devices, weights), *((one[k], own[k]) for one, own in more for k in own)]


def run(name, make, arrays):
    """Return the number of elements that differ after the steps of a case, or the error."""
    try:
        return sum(different(*pair) for pair in stepped(name, make, arrays))
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
    of_kernels = ("executed", "compiled", "launched")
    kernels = {name: sorted(getattr(executor, name)) for name in of_kernels}
    json.dump({"different": found, "refused": refused, **kernels}, sys.stdout)
