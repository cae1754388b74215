"""Run the checks of modules on all ranks of torch.distributed, from the repository's root.

``PYTHONPATH=.:tests torchrun --nproc-per-node 2 tests/distributed/ranks/run_torch.py ranks_join``
"""

import socket
import sys

import torch.distributed as dist

from fastopt.torch.communicator import GlooCommunicator, joined
from helpers.ranks import OF_FORMULAS, World, call_checks
from helpers.untraced import trace_no_compiler


class GlooWorld(World, GlooCommunicator):
    """Processes as ranks."""


def main(*names):
    """Call the checks of the modules, in order, except those of formulas.

    After ``nodes``, two ranks are one node and others another.
    """
    dist.init_process_group("gloo")
    if names[0] == "nodes":
        names, node = names[1:], f"node {dist.get_rank() // 2}"
        socket.gethostname = lambda: node
    world = joined(dist.group.WORLD, timeout=60)
    world.__class__ = GlooWorld
    for name in names:
        call_checks(world, name, skipped=OF_FORMULAS)


if __name__ == "__main__":
    trace_no_compiler()
    main(*sys.argv[1:])
