"""Fastopt's optimizers for torch models on CPUs; requires torch.

Every class is a ``torch.optim.Optimizer``. Names and arguments are torch's where torch has the
optimizer, such as :class:`Adam`, else fastopt's, such as :class:`Lion`.

Examples
--------
>>> import torch
>>> import fastopt.torch
>>> model = torch.nn.Linear(3, 1)
>>> opt = fastopt.torch.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999))
>>> model(torch.ones(1, 3)).sum().backward()
>>> opt.step()
"""

import functools
import typing

try:
    import torch as _  # noqa: F401
except ImportError as error:
    raise ImportError(f"fastopt.torch needs torch: pip install torch ({error})") from error

from fastopt._advice import Advice as _Advice
from fastopt._advice import no_attribute as _no_attribute
from fastopt.optimizer import Optimizer as _Rule
from fastopt.optimizer import opt_registry as _registry
from fastopt.torch.optimizer import Optimizer as Optimizer
from fastopt.torch.optimizer import class_of as _class_of
from fastopt.torch.optimizer import make as _make
from fastopt.torch.recipes import is_name as _is_name
from fastopt.torch.recipes import names as _names
from fastopt.torch.recipes import recipe as _recipe


@functools.cache
def _made(name: str, _kind: typing.Any) -> typing.Any:
    return _make(_recipe(name))


def of(kind: type[_Rule]) -> type[Optimizer]:
    """Return the class for torch of an optimizer of your own.

    Parameters
    ----------
    kind : type
        Subclass of :class:`fastopt.optimizer.Optimizer`. One that is registered is also an
        attribute of this module, under its name.

    Returns
    -------
    type
        Subclass of :class:`Optimizer` that takes parameters, `lr`, and the arguments of `kind`.

    Raises
    ------
    TypeError
        `kind` is no such class.

    Examples
    --------
    >>> import torch
    >>> import fastopt, fastopt.torch
    >>> class Half(fastopt.optimizer.SGD):
    ...     pass
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = fastopt.torch.of(Half)([weight], lr=0.5)
    >>> weight.grad = torch.ones(2)
    >>> opt.step()
    >>> weight.detach()
    tensor([0.5000, 0.5000])
    """
    if not (isinstance(kind, type) and issubclass(kind, _Rule)):
        raise TypeError(f"kind must be a class of optimizers, got {kind!r}")
    return _class_of(kind)


def __getattr__(name: str) -> typing.Any:
    if not _is_name(name):
        raise _no_attribute(f"module {__name__!r}", name, _names(), _Advice("TORCH"))
    return _made(name, _registry.get(name.lower()))  # a class may be registered again


def __dir__() -> list[str]:
    return sorted({*globals(), *_names()})
