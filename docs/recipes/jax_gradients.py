"""fastopt with gradients of JAX: weights are NumPy arrays, and optax runs outside `jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from both_times import both_times
from sklearn.datasets import load_digits

import fastopt

STEPS, BATCH, WIDTH, RATE = 100, 64, 128, 0.001
IMAGES, DIGITS = load_digits(return_X_y=True)
IMAGES = IMAGES.astype(np.float32) / 16


def loss(params, x, y):
    """Return the mean cross-entropy of a network with a hidden layer."""
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    scores = jax.nn.log_softmax(hidden @ params["w2"] + params["b2"])
    return -jnp.take_along_axis(scores, y[:, None], axis=1).mean()


gradient = jax.jit(jax.value_and_grad(loss))
ADAM = optax.adam(RATE)


def start():
    """Return the initial weights."""
    rng = np.random.default_rng(0)
    w1 = rng.normal(scale=0.1, size=(64, WIDTH)).astype(np.float32)
    w2 = rng.normal(scale=0.1, size=(WIDTH, 10)).astype(np.float32)
    return {"w1": w1, "b1": np.zeros(WIDTH, np.float32), "w2": w2, "b2": np.zeros(10, np.float32)}


def batches():
    """Yield the images and digits of each step."""
    for step in range(STEPS):
        rows = np.random.default_rng(step).integers(len(IMAGES), size=BATCH)
        yield IMAGES[rows], DIGITS[rows]


def with_optax():
    """Return the losses with optax, where each operation is dispatched separately."""
    params = jax.tree.map(jnp.asarray, start())
    state, losses = ADAM.init(params), []
    for x, y in batches():
        value, grads = gradient(params, x, y)
        updates, state = ADAM.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses


@jax.jit
def compiled(params, state, x, y):
    """Compute gradient and update in one compiled function."""
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def with_optax_in_jit():
    """Return the losses with optax, compiled together with the gradient."""
    params = jax.tree.map(jnp.asarray, start())
    state, losses = ADAM.init(params), []
    for x, y in batches():
        params, state, value = compiled(params, state, x, y)
        losses.append(float(value))
    return losses


def with_fastopt():
    """Return the losses with fastopt, which reads JAX's gradients without copying."""
    params, losses = start(), []
    updater = fastopt.Updater(fastopt.Adam(lr=RATE))
    for x, y in batches():
        value, grads = gradient(params, x, y)
        updater.step(grads, params)
        losses.append(float(value))
    return losses


def curves():
    """Return the losses with optax and with fastopt."""
    return with_optax(), with_fastopt()


if __name__ == "__main__":
    for step, (theirs, ours) in enumerate(zip(*curves(), strict=True)):
        if step % 10 == 0:
            print(f"step {step:2}: optax {theirs:.6f}, fastopt {ours:.6f}")
    print(both_times("optax", with_optax, with_fastopt))
