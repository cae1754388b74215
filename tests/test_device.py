"""Devices are values, and `with` nests."""

import asyncio
import copy
import pickle
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastopt.device import Device, cpu, cuda, current_device  # noqa: F401
from helpers.refusals import check_refused
from helpers.written_headers import threads_start_anew

devices = st.builds(Device, st.sampled_from(["cpu", "cuda"]), st.integers(0, 99))


@given(devices, devices)
def test_devices_are_equal_exactly_if_type_and_number_are(one, other):
    same = (one.device_type, one.device_id) == (other.device_type, other.device_id)
    assert (one == other) is same
    assert (len({one, other}) == 1) is same
    assert (repr(one) == repr(other)) is same
    for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), eval(repr(one))):
        assert again == one


@given(st.lists(devices, max_size=5))
def test_the_innermost_device_is_current_and_the_outer_ones_come_back(nest):
    def enter(depth):
        assert current_device() == (nest[depth - 1] if depth else cpu(0))
        if depth < len(nest):
            with nest[depth] as entered:
                assert entered is nest[depth]
                enter(depth + 1)
            assert current_device() == (nest[depth - 1] if depth else cpu(0))

    enter(0)


@threads_start_anew
def test_the_same_device_can_be_entered_again_threads_start_anew_and_errors_leave_it():
    seen = []
    with suppress(KeyError), cpu(5) as device, device:
        thread = threading.Thread(target=lambda: seen.append(current_device()))
        thread.start()
        thread.join()
        assert current_device() == cpu(5)
        raise KeyError
    assert seen == [current_device()] == [cpu(0)]


def test_tasks_inherit_a_device_and_do_not_change_each_other():
    async def work(number, turn, other):
        with cpu(number):
            other.set()
            await turn.wait()
            return current_device()

    async def main():
        with cpu(7):
            one, two = asyncio.Event(), asyncio.Event()
            inner = await asyncio.gather(work(1, one, two), work(2, two, one))
            return [*inner, current_device()]

    assert asyncio.run(main()) == [cpu(1), cpu(2), cpu(7)]


WRONG = {
    "Device('tpu')": "ValueError: device_type must be one of",
    "Device('cpu', -1)": "ValueError: device_id must be at least 0, got -1",
    "Device('cpu', 0.5)": "TypeError: device_id must be an integer, got 0.5",
    "Device('cuda', True)": "TypeError: device_id must be an integer",
    "setattr(cpu(), 'device_id', 1)": "AttributeError: device_id",
}


@pytest.mark.parametrize("code", WRONG)
def test_wrong_devices_and_changes_are_refused(code):
    check_refused(code, WRONG[code], globals())
