"""What every updater promises, whatever its settings: one table of settings for all promises."""

import copy
import dataclasses

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastopt import RowSparse
from fastopt._engine.validate import leaves
from fastopt._kernels.numpy_abi import readable
from fastopt._kernels.threads import use_threads
from fastopt.amp import LossScaler
from helpers.cases import CASES, FEW, LIGHT, exhaustive
from helpers.half_precision import master_of
from helpers.plans import FAULTS, Call, follow, is_compiled, plans
from helpers.resuming import WAYS, resumed
from helpers.settings import TABLE, every_setting
from helpers.tensor_lists import as_list, everything, frozen

# Parameters come late, also after a load, and weights are replaced.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.* has no effect", "ignore:.*arguments swapped", "ignore:this call starts states of"
)
few = settings(max_examples=settings().max_examples // 4, suppress_health_check=list(HealthCheck))


def all_of(updater, weights):
    """All that a call may change, with averages."""
    return everything(updater, weights), frozen(dict(updater.averages))


def changed(change, grads):
    """Gradients whose numbers are changed."""
    for grad in grads.values():
        if isinstance(grad, RowSparse):
            yield RowSparse(change(grad.values), grad.indices, grad.shape)
        else:
            yield change(grad)


def step_of(updater, weights, grads, change=np.copy):
    as_list(updater, weights, changed(change, grads), weights.values())


@every_setting()
@few
@given(data=st.data())
def test_every_form_of_a_call_equals_the_plain_form(setting, data):
    """Arrays in C order, one call after the other where a list is no step of its own."""
    check_forms(setting, data.draw(plans(setting)))


def check_forms(setting, plan):
    world = follow(setting, plan)
    assert world.results() == follow(setting, plan, plain=True).results()
    assert {type(array) for array in leaves([*world.updater.states.values()])} <= {np.ndarray}
    if readable() and is_compiled(setting, plan):
        assert world.updater.info.slow.calls == 0


@every_setting()
@few
@given(data=st.data())
def test_a_failed_call_changes_nothing(setting, data):
    """Neither the first call nor a later one; the next is that of an updater without failures."""
    check_faults(setting, data.draw(plans(setting, [*FAULTS])))


def check_faults(setting, plan):
    assert follow(setting, plan, fails=True).bits() == follow(setting, plan).bits()


PLAIN = ("plain",) * 4
PAST = {
    "updater.step() refused weights of bfloat16": ("split masters", check_forms, (
        PLAIN, (Call("dict", (("body.bias", "plain"),)),),
    )),
    "a checkpoint refused the int32 rows that LBSGD had added up": ("sums of rows", check_forms, (
        PLAIN, (Call("list", (("body.bias", "rows of i4"),), "resumed by save"),),
    )),
    "a failed call dropped an average whose state was deleted": ("SWA of rows", check_faults, (
        PLAIN,
        (
            Call("list", (("embed.weight", "pair"),), change="no states"),
            Call(
                "list",
                (("body.bias", "pair"), ("embed.weight", "pair"), ("body.bias", "pair")),
                fault="a rate that is NaN",
            ),
        ),
    )),
    "an updater went on to write a copy in half precision after it was taken away": (
        "lazy rows", check_forms, (PLAIN, tuple(
            Call("list", (("embed.weight", "rows"), ("body.weight", "plain")), aside)
            for aside in ("copies in half precision",) * 2 + ("no copies", "nothing")
        )),
    ),
}  # fmt: skip
"""Settings, promises and plans that found faults, or that are rarely drawn."""


@pytest.mark.parametrize("fault", PAST)
def test_a_fault_of_the_past_does_not_come_back(fault):
    name, check, plan = PAST[fault]
    check(TABLE[name], plan)


@every_setting(sample=[str(case) for case in CASES if not case.recorded])
def test_a_resumed_run_has_the_same_bits(setting, tmp_path):
    """By every way of saving, in the middle of windows and periods too."""
    for calls in range(2, 2 + setting.period):
        updater, weights = setting.updater(), setting.weights()
        setting.train(updater, weights, range(calls))
        resumes = [
            (resumed(way, updater, setting.fresh(), tmp_path), copy.deepcopy(weights))
            for way in WAYS
            if way != "get_states" or updater.loss_scaler is None  # MXNet's bytes have no place
        ]
        resumes.append((copy.deepcopy(updater), copy.deepcopy(weights)))
        setting.train(updater, weights, range(calls, calls + 4))
        expected = all_of(updater, weights)
        for again, own in resumes:
            setting.train(again, own, range(calls, calls + 4))
            assert frozen((own, again.states, again.averages)) == frozen(
                (weights, updater.states, updater.averages)
            )
            assert all_of(again, own)[0][-1] == expected[0][-1]
            assert again.optimizer._index_update_count == updater.optimizer._index_update_count


@every_setting(sample=[str(case) for case in CASES if not case.recorded])
def test_ascent_is_descent_along_the_opposite_gradient(setting):
    """So decay still shrinks; all gradients are scaled and bounded."""
    ends = []
    for up, change in ((True, np.copy), (False, np.negative)):
        updater, weights = setting.updater(), setting.weights()
        updater.optimizer.rescale_grad = 0.5
        own = [group.get("optimizer") for group in (updater.groups or {}).values()]
        for made in filter(None, (updater.optimizer, *own)):
            made.maximize, made.clip_gradient = up, 0.75
        for step in range(4):
            step_of(updater, weights, setting.gradients(weights, step), change)
        ends.append(frozen((weights, dict(updater.averages))))
    assert ends[0] == ends[1]


def scaled(scale):
    return lambda array: array * array.dtype.type(scale)


@every_setting(lambda setting: "loss_scaler" not in setting.settings())
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(setting):
    ends = []
    for scale in (1, 1024):
        updater, weights = setting.updater(), setting.weights()
        updater.loss_scaler = LossScaler(scale, dynamic=False) if scale > 1 else None
        for step in range(6):  # whole windows
            step_of(updater, weights, setting.gradients(weights, step), scaled(scale))
        updater.loss_scaler = None
        ends.append(all_of(updater, weights))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@every_setting(lambda setting: not {"accumulate", "loss_scaler"} & {*setting.settings()}, FEW)
def test_an_overflow_changes_nothing_and_names_the_parameter(setting, bad):
    """No schedule is asked for a rate either."""
    updater, weights, asked = setting.updater(), setting.weights(), []
    updater.loss_scaler = scaler = LossScaler(256.0)
    updater.optimizer.lr_scheduler = lambda update: asked.append(update) or 0.01
    first, *_, last = weights

    def kept():
        return everything(updater, weights)[:-1], frozen(dict(updater.averages)), len(asked)

    for step in range(3):
        grads = setting.gradients(weights, step)
        for name in (first, last):
            getattr(grads[name], "values", grads[name])[-1] = bad
        before, scale = kept(), scaler.scale
        step_of(updater, weights, grads)
        assert (updater.info.skipped, updater.info.stepped) == (True, False)
        assert updater.info.non_finite == (first, last)
        assert not np.isfinite(updater.info.global_norm)
        updater(last, grads[last], weights[last])
        assert updater.info.non_finite == (last,)
        assert (scaler.scale, scaler.good_steps) == (scale / 4, 0)
        assert kept() == before
        step_of(updater, weights, setting.gradients(weights, step), scaled(scale))
        assert not updater.info.skipped


@every_setting(lambda setting: setting.is_elementwise)
def test_any_number_of_threads_gives_the_same_bits(setting):
    """Also of repeated rows, of sums over a tensor and of their norm."""
    large = {name: (7_000, *shape[1:]) for name, shape in setting.shapes.items()}
    large, ends = dataclasses.replace(setting, shapes=large), []
    for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
        updater, weights = large.updater(), large.weights()
        with use_threads(threads):
            large.train(updater, weights, range(3))
        ends.append((all_of(updater, weights), updater.info))
    assert all(end == ends[0] for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["default", *exhaustive("exhaustive")])
def test_more_threads_than_processors_give_the_same_bits(profile, run_python):
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    chosen = "-k", "test_any_number_of_threads", "-m", "not gpu", "--hypothesis-profile", profile
    run_python(code, __file__, "-q", *chosen, "-p", "no:cacheprovider", NUMBA_NUM_THREADS="4")


@every_setting(lambda setting: setting.is_float32(), LIGHT)
def test_masters_give_the_rounded_steps_of_float32(setting, half):
    """And have the states and averages of float32."""
    halves, floats = setting.updater(), setting.updater()
    halves.optimizer.multi_precision, floats.optimizer.multi_precision = True, False
    weights = {name: weight.astype(half) for name, weight in setting.weights().items()}
    exact = {name: weight.astype(np.float32) for name, weight in weights.items()}
    for step in range(6):
        grads = setting.gradients(weights, step)
        step_of(halves, weights, grads)
        step_of(floats, exact, grads, np.float32)
    for name, weight in weights.items():
        halves.flush(name)
        floats.flush(name)
        np.testing.assert_array_equal(weight, exact[name].astype(half))
        master, inner = master_of(halves, name)
        assert frozen(master) == frozen(exact[name])
        assert frozen(leaves(inner)) == frozen(leaves(floats.states[name]))
    assert frozen(dict(halves.averages)) == frozen(dict(floats.averages))
