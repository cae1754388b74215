"""A step of Adam with sharded state on several ranks of this machine."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scaling.py"


def mpiexec() -> str | None:
    """Return the path of ``mpiexec``, preferably the one beside Python."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def job(ranks: int, script: Path, name: str, *options: str) -> dict:
    """Run a script in an MPI job and return the JSON that it prints."""
    command = [str(mpiexec()), "-n", str(ranks), sys.executable, str(script), "--name", name]
    done = subprocess.run([*command, *options], check=True, capture_output=True)
    return json.loads(done.stdout)


class Step:
    params = (("ResNet-50", "1,000 x 1,000"), (1, 2))
    param_names = ("tensors", "ranks")

    def setup(self, tensors, ranks):
        if importlib.util.find_spec("mpi4py") is None or mpiexec() is None:
            raise NotImplementedError("needs mpi4py and mpiexec, as of pip install mpi4py mpich")

    def track_time(self, tensors, ranks):
        return 1e3 * job(ranks, SCRIPT, tensors)["step"]

    track_time.unit = "ms"
