"""Started once for each rank, ``python shrink.py HOST:PORT RANK RANKS PATH STEPS``, on any machine.

Ranks that survive the end of others go on without them, from the last checkpoint.
"""

import json
import sys
import time

import torch.distributed as dist
from train import train

PATIENCE = 5.0  # seconds in which survivors report; those of a slow step need more


def survivors(store, ranks, rank, attempt):
    """Agree on the ranks that are left; rank 0, whose process has the store, must be one."""
    store.set(f"{attempt} {rank}", "here")
    keys, end = {each: f"{attempt} {each}" for each in ranks}, time.monotonic() + PATIENCE
    if rank == 0:
        while time.monotonic() < end and not store.check([*keys.values()]):
            time.sleep(0.05)
        left = [each for each in ranks if store.check([keys[each]])]
        store.set(f"{attempt} left", json.dumps(left))
    return json.loads(store.get(f"{attempt} left"))  # waits for rank 0


def go_on(store, rank, size, path, steps):
    """Train with all ranks, and again with those that are left; return the steps and weights."""
    ranks, attempt = [*range(size)], 0
    while True:
        here, own = ranks.index(rank), dist.PrefixStore(f"group {attempt}", store)
        dist.init_process_group("gloo", store=own, rank=here, world_size=len(ranks))
        try:
            return train(dist.group.WORLD, here, len(ranks), path, steps)
        except (RuntimeError, TimeoutError):
            left = survivors(store, ranks, rank, attempt)
            if left == ranks:
                raise  # all are here: it was no rank that ended
            ranks, attempt = left, attempt + 1
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    (host, port), rank, size = sys.argv[1].split(":"), int(sys.argv[2]), int(sys.argv[3])
    store = dist.TCPStore(host, int(port), size, is_master=rank == 0)
    go_on(store, rank, size, sys.argv[4], int(sys.argv[5]))
    time.sleep(1)  # the store of rank 0 is there until all have ended
