"""Compiled kernels on disk: compiled once for all processes, never stale, never in the way."""

import errno
import logging
import os
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
from numba import njit
from numba.core.caching import IndexDataCacheFile

import fastopt
from fastopt._kernels.compiling import KernelFiles, created, log_compiling
from helpers.cases import exhaustive

STEP = """
import sys, numpy as np
from numba.core import event
with event.install_recorder("numba:compile") as recorder:
    {load}
    for dtype in (np.float32, np.float64):
        for shape in ((5, 2), (40, 1000)):
            weight = np.zeros(shape, dtype)
            updater(0, np.ones(shape, dtype), weight)
            updater(0, (np.ones((2, shape[1]), dtype), np.array([1, 3])), weight)
            updater.states.clear()
    print(weight[0, 0], len(recorder.buffer))
"""
OF = "from fastopt import optimizer\nupdater = optimizer.Updater(optimizer.create({}))"
INT8 = "'adam', state_dtype='int8'"


def stepping(load):
    """Code of a step of the updater that other code creates."""
    return STEP.format(load=textwrap.indent(load, "    ").strip())


@pytest.fixture
def step(run_python, tmp_path):
    """Run a step in a new process; return the weight and how many compilations there were."""

    def run(load, *args, **environment):
        environment.setdefault("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
        value, compiled = run_python(stepping(load), *args, **environment).split()
        return float(value), int(compiled)

    return run


@pytest.fixture
def install(tmp_path):
    """Copy of the package with an empty cache."""
    package = Path(fastopt.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "site" / "fastopt", ignore=ignored)
    return tmp_path / "site"


@pytest.mark.parametrize(
    "name", ["'adam'", *exhaustive("'lamb'", "'sgld'", "'groupadagrad'", INT8)]
)
def test_a_second_process_compiles_nothing(name, step, install):
    """Whose modules come from bytecode, while those of the first are compiled from their source."""
    environment = {"PYTHONPATH": str(install), "PYTHONDONTWRITEBYTECODE": None}
    first, second = (step(OF.format(name), **environment) for _ in range(2))
    assert first[1] > 0
    assert second == (first[0], 0)


HELPER = """
from fastopt.kernels.rule import scalar
@scalar
def scaled(grad, h):
    return {} * h.lr * grad
"""
RULE = """
import fastopt
@fastopt.rule(hyper=("lr",))
def mine(weight, grad, state, h):
    return weight - scaled(grad, h), ()
class Mine(fastopt.optimizer.Optimizer):
    rule = mine
"""


MADE = "\nupdater = fastopt.get_updater({}Mine(learning_rate=1.0))"


@pytest.mark.slow("exhaustive")
def test_a_rule_is_compiled_again_when_a_helper_of_another_module_was_edited(step, tmp_path):
    (tmp_path / "mine.py").write_text("from parts import scaled" + RULE)
    path, seen = f"{tmp_path}:{Path(fastopt.__file__).parents[1]}", []
    for factor in (1, 1, 2, 1):
        (tmp_path / "parts.py").write_text(HELPER.format(factor))
        load = "import mine, fastopt" + MADE.format("mine.")
        value, compiled = step(load, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
        seen.append((value, compiled > 0))
    assert seen == [(-1, True), (-1, False), (-2, True), (-1, False)]


MINE = HELPER.format(1) + RULE
TYPED = {
    "a script": "import runpy\n"
    "updater = runpy.run_path(sys.argv[1], run_name='__main__')['updater']",
    # IPython puts the number of the process into the file names of cells.
    "a cell of a notebook": "file = '/ipykernel_' + sys.argv[2] + '/1.py'\n"
    f"exec(compile({MINE!r}, file, 'exec'), globals())\nimport fastopt" + MADE.format(""),
    "a REPL": MINE + MADE.format(""),  # code from ``python -c`` has no source file either
}


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("place", TYPED)
def test_a_rule_outside_of_modules_works_and_is_cached_if_it_has_a_file(place, step, tmp_path):
    (tmp_path / "train.py").write_text(MINE + MADE.format(""))
    first, second = (step(TYPED[place], tmp_path / "train.py", k) for k in (1, 2))
    assert first[0] == second[0] == -1
    assert first[1] > 0
    assert place == "a REPL" or second[1] == 0


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("home", [None, "/dev/null"], ids=["unset", "unusable"])
def test_an_install_that_cannot_be_written_works(run_python, install, tmp_path, home):
    """Directories are read-only for anyone; a file in place of the directory stops root too."""
    for folder in ("_kernels", "optimizer"):
        (install / "fastopt" / folder / "__pycache__").write_text("not a directory")
    code = "import logging; logging.basicConfig(level='INFO', format='%(name)s %(message)s')\n"
    environment = {
        "PYTHONPATH": str(install),
        "HOME": home,
        "XDG_CACHE_HOME": None if home is None else "/dev/null",
        "NUMBA_CACHE_DIR": None,
    }
    done = run_python(code + stepping(OF.format("'adam'")), check=False, **environment)
    assert done.returncode == 0, done.stderr
    if home is not None:
        assert done.stderr.count("kernels are compiled again in every process") == 1
        assert int(done.stdout.split()[1]) > 0


STEPS = """
import sys
import numpy as np
from fastopt import optimizer
for made in sys.argv[1:]:
    updater = optimizer.get_updater(eval("optimizer." + made))
    weight = np.linspace(-1, 1, 37, dtype=np.float32)
    for _ in range(3):
        updater(0, np.full(37, 0.5, np.float32), weight)
    print(made, weight.tobytes().hex())
"""


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize("made", [
    ("AdamW(formula='torch')", "Adam()"),  # records of equal number
    ("SGD(momentum=0.9)", "NAG(momentum=0.9)"),  # functions of equal name, number and arguments
], ids=str)  # fmt: skip
def test_kernels_of_different_processes_do_not_mix(made, run_python, tmp_path):
    shared, own = ({"NUMBA_CACHE_DIR": str(tmp_path / part)} for part in ("shared", "own"))
    for one in made:
        run_python(STEPS, one, **shared)
    assert run_python(STEPS, *made, **shared) == run_python(STEPS, *made, **own)


def test_processes_that_save_at_once_never_exchange_kernels(tmp_path):
    """Both look up a free name before either writes, and the first to look is the last to write."""
    first, second, third = (KernelFiles(str(tmp_path), "kernel", 0) for _ in range(3))
    late = []
    first._save_data = lambda *saved: late.append(saved)
    second._load_index = dict
    first.save("float32", 32)
    second.save("float64", 64)
    KernelFiles._save_data(first, *late[0])
    assert third.load("float64") == 64
    assert third.load("float32") in (None, 32)


@pytest.fixture
def kernel(monkeypatch, tmp_path, caplog) -> Callable:
    """Function that returns a kernel, as in a new process, and its cache hits after a call."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    log_compiling()
    caplog.set_level(logging.INFO, "fastopt")

    def doubled(x):
        return x + x

    def run():
        made = created(njit, doubled)
        assert made(1.5) == 3
        return sum(made.stats.cache_hits.values())

    return run


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replaced(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "one bit": flipped,
    "a directory": replaced,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("end", ["nbi", "nbc"])
def test_a_damaged_file_is_logged_once_and_replaced(end, damage, kernel, tmp_path, caplog):
    assert [kernel(), kernel()] == [0, 1]
    for path in tmp_path.rglob(f"*.{end}"):
        DAMAGES[damage](path)
    found = [kernel(), kernel(), kernel()]
    assert found == ([0, 0, 0] if damage == "a directory" else [0, 1, 1])
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert str(tmp_path) in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_disk_is_logged_once(number, kernel, monkeypatch, caplog):
    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(IndexDataCacheFile, "_open_for_write", full)
    assert [kernel(), kernel()] == [0, 0]
    assert [os.strerror(number) in record.getMessage() for record in caplog.records] == [True]


def test_a_compilation_is_logged_once(kernel, caplog):
    log_compiling.cache_clear()
    assert [kernel(), kernel()] == [0, 1]
    assert ["compiling kernels" in record.getMessage() for record in caplog.records] == [True]


SIGNAL = """
import signal, sys, numpy as np, fastopt
class Late(Exception):
    pass
def handler(*_):
    raise Late
number = getattr(signal, sys.argv[1])
signal.signal(number, handler)
def profile(frame, event, _):
    if event == "call" and frame.f_code.co_name == "stream_list":
        seen.append(frame)
        if len(seen) == 30:
            sys.setprofile(None)
            signal.raise_signal(number)
seen, results = [], []
updater, weight = fastopt.Updater(fastopt.SGD(lr=1.0)), np.zeros(3)
sys.setprofile(profile)
for _ in range(3):
    try:
        updater(0, np.ones(3), weight)
        results.append(-weight.item(0) == updater.optimizer.num_update)
    except Late:
        results.append("late")
print(len(seen), results, signal.getsignal(number) is handler)
"""


@pytest.mark.skipif(os.name != "posix", reason="the handlers of signals")
@pytest.mark.parametrize("name", ["SIGALRM", *exhaustive("SIGINT", "SIGUSR1")])
def test_a_signal_handler_that_raises_waits_until_kernels_are_compiled(name, run_python):
    """Numba lists its functions in generators, which an exception would end for ever."""
    assert run_python(SIGNAL, name) == "30 ['late', True, True] True\n"


BLAS = """
import sys, numba, numpy as np, fastopt
weight = np.zeros(3)
fastopt.Updater(fastopt.SGD())(0, np.ones(3), weight)
assert "scipy.linalg" not in sys.modules
print(numba.njit(lambda a: np.dot(a, a))(np.full((2, 2), 2.0)).tolist())
"""


def test_a_first_step_does_not_load_scipy_and_numba_has_a_blas(run_python):
    pytest.importorskip("scipy")
    assert run_python(BLAS).strip() == "[[8.0, 8.0], [8.0, 8.0]]"


DEBUGGED = """
import numpy as np, numba, fastopt
from fastopt.optimizer import Optimizer

@numba.njit
def doubled(x):
    return 2 * x

@fastopt.rule(hyper=("lr",))
def twice(weight, grad, state, h):
    return weight - h.lr * doubled(grad), ()

class Twice(Optimizer):
    rule = twice

for made in (fastopt.Adam(lr=0.1), Twice(learning_rate=0.25)):
    weight, updater = np.ones(3, np.float32), fastopt.Updater(made)
    updater([0, 1], [weight * 1, weight[:1] * 1], [weight, np.ones(1, np.float32)])
    print(weight[0], len(updater.records.known()))

@numba.njit
def tripled(x):
    return 3 * x

print(type(doubled).__name__, type(tripled).__name__)
"""


def test_users_debug_their_own_functions_and_kernels_are_compiled_all_the_same(run_python):
    """A rule may call functions that NUMBA_DISABLE_JIT has left to Python."""
    compiled, debugged = (run_python(DEBUGGED, NUMBA_DISABLE_JIT=switch) for switch in "01")
    *numbers, kinds = compiled.splitlines()
    assert kinds == "CPUDispatcher CPUDispatcher"
    assert debugged.splitlines() == [*numbers, "function function"]
    assert [line.split()[1] for line in numbers] == ["2", "2"]
