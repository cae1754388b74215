"""What each worker of Ray or Dask calls to become a rank."""

import socket

import torch.distributed as dist
from train import train


def meeting_point(host):
    """Address at which the ranks meet: a free port of the machine of rank 0, named `host`."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    return f"tcp://{host}:{port}"


def member(address, rank, ranks, path, steps):
    """Take part in a job as one of its ranks; return the number of steps done."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    try:
        return train(dist.group.WORLD, rank, ranks, path, steps)[0]
    finally:
        dist.destroy_process_group()
