"""Table of what a call costs in each form, against NumPy: ``python call_forms.py``.

One thread, 20 x 50 float32 numbers and Adam where not stated. Times are CPU times of the thread;
the two take turns, and the ratio is the median over rounds.
"""

import argparse
import re
import time
from functools import partial

import numpy as np
from benchmarks.forms import FORMS, ROUNDS

from fastopt._kernels.threads import use_threads
from fastopt.bench.clock import Call, interleaved


def cpu_seconds(call: Call, number: int) -> float:
    """Return the mean CPU seconds of `number` calls."""
    start = time.thread_time()
    for _ in range(number):
        call()
    return (time.thread_time() - start) / number


def sampler(call: Call, duration: float = 0.01) -> partial[float]:
    """Return a function that times `call`, for about `duration` seconds."""
    cpu_seconds(call, 30)
    return partial(cpu_seconds, call, max(round(duration / cpu_seconds(call, 3)), 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="forms that match")
    chosen = re.compile(parser.parse_args().only)
    print("| form of the call | fastopt, us | NumPy, us | NumPy / fastopt |")
    print("| --- | --- | --- | --- |")
    for form, make in FORMS.items():
        if not chosen.search(form):
            continue
        with use_threads(1):
            times = interleaved([sampler(call) for call in make()], ROUNDS)
        ours, plain = 1e6 * np.median(times, axis=0)
        factor = np.median(times[:, 1] / times[:, 0])
        print(f"| {form} | {ours:.3g} | {plain:.3g} | {factor:.1f} |", flush=True)


if __name__ == "__main__":
    main()
