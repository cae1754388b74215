"""Checks that an updater can average the weights of an optimizer."""

from fastopt.averages import Average
from fastopt.optimizer.optimizer import Optimizer


def check_averaged(optimizer: Optimizer, average: Average, context: str = "") -> None:
    """Raise TypeError unless an optimizer's weights can be averaged during its updates.

    Parameters
    ----------
    optimizer : Optimizer
        The optimizer.
    average : Average
        The averaging method.
    context : str
        Prefix of the error message.
    """
    name = type(optimizer).__name__
    if not optimizer.native:
        raise TypeError(
            f"{context}average is computed in the pass of a rule, and {name} overrides update(): "
            "average its weights in your own code"
        )
    if optimizer.accumulates:
        raise TypeError(
            f"{context}{name} counts calls that update nothing, so its steps cannot be averaged; "
            "use Updater(optimizer, accumulate=n) with another optimizer"
        )
    if not average.constant and type(optimizer)._update_count is not Optimizer._update_count:
        raise TypeError(
            f"{context}{average} depends on the number of updates, and {name} counts them in its "
            "own way; EMA(decay) does not"
        )


def check_averaged_together(main: Optimizer, other: Optimizer, label: str) -> None:
    """Raise TypeError if only one of two optimizers has averages of weights in its own state.

    Parameters
    ----------
    main : Optimizer
        The optimizer of an updater with an average.
    other : Optimizer
        The optimizer of one of its groups.
    label : str
        Label of the group.
    """
    if main.evaluates != other.evaluates:
        own, rest = (main, other) if main.evaluates else (other, main)
        raise TypeError(
            f"{label}: average cannot be combined with groups of {type(own).__name__} and "
            f"{type(rest).__name__}, as the former averages in its own state: use two updaters"
        )
