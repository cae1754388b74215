"""Updates among threads, and signals and reads in the middle of them."""

import copy
import dataclasses
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt import optimizer
from fastopt._interrupts import uninterrupted
from fastopt.amp import LossScaler
from fastopt.checkpoint import to_torch_state_dict
from fastopt.trainer import Trainer
from helpers.cases import SAMPLE, exhaustive, kept, nightly
from helpers.lines import at_line
from helpers.settings import TABLE, Setting, adam
from helpers.tensor_lists import everything, frozen

PROGRESS = """
import sys, threading, time, numpy as np
from fastopt import optimizer
updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
small = [np.zeros(9), np.zeros(9)], [np.ones(9), np.ones(9)]
large = [np.zeros(4_000_000), np.zeros(4_000_000)], [np.ones(4_000_000), np.ones(4_000_000)]
for weights, grads in (small, large):
    updater([weights[0].size, "b"], grads, weights)
    updater("c", grads[0], weights[0])
sys.setswitchinterval(1000)  # no thread is made to give up the interpreter
count, stop = 0, False
def work():
    global count
    while not stop:
        count += 1
        time.sleep(0)
other = threading.Thread(target=work)
other.start()
def progress(call):
    before = count
    call()
    return count - before
print(progress(lambda: sum(range(3_000_000))))
print(max(progress(lambda: updater([4_000_000, "b"], large[1], large[0])) for _ in range(50)) > 0)
print(max(progress(lambda: updater("c", large[1][0], large[0][0])) for _ in range(50)) > 0)
stop = True
"""


@pytest.mark.slow
def test_other_threads_run_while_kernels_run(run_python):
    assert run_python(PROGRESS).split() == ["0", "True", "True"]


@contextmanager
def handled_by(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_waits_until_the_end_or_an_error_and_comes_once():
    came = []
    with handled_by(lambda *signal: came.append(signal)):
        with uninterrupted:
            with uninterrupted:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            assert came == []
        assert len(came) == 1
        signal.raise_signal(signal.SIGINT)
        assert len(came) == 2
        with suppress(ValueError), uninterrupted:
            signal.raise_signal(signal.SIGINT)
            raise ValueError("inside")
        assert len(came) == 3


def test_an_ignored_signal_stays_ignored():
    with handled_by(signal.SIG_IGN):
        with uninterrupted:
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


DEFAULT = """
import signal
from fastopt._interrupts import uninterrupted
signal.signal(signal.SIGINT, signal.SIG_DFL)
with uninterrupted:
    signal.raise_signal(signal.SIGINT)
    print("inside", flush=True)
print("after", flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="elsewhere no signal ends a process")
def test_the_default_action_ends_the_process_at_the_end(run_python):
    done = run_python(DEFAULT, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "inside\n")


FORKED = """
import os, signal, threading, warnings
from fastopt._interrupts import uninterrupted
warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
def fork():
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        return
    status = 1
    try:
        with uninterrupted:
            signal.raise_signal(signal.SIGINT)
            status = 2
    except KeyboardInterrupt:
        os._exit(status)
    os._exit(3)
thread = threading.Thread(target=fork)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_waits_in_a_child_that_another_thread_has_forked(run_python):
    assert run_python(FORKED).strip() == "2"


DROPPED = """
import threading, time
import numpy as np
from fastopt import optimizer

size = 2_000_000
updater = optimizer.Updater(optimizer.SGD(learning_rate=1.0))
weights = [np.zeros(size, np.float32) for _ in range(2)]
fresh = lambda: [np.ones(size, np.float32) for _ in weights]
for _ in range(2):
    updater([0, 1], fresh(), weights)
grads, ended, done = [], threading.Event(), 2

def drop():
    while not ended.wait(0.0005):
        grads.clear()

thread = threading.Thread(target=drop)
thread.start()
while done < 60:
    grads.extend(fresh())
    try:
        updater([0, 1], grads, weights)
        done += 1
    except TypeError:  # dropped before the call
        pass
ended.set()
thread.join()
assert all((weight == -done).all() for weight in weights)
print("alive")
"""


@pytest.mark.slow
def test_gradients_that_another_thread_drops_from_a_list_stay_alive(run_python):
    """The kernels of large tensors run without the interpreter's lock."""
    assert run_python(DROPPED) == "alive\n"


@pytest.mark.parametrize("way", ["updater", "optimizer"])
def test_a_schedule_that_updates_is_refused_and_nothing_changes(way):
    made, weight = optimizer.SGD(learning_rate=1.0), np.zeros(3, np.float32)
    updater, one = optimizer.Updater(made), np.ones_like(weight)

    def call(_):
        return updater(0, one, weight) if way == "updater" else made.update(0, weight, one, None)

    call(1)
    made.lr_scheduler = call
    for _ in range(2):
        with pytest.raises(RuntimeError, match="update inside an update"):
            call(1)
    made.lr_scheduler = None
    call(1)
    assert (made.num_update, weight.tolist()) == (2, [-2, -2, -2])


@pytest.mark.parametrize("sizes", [(3,), (70_000,), (3, 70_000)], ids=str)
@pytest.mark.parametrize("before", [2, *exhaustive(0)])
def test_an_update_inside_an_update_happens_wholly_or_is_refused(sizes, before):
    """At any line, as by a signal handler; gradients are fresh, and large ones are unmapped."""
    outcomes, passed, moment = set(), 1, 0
    while passed > moment:
        moment += 1
        updater = optimizer.Updater(optimizer.SGD(learning_rate=1.0))
        weights = [np.zeros(size, np.float32) for size in sizes]
        inside = []

        def update(value, updater=updater, weights=weights):
            grads = [np.full_like(weight, value) for weight in weights]
            updater([*range(len(weights))], grads, weights)

        def act(update=update, inside=inside):
            try:
                update(1000)
                inside.append(1000)
            except RuntimeError:
                inside.append(0)

        for _ in range(before):
            update(0)
        passed = at_line(moment, act, lambda update=update: update(1))
        for weight in weights:
            np.testing.assert_array_equal(weight, -1 - sum(inside))
        assert updater.optimizer.num_update == before + 1 + inside.count(1000)
        outcomes.update(inside)
        passed += bool(inside)
    assert outcomes == ({1000} if sizes == (3,) and before else {0, 1000})


class Run:
    """An updater of a setting with weights, and all that its calls may change."""

    def __init__(self, setting, before):
        self.setting, self.updater, self.weights = setting, setting.updater(), setting.weights()
        for _ in range(before):
            self.step()

    def step(self):
        """With a scaler, gradients overflow after the first update."""
        self.setting.train(
            self.updater, self.weights, [1 + bool(self.updater.optimizer.num_update)]
        )

    def bits(self):
        windows = self.updater._windows
        waiting = windows and (windows.calls, windows.open_sums())
        return everything(self.updater, self.weights), frozen((self.updater.averages, waiting))


class Boom(Exception):
    """An exception from outside, as of a handler of a signal."""


def boom(*_):
    raise Boom


def halves(setting, before, stride, act=boom, call=Run.step):
    """Lines at which an exception leaves a call half done; and the number of lines tried."""
    whole = Run(setting, before)
    trace = [whole.bits()]
    for _ in range(2):
        call(whole)
        trace.append(whole.bits())
    found, moment, ended = [], 1, False
    while not ended:
        run = Run(setting, before)
        try:
            ended = at_line(moment, act, lambda run=run: call(run)) < moment
        except Boom as error:
            last = traceback.extract_tb(error.__traceback__)[-3]
            where, bits = f"{os.path.basename(last.filename)}:{last.lineno}", run.bits()
            if bits not in trace[:2]:
                found.append(where)
            else:
                call(run)
                if run.bits() != trace[1 + trace.index(bits)]:
                    found.append(f"{where}, in the next call")
        moment += stride
    return found, moment


CLIPPED = Setting(adam, lambda: {"accumulate": 2, "clip_global_norm": 0.1}, is_whole=True)
SKIPPED = Setting(adam, lambda: {"accumulate": 2, "loss_scaler": LossScaler(8.0)}, is_whole=True)
SETTINGS = {name: each for name, each in TABLE.items() if not each.case or name in SAMPLE}
SETTINGS |= {"clipped windows": CLIPPED, "skipped windows": SKIPPED}
FEW = "EMA", "accumulate", "clip_global_norm", "groups", "clipped windows", "skipped windows"


@pytest.mark.parametrize("stride", [37, *exhaustive(7), *nightly(1)])
@pytest.mark.parametrize("name", kept(SETTINGS, *FEW))
@pytest.mark.parametrize("before", [0, 2, *exhaustive(3)])
def test_an_exception_at_any_line_leaves_all_of_a_call_or_nothing(name, stride, before):
    interrupt = partial(signal.raise_signal, signal.SIGINT)
    act = boom if name in FEW else interrupt  # some rules need that handlers wait for the end
    with handled_by(boom):
        found, lines = halves(SETTINGS[name], before, stride, act)
    assert found == []
    assert lines > 5


def test_an_exception_leaves_all_of_a_finished_window_or_nothing():
    found, lines = halves(CLIPPED, 3, 7, call=lambda run: run.updater.finish())
    assert found == []
    assert lines > 5


READERS = {
    "save": lambda updater, path: updater.save(path),
    "states_dict": lambda updater, path: updater.states_dict(),
    "get_states": lambda updater, path: updater.get_states(dump_optimizer=True),
    "pickle": lambda updater, path: pickle.dumps(updater),
    "deepcopy": lambda updater, path: copy.deepcopy(updater),
    "flush": lambda updater, path: updater.flush(0),
    "finish": lambda updater, path: updater.finish(),
    "averaged": lambda updater, path: updater.averaged().__enter__(),
    "torch": lambda updater, path: to_torch_state_dict(updater),
    "trainer": lambda updater, path: Trainer([], updater.optimizer, comm=updater).save_states(path),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_reads_inside_an_update_raise_and_change_nothing(read, tmp_path):
    sgd, weight, path = optimizer.SGD(momentum=0.5), np.ones(3), tmp_path / "file"
    updater = optimizer.Updater(sgd, average=fastopt.EMA(0.5))
    updater(0, np.ones(3), weight)

    def called(*_):
        with pytest.raises(RuntimeError, match=r"inside an update .* set a flag there"):
            read(updater, path)
        return 0.01

    sgd.lr_scheduler, before = called, weight.copy()
    for grad in (np.ones(3), np.ones(3)):
        updater(0, grad, weight)
    assert (weight < before).all()
    assert list(tmp_path.iterdir()) == []
    sgd.lr_scheduler = None
    read(updater, path)


def events_in_package(call, look):
    """Call, and look at each call, line and return of the package."""
    package, before = os.path.dirname(fastopt.__file__), sys.gettrace()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(package):
            return None
        look()
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("rows", [2, 20_000])
@pytest.mark.parametrize("name", ["groups", "accumulate", "masters"])
def test_a_checkpoint_in_the_middle_of_an_update_is_complete_or_refused(name, rows):
    shapes = {index: (rows, *shape[1:]) for index, shape in TABLE[name].shapes.items()}
    run = Run(dataclasses.replace(TABLE[name], shapes=shapes), 0)

    def look():
        try:
            found.append(frozen((run.updater.states_dict(), run.weights)))
        except RuntimeError as error:
            refused.append(str(error))

    for _ in range(4):  # new indices, then known ones
        found, refused = [], []
        look()
        before = found.pop()
        events_in_package(run.step, look)
        look()
        after = found.pop()
        assert [each for each in found if each not in (before, after)] == []
        assert [found[0], found[-1]] == [before, after]
        assert all("inside an update" in error for error in refused)


@pytest.mark.usefixtures("ctrl_c")
def test_a_handler_that_saves_waits_for_the_update_of_another_thread():
    sgd, saved = optimizer.SGD(momentum=0.5), []
    updater, weights = optimizer.Updater(sgd), [np.ones(3, np.float32), np.ones(3)]
    entered, signaled = threading.Event(), threading.Event()

    def schedule(count):
        entered.set()
        assert signaled.wait(60)
        return 0.5

    def save(*_):
        signaled.set()
        saved.append(frozen((updater.states_dict(), weights)))

    sgd.lr_scheduler = schedule
    signal.signal(signal.SIGINT, save)
    grads = [np.ones_like(weight) for weight in weights]
    thread = threading.Thread(target=updater, args=([0, 1], grads, weights))
    thread.start()
    assert entered.wait(60)
    signal.raise_signal(signal.SIGINT)
    thread.join()
    assert saved == [frozen((updater.states_dict(), weights))]
