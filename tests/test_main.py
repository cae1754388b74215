import os
import re
import subprocess
import sys

import pytest

import fastopt
from fastopt import warmup
from fastopt.__main__ import main
from fastopt.demo import digits as demo


def one_line(text):
    assert text.count("\n") == 1
    assert text.endswith("\n")
    return text


@pytest.mark.parametrize(("command", "code", "shown"), [
    ("", 2, "usage: fastopt.*demo.*info"),
    ("--help", 0, "usage: fastopt"),
    ("demo --help", 0, "usage: fastopt"),
    ("bench --help", 0, "usage: fastopt"),
    ("--version", 0, f"fastopt {re.escape(fastopt.__version__)}\n$"),
])  # fmt: skip
def test_help_and_version_are_printed(command, code, shown, capsys):
    assert main(command.split()) == code
    assert re.match(shown, capsys.readouterr().out, re.DOTALL)


def test_the_demo_takes_its_options_and_help_shows_the_defaults(capsys, monkeypatch):
    asked, half = [], "demo --dtype bfloat16 --no-master --rounding stochastic --learning-rate 1e-4"
    monkeypatch.setattr(demo, "run", asked.append)
    for command in ("demo", half, "demo --help"):
        assert main(command.split()) == 0
    default, options = demo.Options(), {"no_master": True, "rounding": "stochastic"}
    assert asked == [default, demo.Options(dtype="bfloat16", learning_rate=0.0001, **options)]
    words = " ".join(capsys.readouterr().out.split())
    assert f"name of the optimizer, default {default.optimizer}" in words
    assert f"--epochs N default {default.epochs}" in words
    assert f"images in a step, default {default.batch_size}" in words


WRONG = {
    "demo --optimizer adum": "Cannot find optimizer 'adum'; did you mean 'adam'? The n",
    "demo --epochs 0": "--epochs: must be an integer of at least 1, got '0'",
    "demo --batch-size 1438": "--batch-size is at most 1437",
    "demo --learning-rate=-1": "--learning-rate: must be a finite number of at least 0",
    "demo --learning-rate nan": "--learning-rate: must be a finite number",
    "demo --seed -1": "--seed: must be an integer of at least 0",
    "demo --dtype int8": "--dtype: invalid choice: 'int8'",
    "demo --no-master": "--no-master is for --dtype float16 and bfloat16",
    "demo --dtype float16 --rounding stochastic": "give --no-master too",
    "demo --optimizer groupadagrad":
        "index 0 (perceptron/hidden1/bias): rule group_adagrad works on rows",
    "dance": "invalid choice: 'dance'",
}  # fmt: skip


@pytest.mark.parametrize("command", WRONG)
def test_what_is_wrong_is_one_line_on_standard_error_and_exit_code_2(command, capsys):
    assert main(command.split()) == 2
    line = one_line(capsys.readouterr().err)
    assert line.startswith("fastopt")
    assert WRONG[command] in line


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_ranks_the_first_alone_prints(rank, monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", rank)
    assert main(["demo", "--batch-size", "1438"]) == 2
    assert main(["--version"]) == 0
    captured = capsys.readouterr()
    assert bool(captured.out) == bool(captured.err) == (rank == "0")


def test_interrupt_is_one_line_and_exit_code_130(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "fastopt: interrupted\n"


def test_missing_extra_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = one_line(captured.err)
    assert "sklearn" in line
    assert "pip install scikit-learn tqdm matplotlib" in line


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows reports a closed pipe in another way")
def test_closed_pipe_shows_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "fastopt", "info"],
            env={name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert done.returncode == 141
    assert done.stderr == ""


# fastopt warmup: what it compiles is compiled for every later process

UPDATE = """
import numpy as np
from numba.core import event
from fastopt import optimizer
with event.install_recorder("numba:compile") as recorder:
    for size in (10, 40_000):
        optimizer.get_updater(optimizer.Adam())(0, np.ones(size, "f4"), np.zeros(size, "f4"))
print(len(recorder.buffer))
"""
WARM = """
import sys
from fastopt.__main__ import main
main(["warmup", *sys.argv[1:]])
"""


@pytest.mark.slow("exhaustive")
@pytest.mark.parametrize(("arguments", "least"), [("Adam", 3), ("Adam sgd --rows", 10)])
def test_after_a_warmup_nothing_is_compiled(arguments, least, run_python, tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, again = (run_python(WARM, *arguments.split(), **cache) for _ in range(2))
    made = int(first.split()[0])
    assert made > least
    assert first.strip().endswith(", 0 were in the cache")
    assert again.strip() == f"0 kernels compiled, {made} were in the cache"
    assert run_python(UPDATE, **cache).strip() == "0"


def test_all_optimizers_with_rules_can_be_warmed():
    assert {"adafactor", "groupadagrad", "lbsgd", "muon", "sgld", "soap"} <= {*warmup.names()}
    assert "ccsgd" not in warmup.names()


@pytest.mark.parametrize("arguments", [["adm"], ["--dtypes", "float8"]])
def test_what_cannot_be_warmed_is_refused_in_a_line(arguments, capsys):
    assert main(["warmup", *arguments]) == 2
    assert "he names are" in capsys.readouterr().err


@pytest.mark.parametrize("names", [["Adam", "sgd", "adam"], []], ids=["named", "all"])
@pytest.mark.parametrize("rows", [[], ["--rows"]])
def test_each_optimizer_is_warmed_once(names, rows, monkeypatch):
    asked = []
    monkeypatch.setattr(warmup, "warm", lambda *task: asked.append(task))
    assert main(["warmup", *names, *rows]) == 0
    kinds = [False, True] if rows else [False]
    once = ["adam", "sgd"] if names else warmup.names()
    assert asked == [(name, "float32", kind) for name in once for kind in kinds]
