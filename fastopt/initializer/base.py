"""The base class of all initializers, the names that it is called with, and its registry."""

import inspect
import json
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np

from fastopt._advice import Advice, choices, closest
from fastopt.arguments import brief, is_array
from fastopt.initializer import draws

Array = np.ndarray[Any, Any]
FLOATS = ("float16", "bfloat16", "float32", "float64")


def is_real(dtype: np.dtype[Any]) -> bool:
    """Whether this is a dtype of integers or floats."""
    return dtype.kind in "iuf" or dtype.name == "bfloat16"


def target(name: str, arr: object) -> Array:
    """Validate `arr` and return it as a base-class array that shares its memory.

    Raises
    ------
    TypeError
        `arr` is not a NumPy array of real numbers.
    ValueError
        `arr` is read-only.
    """
    if not is_array(arr):
        raise TypeError(f"{name}: arr must be a NumPy array, got {type(arr).__name__}")
    if not is_real(arr.dtype):
        raise TypeError(f"{name}: arr must hold real numbers, got dtype {arr.dtype}")
    if not arr.flags.writeable:
        raise ValueError(f"{name}: arr is read-only, an initializer writes to it")
    return np.asarray(arr)


def drawable(name: str, arr: Array) -> type[np.float32] | type[np.float64]:
    """Return the dtype to draw random numbers in; TypeError if `arr` is not a float array."""
    if arr.dtype.name not in FLOATS:
        raise TypeError(
            f"{name}: arr must have one of the dtypes {', '.join(FLOATS)} for random numbers, "
            f"got {arr.dtype}"
        )
    return np.float64 if arr.dtype.name == "float64" else np.float32


def assign(name: str, arr: Array, values: Array, what: str) -> None:
    """Copy `values` into `arr` with broadcasting; only precision may be lost.

    Raises
    ------
    TypeError
        `arr` has an integer dtype, and `values` are floats or integers out of its range.
    ValueError
        `values` does not broadcast to the shape of `arr`.
    """
    if arr.dtype.kind in "iu" and not _within(values, np.iinfo(arr.dtype)):
        raise TypeError(f"{name}: {what} ({values.dtype}) does not fit into {arr.dtype}")
    try:
        values = np.broadcast_to(values, arr.shape)
    except ValueError:
        raise ValueError(
            f"{name}: {what} has shape {values.shape}, which does not fit {arr.shape}"
        ) from None
    arr[...] = values


def _within(values: Array, limits: "np.iinfo[Any]") -> bool:
    """Whether `values` are integers within the limits of a dtype."""
    if values.dtype.kind not in "iu":
        return False
    return not values.size or bool(limits.min <= values.min() and values.max() <= limits.max)


class InitDesc(str):
    """Name of a parameter with attributes that control its initialization.

    Parameters
    ----------
    name : str
    attrs : mapping of str to object, optional
        ``attrs["__init__"]`` is the parameter's own initializer, which takes precedence over its
        name: an :class:`Initializer`, its text or registered name, or another function of (name,
        array).
    global_init : Initializer, optional
        Fallback for the parts of a composite initializer. Default: the initializer that is called.

    Raises
    ------
    TypeError
        `name` is not a string, or `attrs` is not a mapping.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty(3)
    >>> initializer.Zero()(initializer.InitDesc("scale", {"__init__": "ones"}), weight)
    >>> weight
    array([1., 1., 1.])
    """

    attrs: dict[str, Any]
    global_init: Any

    def __new__(
        cls, name: str, attrs: Mapping[str, Any] | None = None, global_init: object = None
    ) -> "InitDesc":
        """Create the name with a copy of `attrs`."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {brief(name)}")
        if not isinstance(attrs, Mapping | None):
            raise TypeError(f"attrs must be a mapping, got {attrs!r}")
        desc = super().__new__(cls, name)
        desc.attrs = dict(attrs or {})
        desc.global_init = global_init
        return desc


_COMMON = {
    "*weight": "_init_weight",
    "*bias": "_init_bias",
    "*gamma": "_init_gamma",
    "*beta": "_init_beta",
    "*min": "_init_zero",
    "*max": "_init_one",
}

DESCRIBED = {
    **_COMMON,
    "*weight_quantize": "_init_quantized_weight",
    "*bias_quantize": "_init_quantized_bias",
}
"""Name patterns and the hooks they select; the first match wins."""

PLAIN = {
    "upsampling*": "_init_bilinear",
    "stn_loc*weight": "_init_zero",
    "stn_loc*bias": "_init_loc_bias",
    **_COMMON,
    "*moving_mean": "_init_zero",
    "*moving_var": "_init_one",
    "*moving_inv_var": "_init_zero",
    "*moving_avg": "_init_zero",
}
"""Patterns for names that are plain strings."""


Filler = Callable[[str, Array], None]
"""Callable that fills an array by name: an initializer, Load, Mixed, or a function."""

initializer_registry: dict[str, type[Any]] = {}
"""Initializer classes by lower-case name."""


def build(text: str, **kwargs: Any) -> Any:
    """Create an initializer from its text or name; `kwargs` override the text's arguments.

    Raises
    ------
    ValueError
        No class of that name is registered, or the text does not describe an initializer.
    TypeError
        The class does not accept an argument.
    """
    name = text
    if text.startswith("["):
        name, saved = _parsed(text)
        kwargs = {**saved, **kwargs}
    klass = initializer_registry.get(name.lower())
    if klass is None:
        names = sorted(initializer_registry)
        advice = choices(Advice("INITIALIZERS").get(name.lower()) or closest(name, names), names)
        raise ValueError(f"Cannot find initializer {name!r}; {advice}")
    signature = inspect.signature(klass)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        known = ", ".join(signature.parameters)
        hint = "; the seed is the argument rng" if "seed" in kwargs else ""
        raise TypeError(f"{klass.__name__} takes {known}; {error}{hint}") from None
    return klass(**kwargs)


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a text into name and arguments."""
    try:
        name, kwargs = json.loads(text)
    except ValueError:
        name = kwargs = None
    if not (isinstance(name, str) and isinstance(kwargs, dict)):
        raise ValueError(f'the text of an initializer is ["name", {{arguments}}], got {text!r}')
    return name, kwargs


def filler(name: str, value: object) -> Filler:
    """Return `value` if it is a callable, or the initializer whose text or name it is.

    Raises
    ------
    TypeError
        `value` is a class, or neither a callable nor a string.
    """
    if isinstance(value, str):
        value = build(value)
    if isinstance(value, type) or not callable(value):
        got = f"the class {value.__name__}: call it" if isinstance(value, type) else brief(value)
        raise TypeError(
            f"{name} must be an initializer, its text or name, or a function of (name, array), "
            f"got {got}"
        )
    function: Filler = value
    return function


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
        self._print_func = (print_func or _root_mean_square) if verbose else None
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
            matches = (pattern for pattern in patterns if fnmatchcase(desc, pattern))
            pattern = next(matches, "default")
            getattr(self, patterns.get(pattern, "_init_default"))(desc, arr)
            pattern = pattern.strip("*")
        if self._print_func:
            log.info("Initialized %s as %s: %s", desc, pattern, self._print_func(arr))

    def _init_own(self, chosen: object, desc: InitDesc, arr: Array) -> None:
        """Fill the array with the parameter's own initializer."""
        if isinstance(chosen, (str, Initializer)):
            self._created(chosen)._init_weight(desc, arr)
        else:
            rest = {name: value for name, value in desc.attrs.items() if name != "__init__"}
            filler(f"{desc}: init", chosen)(InitDesc(desc, rest, desc.global_init), arr)

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
        if arr.ndim != 4:
            raise ValueError(
                f"{desc}: bilinear upsampling needs shape (out, in, height, width), got {arr.shape}"
            )
        height, width = arr.shape[2:]
        factor = max(math.ceil(width / 2), 1)  # 1 for arrays without elements
        center = (2 * factor - 1 - factor % 2) / (2 * factor)
        rows, columns = (1 - abs(np.arange(size) / factor - center) for size in (height, width))
        arr[...] = np.outer(rows, columns)

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


def _root_mean_square(arr: Array) -> str:
    """Format the root mean square of an array."""
    return f"{np.linalg.norm(arr.astype(np.float64)) / math.sqrt(max(arr.size, 1)):g}"


Init = str | Initializer | Filler
Class = TypeVar("Class", bound=type[Initializer])


def register(klass: Class) -> Class:
    """Register a class under its lower-case name; a decorator.

    Parameters
    ----------
    klass : type
        Subclass of :class:`Initializer`. Replacing a class of the same name warns.

    Raises
    ------
    TypeError
        `klass` is not a subclass of :class:`Initializer`.

    Examples
    --------
    >>> from fastopt import initializer
    >>> @initializer.register
    ... @initializer.alias("half")
    ... class Halves(initializer.Initializer):
    ...     def _init_weight(self, desc, arr):
    ...         arr[...] = 0.5
    >>> initializer.create("halves"), initializer.create("half")
    (Halves(), Halves())
    """
    _enter(getattr(klass, "__name__", ""), klass)
    return klass


def alias(*names: str) -> Callable[[Class], Class]:
    """Register a class under additional names; a decorator like :func:`register`.

    Parameters
    ----------
    *names : str
        Names, case-insensitive.

    Raises
    ------
    TypeError
        A name is not a string, or the class is not a subclass of :class:`Initializer`.

    Examples
    --------
    >>> from fastopt import initializer
    >>> @initializer.register
    ... @initializer.alias("sevens")
    ... class Seven(initializer.Initializer):
    ...     def _init_weight(self, desc, arr):
    ...         arr[...] = 7
    >>> type(initializer.create("sevens")).__name__
    'Seven'
    """
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"names must be strings, got {names!r}")

    def enter(klass: Class) -> Class:
        for name in names:
            _enter(name, klass)
        return klass

    return enter


def _enter(name: str, klass: object) -> None:
    if not (isinstance(klass, type) and issubclass(klass, Initializer)):
        raise TypeError(f"only subclasses of Initializer can be registered, got {klass!r}")
    old = initializer_registry.get(name.lower(), klass)
    if old is not klass:
        warnings.warn(f"{klass!r} replaces {old!r} in initializer_registry", stacklevel=3)
    initializer_registry[name.lower()] = klass


def create(name: str | Initializer, **kwargs: Any) -> Initializer:
    """Create an initializer from its registered name or its text.

    Parameters
    ----------
    name : str or Initializer
        Case-insensitive name of a registered class, or the result of :meth:`Initializer.dumps`.
        An initializer is returned unchanged.
    **kwargs
        Arguments of the class; they override those of the text.

    Raises
    ------
    ValueError
        No class of that name is registered, or the text does not describe an initializer.
    TypeError
        The class does not accept an argument, or `name` has another type.

    Examples
    --------
    >>> from fastopt import initializer
    >>> initializer.create("he_normal", rng=0), initializer.create('["normal", {"sigma": 0.5}]')
    (HeNormal(truncated=True), Normal(sigma=0.5))
    """
    if isinstance(name, Initializer):
        if kwargs:
            raise TypeError(f"{name!r} is an instance and takes no {', '.join(kwargs)}")
        return name
    if not isinstance(name, str):
        raise TypeError(f"name must be a string or an Initializer, got {name!r}")
    made: Initializer = build(name, **kwargs)
    return made
