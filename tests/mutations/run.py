"""Plant the defects of ``defects.py`` in a copy of the package, one at a time, and run their tests.

``python tests/mutations/run.py [NUMBER ...]`` prints a line for each defect: caught, missed, or
stale, if the module no longer has the text once. The exit status is 1 unless all are caught.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from defects import DEFECTS

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(".*", "shared")


def verdict(copy: Path, path: str, text: str, defect: str, tests: str) -> str:
    """Return what becomes of a defect."""
    module = copy / "fastopt" / path
    source = module.read_text("utf-8")
    if source.count(text) != 1:
        return "stale"
    module.write_text(source.replace(text, defect), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-m", "not gpu"]
    files, *chosen = tests.split(" -k ")
    try:
        done = subprocess.run(
            [*command, *files.split(), *(f"-k{names}" for names in chosen)],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        module.write_text(source, "utf-8")
    return {0: "missed", 1: "caught"}.get(done.returncode, f"error\n{done.stdout}{done.stderr}")


def main(numbers: list[int]) -> int:
    """Return 0 if all are caught, else 1."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=IGNORED)
        found = []
        for number in numbers or range(len(DEFECTS)):
            path, text, defect, tests = DEFECTS[number]
            found.append(verdict(copy, path, text, defect, tests))
            print(f"{number:2d} {path}: {defect.strip()}: {found[-1]}", flush=True)
    print(f"{found.count('caught')} of {len(found)} caught")
    return int(found.count("caught") < len(found))


if __name__ == "__main__":
    sys.exit(main([*map(int, sys.argv[1:])]))
