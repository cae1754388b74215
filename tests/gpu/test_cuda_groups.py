"""Groups beside accumulation, averages and clipping on the device are those of the CPU."""

import numpy as np
import pytest

from fastopt import EMA, SWA, Lookahead, RowSparse, optimizer
from fastopt.amp import LossScaler
from helpers.device_arrays import check_close, host, on_device

pytestmark = pytest.mark.gpu

NAMES = ["embed", "body", "bias", "head", "frozen"]
SETTINGS = {
    "alone": {},
    "accumulate": {"accumulate": 2},
    "EMA": {"average": EMA(decay=0.5)},
    "SWA": {"average": SWA(start=1, every=2)},
    "Lookahead": {"average": Lookahead(k=2)},
    "all": {"accumulate": 2, "average": EMA(decay=0.5, warmup=True), "clip_global_norm": 0.5},
}


def made(**settings):
    groups = {
        r"^embed": {"lr_mult": 0.1, "beta1": 0.5},
        r"bias$": {"wd_mult": 0.0},
        r"^head": {"optimizer": optimizer.SGD(learning_rate=1.0, momentum=0.9)},
        r"^frozen": {"frozen": True},
    }
    adam = optimizer.Adam(learning_rate=0.1, wd=0.1)
    scaler = LossScaler(init_scale=8) if "clip_global_norm" in settings else None
    return optimizer.Updater(adam, loss_scaler=scaler, groups=groups, **settings)


def arrays(rng):
    return {name: rng.normal(size=(3, 2)).astype(np.float32) for name in NAMES}


def there(values):
    return {name: None if value is None else on_device(value) for name, value in values.items()}


def same(device, weights):
    check_close([*device.values()], [*weights.values()])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_groups_with_settings_work_on_the_device(settings, rng):
    cpu, gpu, weights = made(**settings), made(**settings), arrays(rng)
    device = there(weights)
    for step in range(5):
        if step == 3:  # within a window, and with averages
            gpu.load_state_dict(cpu.state_dict())
            device = there(weights)
        grads = {**arrays(rng), "frozen": None}
        cpu.step(grads, weights)
        gpu.step(there(grads), device)
        same(device, weights)
        assert gpu.info.stepped == cpu.info.stepped
    cpu.finish()
    gpu.finish()
    same(device, weights)
    assert gpu.info.stepped == cpu.info.stepped == ("accumulate" in settings)
    if "average" in settings:
        with cpu.averaged(), gpu.averaged():
            same(device, weights)
        same(device, weights)


def test_groups_may_be_on_the_host_and_on_the_device(rng):
    cpu, gpu = (made(accumulate=2, average=EMA(decay=0.5)) for _ in range(2))
    weights = arrays(rng)
    mixed = {name: on_device(w) if name == "head" else w.copy() for name, w in weights.items()}
    for _ in range(4):
        grads = {**arrays(rng), "frozen": None}
        cpu.step(grads, weights)
        gpu.step({**grads, "head": on_device(grads["head"])}, mixed)
    same({"head": mixed.pop("head")}, {"head": weights.pop("head")})
    for name, weight in mixed.items():
        np.testing.assert_array_equal(weight, weights[name])


@pytest.mark.filterwarnings("ignore:groups.* has no effect")
@pytest.mark.parametrize("average", [None, EMA(decay=0.5)], ids=str)
def test_row_sparse_gradients_of_a_group(average, rng):
    cpu, gpu = made(average=average), made(average=average)
    weight = rng.normal(size=(5, 2)).astype(np.float32)
    bias, device = np.ones(2, np.float32), {"embed": on_device(weight)}
    device["bias"] = on_device(bias)
    for _ in range(3):
        rows, values = rng.integers(0, 5, size=2), rng.normal(size=(2, 2)).astype(np.float32)
        grad = rng.normal(size=2).astype(np.float32)
        cpu(["embed", "bias"], [RowSparse(values, rows, (5, 2)), grad], [weight, bias])
        sparse = RowSparse(on_device(values), on_device(rows), (5, 2))
        gpu(["embed", "bias"], [sparse, on_device(grad)], [*device.values()])
    same(device, {"embed": weight, "bias": bias})


def test_what_is_refused_changes_nothing_in_any_group(rng):
    gpu, weights = made(clip_adaptive=0.1), arrays(rng)
    device, grads = there(weights), there({**arrays(rng), "frozen": None})
    for _ in range(2):
        with pytest.raises(TypeError, match="index 'embed': clip_adaptive works on arrays on the"):
            gpu.step(grads, device)
    for name, weight in device.items():
        np.testing.assert_array_equal(host(weight), weights[name])
    assert (gpu.states, gpu.optimizer.num_update) == ({}, 0)
