"""``fastopt bench`` and what it measures with."""

import re
import sys
import time
from functools import partial

import numba
import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt.__main__ import main
from fastopt._console import progress, table
from fastopt.bench import report
from fastopt.bench.clock import seconds
from fastopt.bench.steps import PLAIN, Step, momentum_of


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_plain_numpy_does_the_same_as_the_kernel(name, momentum, rng):
    weights = [rng.standard_normal((6, 7), np.float32) for _ in range(2)]
    copies = [weight.copy() for weight in weights]
    made = optimizer.create(name, **({"momentum": momentum} if momentum_of(name) else {}))
    updater, update = optimizer.get_updater(made), PLAIN[name](made)
    for grad in rng.standard_normal((12, 6, 7), np.float32):
        for index in range(2):
            updater(index, grad, weights[index])
            update(index, grad, copies[index])
    np.testing.assert_allclose(copies, weights, rtol=0, atol=2e-5)


@pytest.fixture
def bench(monkeypatch, capsys):
    """What the command prints with as few measurements as possible."""
    monkeypatch.setattr(report, "ROUNDS", 1)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(report, "sampler", lambda call: partial(seconds, call, 1))

    def printed(*arguments, code=0):
        assert main(["bench", *arguments]) == code
        return capsys.readouterr().out

    return printed


@pytest.mark.slow
def test_report_has_the_memory_the_threads_and_the_standings(bench):
    out = bench("Adam", "groupadagrad", "--sizes", "1000", "70000")
    assert out.startswith(f"fastopt {fastopt.__version__}, ")
    memory = r"^memory, .* written: [\d.]+ GB/s at 1,000, [\d.]+ GB/s at 70,000 elements$"
    assert re.search(memory, out, re.MULTILINE)
    assert re.search(
        r"^optimizer +compile +1,000 +limit +NumPy +70,000 +limit +NumPy$", out, re.MULTILINE
    )
    for name, plain in (("adam", r"[\d.]+"), ("groupadagrad", "-")):
        row = rf"^{name} +[\d.]+ s( +[\d.]+ [um]s +[\d.]+ +{plain}){{2}}$"
        assert re.search(row, out, re.MULTILINE)
    assert "\nsgd" not in out
    threads = re.findall(r"^(\d+) +[\d.]+ [um]s$", out, re.MULTILINE)
    most = numba.get_num_threads()
    counts = sorted({1 << k for k in range(most.bit_length())} | {most})
    assert [int(number) for number in threads] == counts * (most > 1)


def test_report_ends_when_time_is_over_and_names_what_is_missing(bench):
    """With 1 as the exit code, as nothing was measured, and nothing compiled for another run."""
    out = bench("--seconds", "0", code=1)
    text = " ".join(out.split())
    assert "not measured within 0 s: adam, sgd, adamw, " in text
    assert text.endswith("; give more --seconds")


@pytest.mark.slow
def test_time_to_compile_counts(monkeypatch, bench):
    """The clock says an hour after the first optimizer has been compiled."""

    clock, hours = time.perf_counter, []
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(hours))

    def slow(*arguments, **options):
        hours.append(1)
        return Step(*arguments, **options)

    monkeypatch.setattr(report, "Step", slow)
    out = bench("sgd", "adam", "lion", "--sizes", "100", "--seconds", "3000")
    assert "\nsgd  " in out
    assert "3600 s of them to compile" in out
    missing = "adam, lion; give more --seconds, or run it again, now that kernels are cached"
    assert f"not measured within 3000 s: {missing}" in " ".join(out.split())


@pytest.mark.parametrize("load", [0.1, 12.0])
def test_report_says_that_a_machine_is_busy(load, monkeypatch, bench):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    said = "this machine is busy (load 12.0 on 2 CPUs): timings mean little" in bench(
        "--seconds", "0", code=1
    )
    assert said == (load == 12.0)


REFUSED = {
    "--sizes 0": "--sizes: must be an integer of at least 1, got '0'",
    f"--sizes {10**15}": "no memory for 1,000,000,000,000,000 elements: give smaller",
    "--threads 100000": "--threads is at most ",
    "--seconds nan": "--seconds: must be a finite number of at least 0",
    "adm": "no 'adm'; did you mean 'adam'? The names are adabelief, adadelta",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_measured_is_refused_in_a_line(arguments, capsys):
    assert main(["bench", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("fastopt bench: ")
    assert REFUSED[arguments] in line


def test_commands_go_without_a_progress_bar_where_tqdm_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(progress([1, 2], "thing")) == [1, 2]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_limit_moves_the_memory_and_leaves_the_numbers_alone():
    step = Step("lamb", (30, 30))
    before = [array.copy() for array in (step.weight, step.grad, *step.updater.states[0])]
    step.limit()
    after = (step.weight, step.grad, *step.updater.states[0])
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_table_is_aligned_and_markdown_on_demand():
    lines = [["adam", "1.0"], ["sgd", "22.5"]]
    assert table(["name", "time"], lines).splitlines()[2:] == ["adam   1.0", "sgd   22.5"]
    head, rule, *_ = table(["name", "time"], lines, markdown=True).splitlines()
    assert (head, rule) == ("| name | time |", "| ---- | ---: |")
