"""Whatever the settings, calls on a device are those of the CPU: the plans of test_promises.py."""

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fastopt import RowSparse
from fastopt._kernels.device_memory import host
from helpers.cases import CASES
from helpers.device_arrays import Bare, Foreign, leaves, on_device
from helpers.plans import ASIDE, FAULTS, WAYS_TO_CALL, Call, Forms, follow, plans
from helpers.settings import TABLE, every_setting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.* has no effect", "ignore:.*arguments swapped"),
    pytest.mark.filterwarnings("ignore:this call starts states"),
]
few = settings(max_examples=8, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
WARM = 4
"""Times of each call, so that compiled code makes the last ones."""


def strided(array):
    wide = on_device(np.repeat(array, 2, axis=-1))
    return wide[(*[slice(None)] * (array.ndim - 1), slice(None, None, 2))]


def not_aligned(array):
    flat = array.ravel()
    return on_device(np.concatenate([flat[:1], flat]))[1:].reshape(*array.shape)


def moved(state):
    """A copy of arrays, each where it was."""
    if isinstance(state, (tuple, list)):
        return type(state)(map(moved, state))
    is_here = state is None or isinstance(state, np.ndarray)
    return copy.copy(state) if is_here else on_device(host(state))


def replace(world):
    for name, weight in world.weights.items():
        if not isinstance(weight, (Bare, Foreign)):
            world.weights[name] = moved(weight)


def restate(world):
    states = world.updater.states
    for index in states:
        states[index] = moved(states[index])


def copied(world):
    world.updater = copy.deepcopy(world.updater)
    replace(world)


DENSE = {
    "plain": on_device,
    "Fortran order": lambda array: on_device(np.asfortranarray(array)),
    "strided": strided,
    "not aligned": not_aligned,
    "of another library": lambda array: Foreign(on_device(array)),
}
ROWS = {
    "rows": lambda values, rows, shape: on_device(RowSparse(values, rows, shape)),
    "pair": lambda values, rows, shape: (on_device(values), on_device(rows)),
    "int32": lambda values, rows, shape: (on_device(values), on_device(rows.astype(np.int32))),
    "indices on the host": lambda values, rows, shape: (on_device(values), rows),
    "of another library": lambda values, rows, shape: (Bare(on_device(values)), on_device(rows)),
}
ASIDES = {
    **{name: ASIDE[name] for name in ASIDE if name.startswith("resumed")},
    "nothing": ASIDE["nothing"],
    "averages, and back": ASIDE["averages, and back"],
    "copies of the weights": replace,
    "copies of the states": restate,
    "a copy of the updater": copied,
}
ON_DEVICE = Forms(
    DENSE | {"on the host": np.array},
    DENSE,
    ROWS,
    ASIDES,
    ("nothing",),
    WAYS_TO_CALL,
    on_device,
)
REFUSED = [name for name in FAULTS if name != "a read-only weight"]

FORMS = [case for case in CASES if case.name in ("lamb", "prodigy", "groupadagrad")]
of_devices = every_setting(
    lambda setting: (
        setting.is_elementwise
        and (setting.case is None or setting.case in FORMS)
        and "clip_adaptive" not in setting.settings()
        and setting is not TABLE["8-bit state"]  # codes that differ change later steps
    ),
    sample=[*map(str, FORMS)],
)


def counts_alike(setting, plan):
    """Whether no schedule is asked in lists with weights on both sides: the device counts first."""
    layouts, calls = plan
    is_scheduled = setting.make().lr_scheduler or any(call.change == "a schedule" for call in calls)
    return not is_scheduled or "on the host" not in layouts


def check_same(device, here):
    """But for roundings; codes may differ by one, and remainders of split masters anyhow."""
    updates = [world.updater.optimizer for world in (device, here)]
    assert updates[0].num_update == updates[1].num_update
    assert dict(updates[0]._index_update_count) == dict(updates[1]._index_update_count)
    numbers = [
        [[key, *leaves(part[key])] for part in world.numbers() for key in sorted(part)]
        for world in (device, here)
    ]
    for one, other in zip(*map(leaves, numbers), strict=True):
        if isinstance(one, str):
            assert one == other
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype.kind in "iu":
            away = np.abs(one.astype(int) - other.astype(int))
            assert one.dtype == np.uint16 or away.max(initial=0) <= 1
        else:
            near = 1e-2 if one.dtype.itemsize == 2 else 1e-5
            one, other = one.astype(float), other.astype(float)
            np.testing.assert_allclose(one, other, rtol=near, atol=near)


@of_devices
@few
@given(data=st.data())
def test_calls_on_a_device_are_those_of_the_cpu(setting, data):
    plan = data.draw(plans(setting, of=ON_DEVICE).filter(lambda plan: counts_alike(setting, plan)))
    check_plan(setting, plan)


def check_plan(setting, plan):
    check_same(
        *(follow(setting, plan, plain=p, forms=ON_DEVICE, times=WARM) for p in (False, True))
    )


ROWS_OF_ONE, ALL = ("embed.weight", "rows"), (("embed.weight", "plain"), ("body.bias", "plain"))
PLANS = {
    "groups": [Call("list", ALL, aside) for aside in ASIDES],
    "SWA of rows": [Call("single", (ROWS_OF_ONE,)), Call("list", (ROWS_OF_ONE, ROWS_OF_ONE))],
}


@pytest.mark.parametrize("name", PLANS)
def test_what_happens_between_calls_and_rows_that_come_twice(name):
    check_plan(TABLE[name], (("plain",) * 4, PLANS[name]))


@of_devices
@few
@given(data=st.data())
def test_a_failed_call_changes_nothing(setting, data):
    plan = plans(setting, [*REFUSED], of=ON_DEVICE)
    plan = data.draw(plan.filter(lambda plan: counts_alike(setting, plan)))
    fails, calls = (follow(setting, plan, fails=f, forms=ON_DEVICE) for f in (True, False))
    assert fails.bits() == calls.bits()
