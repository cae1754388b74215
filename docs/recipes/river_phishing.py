"""fastopt in river's logistic regression, which learns from one example at a time."""

from both_times import both_times
from river import datasets, linear_model, optim, preprocessing

from fastopt.adapters import RiverOptimizer


def train(made):
    """Return the loss of each example with an optimizer that has river's interface."""
    model = preprocessing.StandardScaler() | linear_model.LogisticRegression(made)
    log_loss, losses = optim.losses.Log(), []
    for x, y in EXAMPLES:
        losses.append(log_loss(y, 2 * model.predict_proba_one(x)[True] - 1))
        model.learn_one(x, y)
    return losses


EXAMPLES = list(datasets.Phishing())


def theirs():
    """Return the losses with river's Adam."""
    return train(optim.Adam(0.1))


def ours():
    """Return the losses with fastopt's Adam."""
    return train(RiverOptimizer("adam", lr=0.1))


def curves():
    """Return mean losses of every 125 examples with river's Adam and with fastopt's."""
    return [
        [sum(losses[start : start + 125]) / 125 for start in range(0, len(losses), 125)]
        for losses in (theirs(), ours())
    ]


if __name__ == "__main__":
    for part, (one, other) in enumerate(zip(*curves(), strict=True), 1):
        print(f"{125 * part:4} examples: river {one:.9f}, fastopt {other:.9f}")
    print(both_times("river", theirs, ours))
