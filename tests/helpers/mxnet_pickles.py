"""Pickles like those of MXNet's get_states, made with stand-ins for its classes."""

import io
import pickle
import struct

import numpy as np

DTYPES = ("f4", "f8", "f2", "u1", "i4", "i1", "i8")
CODES = {np.dtype(name): code for code, name in enumerate(DTYPES)}


def shape_bytes(shape):
    return struct.pack(f"<i{len(shape)}q", len(shape), *shape)


def dense(array, magic=0xF993FAC9):
    """Bytes that MXNet's NDArray writes."""
    head = struct.pack("<Ii", magic, 0) + shape_bytes(array.shape)
    return head + struct.pack("<iii", 1, 0, CODES[array.dtype]) + array.tobytes()


def row_sparse(shape, rows, values):
    """Bytes that MXNet's RowSparseNDArray writes."""
    rows = np.asarray(rows, np.int64)
    head = struct.pack("<Ii", 0xF993FAC9, 1) + shape_bytes(values.shape) + shape_bytes(shape)
    head += struct.pack("<iii", 1, 0, CODES[values.dtype])
    return head + struct.pack("<i", 6) + shape_bytes(rows.shape) + values.tobytes() + rows.tobytes()


def legacy(array, version=1):
    """Bytes of MXNet 0.11 and earlier: version 1, or 0 with dimensions of 32 bits."""
    head = struct.pack("<I", 0xF993FAC8) + shape_bytes(array.shape)
    if not version:
        head = struct.pack(f"<I{array.ndim}I", array.ndim, *array.shape)
    return head + struct.pack("<iii", 1, 0, CODES[array.dtype]) + array.tobytes()


def named_list(blobs):
    """Bytes that MXNet's nd.save writes for a dict."""
    names = [struct.pack("<Q", len(name.encode())) + name.encode() for name in blobs]
    count = struct.pack("<Q", len(blobs))
    head = struct.pack("<QQ", 0x112, 0)
    return head + count + b"".join(blobs.values()) + count + b"".join(names)


class Stand:
    """Is pickled as NDArray is."""

    def __init__(self, blob=None):
        if blob is not None:
            self.handle = bytearray(blob)

    def __reduce__(self):
        return type(self), (None,), vars(self)


class Pickler(pickle._Pickler):
    """Pickles stand-ins under the full names of their classes, which need not exist."""

    def save_global(self, obj, name=None):
        if Stand not in getattr(obj, "__mro__", ()):
            return super().save_global(obj, name)
        module, _, name = obj.__name__.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        return self.memoize(obj)


def pickled(states, optimizer=None, protocol=4):
    """Pickle of states, each of a blob, None, or a tuple of these; `optimizer` is its attributes.

    Blobs whose storage type is 1 become row-sparse arrays.
    """
    names = "ndarray.ndarray.NDArray", "ndarray.sparse.RowSparseNDArray"
    names += f"optimizer.{(optimizer or {}).get('class', 'SGD')}", "lr_scheduler.FactorScheduler"
    plain, sparse, klass, schedule = (type(f"mxnet.{name}", (Stand,), {}) for name in names)

    def convert(state):
        if isinstance(state, tuple):
            return tuple(map(convert, state))
        if isinstance(state, dict):
            return {key: convert(value) for key, value in state.items()}
        if isinstance(state, bytes):
            return (sparse if state[4:8] == b"\1\0\0\0" else plain)(state)
        return schedule() if state == "schedule" else state

    content = convert(states)
    if optimizer:
        made = klass()
        attributes = {"lr_scheduler": None, **optimizer}
        vars(made).update((k, convert(v)) for k, v in attributes.items() if k != "class")
        content = content, made
    file = io.BytesIO()
    Pickler(file, protocol).dump(content)
    return file.getvalue()
