"""Checks of a Trainer whose updates are shared out, on any number of ranks."""

from pathlib import Path

import numpy as np
from ranks_common import comm, exact

from fastopt import Parameter, Trainer, optimizer
from fastopt.amp import LossScaler
from fastopt.distributed import ShardedUpdater
from helpers.tensor_lists import frozen

SHAPES = {"fc_weight": (20, 6), "fc_bias": (6,), "half_weight": (9, 9), "table": (50, 3)}


def parameters():
    """Parameters with equal values in every process."""
    made = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        dtype = "float16" if "half" in name else "float32"
        kind = "row_sparse" if name == "table" else "default"
        made.append(Parameter(name, shape=shape, dtype=dtype, grad_stype=kind))
        made[-1].initialize()
        made[-1].set_data(exact(number, shape, dtype))
    return made


def train(trainer, params, steps, ranks):
    """Do steps with the gradients of these ranks."""
    for step in steps:
        for k, parameter in enumerate(params):
            for rank in ranks:
                rows = np.array([rank, 40 - rank, rank])
                shape = (3, 3) if parameter.name == "table" else parameter.shape
                grad = exact(31 * step + 7 * rank + k, shape, np.float32)
                parameter.add_grad((grad, rows) if parameter.name == "table" else grad)
        trainer.step(batch_size=8)


def check_a_trainer_shares_out(folder):
    arguments = {"learning_rate": 0.01, "multi_precision": True}
    ours, theirs = parameters(), parameters()
    trainers = [
        Trainer(params, "adam", arguments, loss_scaler=LossScaler(4.0), comm=one)
        for params, one in ((ours, comm), (theirs, None))
    ]
    train(trainers[0], ours, range(3), [comm.rank])
    train(trainers[1], theirs, range(3), range(comm.size))
    assert data(ours) == data(theirs)
    assert (ours[3].data()[20] == parameters()[3].data()[20]).all()
    path = Path(folder, f"trainer_{comm.size}")
    trainers[0].save_states(path)
    before = [p.data().copy() for p in ours]
    train(trainers[0], ours, range(3, 5), [comm.rank])
    again = parameters()
    trainer = Trainer(again, "adam", arguments, loss_scaler=LossScaler(2.0), comm=comm)
    trainer.load_states(path)
    for parameter, values in zip(again, before, strict=True):
        parameter.set_data(values)
    assert trainer.updater.loss_scaler.scale == 4
    trainer.load_states(path)  # setting data has set the masters too
    train(trainer, again, range(3, 5), [comm.rank])
    assert data(again) == data(ours)


def data(params):
    return frozen([parameter.data() for parameter in params])


def check_a_trainer_takes_an_updater(folder):
    made, ends = optimizer.SGD(learning_rate=0.5), []
    for kind, one in ((made, ShardedUpdater(made, comm, bucket_bytes=64)), ("sgd", comm)):
        params = parameters()[:2]
        trainer = Trainer(params, kind, {"learning_rate": 0.5} if one is comm else None, comm=one)
        train(trainer, params, [0], [comm.rank])
        ends.append(data(params))
    assert ends[0] == ends[1] != data(parameters()[:2])
