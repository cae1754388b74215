"""Interrupt updates everywhere, and print what was left half done; run as a process."""

import linecache
import os
import random
import signal
import sys
import threading
import time

import numpy as np

import fastopt
from fastopt import optimizer
from fastopt.sparse import RowSparse
from helpers.tensor_lists import as_list, frozen, one_by_one

PACKAGE = os.path.dirname(fastopt.__file__)
FORMS = {
    "sgd": {"momentum": 0.5},
    "adam": {"multi_precision": True},
    "lamb": {},
    "lars": {"momentum": 0.5},
    "lbsgd": {"batch_scale": 2},
    "adamw": {"sparse_decay": "dense"},
}
SIZES = {0: (6, 2), "w": (5,), 2: (40_000,)}


class Training:
    """An updater and weights; every gradient is one."""

    def __init__(self, name, sizes=SIZES):
        made = optimizer.create(name, learning_rate=0.1, wd=0.1, **FORMS[name])
        self.updater = optimizer.get_updater(made)
        self.weights = {index: np.ones(shape, np.float32) for index, shape in sizes.items()}
        spread = np.ones((6, 4), np.float32)[:, ::2]
        self.weights["strided"] = spread
        if made.multi_precision:
            self.weights["half"] = np.ones((3, 3), np.float16)
        self.start = {index: frozen(weight) for index, weight in self.weights.items()}
        self.grads = {index: np.ones_like(weight) for index, weight in self.weights.items()}
        ones = np.ones((2, 2), np.float32)
        self.grads[0] = RowSparse(ones, np.array([4, 1]), (6, 2))

    def step(self, way):
        way(self.updater, self.weights, self.grads.values(), self.weights.values())

    def counts(self):
        return [self.updater.optimizer._index_update_count.get(index, 0) for index in self.weights]

    def bits(self, index):
        """All that belongs to one parameter."""
        made = self.updater.optimizer
        hidden = [vars(made).get(name, {}).get(index) for name in ("cumgrads", "row_decay")]
        state = self.updater.states.get(index)
        return frozen((self.weights[index], state, hidden))


def expected(name, sizes=SIZES, steps=8):
    """What belongs to each parameter after so many updates."""
    training = Training(name, sizes)
    trace = {index: [training.bits(index)] for index in training.weights}
    for _ in range(steps):
        training.step(one_by_one)
        for index, bits in trace.items():
            bits.append(training.bits(index))
    return trace


def faults(training, trace, whole):
    """What is inconsistent; `whole` says that lists are updated wholly or not at all."""
    found = []
    for index, count in zip(training.weights, training.counts(), strict=True):
        if training.bits(index) != trace[index][count]:
            found.append(f"{index} is not what {count} updates make")
    made = training.updater.optimizer
    if whole and len(set(training.counts())) > 1:
        found.append(f"counts are {training.counts()}")
    if made.num_update != max(training.counts()):
        found.append(f"num_update is {made.num_update}, counts are {training.counts()}")
    if made.rescale_grad != 1:
        found.append(f"rescale_grad is {made.rescale_grad}")
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        found.append("the handler was not restored")
    if not is_free(made.lock):
        found.append("the lock is held")
    return found


def is_free(lock):
    """Whether another thread can take a lock."""
    taken = []

    def take():
        if lock.acquire(blocking=False):
            taken.append(lock)
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return bool(taken)


def interrupt_at(moment, opcodes, call):
    """Call, with Ctrl-C at a moment counted in lines or opcodes; whether the call ended first.

    Lines with ``with`` or ``try`` do not count: Python looks for signals neither before a block
    begins nor between its last line and the release of what it holds.
    """
    passed, before = 0, sys.gettrace()

    def trace(frame, event, _):
        nonlocal passed
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = opcodes, not opcodes
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
        if line.lstrip().startswith(("with ", "try:")):
            return trace
        if event == ("opcode" if opcodes else "line"):
            passed += 1
            if passed == moment:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return passed < moment


def everywhere(name, way, stride, opcodes=False):
    """Interrupt the first and a later call at every so many lines or opcodes."""
    trace, whole = expected(name), way is as_list
    moments = 0
    for before in (0, 2):
        moment, ended = 1, False
        while not ended:
            training = Training(name)
            for _ in range(before):
                training.step(way)
            ended = interrupt_at(moment, opcodes, lambda training=training: training.step(way))
            for after in ("the interrupt", "one more step"):
                for fault in faults(training, trace, whole):
                    print(f"{name}, {way.__name__}, moment {moment}, after {after}: {fault}")
                training.step(way)
            moment += stride
            moments += 1
    return moments


def at_random(way, times=40):
    """Interrupt training on large tensors at random moments, from another thread."""
    sizes = {0: (6, 2), "w": (300_000,), 2: (2_000_000,)}
    steps, came = 30, 0
    trace = expected("sgd", sizes, steps)
    rng = random.Random(0)
    for _ in range(times):
        training = Training("sgd", sizes)

        def send():
            time.sleep(rng.uniform(0, 0.03))
            os.kill(os.getpid(), signal.SIGINT)

        sender = threading.Thread(target=send)
        try:
            sender.start()
            for _ in range(steps):
                training.step(way)
            sender.join()
            time.sleep(1)
        except KeyboardInterrupt:
            came += 1
        sender.join()
        for fault in faults(training, trace, way is as_list):
            print(f"at random, {way.__name__}: {fault}")
    return came


def main(stride, names=FORMS):
    for way in (as_list, one_by_one):
        for name in names:
            print("moments", everywhere(name, way, stride))
        print("moments", everywhere("sgd", way, 7 * stride, opcodes=True))
        print("interrupts", at_random(way))
