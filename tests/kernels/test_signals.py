"""Handlers of signals wait while a kernel is compiled."""

import itertools
import os
import signal
from contextlib import suppress

import pytest

from fastopt._kernels import signals
from fastopt._kernels.signals import undisturbed
from helpers.lines import at_line


@pytest.mark.skipif(os.name != "posix", reason="sends itself other signals")
def test_all_signals_wait_and_all_come_though_handlers_raise():
    came, sent = [], [signal.SIGALRM, signal.SIGINT, signal.SIGUSR1]

    def handler(number, _):
        came.append(number)
        raise OSError(number)

    def fail():
        with undisturbed(), undisturbed():
            for number in sent * 2:
                signal.raise_signal(number)
            assert came == []
            raise ValueError("inside")

    before = {number: signal.signal(number, handler) for number in sent}
    try:
        with pytest.raises(OSError, match=str(int(sent[-1]))):
            fail()
        assert came == sent
        assert [signal.getsignal(number) for number in sent] == [handler] * 3
    finally:
        for number, own in before.items():
            signal.signal(number, own)


CHILD_OF_THREAD = """
import os, signal, threading, warnings
from fastopt._interrupts import uninterrupted
from fastopt._kernels.signals import undisturbed
from helpers.lines import at_line
warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
def fork():
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        return
    same = [signal.getsignal(number) for number in numbers] == handlers
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        os._exit(3 + same)
    os._exit(2)
numbers = signal.SIGINT, signal.SIGUSR1
signal.signal(signal.SIGUSR1, print)
handlers = [signal.getsignal(number) for number in numbers]
thread = threading.Thread(target=fork)
with uninterrupted, undisturbed():
    signal.raise_signal(signal.SIGUSR1)  # comes in the parent alone
    thread.start()
    thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.usefixtures("ctrl_c")
def test_a_child_that_another_thread_has_forked_defers_no_signal(run_python):
    first, second = run_python(CHILD_OF_THREAD).splitlines()
    assert (first, second.split()[0]) == ("4", str(int(signal.SIGUSR1)))


@pytest.mark.skipif(os.name != "posix", reason="sends itself other signals")
def test_a_handler_that_raises_at_any_line_leaves_no_signal_deferred():
    """Before all handlers are replaced, and after some are restored."""
    inside, sent = [], [signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2]

    def handler(*_):
        raise OSError

    def call():
        with undisturbed():
            inside.append(moment)

    before = {number: signal.signal(number, handler) for number in sent}
    try:
        for moment in itertools.count(1):
            passed = 0
            with suppress(OSError):
                passed = at_line(
                    moment, lambda: signal.raise_signal(signal.SIGUSR1), call, signals.__file__
                )
            assert not signals._Deferred.active
            for number in sent:
                with pytest.raises(OSError):  # noqa: PT011
                    signal.raise_signal(number)
            if passed:
                break
        call()
        assert [signal.getsignal(number) for number in sent] == [handler] * 3
        assert 1 < len(inside) < moment - 3
    finally:
        for number, own in before.items():
            signal.signal(number, own)
