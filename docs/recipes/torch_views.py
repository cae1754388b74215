"""fastopt with gradients of torch: it updates NumPy views of the parameters in place."""

import numpy as np
import torch
from both_times import both_times
from sklearn.datasets import load_digits

import fastopt

EPOCHS, BATCH, WIDTH, RATE = 10, 64, 512, 0.001
torch.set_num_threads(1)  # more threads do not help for layers of this size


def of_torch(params, **options):
    """Return a step of torch's Adam."""
    made = torch.optim.Adam(params, lr=RATE, **options)
    return made.step


def of_torch_fused(params):
    """Return a step of torch's fused Adam, the fastest one."""
    return of_torch(params, fused=True)


def of_fastopt(params):
    """Return fastopt's step: views share the memory of the parameters."""
    updater = fastopt.Updater(fastopt.Adam(lr=RATE))
    weights = [p.detach().numpy() for p in params]

    def step():
        updater.step([p.grad.numpy() for p in params], weights)

    return step


def train(make_step):
    """Return the mean loss of each epoch; `make_step(params)` returns the update function."""
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images.astype(np.float32) / 16), torch.from_numpy(digits)
    layers = torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10)
    model, cross_entropy = torch.nn.Sequential(*layers), torch.nn.CrossEntropyLoss()
    params = list(model.parameters())
    step, rng, curve = make_step(params), np.random.default_rng(0), []
    for _ in range(EPOCHS):
        losses = []
        for rows in np.array_split(rng.permutation(len(x)), len(x) // BATCH):
            loss = cross_entropy(model(x[rows]), y[rows])
            for p in params:
                p.grad = None
            loss.backward()
            step()
            losses.append(loss.item())
        curve.append(float(np.mean(losses)))
    return curve


def curves():
    """Return the losses with torch's Adam and with fastopt's."""
    return train(of_torch), train(of_fastopt)


if __name__ == "__main__":
    for epoch, (theirs, ours) in enumerate(zip(*curves(), strict=True), 1):
        print(f"epoch {epoch:2}: torch {theirs:.6f}, fastopt {ours:.6f}")
    print(both_times("torch", lambda: train(of_torch), lambda: train(of_fastopt)))
