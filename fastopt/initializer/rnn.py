"""Initializers for recurrent layers."""

import math
import warnings
from itertools import product

import numpy as np

from fastopt.arguments import choice, count, number
from fastopt.initializer.base import Array, InitDesc, Initializer, create, register
from fastopt.initializer.draws import Seed

GATES = {
    "rnn_relu": ("",),
    "rnn_tanh": ("",),
    "lstm": ("_i", "_f", "_c", "_o"),
    "gru": ("_r", "_z", "_o"),
}
"""Gates of each kind of layer, in packing order."""


@register
class LSTMBias(Initializer):
    """Fill the bias of an LSTM with zeros, except the forget gate's with `forget_bias`.

    The gates are in the order input, forget, cell, output; each has a quarter of the length,
    rounded down. Jozefowicz et al., "An Empirical Exploration of Recurrent Network Architectures"
    (2015), recommend 1. Set it as the attribute ``__init__`` of a bias: called directly with the
    name of a bias it fills zeros, like every initializer, and warns.

    Parameters
    ----------
    forget_bias : float, default 1
    rng
        See :class:`Initializer`, also for errors.

    Raises
    ------
    ValueError
        The array has no dimensions.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> bias = np.empty(8)
    >>> desc = initializer.InitDesc("lstm_bias", {"__init__": initializer.LSTMBias()})
    >>> initializer.Xavier()(desc, bias)
    >>> bias
    array([0., 0., 1., 1., 0., 0., 0., 0.])
    """

    def __init__(self, forget_bias: float = 1.0, *, rng: Seed = None) -> None:
        self.forget_bias = number("forget_bias", forget_bias)
        super().__init__(rng=rng, forget_bias=self.forget_bias)

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        if not arr.ndim:
            raise ValueError(f"{desc}: LSTMBias needs one dimension or more, got shape ()")
        hidden = len(arr) // 4
        arr[...] = 0
        arr[hidden : 2 * hidden] = self.forget_bias

    def _init_bias(self, desc: InitDesc, arr: Array) -> None:
        warnings.warn(
            f"{desc} gets zeros because of its name; for a forget bias give it LSTMBias as "
            "attribute '__init__'",
            stacklevel=3,
        )
        super()._init_bias(desc, arr)


@register
class FusedRNN(Initializer):
    """Fill the packed weights and biases of recurrent layers, part by part; see :meth:`layout`.

    Each part is initialized under its own name, so biases become 0, except the biases of an
    LSTM's forget gates, which become `forget_bias`.

    Parameters
    ----------
    init : Initializer, str or None
        Initializer of the parts, its text or its name. None: the global initializer, which
        requires that this one is the attribute ``__init__`` of a parameter.
    num_hidden : int
        Units of a layer in one direction.
    num_layers : int
    mode : {'rnn_relu', 'rnn_tanh', 'lstm', 'gru'}
    bidirectional : bool, default False
    forget_bias : float, default 1
    rng
        See :class:`Initializer`, also for errors. An initializer given as text draws from it.

    Raises
    ------
    ValueError
        The array is not one-dimensional, its length matches no number of inputs, or `init` is
        None and there is no global initializer.

    Examples
    --------
    >>> import numpy as np
    >>> from fastopt import initializer
    >>> weight = np.empty(6)
    >>> init = initializer.FusedRNN("ones", num_hidden=1, num_layers=1, mode="rnn_tanh")
    >>> init(initializer.InitDesc("rnn_weight"), weight)
    >>> weight
    array([1., 1., 1., 1., 0., 0.])
    """

    def __init__(
        self,
        init: Initializer | str | None,
        num_hidden: int,
        num_layers: int,
        mode: str,
        bidirectional: bool = False,
        forget_bias: float = 1.0,
        *,
        rng: Seed = None,
    ) -> None:
        if not isinstance(init, Initializer | str | None):
            raise TypeError(f"init must be an Initializer, its text or name, or None, got {init!r}")
        if init is not None:
            create(init)
        self.init = init
        self.num_hidden = count("num_hidden", num_hidden)
        self.num_layers = count("num_layers", num_layers)
        self.mode = choice("mode", mode, *GATES)
        self.bidirectional = bool(bidirectional)
        self.forget_bias = number("forget_bias", forget_bias)
        super().__init__(
            rng=rng,
            init=init.dumps() if isinstance(init, Initializer) else init,
            num_hidden=self.num_hidden,
            num_layers=self.num_layers,
            mode=mode,
            bidirectional=self.bidirectional,
            forget_bias=self.forget_bias,
        )

    def layout(self, size: int) -> list[tuple[str, tuple[int, ...], int]]:
        """Return name, shape and offset of each part of a packed vector.

        All weights come before all biases. Both are ordered by layer, direction (``l`` and
        ``r``), source (``i2h`` from the inputs, ``h2h`` from the hidden state) and gate: ``_i``,
        ``_f``, ``_c``, ``_o`` of an LSTM, ``_r``, ``_z``, ``_o`` of a GRU.

        Parameters
        ----------
        size : int
            Length of the vector.

        Raises
        ------
        ValueError
            The length matches no number of inputs.

        Examples
        --------
        >>> from fastopt import initializer
        >>> init = initializer.FusedRNN("ones", num_hidden=2, num_layers=1, mode="rnn_tanh")
        >>> for part in init.layout(14):
        ...     print(part)
        ('l0_i2h_weight', (2, 3), 0)
        ('l0_h2h_weight', (2, 2), 6)
        ('l0_i2h_bias', (2,), 10)
        ('l0_h2h_bias', (2,), 12)
        """
        hidden, directions = self.num_hidden, "lr" if self.bidirectional else "l"
        widths = [self._inputs(size), *[len(directions) * hidden] * (self.num_layers - 1)]
        parts: list[tuple[str, tuple[int, ...], int]] = []
        start = 0
        for kind, layer, direction, source, gate in product(
            ("weight", "bias"), range(self.num_layers), directions, ("i2h", "h2h"), GATES[self.mode]
        ):
            width = widths[layer] if source == "i2h" else hidden
            shape = (hidden, width) if kind == "weight" else (hidden,)
            parts.append((f"{direction}{layer}_{source}{gate}_{kind}", shape, start))
            start += math.prod(shape)
        return parts

    def _inputs(self, size: int) -> int:
        """Return the number of inputs of the first layer, from the length of the vector."""
        hidden, directions = self.num_hidden, 1 + self.bidirectional
        rows = directions * hidden * len(GATES[self.mode])
        upper = (self.num_layers - 1) * (directions * hidden + hidden + 2)
        inputs, rest = divmod(size, rows)
        inputs -= upper + hidden + 2
        if rest or inputs < 1:
            raise ValueError(
                f"size must be {rows} * ({upper + hidden + 2} + inputs) for {self!r}, got {size}"
            )
        return inputs

    def _init_weight(self, desc: InitDesc, arr: Array) -> None:
        inner = desc.global_init if self.init is None else self._created(self.init)
        if inner is None or inner is self:
            raise ValueError(f"{desc}: FusedRNN(init=None) needs a global initializer")
        if arr.ndim != 1:
            raise ValueError(f"{desc}: FusedRNN needs a packed vector, got shape {arr.shape}")
        try:
            layout = self.layout(arr.size)
        except ValueError as error:
            raise ValueError(f"{desc}: {error}") from None
        packed = np.empty_like(arr)  # so that an error leaves `arr` unchanged
        for name, shape, start in layout:
            part = packed[start : start + math.prod(shape)].reshape(shape)
            if self.mode == "lstm" and name.endswith("_f_bias"):
                part[...] = self.forget_bias
            else:
                inner(InitDesc(name, global_init=desc.global_init), part)
        arr[...] = packed
