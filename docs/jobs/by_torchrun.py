"""Started by ``torchrun --standalone --nproc-per-node 4 by_torchrun.py PATH STEPS``."""

import sys

import torch.distributed as dist
from train import train

dist.init_process_group("gloo")
train(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), sys.argv[1], int(sys.argv[2]))
dist.destroy_process_group()
