"""Flattening of nested weights and gradients into leaves that are named by their paths."""

import copy
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence, Set
from dataclasses import fields, is_dataclass
from numbers import Integral, Number
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from fastopt._foreign import as_gradient, is_buffer, is_foreign, is_subclass
from fastopt._kernels.devices import is_cuda
from fastopt._notices import warn_user
from fastopt.arguments import array_inside, choice
from fastopt.sparse import Array, RowSparse

KEPT = 16
"""Maximum number of cached structures."""

LATEST: dict[str, "_Cached"] = {}
"""The structure that was cached last by any updater, by `missing`."""

REPEATED = 2
"""Number of steps with the same unchanged gradient but other weights that are suspicious."""

SAMPLE = 64
"""Number of elements of a gradient that are compared."""


Leaves = tuple[tuple[str, ...], Sequence[Any], Sequence[Any], tuple[str, ...]]
"""Paths, gradients and weights of the leaves with a gradient, in the order of the weights; and the
paths of the leaves without one."""


class Structures:
    """Flattens gradients and weights of the same structure, and caches the paths.

    Containers are mappings, lists, tuples, named tuples and dataclass instances; everything else
    is a leaf. The weights define the structure: the gradient of a leaf is whatever the gradients
    hold at its path, even a tuple. Two containers match if they hold the same names, regardless of
    their types and the order of their keys.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Cached] = {}
        self._latest: dict[str, _Cached] = {}
        """The structure that was cached last, by `missing`; for containers that are new each time.
        """
        self._warned = False
        self.restart()

    def restart(self) -> None:
        """Forget the gradients and weights of earlier steps."""
        self.first_gradient = 0
        """Id of the first gradient of the last step."""
        self._repeated: tuple[bytes, int] = b"", 0
        """Values of a first gradient that came again with other weights, and how often it did."""
        self._earlier = WeakValueDictionary[int, Array]()
        """Arrays that were the first weight before another one was, by id."""

    def flatten(
        self,
        grads: object,
        weights: object,
        missing: str = "raise",
        spares: Callable[[str], bool] = lambda path: False,
    ) -> Leaves:
        """Return paths, gradients and weights of leaves with a gradient, and the other paths.

        Parameters
        ----------
        grads, weights : nested containers of arrays, or arrays
            None instead of a gradient, or of an inner container of gradients, skips the weights
            there.
            Leaves that are arrays in neither of them are left out.
        missing : str
            ``"raise"``, or ``"skip"`` to treat missing gradients like None.
        spares : callable
            Whether the weight of a path needs no gradient, as frozen ones.

        Raises
        ------
        ValueError
            A gradient is missing or has no weight, two leaves have the same path, or a container
            contains itself.
        TypeError
            The gradients are None, a gradient is at the path of a container of weights, or a key
            is not a string or an integer.
        """
        if type(grads) is type(weights) is np.ndarray and missing == "raise":
            return ("",), (grads,), (weights,), ()
        if type(missing) is not str:
            choice("missing", missing, "raise", "skip")
        key = id(weights), missing
        known = self._known.get(key) or self._latest.get(missing) or LATEST.get(missing)
        if known is not None:
            node, paths, without = known
            read = node.read(grads, weights)
            if read is not None:
                if not self._latest:  # that of another updater, such as the last episode's
                    self._keep(key, known)
                return paths, read[0], read[1], without
        skips = choice("missing", missing, "raise", "skip") == "skip"
        if grads is None:
            raise TypeError(
                "gradients must be nested like the weights, got None, so that nothing would be "
                "updated: pass what the backward pass returns; None inside skips single weights"
            )
        if key in self._known:  # other gradients for the same weights
            plain = _of_dict(grads, weights, skips)
            if plain is not None:
                return plain
        walk = _Walk(skips, spares)
        try:
            top = walk.node("", grads, weights)
        except RecursionError:
            raise ValueError("a structure is nested too deeply, or holds itself") from None
        leaves, left = walk.leaves, walk.left
        paths = tuple(path for path, _, _ in leaves)
        every = [*paths, *left]
        if len(set(every)) < len(every):
            twice = next(path for k, path in enumerate(every) if path in every[:k])
            raise ValueError(f"two weights have the path {twice!r}; rename a key that has a dot")
        if top is not None and not walk.spared:  # others may not be frozen
            self._keep(key, (top, paths, tuple(left)))
        return paths, [g for _, g, _ in leaves], [w for _, _, w in leaves], tuple(left)

    def _keep(self, key: tuple[int, str], known: "_Cached") -> None:
        """Cache a structure, for this updater and as the first one of others."""
        if len(self._known) >= KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = self._latest[key[1]] = LATEST[key[1]] = known

    def check_weight(
        self, path: str, grad: object, weight: object, updated: object, repeated: bool
    ) -> None:
        """Warn once if gradients and weights seem to be swapped, or weights to share a name.

        Parameters
        ----------
        path : str
            Path of the first leaf.
        grad, weight
            The leaf.
        updated
            The weight of the last step, which is another one, or is the gradient now.
        repeated : bool
            Whether the last step had the same gradient.
        """
        if self._warned:
            return
        swapped, advice = "are the arguments swapped? gradient", ""
        if grad is updated and weight is not grad:
            advice = f"{swapped} {path!r} is an array that was updated as weight before"
        elif type(grad) is type(weight) is type(updated) is np.ndarray and weight is not updated:
            if self._earlier.get(id(weight)) is weight:
                advice = f"several arrays are updated in turns as weight {path!r}"
            elif repeated and self._is_constant(grad, weight, updated):
                steps = f"{REPEATED + 1} steps with other weights"
                advice = f"{swapped} {path!r} is the same unchanged array in {steps}"
            self._earlier[id(updated)] = updated
        if advice:
            self._warned = True
            warn_user(
                f"step(grads, weights): {advice}; weights of several calls that share a name share "
                "a state: give each its own, as in step({'a': grad}, {'a': weight})"
            )

    def _is_constant(self, grad: Array, weight: Array, updated: Array) -> bool:
        """Return whether a gradient has come again unchanged, with other weights, too often."""
        sample = grad.flat[:SAMPLE].tobytes()
        before, count = self._repeated
        is_copy = weight.flat[:SAMPLE].tobytes() == updated.flat[:SAMPLE].tobytes()
        count = count + 1 if sample == before and not is_copy else 1
        self._repeated = sample, count
        return count == REPEATED


def _of_dict(grads: object, weights: object, skips: bool) -> Leaves | None:
    """Return the leaves of plain dictionaries of arrays; None for others, or if they do not match.

    Subsets that differ in each step, such as those of experts, are read in this way.
    """
    if type(grads) is not dict or type(weights) is not dict:
        return None
    paths, present, arrays, left = [], [], [], []
    for name, weight in weights.items():
        if type(weight) is not np.ndarray or type(name) is not str or not (skips or name in grads):
            return None
        grad = grads.get(name)
        if grad is None:
            left.append(name)
        elif type(grad) is np.ndarray:
            paths.append(name)
            present.append(grad)
            arrays.append(weight)
        else:
            return None
    if not grads.keys() <= weights.keys():
        return None
    return tuple(paths), present, arrays, tuple(left)


Reader = Callable[[Any], tuple[Any, ...]]


class _Node(NamedTuple):
    """Cached structure of a container of weights and the container of its gradients.

    Whether an item is a container depends only on its type, so a container with the same types and
    names as before has the same structure.
    """

    types: tuple[type, type]
    grads_length: int | None
    weights_length: int | None
    """Numbers of items; None if the type determines them."""
    read_grads: Reader
    read_weights: Reader
    grad_types: tuple[type, ...]
    weight_types: tuple[type, ...]
    parts: "tuple[tuple[int, int, _Node | None], ...] | None"
    """Positions of gradient and weight of the leaves with a gradient (node None), and of the
    containers with their nodes; None if all items are leaves with a gradient."""

    def read(self, grads: Any, weights: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """Return gradients and weights in order; None if the structure differs."""
        if (type(grads), type(weights)) != self.types:
            return None
        if self.grads_length is not None and len(grads) != self.grads_length:
            return None
        if self.weights_length is not None and len(weights) != self.weights_length:
            return None
        try:
            own_grads, own_weights = self.read_grads(grads), self.read_weights(weights)
        except (KeyError, AttributeError):
            return None
        if tuple(map(type, own_grads)) != self.grad_types:
            return None
        if tuple(map(type, own_weights)) != self.weight_types:
            return None
        if self.parts is None:
            return own_grads, own_weights
        all_grads: list[Any] = []
        all_weights: list[Any] = []
        for j, k, node in self.parts:
            if node is None:
                all_grads.append(own_grads[j])
                all_weights.append(own_weights[k])
                continue
            below = node.read(own_grads[j], own_weights[k])
            if below is None:
                return None
            all_grads += below[0]
            all_weights += below[1]
        return all_grads, all_weights


_Cached = tuple[_Node, tuple[str, ...], tuple[str, ...]]
"""Structure, paths of the leaves with a gradient, and paths of the others."""


class _Walk:
    """Collects the leaves of gradients and weights."""

    def __init__(self, skips: bool, spares: Callable[[str], bool]) -> None:
        self.skips, self.spares, self.spared = skips, spares, False
        self.leaves: list[tuple[str, Any, Any]] = []
        self.left: list[str] = []

    def node(self, path: str, grads: object, weights: object) -> _Node | None:
        """Collect the leaves below `path`; return the node of a container that can be cached."""
        below = items(path, weights)
        if grads is None:
            self.leave(path, weights)
            return None
        if below is None:
            self.leaf(path, grads, weights)
            return None
        check_items(path, weights, below)
        beside = items(path, grads)
        if beside is None:
            cure = ": make a list of it" if isinstance(grads, (Iterator, MappingView)) else ""
            raise TypeError(
                f"gradients{_at(path)} must be nested like the weights, which have a "
                f"{type(weights).__name__} of {len(below)} there, got {type(grads).__name__}{cure}"
            )
        self.check_names(path, below, beside)
        parts: list[tuple[int, int, _Node | None]] = []
        again, places = True, {name: j for j, name in enumerate(n for n in below if n in beside)}
        for k, (name, (_, weight)) in enumerate(below.items()):
            if name not in beside:
                self.leave(_join(path, name), weight)
                continue
            grad, before = beside[name][1], len(self.leaves)
            node = self.node(_join(path, name), grad, weight)
            again &= grad is None or node is not None or items(path, weight) is None
            if node is not None or len(self.leaves) > before:
                parts.append((places[name], k, node))
        read_grads = _reader(grads, [beside[name][0] for name in places])
        read_weights = _reader(weights, [key for key, _ in below.values()])
        if not again or read_grads is None or read_weights is None:
            return None
        flat = len(parts) == len(below) and all(node is None for _, _, node in parts)
        return _Node(
            (type(grads), type(weights)),
            len(beside) if isinstance(grads, (dict, list, tuple)) else None,
            len(below) if isinstance(weights, (dict, list, tuple)) else None,
            read_grads,
            read_weights,
            tuple(type(beside[name][1]) for name in places),
            tuple(type(weight) for _, weight in below.values()),
            None if flat else tuple(parts),
        )

    def leave(self, path: str, weights: object) -> None:
        """Collect the paths of weights without a gradient."""
        self.left += [at for at, leaf in named(path, weights) if _is_array(leaf)]

    def leaf(self, path: str, grad: object, weight: object) -> None:
        """Collect a gradient and its weight, unless neither of them is an array."""
        cure = ""
        if isinstance(weight, (Iterator, MappingView)):
            cure = "make a list or dict of it"
        elif not is_foreign(weight) and (inside := array_inside(weight)):
            cure = f"store {inside}, a NumPy array"
        elif _has_arrays(weight) or (isinstance(grad, Mapping) and not _is_array(weight)):
            cure = "pass a dict of its arrays"
        elif isinstance(weight, Set) and any(map(_is_number, weight)):
            raise _fixed(path, "a set of numbers")
        elif not path and not _is_array(weight) and not _is_array(grad):
            cure = "pass arrays"
        if cure:
            raise TypeError(
                f"weights{_at(path)} must be arrays, or dicts, lists, tuples or dataclasses of "
                f"them, got {type(weight).__name__}: {cure}"
            )
        if _is_number(weight):
            raise _fixed(path, type(weight).__name__)
        if _is_array(weight) or _is_array(grad) or items(path, grad) is not None:
            if weight is None:
                raise ValueError(f"gradient {path!r} has no weight, which is None")
            self.leaves.append((path, grad, weight))

    def check_names(self, path: str, below: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
        """Raise if a gradient is missing or has no weight."""
        for name, (_, weight) in below.items():
            if name in beside or self.skips:
                continue
            arrays = [at for at, leaf in named(_join(path, name), weight) if _is_array(leaf)]
            self.spared = self.spared or bool(arrays)
            if not all(map(self.spares, arrays)):
                surplus = sorted(_join(path, other) for other in beside.keys() - below)
                also = f", and gradient {surplus[0]!r} no weight" if surplus else ""
                raise ValueError(
                    f"weight {_join(path, name)!r} has no gradient{also}; pass None as gradient, "
                    'or missing="skip" to step(), to skip it'
                )
        for name in beside:
            if name not in below:
                raise ValueError(f"gradient {_join(path, name)!r} has no weight")


def check_items(path: str, weights: object, below: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise if items of a container of weights cannot be updated in place."""
    if isinstance(weights, (list, tuple)):
        if below and all(_is_number(weight) for _, weight in below.values()):
            raise _fixed(path, f"a {type(weights).__name__} of numbers")
    elif type(weights) is not dict and isinstance(weights, Mapping):
        for name, (key, weight) in below.items():
            again = weights[key] if isinstance(weight, np.ndarray) else weight
            if again is not weight and not np.may_share_memory(again, weight):
                raise TypeError(
                    f"index {_join(path, name)!r}: {type(weights).__name__} returns another copy "
                    "of the weight each time, so that its update would be lost: keep dict(x)"
                )


def _is_number(value: object) -> bool:
    return isinstance(value, (Number, np.generic)) and not isinstance(value, bool)


def _fixed(path: str, got: str) -> TypeError:
    """Return the error for weights that are numbers."""
    what = f"index {path!r}" if path else "the array"
    return TypeError(
        f"{what}: weight must be a NumPy array, got {got}, which cannot change in place: "
        "store np.array(x), or pass None as gradient if it is a setting"
    )


ARRAYS_ALONE, COPY = {np.ndarray}, np.ndarray.__copy__  # copy("K") takes twice as long

SCALARS = (float, complex, np.inexact)

ARRAYS = ("__array__", "__array_interface__", "__cuda_array_interface__", "__dlpack__")
"""Attributes of arrays, any of which is enough."""


def _is_array(value: Any) -> bool:
    """Whether a leaf is an array, a number, or anything else that may be a weight or gradient."""
    if isinstance(value, (np.ndarray, np.generic, RowSparse)) or hasattr(value, "tocsr"):
        return True
    if isinstance(value, (str, bytes, bool, type)) or value is None:
        return False
    known = isinstance(value, Number) or any(hasattr(value, name) for name in ARRAYS)
    return known or is_buffer(value)


def _has_arrays(value: object) -> bool:
    """Whether an object that is no array has attributes that are arrays."""
    if _is_array(value) or isinstance(value, type):
        return False
    slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    values = [*getattr(value, "__dict__", {}).values()]
    values += [getattr(value, name, None) for name in names if not name.startswith("__")]
    return any(isinstance(value, np.ndarray) for value in values)


def _at(path: str) -> str:
    return f" at {path!r}" if path else ""


def items(path: str, value: object) -> dict[str, tuple[Any, Any]] | None:
    """Return the keys and values of a container's items, by name; None for a leaf."""
    pairs: Iterator[tuple[str, tuple[Any, Any]]]
    if isinstance(value, Mapping):
        pairs = ((_name(path, key), (key, value[key])) for key in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = zip(value._fields, enumerate(value), strict=True)
    elif isinstance(value, (list, tuple)):
        pairs = ((str(k), (k, item)) for k, item in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        pairs = ((name, (name, getattr(value, name))) for name in names)
    else:
        return None
    items: dict[str, tuple[Any, Any]] = {}
    for name, item in pairs:
        if name in items:
            raise ValueError(f"two keys have the path {_join(path, name)!r}")
        items[name] = item
    return items


def named(path: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield the paths and leaves of a structure, in order."""
    below = items(path, value)
    if below is None:
        yield path, value
    for name, (_, item) in (below or {}).items():
        yield from named(_join(path, name), item)


def by_index(weights: object) -> dict[Any, Any]:
    """Return the arrays of nested weights by path; those directly in a mapping keep their key."""
    if not isinstance(weights, Mapping):
        return {path: leaf for path, leaf in named("", weights) if _is_array(leaf)}
    return {
        f"{key}.{path}" if path else key: leaf
        for key, item in weights.items()
        for path, leaf in named("", item)
        if _is_array(leaf)
    }


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a structure of new containers, of the same types, with changed leaves, in order."""
    kind = type(value)
    if kind is np.ndarray:
        return change(value)
    if kind is dict:
        return {
            key: change(item) if type(item) is np.ndarray else mapped(change, item)
            for key, item in value.items()
        }
    if kind is list:
        return [mapped(change, item) for item in value]
    below = items("", value)
    if below is None:
        return change(value)
    return rebuilt(value, {key: mapped(change, item) for key, item in below.values()})


def copied(leaf: object) -> Any:
    """Return a NumPy copy of an array in its memory order; other leaves are returned."""
    if type(leaf) is np.ndarray:
        return COPY(leaf)
    if is_cuda(leaf):
        raise TypeError(f"updated() copies arrays on the host, got {type(leaf).__name__}")
    if isinstance(leaf, np.ndarray) or is_foreign(leaf):
        if is_subclass(leaf) and not isinstance(leaf, np.memmap):
            return leaf.copy()  # with what it has beside its numbers
        return np.array(as_gradient(leaf))
    return np.array(leaf) if isinstance(leaf, SCALARS) else leaf


def copies(value: Any) -> Any:
    """Return copies of the arrays of a structure, in new containers of the same types.

    Scalars, to which arrays without dimensions decay in arithmetic, become arrays, see
    :func:`as_given`.
    """
    kind = type(value)
    if kind is dict and {*map(type, value.values())} == ARRAYS_ALONE:
        return dict(zip(value, map(COPY, value.values()), strict=True))
    if kind is dict:
        return {key: copies(item) for key, item in value.items()}
    return mapped(copied, value)


def as_given(value: object, before: Any) -> Any:
    """Return :func:`copies` of a structure, in which what was a scalar before is one again."""
    kind = type(before)
    if kind is np.ndarray or (kind is dict and {*map(type, before.values())} == ARRAYS_ALONE):
        return value
    if isinstance(before, SCALARS):
        return kind(value)
    below, beside = items("", value), items("", before)
    leaves = [leaf for _, item in (beside or {}).values() for _, leaf in named("", item)]
    if not below or beside is None or not any(isinstance(leaf, SCALARS) for leaf in leaves):
        return value
    again = zip(below.values(), beside.values(), strict=True)
    return rebuilt(value, {key: as_given(item, old) for (key, item), (_, old) in again})


def rebuilt(container: Any, values: dict[Any, Any]) -> Any:
    """Return a container of the same type with other items; a read-only mapping becomes a dict."""
    if isinstance(container, tuple):
        kind = type(container)
        return kind._make(values.values()) if hasattr(kind, "_make") else kind(values.values())
    if isinstance(container, Mapping) and not hasattr(container, "__setitem__"):
        return values
    result = copy.copy(container)
    for key, value in values.items():
        if is_dataclass(result):
            object.__setattr__(result, key, value)
        else:
            result[key] = value
    return result


def _name(path: str, key: object) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, Integral) and not isinstance(key, bool):
        return str(int(key))
    cure = f": join it, {'.'.join(map(str, key))!r}" if isinstance(key, tuple) else ""
    raise TypeError(f"keys{_at(path)} must be strings or integers, got {key!r}{cure}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _reader(container: object, keys: Sequence[Any]) -> Reader | None:
    """Return a function that reads the items of a container of this type as a tuple.

    None for mappings other than dict, since reading them may have side effects.
    """
    in_order = isinstance(container, (list, tuple))
    if in_order and list(keys) == list(range(len(keys))):
        return tuple
    if isinstance(container, Mapping) and type(container) is not dict:
        return None
    if not keys:
        return lambda value: ()
    getter: Any = itemgetter if in_order or type(container) is dict else attrgetter
    get = getter(*keys)
    return get if len(keys) > 1 else lambda value: (get(value),)
