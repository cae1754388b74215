"""fastopt instead of PennyLane's Adam: a circuit of three qubits learns a parity."""

import pennylane as qml
from both_times import both_times
from pennylane import numpy as np

from fastopt.adapters import PennyLaneOptimizer

STEPS, WIRES, LAYERS = 20, 3, 2


@qml.qnode(qml.device("default.qubit", wires=WIRES))
def circuit(weights, bits):
    """Return the expected parity of three bits."""
    qml.BasisEmbedding(bits, wires=range(WIRES))
    for layer in weights:
        for wire, angles in enumerate(layer):
            qml.Rot(*angles, wires=wire)
        for wire in range(WIRES):
            qml.CNOT(wires=[wire, (wire + 1) % WIRES])
    return qml.expval(qml.PauliZ(0))


def cost(weights, bias, bits, signs):
    """Return the mean squared error."""
    errors = (circuit(weights, b) + bias - s for b, s in zip(bits, signs, strict=True))
    return sum(error**2 for error in errors) / len(bits)


def train(made):
    """Return the loss of each step with an optimizer that has PennyLane's interface."""
    rng = np.random.default_rng(0)
    weights = np.array(rng.normal(size=(LAYERS, WIRES, 3)) / 10, requires_grad=True)
    bias, losses = np.array(0.0, requires_grad=True), []
    bits = np.array([[k >> j & 1 for j in range(WIRES)] for k in range(4)], requires_grad=False)
    signs = np.array([1 - 2 * (sum(row) % 2) for row in bits], requires_grad=False)
    for _ in range(STEPS):
        (weights, bias, _, _), loss = made.step_and_cost(cost, weights, bias, bits, signs)
        losses.append(float(loss))
    return losses


def theirs():
    """Return the losses with PennyLane's Adam."""
    return train(qml.AdamOptimizer(0.05))


def ours():
    """Return the losses with fastopt's Adam."""
    return train(PennyLaneOptimizer("adam", stepsize=0.05, beta2=0.99))


def curves():
    """Return the losses with PennyLane's Adam and with fastopt's."""
    return theirs(), ours()


if __name__ == "__main__":
    for step, (one, other) in enumerate(zip(*curves(), strict=True)):
        if step % 2 == 0:
            print(f"step {step:2}: PennyLane {one:.9f}, fastopt {other:.9f}")
    print(both_times("PennyLane", theirs, ours))
