"""``.ci/run``: README's commands come first, with nothing installed but what they install."""

import re

import pytest

from helpers.paths import ROOT
from helpers.processes import run


def test_the_commands_of_the_readme_run_in_a_new_environment():
    script, _, _ = (ROOT / ".ci" / "run").read_text("utf-8").partition('step "$command"')
    assert 'python3 -m venv "$temporary/venv"' in script
    assert "system-site-packages" not in script
    assert "pip install" not in script


@pytest.mark.parametrize("tests", ["tests/adapters", "tests/pytorch"])
def test_no_test_of_another_library_is_skipped(tests):
    script = (ROOT / ".ci" / "run").read_text("utf-8").replace("\\\n", "")
    (line,) = (
        line
        for line in script.splitlines()
        if re.search(rf"pytest +-n 2 (-m .not gpu. )?+{tests}", line)
    )
    assert "FASTOPT_TEST_SKIPS=fail" in line


def test_an_unknown_argument_is_refused():
    done = run("bash", ROOT / ".ci" / "run", "exhausting", status=2)
    assert done.stdout == ""
    assert done.stderr == ".ci/run: the only argument is exhaustive, got exhausting\n"


@pytest.mark.parametrize(
    ("last", "status"), [("echo two", 0), ("false", 1)], ids=["all steps pass", "a step fails"]
)
def test_it_ends_with_the_time_of_each_step(last, status, tmp_path):
    """Up to the first step it is the script itself, without its environment."""
    script, _, _ = (ROOT / ".ci" / "run").read_text("utf-8").partition("commands=$(")
    script = script.replace('python3 -m venv "$temporary/venv"\n', "")
    script += f"step true\nstep '{last}'\n"
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(script, "utf-8")
    done = run("bash", tmp_path / ".ci" / "run", status=status)
    table = done.stdout.partition("Minutes of each step\n")[2]
    assert re.findall(r"^ +0:0\d  (.*)$", table, re.MULTILINE) == ["true", last]


@pytest.mark.slow("exhaustive")
def test_tests_are_collected_without_mpi4py_from_any_directory(run_python):
    code = """
import sys
import pytest
sys.modules["mpi4py"] = None
root = sys.argv[1]
options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", root]
options += ["-c", f"{root}/pyproject.toml"]
sys.exit(pytest.main([*options, f"{root}/tests", f"{root}/fastopt"]))
"""
    done = run_python(code, ROOT, check=False, cwd=ROOT / "tests", PYTEST_ADDOPTS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mpi/test_jobs.py::" in done.stdout
    assert "/mpi_" not in done.stdout
