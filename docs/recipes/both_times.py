"""Training time with a library's own optimizer and with fastopt."""

from statistics import median
from time import perf_counter

ROUNDS = 5


def seconds(train):
    """Return the seconds of a training run."""
    start = perf_counter()
    train()
    return perf_counter() - start


def both_times(library, theirs, ours):
    """Return a line with the median times of both, which are measured in turn."""
    theirs(), ours()
    times = [(seconds(theirs), seconds(ours)) for _ in range(ROUNDS)]
    own, fast = (median(column) * 1e3 for column in zip(*times, strict=True))
    ratio = median(fast / own for own, fast in times)
    return f"time: {library} {own:.0f} ms, fastopt {fast:.0f} ms, {ratio:.2f} times as long"
