"""Devices that hold the copies of a parameter."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from fastopt.arguments import choice, count

__all__ = ["Device", "cpu", "cuda", "current_device"]


@dataclass(frozen=True)
class Device:
    """A device that holds arrays: comparable by value, hashable, and a context manager.

    ``cpu(0)`` and ``cpu(1)`` are different devices although both are host memory, so that code
    for several devices can be run and tested without a GPU.

    Parameters
    ----------
    device_type : {'cpu', 'cuda'}
        Kind of device.
    device_id : int
        Index of the device, from 0. Default 0.

    Raises
    ------
    TypeError
        `device_id` is not an integer.
    ValueError
        `device_type` is unknown, or `device_id` is negative.

    Examples
    --------
    >>> from fastopt.device import cpu, current_device
    >>> with cpu(1):
    ...     print(current_device())
    cpu(1)
    >>> current_device()
    cpu(0)
    """

    device_type: Literal["cpu", "cuda"]
    device_id: int = 0

    def __post_init__(self) -> None:
        choice("device_type", self.device_type, "cpu", "cuda")
        object.__setattr__(self, "device_id", count("device_id", self.device_id, least=0))

    def __repr__(self) -> str:
        return f"{self.device_type}({self.device_id})"

    def __enter__(self) -> "Device":
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        _entered.set(_entered.get()[:-1])


# A tuple, not a list: a task or thread that copies the context must not see later changes to it.
_entered: ContextVar[tuple[Device, ...]] = ContextVar("fastopt.device", default=())


def cpu(device_id: int = 0) -> Device:
    """Return a CPU device.

    Parameters
    ----------
    device_id : int
        Index of the device, from 0. Default 0.

    Examples
    --------
    >>> from fastopt.device import cpu
    >>> cpu(1) == cpu(1) != cpu(0)
    True
    """
    return Device("cpu", device_id)


def cuda(device_id: int = 0) -> Device:
    """Return a CUDA device, without querying the driver.

    Parameters
    ----------
    device_id : int
        Index of the device, from 0. Default 0.

    Examples
    --------
    >>> from fastopt.device import cuda
    >>> cuda(0)
    cuda(0)
    """
    return Device("cuda", device_id)


def current_device() -> Device:
    """Return the device of the innermost ``with`` block of this thread or task, or ``cpu(0)``.

    Examples
    --------
    >>> from fastopt.device import current_device
    >>> current_device()
    cpu(0)
    """
    entered = _entered.get()
    return entered[-1] if entered else cpu(0)
