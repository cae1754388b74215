"""Sharded updates by ``torchrun`` over gloo; ``FASTOPT_TEST_TORCH`` names a Python with torch."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from helpers.cases import exhaustive, variants
from helpers.paths import ROOT, TESTS
from helpers.ranks import CHECKS, OF_FORMULAS, names_of

PYTHON = os.environ.get("FASTOPT_TEST_TORCH") or sys.executable

pytestmark = pytest.mark.skipif(
    sys.executable == PYTHON and importlib.util.find_spec("torch") is None,
    reason="torch is missing",
)


@pytest.fixture
def torchrun():
    """Run a program on so many ranks of one machine."""

    def run(ranks, *command, check=True):
        start = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        done = subprocess.run(
            [*map(str, start), *map(str, command)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        if check and done.returncode:
            pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    return run


@pytest.mark.parametrize(
    "parts",
    [
        ("updates", "divergence"),
        *exhaustive(("rules", "settings", "overlap", "join")),
    ],
    ids=" ".join,
)
def test_checks_pass(torchrun, parts):
    modules = [f"ranks_{part}" for part in parts]
    done = torchrun(3, CHECKS / "run_torch.py", *modules)
    names = [name for module in modules for name in names_of(module)]
    found = [name for name in names if name not in OF_FORMULAS]
    assert re.findall(r"^passed (\w+)$", done.stdout, re.MULTILINE) == found


@pytest.mark.parametrize("choice", variants("every case"))
def test_rules_have_the_bits_of_one_process(torchrun, choice):
    done = torchrun(3, CHECKS / "run_torch.py", f"ranks_rules={choice}")
    assert re.findall(r"^passed (\w+)$", done.stdout, re.MULTILINE) == names_of("ranks_rules")


ENDS = """
import os, sys
import numpy as np
import torch.distributed as dist
from fastopt import optimizer
from fastopt.distributed import ShardedUpdater

dist.init_process_group("gloo")
updater = ShardedUpdater(optimizer.SGD(), dist.group.WORLD)
weight = np.ones(3, np.float32)
updater(0, weight.copy(), weight)
if dist.get_rank() == 1:
    os._exit(0) if "killed" in sys.argv else sys.exit()
updater(0, weight.copy(), weight)
"""


@pytest.mark.parametrize(
    ("way", "words"),
    [("left", "rank 1 has ended"), ("killed", "the connection to another rank failed")],
)
def test_a_rank_that_ends_is_an_error_of_the_others(torchrun, tmp_path, way, words):
    program = tmp_path / "ends.py"
    program.write_text(ENDS, encoding="utf-8")
    done = torchrun(2, program, way, check=False)
    assert done.returncode != 0
    assert f"RuntimeError: call 2 of updater 0 (update): {words}" in done.stderr
