"""The base class of all initializers."""

import json
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from fastopt.initializer import draws
from fastopt.initializer.arrays import Array, bilinear, drawable, target
from fastopt.initializer.names import DESCRIBED, PLAIN, InitDesc, hook_of
from fastopt.initializer.text import build, filler

log = logging.getLogger("fastopt.initializer")


class Initializer:
    """Base class of all initializers: called with a name and an array, they fill the array.

    The ending of the name selects the hook: ``weight`` :meth:`_init_weight`, which a subclass
    implements; ``bias`` :meth:`_init_bias` and ``beta`` :meth:`_init_beta`, zeros; ``gamma``
    :meth:`_init_gamma`, ones; ``min`` :meth:`_init_zero`; ``max`` :meth:`_init_one`;
    ``weight_quantize`` and ``bias_quantize`` :meth:`_init_quantized_weight` and
    :meth:`_init_quantized_bias`; any other ending :meth:`_init_default`, which raises an error.
    Every hook takes the name and the array and can be overridden.

    Parameters
    ----------
    rng : numpy.random.Generator or seed, optional
        Source of random numbers: a generator, which is shared and advanced, or a seed for a new
        one. Default: the generator set by :func:`seed`, or one with fresh entropy.
    **kwargs
        Arguments of the subclass, as written by :meth:`dumps`.

    Raises
    ------
    TypeError, ValueError
        An argument of an initializer, or the array of a call, is invalid. A call that fails
        leaves the array unchanged.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> init = initializer.Normal(0.5, rng=0)
    >>> weight, bias = np.empty((2, 2), np.float32), np.empty(2, np.float32)
    >>> init(initializer.InitDesc("fc_weight"), weight)
    >>> init(initializer.InitDesc("fc_bias"), bias)
    >>> bool(weight.any()), bool(bias.any())
    (True, False)
    """

    _fresh: np.random.Generator | None = None

    def __init__(self, *, rng: draws.Seed = None, **kwargs: object) -> None:
        self._rng = None if rng is None else draws.generator(rng)
        self._kwargs = kwargs
        self._print_func: Callable[[Array], str] | None = None

    @property
    def rng(self) -> np.random.Generator:
        """Random generator of this initializer."""
        generator = self._rng or draws.seeded()
        if generator is None:
            generator = self._fresh = self._fresh or draws.generator(None)
        return generator

    def set_verbosity(
        self, verbose: bool = False, print_func: Callable[[Array], str] | None = None
    ) -> "Initializer":
        """Log every array that is initialized, at level INFO of logger "fastopt.initializer".

        Parameters
        ----------
        verbose : bool, default False
        print_func : callable, optional
            Takes the array and returns the text to log. Default: the root mean square of the
            array.

        Returns
        -------
        Initializer
            The initializer itself.

        Raises
        ------
        TypeError
            `print_func` is not callable.
        """
        if not (print_func is None or callable(print_func)):
            raise TypeError(f"print_func must be a function of an array, got {print_func!r}")
        self._print_func = (print_func or root_mean_square) if verbose else None
        return self

    def dumps(self) -> str:
        """Return the initializer, without its `rng`, as JSON text for :func:`create`.

        Raises
        ------
        TypeError
            An argument is neither an array nor JSON-serializable.

        Examples
        --------
        >>> from fastopt import initializer
        >>> initializer.Normal(0.5, rng=0).dumps()
        '["normal", {"sigma": 0.5}]'
        """
        return json.dumps([type(self).__name__.lower(), self._kwargs], default=_plain)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._kwargs.items())
        return f"{type(self).__name__}({arguments})"

    def __call__(self, desc: str, arr: Array) -> None:
        """Fill `arr` in place.

        Parameters
        ----------
        desc : InitDesc
            The parameter's name. A plain string is deprecated; see the guide for the differences.
        arr : numpy.ndarray
            Array of any shape and strides, of float16, bfloat16, float32 or float64.
            Initializers that draw no random numbers also fill integer arrays.
        """
        patterns = DESCRIBED
        if not isinstance(desc, InitDesc):
            patterns, desc = PLAIN, InitDesc(desc)
            warnings.warn(
                f"plain names are deprecated, use InitDesc({str(desc)!r})",
                DeprecationWarning,
                stacklevel=2,
            )
        arr = target(desc, arr)
        if desc.global_init is None:
            desc = InitDesc(desc, desc.attrs, self)
        pattern = desc.attrs.get("__init__")
        if not (pattern is None or (isinstance(pattern, str) and not pattern)):
            self._init_own(pattern, desc, arr)
        else:
            pattern, hook = hook_of(desc, patterns)
            getattr(self, hook)(desc, arr)
        if self._print_func:
            log.info("Initialized %s as %s: %s", desc, pattern, self._print_func(arr))

    def _init_own(self, own: object, desc: InitDesc, arr: Array) -> None:
        """Fill the array with the parameter's own initializer."""
        if isinstance(own, (str, Initializer)):
            self._created(own)._init_weight(desc, arr)
        else:
            rest = {name: value for name, value in desc.attrs.items() if name != "__init__"}
            filler(f"{desc}: init", own)(InitDesc(desc, rest, desc.global_init), arr)

    def _created(self, init: "str | Initializer") -> "Initializer":
        """Create an initializer from its text; it draws from this initializer's generator."""
        if isinstance(init, Initializer):
            return init
        created: Initializer = build(init)
        if created._rng is None:
            created._rng = self.rng
        return created

    def _draw(self, desc: str, arr: Array, sampler: draws.Sampler, scale: float) -> None:
        """Fill `arr` with random numbers from `sampler`, multiplied by `scale`."""
        draws.fill(arr, self.rng, sampler, drawable(desc, arr), scale)

    # Hooks

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define _init_weight(desc, arr)")

    def _init_zero(self, desc: InitDesc, arr: Array) -> None:
        arr[...] = 0

    def _init_one(self, desc: InitDesc, arr: Array) -> None:
        arr[...] = 1

    _init_bias = _init_beta = _init_quantized_bias = _init_zero
    _init_gamma = _init_one

    def _init_quantized_weight(self, desc: InitDesc, arr: Array) -> None:
        draws.fill(arr, self.rng, draws.integers, np.int64)

    def _init_bilinear(self, desc: InitDesc, arr: Array) -> None:
        bilinear(desc, arr)

    def _init_loc_bias(self, desc: InitDesc, arr: Array) -> None:
        if arr.shape != (6,):
            raise ValueError(f"{desc}: an affine map has shape (6,), got {arr.shape}")
        arr[...] = [1, 0, 0, 0, 1, 0]

    def _init_default(self, desc: InitDesc, arr: Array) -> None:
        endings = ", ".join(pattern.strip("*") for pattern in DESCRIBED)
        raise ValueError(
            f"{desc}: names are initialized by their endings, one of {endings}; for another name "
            "pass InitDesc(name, {'__init__': initializer})"
        )


def _plain(value: object) -> Any:
    """Convert an array or a NumPy scalar to its JSON form."""
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"an argument cannot be written as JSON: {value!r}")
    return value.tolist()


def root_mean_square(arr: Array) -> str:
    """Format the root mean square of an array."""
    return f"{np.linalg.norm(arr.astype(np.float64)) / math.sqrt(max(arr.size, 1)):g}"
