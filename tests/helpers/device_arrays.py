"""Arrays on the device, and the same steps on both sides."""

import numpy as np

from fastopt import RowSparse
from fastopt._engine.validate import leaves as leaves
from fastopt._kernels.device_memory import host, owned
from fastopt._kernels.devices import cuda_target
from fastopt.device import Device


class Foreign:
    """Array of another library: nothing but the interface."""

    def __init__(self, array, **changes):
        self.array, self.changes = array, changes
        self.shape, self.strides, self.dtype = array.shape, array.strides, array.dtype

    @property
    def __cuda_array_interface__(self):
        return {**self.array.__cuda_array_interface__, **self.changes}


class Bare:
    """Array without any other attribute, whose shape and dtype may be of types of its own."""

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def on_device(state):
    """Copy of NumPy arrays on the device, with the same nesting."""
    if isinstance(state, (list, tuple)):
        return type(state)(map(on_device, state))
    if isinstance(state, RowSparse):
        return RowSparse(on_device(state.values), on_device(state.indices), state.shape)
    return owned(state, Device("cuda", cuda_target().get_current_device().id))


def check_close(device, expected, rtol=2e-6, atol=1e-6):
    """The arrays on the device are those in main memory, but for a rounding or two.

    Codes may differ by one, where the last bit of a number decides, and remainders of split masters
    anyhow.
    """
    for one, other in zip(leaves(host(device)), leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype.itemsize == 1:
            away = np.abs(one.astype(int) - other.astype(int))
            assert away.max(initial=0) <= 1
            assert (away > 0).sum() <= max(1, 0.01 * away.size)
        elif one.dtype != np.uint16:
            near = {"rtol": 1e-2 if one.dtype.itemsize == 2 else rtol, "atol": atol}
            np.testing.assert_allclose(one.astype(float), other.astype(float), **near)


def check_steps(make, weight, grads, index=0, set_up=lambda updater: None, **tolerance):
    """Updaters made by `make` do the same on the device and on the CPU, which is returned."""
    here, there = make(), make()
    set_up(here)
    set_up(there)
    host_weight, device_weight = weight.copy(order="K"), on_device(weight)
    for grad in grads:
        here(index, grad, host_weight)
        there(index, on_device(grad), device_weight)
    check_close(device_weight, host_weight, **tolerance)
    check_close(there.states[index], here.states[index], **tolerance)
    return here, there, host_weight, device_weight
