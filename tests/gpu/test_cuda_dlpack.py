"""Arrays of libraries that describe device memory by DLPack only, and immutable arrays."""

import ctypes

import numpy as np
import pytest

from fastopt import optimizer
from fastopt._kernels import dlpack
from fastopt._kernels.devices import header
from helpers.device_arrays import Foreign, host, on_device

pytestmark = pytest.mark.gpu

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Packed:
    """Array with nothing but DLPack; `version` 0 is the one without flags."""

    def __init__(self, array, version=1, flags=0, code=2):
        self.array, self.version, self.seen = array, version, []
        described = Foreign(array).__cuda_array_interface__
        shape, itemsize = described["shape"], array.dtype.itemsize
        self.numbers = [
            (ctypes.c_int64 * len(shape))(*shape),
            (ctypes.c_int64 * len(shape))(*[step // itemsize for step in array.strides]),
        ]
        lengths, steps = (ctypes.cast(n, ctypes.POINTER(ctypes.c_int64)) for n in self.numbers)
        before = 8  # bytes, which byte_offset adds again
        tensor = (described["data"][0] - before, 2, 0, len(shape), code, 8 * itemsize, 1)
        self.tensor = dlpack._Tensor(*tensor, lengths, steps, before)
        self.whole = dlpack._Versioned(1, 0, None, None, flags, self.tensor)

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **kwargs):
        if not self.version and "max_version" in kwargs:
            raise TypeError("max_version")
        self.seen.append(kwargs)
        of, name = (self.whole, self.name) if self.version else (self.tensor, b"dltensor")
        return new_capsule(ctypes.addressof(of), name, None)

    name = b"dltensor_versioned"


@pytest.mark.parametrize("shape", [(5,), (3, 4)], ids=str)
def test_weights_and_gradients_are_taken(shape, rng):
    array, grad = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    weight, given = on_device(array), on_device(grad)
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=0.5))
    packed = Packed(weight), Packed(given, version=0)
    for _ in range(3):
        updater(0, packed[1], packed[0])
    np.testing.assert_allclose(host(weight), array - 1.5 * grad, rtol=1e-5, atol=1e-6)
    assert all(seen["stream"] == 1 for one in packed for seen in one.seen)


@pytest.mark.parametrize("options", [{"version": 0}, {"flags": 1}], ids=str)
def test_weights_that_may_be_read_only_are_refused(options):
    weight = on_device(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="weight is read-only"):
        optimizer.get_updater("sgd")(0, weight, Packed(weight, **options))
    np.testing.assert_array_equal(host(weight), 1)


def test_types_that_numpy_lacks_are_refused():
    weight = on_device(np.ones(3, np.float32))
    with pytest.raises(TypeError, match=r"index 0: gradient: .*DLPack's type 5 of 32 bits"):
        optimizer.get_updater("sgd")(0, Packed(on_device(np.ones(3, np.float32)), code=5), weight)


def test_bfloat16_is_two_bytes(bfloat16):
    assert header(Packed(on_device(np.ones(3, bfloat16)), code=4)).dtype == bfloat16


def test_arrays_of_jax_are_gradients_only():
    class Array(Foreign):
        __module__ = "jaxlib._jax"

    weight = on_device(np.ones(3, np.float32))
    updater = optimizer.get_updater(optimizer.SGD(learning_rate=1.0))
    updater(0, Array(on_device(np.ones(3, np.float32))), weight)
    np.testing.assert_array_equal(host(weight), 0)
    with pytest.raises(ValueError, match="weight is read-only"):
        updater(1, on_device(np.ones(3, np.float32)), Array(weight))
