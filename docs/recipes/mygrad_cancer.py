"""fastopt with mygrad tensors, compared to Adam of its companion library mynn."""

import mygrad
import numpy as np
from both_times import both_times
from mynn.optimizers.adam import Adam
from sklearn.datasets import load_breast_cancer

import fastopt

STEPS, BATCH = 200, 64


def train(make_step):
    """Return the loss of each batch; `make_step(tensors)` returns the update function."""
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    rng = np.random.default_rng(0)
    params = [
        mygrad.tensor(start)
        for start in (rng.normal(size=(30, 16)) / 30**0.5, np.zeros(16), rng.normal(size=16) / 4)
    ]
    step, losses = make_step(params), []
    for _ in range(STEPS):
        rows = rng.integers(len(x), size=BATCH)
        w1, b1, w2 = params
        score = mygrad.tanh(x[rows] @ w1 + b1) @ w2
        loss = mygrad.mean(mygrad.logaddexp(0, score) - y[rows] * score)
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def of_mynn(params):
    """Return a step of mynn's Adam."""
    return Adam(params, learning_rate=0.01).step


def of_fastopt(params):
    """Return a step of fastopt's Adam, which updates the arrays of the tensors in place."""
    updater = fastopt.Updater(fastopt.Adam(lr=0.01, formula="torch"))

    def step():
        updater.step([p.grad for p in params], [p.data for p in params])

    return step


def curves():
    """Return the losses with mynn's Adam and with fastopt's."""
    return train(of_mynn), train(of_fastopt)


if __name__ == "__main__":
    for step, (theirs, ours) in enumerate(zip(*curves(), strict=True)):
        if step % 20 == 0:
            print(f"step {step:3}: mynn {theirs:.9f}, fastopt {ours:.9f}")
    print(both_times("mynn", lambda: train(of_mynn), lambda: train(of_fastopt)))
