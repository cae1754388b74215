"""Kernels that run from their PTX have the bits of the CPU's, and defects in them are found."""

import json
import shutil

import pytest

from helpers.cases import exhaustive, nightly
from helpers.paths import ROOT, TESTS
from ptx.executor import needs_numba_cuda, run_python

pytestmark = needs_numba_cuda

KERNELS = {
    *("begin", "blocks", "copy", "count_rows", "cut_rows", "dense", "finish", "flush_decay"),
    *("fold", "lazy", "mark_decay", "merge", "rows", "sort_tiles", "squares", "sums", "totals"),
}
SAMPLE = [
    *("dense/Adam", "dense/strided gradient", "int8/ragged blocks", "reductions/LAMB"),
    *("rows/several tiles", "rows/a row often", "rows/GroupAdaGrad", "rows/decay caught up"),
    "clip/dense",
]
"""Steps in which each kernel runs."""

FAMILIES = [
    *("dense", "half", "int8", "reductions", "lists", "rows", "clip", "averages"),
    *("graphs", "streams", "every optimizer", "every optimizer, rows", "float64"),
    *nightly("other forms", "other forms, rows", "float64, other forms"),
]
RULES = [
    *("every optimizer", "every optimizer, rows", "other forms", "other forms, rows"),
    *("float64", "float64, other forms", "every rule, float16 with master"),
    *("every rule, bfloat16 with master", "every rule, bfloat16 split"),
    *("every rule, float16 rounded at random", "every rule, bfloat16 state"),
    *("every rule, 8 bits", "every rule, standard rows"),
]
"""Families with every rule: dense, rows, lazy, float64, masters, 8 bits; and their sums."""

DEVICES = {"cc90": {}, "cc80, in reverse": {"FAKE_CAPABILITY": "80", "PTX_REVERSED": "1"}}
"""Compute capability, and the order of blocks and threads."""

DEFERRED = {"FAKE_DEFER": "1"}
"""Launches and copies are pending until something waits for them, and done in a random order."""

DEFECTS = {
    "pointers to the stack of a function that has returned": (
        "cuda_packs.py", '@overload(begin_pack, prefer_literal=True, inline="always")',
        "@overload(begin_pack, prefer_literal=True)", "dense/Adam", "differ"
    ),
    "a wrong index": (
        "cuda.py", "for i in range(done + t, size, across):",
        "for i in range(done + t, size + 1, across):", "dense/Adam",
        "access outside of allocated memory"
    ),
    "a missing barrier": (
        "cuda.py", "                cuda.syncthreads()\n            if t == 0:",
        "            if t == 0:", "reductions/LAMB", "race"
    ),
    "a missing wait": (
        "cuda_driver.py",
        '    _checked(driver.cuStreamWaitEvent(then, int(event.handle), 0), "cuStreamWaitEvent")\n',
        "", "streams/streams", "differ"
    ),
}  # fmt: skip
"""Changes of fastopt: file, code and its replacement, a step, and what is found."""


BYTES = {
    ("Adam, float32", "dense"): 28,
    ("Adam, float16 with master", "dense"): 28,
    ("Adam, split bfloat16", "dense"): 26,
    ("Adam, bfloat16 state", "dense"): 20,
    ("LAMB, float32", "sums"): 16,
    ("LAMB, float16 with master", "sums"): 14,
    ("norm, float32", "squares"): 4,
    ("norm, float16", "squares"): 2,
}
"""Bytes of an element that is read, and of one that is written, of the arrays of a kernel."""


def run(folder, *cases, package=ROOT, **changes):
    """What ``steps.py`` prints; fma rounds twice, as on a CPU that does not fuse."""
    settings = {"PYTHONPATH": f"{package}:{TESTS}", "PTX_SPLIT_FMA": "1", **DEFERRED}
    return json.loads(run_python(folder, TESTS / "ptx" / "steps.py", *cases, **settings, **changes))


def check_equal(different):
    assert different
    assert {name: count for name, count in different.items() if count != 0} == {}


@pytest.mark.parametrize("device", ["cc90", *exhaustive("cc80, in reverse")])
def test_each_kernel_runs_with_the_bits_of_the_cpu(device, folder):
    found = run(folder, *SAMPLE, **DEVICES[device])
    check_equal(found["different"])
    names = found["executed"]
    ran = {each for each in KERNELS if any(f"{len(each)}{each}" in name for name in names)}
    assert ran == KERNELS


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_have_the_bits_of_the_cpu(family, folder):
    check_equal(run(folder, family)["different"])


@pytest.mark.slow("nightly")
@pytest.mark.parametrize(
    ("family", "device"),
    [*((family, "cc90") for family in RULES), *((family, [*DEVICES][1]) for family in RULES[:2])],
)
def test_what_is_compiled_for_every_rule_is_executed(family, device, folder):
    """No kernel is made and not launched; optimizers without such kernels refuse the call."""
    found = run(folder, family, **DEVICES[device])
    check_equal(found["different"])
    assert sorted(found["compiled"]) == sorted(found["launched"])


@pytest.mark.slow("exhaustive")
def test_the_sectors_that_a_kernel_moves_are_those_of_its_arrays(folder):
    """Besides what a block reads once: less than a byte for each element."""
    printed = run_python(folder, TESTS / "ptx" / "counts.py", *{step: 0 for step, _ in BYTES})
    rows = [line.replace("`", "").split(" | ") for line in printed.splitlines()[2:]]
    found = {(step[2:], kernel): float(moved[:-2]) for step, kernel, _, moved in rows}
    assert found.keys() >= BYTES.keys()
    assert {key for key, bytes_ in BYTES.items() if not 0 <= found[key] - bytes_ < 1} == set()


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_in_fastopt_is_found(name, folder, tmp_path):
    file, code, replacement, case, expected = DEFECTS[name]
    package = tmp_path / "fastopt"
    shutil.copytree(ROOT / "fastopt", package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / "_kernels" / file).read_text("utf-8")
    assert text.count(code) == 1
    (package / "_kernels" / file).write_text(text.replace(code, replacement), "utf-8")
    (found,) = run(folder, case, package=tmp_path)["different"].values()
    if expected == "differ":
        assert isinstance(found, int)
        assert found > 0
    else:
        assert f" of the PTX: {expected}" in str(found)


LONG = "between_the_writes_of_its_stream or test_every_rule_steps"
"""Tests that only take time: a kernel that would run for days, and 713 steps of every rule, which
are made here bit for bit."""


@pytest.mark.slow("nightly")
@pytest.mark.parametrize("name", sorted(path.name for path in (TESTS / "gpu").glob("test_*.py")))
def test_a_file_of_tests_for_gpus_passes(name, folder):
    arguments = ["-m", "pytest", "-q", "-p", "ptx.executor", "-p", "no:cacheprovider"]
    arguments += ["-m", "gpu and not slow", "-k", f"not ({LONG})", TESTS / "gpu" / name]
    run_python(folder, *arguments, nothing=pytest.ExitCode.NO_TESTS_COLLECTED, **DEFERRED)


@pytest.mark.slow("nightly")
def test_the_benchmark_of_gpus_runs(folder):
    code = (
        "import runpy, sys; from ptx import executor; executor.install(); "
        "sys.argv = ['gpu.py', '--quick']; "
        "runpy.run_path('asv_benchmarks/gpu.py', run_name='__main__')"
    )
    assert run_python(folder, "-c", code).count("GB/s") == 6
