"""What CUDA kernels are compiled to, which takes numba-cuda but neither a GPU nor a driver."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from numba import from_dtype, types

from fastopt._engine.accumulate import accumulate
from fastopt._kernels.layout import BFLOAT16, FLOAT16, SPLIT, Layout
from helpers.cases import CASES, SAMPLE

pytest.importorskip("numba_cuda", reason="needs numba-cuda: pip install 'numba-cuda[cu13]'")

from cuda.bindings import nvjitlink
from numba import cuda

from fastopt._kernels import cuda as kernels
from fastopt._kernels import cuda_blocks, cuda_order
from fastopt._kernels.cuda_packs import pack_size

F4, F8 = np.float32, np.float64
CHUNKS, TABLE, SUMS = types.int64[:, ::1], types.uint64[:, ::1], types.float64[:, ::1]
COUNTS = types.int64[::1]
RULES = sorted({case.make().rule for case in CASES} | {accumulate}, key=lambda rule: rule.name)

WEIGHTS = {
    "float32": {},
    "float64": {"real": F8, "weight": (F8,), "grad": F8},
    "float16 with master": {"weight": (F4, FLOAT16), "grad": FLOAT16},
    "bfloat16 with master": {"weight": (F4, BFLOAT16), "grad": BFLOAT16},
    "bfloat16 split": {"weight": SPLIT, "grad": BFLOAT16},
    "float16 rounded at random": {"weight": (FLOAT16,), "grad": FLOAT16, "dither": True},
    "bfloat16 state": {"state": BFLOAT16},
    "standard rows": {"sparse": True},
    "lazy rows": {"sparse": True, "lazy": True},
}


CAPABILITIES = {(8, 0): "cc80", (9, 0): "cc90"}


@pytest.fixture(autouse=True, params=[*CAPABILITIES], ids=CAPABILITIES.get)
def capability(request, monkeypatch):
    """Compute capability of a device that is not there."""

    absent = SimpleNamespace(compute_capability=request.param)
    monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", lambda: absent)
    return request.param


def layout_of(rule, real=F4, weight=(F4,), grad=F4, state=None, **options):
    kind = real if state is None else state
    lazy = options.pop("lazy", False) and rule.row is None
    return Layout(rule, real, weight, grad, (kind,) * len(rule.state), lazy=lazy, **options)


def rule_named(name):
    return next(rule for rule in RULES if rule.name == name)


def records(rule, real):
    return from_dtype(rule.record(real))[::1]


def by_value(rule, real):
    """Hyper-parameters of all tensors, as numbers."""
    return types.UniTuple(from_dtype(np.dtype(real)), len(rule.hyper))


def check(kernel, capability, *arguments, doubles):
    """Compile for a capability, and read the code."""
    text, _ = cuda.compile_ptx(kernel.py_func, types.void(*arguments), cc=capability)
    assert f".target sm_{capability[0]}{capability[1]}" in text
    assert doubles or not re.search(r"\.f64", text)
    machine_code(text, capability)
    return text


def machine_code(text, capability):
    """Make the cubin of a kernel that spills no registers; return their number."""
    options = [f"-arch=sm_{capability[0]}{capability[1]}", "-Xptxas=-v", "-verbose"]
    linker = nvjitlink.create(len(options), options)
    try:
        code = text.encode()
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, code, len(code), "kernel")
        nvjitlink.complete(linker)
        told = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, told)
        spills = re.findall(rb"(\d+) bytes spill (?:stores|loads)", told)
        assert spills
        assert set(spills) == {b"0"}, told.decode()
        registers = int(re.search(rb"Used (\d+) registers", told)[1])
        made = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, made)
    finally:
        nvjitlink.destroy(linker)
    assert made.startswith(b"\x7fELF")
    return registers


def combinations(rules, kinds, usual):
    """Rules and kinds of weight; by default all of some rules, and the `usual` of all rules."""
    found, sample = [], {case.make().rule for case in CASES if str(case) in SAMPLE}
    for rule, weights, capability in itertools.product(rules, kinds, CAPABILITIES):
        default = rule in sample or (weights in usual and capability == (8, 0))
        marks = () if default else pytest.mark.slow("exhaustive")
        name = f"{rule.name}-{weights}-{CAPABILITIES[capability]}"
        found.append(pytest.param(rule, weights, capability, marks=marks, id=name))
    names = "rule", "weights", "capability"
    return pytest.mark.parametrize(names, found, indirect=["capability"])


@combinations(RULES, WEIGHTS, ("float32", "lazy rows"))
def test_a_rule_compiles_without_doubles_and_spills(rule, weights, capability):
    layout = layout_of(rule, **WEIGHTS[weights])
    dense = kernels.lazy if layout.lazy else kernels.dense
    factory = kernels.rows if rule.row else dense
    doubles = layout.real == F8 or rule.row is not None
    passed = weights not in ("float64", "standard rows") and rule.hyper and not rule.passes
    hyper = (by_value if passed else records)(rule, layout.real)
    text = check(factory(layout), capability, CHUNKS, TABLE, hyper, doubles=doubles)
    if rule.row:  # lanes exchange sums without barriers
        assert "shfl.sync.bfly" in text
        assert "bar.sync" not in text
    elif not layout.sparse:
        read = (*layout.weight[: layout.read_weights], *layout.state, layout.grad)
        written = (*layout.weight, *layout.state)
        packs = moved(text, "ld") / pack_bytes(layout, read)  # several, as LLVM unrolls the loop
        assert packs >= 1
        assert packs == int(packs) == moved(text, "st") / pack_bytes(layout, written)


def moved(text, access):
    """Bytes of the vector loads, or stores, in the code of a kernel."""
    found = re.findall(rf"{access}\.global(?:\.cs)?\.v(\d)\.[bf](\d+)", text)
    return sum(int(count) * int(bits) // 8 for count, bits in found)


def pack_bytes(layout, kinds):
    """Bytes of a pack of arrays of these types."""
    return pack_size(layout) * sum(np.dtype(kind).itemsize for kind in kinds)


@combinations(
    [rule for rule in RULES if rule.passes],
    ("float32", "float64", "float16 with master", "standard rows"),
    ("float32",),
)
def test_its_sums_compile(rule, weights, capability):
    layout = layout_of(rule, **WEIGHTS[weights], rounded_sums="master" in weights)
    told = records(rule, layout.real)
    for step in range(len(rule.passes)):
        kernel = kernels.sums(layout, step)
        check(kernel, capability, CHUNKS, TABLE, told, SUMS, doubles=True)
        check(kernels.finish(layout, step), capability, TABLE, told, SUMS, doubles=True)


def test_what_belongs_to_no_rule_compiles(capability):
    rule = CASES[0].make().rule
    caught_up = layout_of(rule, sparse=True, lazy=True, catch_up=True)
    check(kernels.lazy(caught_up), capability, CHUNKS, TABLE, records(rule, F4), doubles=True)
    check(kernels.flush_decay(caught_up), capability, CHUNKS, TABLE, doubles=True)
    for sparse in (False, True):
        check(kernels.mark_decay(sparse), capability, CHUNKS, TABLE, doubles=True)
        for kind in (F4, F8, FLOAT16, BFLOAT16):
            kernel = kernels.squares(kind, 3, sparse)
            check(kernel, capability, CHUNKS, TABLE, SUMS, doubles=True)
    for largest in (False, True):
        check(kernels.totals(2, largest), capability, COUNTS, SUMS, SUMS, doubles=True)
    for kind in (np.int32, np.int64):
        sort_tiles = cuda_order.sort_tiles(kind)
        check(sort_tiles, capability, TABLE, *[types.int64] * 3, doubles=False)
    for kernel in (cuda_order.merge(), cuda_order.count_rows(), cuda_order.cut_rows()):
        check(kernel, capability, TABLE, *[types.int64] * 4, doubles=False)
    for kind in (F4, F8, FLOAT16, BFLOAT16):
        check(cuda_order.fold(kind), capability, TABLE, *[types.int64] * 3, doubles=kind == F8)
    for kind in (np.uint8, np.uint16, np.uint32, np.uint64):
        for index in (np.uint32, np.uint64):
            check(kernels.copy(kind, index), capability, TABLE, CHUNKS, types.int64, doubles=False)


WIDE = {
    "float32": ("ld.global.v4.f32", "ld.global.cs.v4.f32", "st.global.cs.v4.f32"),
    "float64": ("ld.global.v2.f64", "ld.global.cs.v2.f64", "st.global.cs.v2.f64"),
    "float16 with master": ("ld.global.v4.f32", "ld.global.cs.v2.b32", "st.global.v2.b32"),
    "bfloat16 split": ("ld.global.v2.b32", "ld.global.cs.v4.f32", "st.global.v2.b32"),
    "bfloat16 state": ("ld.global.v4.f32", "ld.global.cs.v2.b32", "st.global.cs.v2.b32"),
}
"""Accesses of a thread: one to each array, of 16 bytes to those of the largest elements; streamed
if they are of gradients or states."""


REGISTERS = 65536
"""Of a multiprocessor; those of a thread are allocated by eights."""


@pytest.mark.parametrize("weights", WIDE)
def test_a_thread_moves_16_bytes_at_once_and_five_blocks_fit_a_multiprocessor(weights, capability):
    layout = layout_of(rule_named("adam"), **WEIGHTS[weights])
    hyper = by_value(layout.rule, layout.real)
    doubles = weights == "float64"
    text = check(kernels.dense(layout), capability, CHUNKS, TABLE, hyper, doubles=doubles)
    accesses = set(re.findall(r"(?:ld|st)\.global[.a-z]*\.v\d\.\w+", text))
    assert accesses >= set(WIDE[weights])
    assert all(access[-6:] in ("v4.f32", "v4.b32", "v2.b32", "v2.f64") for access in accesses)
    assert "__local_depot" not in text
    registers = -(-machine_code(text, capability) // 8) * 8
    assert REGISTERS // (registers * kernels.THREADS) >= (4 if doubles else 5)
    if weights == "float32":  # packs are read before they are written: four arrays, and three
        order = re.findall(r"(ld|st)\.global(?:\.cs)?\.v4\.f32", text)
        assert order == (["ld"] * 4 + ["st"] * 3) * (len(order) // 7)
    # Copies of a pack lie in different registers: no two vector stores of a loop are alike.
    loops = re.split(r"^\$L\S*:|^\s*@?\S*\s*bra\b.*$", text, flags=re.MULTILINE)
    stores = [re.findall(r"st\.global\S*\.v\d\S*\s+\[.*\], (\{.*\})", loop) for loop in loops]
    assert any(len(loop) >= 3 for loop in stores)
    assert all(len(set(loop)) == len(loop) for loop in stores)


@pytest.mark.parametrize(
    "weights", ["float32", "float16 with master", "lazy rows", "standard rows", "float64"]
)
def test_states_in_8_bits_compile(weights, capability):
    """A warp takes a block: codes are moved as words, and maxima by shuffles."""
    rule, options = rule_named("adam"), {"real": F4, "weight": (F4,), "grad": F4}
    layout = Layout(rule, state=(np.int8, np.uint8), **{**options, **WEIGHTS[weights]})
    hyper = by_value(rule, layout.real)
    text = check(cuda_blocks.blocks(layout), capability, CHUNKS, TABLE, hyper, doubles=True)
    # Only the limits of a scale are compared as doubles, once for each lane of a block.
    arithmetic = re.search(r"(?:add|sub|mul|div|fma|sqrt)\S*\.f64", text)
    assert bool(arithmetic) == (weights == "float64")
    assert "shfl.sync.bfly" in text
    assert "bar.sync" not in text
    if not layout.sparse:
        assert text.count("ld.global.cs.b32") == text.count("st.global.cs.b32") == 2


def test_float16_is_converted_by_the_gpu_whatever_the_host(capability, monkeypatch):
    monkeypatch.setattr("fastopt._kernels.half._f16c", lambda: False)
    layout = layout_of(rule_named("sgd"), weight=(FLOAT16,), grad=FLOAT16)
    arguments = CHUNKS, TABLE, records(layout.rule, F4)
    text = check(kernels.dense.__wrapped__(layout), capability, *arguments, doubles=False)
    assert {"cvt.f32.f16", "cvt.rn.f16.f32"} <= {*re.findall(r"cvt[.\w]*", text)}


@pytest.mark.parametrize("capability", [(9, 0)], ids=CAPABILITIES.get, indirect=True)
def test_partial_sums_are_loaded_together(capability):
    """A thread has room in registers for all numbers of a group, although it adds them in order.

    For compute capability 8.0 the compiler chooses fewer registers, and several rounds of loads.
    """
    text = check(kernels.totals(1), capability, COUNTS, SUMS, SUMS, doubles=True)
    assert machine_code(text, capability) >= 2 * kernels.BLOCKS
