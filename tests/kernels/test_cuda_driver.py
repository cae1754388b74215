"""What the host does in a step on a CUDA device: exact calls of a driver without a device."""

import json
import re

import pytest

from helpers.paths import TESTS
from ptx.executor import build_driver, needs_numba_cuda, run_python

pytestmark = needs_numba_cuda

NEW_ADDRESSES = ["upload"]
HYPER = ["upload", "launch"]
"""Hyper-parameters that differ between tensors, and the update."""

MEASURED = ["launch", "launch", "launch"]
"""Squares of gradients, their sums, and norm, counts and hyper-parameters of the step."""

LAMB = ["upload", *["launch"] * 4]
"""Hyper-parameters, sums of chunks, their sums, trust ratios, and the update."""

LISTED = ["upload", "launch", "launch"]
"""Addresses; the check and the sorting of the indices, and the unique rows."""

UPDATED = ["copy", "launch"]
"""The number of unique rows joins the other arguments on the device; then the update."""

ROWS = [*LISTED, "download", "wait stream", *UPDATED]
"""The host waits for the check of indices that are on the device."""

EXPECTED = {
    "single": ["launch"],
    "single, new gradient": [*NEW_ADDRESSES, "launch"],
    "single, schedule": ["launch"],
    "single, stream of its own": ["launch"],
    "single, gradient of another stream": ["stream waits", "launch", "stream waits"],
    "single, stochastic rounding": ["upload", "launch"],
    "channels last": ["launch"],
    "strided gradient": ["launch", "launch"],
    "list of 1000": ["launch"],
    "list of 200, new gradients": [*NEW_ADDRESSES, "launch"],
    "list of 200, new weights": [*NEW_ADDRESSES, "launch"],
    "list of 1000, two classes": HYPER,
    "list of 1000, two classes, new gradients": [*NEW_ADDRESSES, *HYPER],
    "rows": ROWS,
    "rows, indices on the host": ["upload", *LISTED, *UPDATED],
    "rows, repeated, indices on the host": ["upload", *LISTED, "launch", *UPDATED],
    "rows, standard": ROWS,
    "LAMB": LAMB,
    "LAMB with clip": [*MEASURED, *LAMB[1:], "download"],
    "clip": [*MEASURED, "launch", "download"],
    "clip of 1000, two classes": [*MEASURED, "launch", "download"],
    "loss scaler": [*MEASURED, "launch", "download"],
    "GroupAdaGrad": ["launch"],
}
"""Calls of the driver in a warm step: no allocation, and no wait but for rows whose indices are on
the device."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """What ``fake_driver/steps.py`` printed."""
    folder = build_driver(tmp_path_factory.mktemp("driver")).parent
    script = TESTS / "fake_driver" / "steps.py"
    return json.loads(run_python(folder, "-W", "error", script, FAKE_DEVICES="2"))


def names(calls):
    return [re.match("[a-z ]*[a-z]", call)[0].removesuffix(" on") for call in calls]


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_of_a_warm_step(steps, name):
    assert names(steps[name]) == EXPECTED[name]


def test_uploads_come_from_pinned_memory_on_the_stream_of_the_weight(steps):
    uploads = [c for name in EXPECTED for c in steps[name] if c.startswith("upload")]
    assert uploads
    assert all(call.endswith("on 0 from pinned") for call in uploads)
    assert " on 5010 " in steps["single, stream of its own"][0]


def test_pinned_memory_is_not_written_to_before_the_device_has_read_it(steps):
    """With 100 steps ahead of the device, the host waits for the oldest upload."""
    calls, torn = steps["torn"]
    assert names(calls) == ["wait event", *LAMB]
    assert torn == 0


def test_a_capture_is_refused_with_the_reason_and_nothing_changes(steps):
    """Before and after are the calls of the driver, and the counts."""
    assert steps["captured"] == [["", 0, 1]] * 7


def test_the_first_step_of_1000_tensors_allocates_all_states_at_once_and_does_not_wait(steps):
    calls = names(steps["first of 1000"])
    assert calls.count("allocate") <= 4
    assert calls.count("set") == 1
    assert not [call for call in calls if call.startswith("wait")]


def test_the_host_does_not_wait_for_the_norms_of_20_steps(steps):
    """It waits once it is asked for the last one's, and then knows all counts."""
    calls, counts, asked, info, counted = steps["clips ahead"]
    assert not [call for call in calls if call.startswith("wait")]
    assert counts == 1
    assert set(names(asked)) == {"wait event"}
    assert info[0]
    assert counted == 21


def test_what_launches_use_lives_until_the_device_is_done(steps):
    assert steps["held"] == [True, False]


def test_memory_does_not_grow_with_the_kinds_of_row_counts(steps):
    first, *later = steps["varying rows"]
    assert first
    assert later == [first] * 3


def test_memory_is_freed_with_its_updater(steps):
    """Without the garbage collector, also while the host has not asked for the norms."""
    assert len(steps["dropped"]) == 9
    assert all(found == [True, 0] for found in steps["dropped"].values()), steps["dropped"]


def test_a_weight_is_updated_in_the_context_of_its_device(steps):
    calls, states = steps["second device"]
    assert names(calls) == ["launch"]
    assert calls[0].endswith("in 1001")
    assert states == [1, 1]
