"""The error for parameters whose shape is not known yet."""


class DeferredInitializationError(RuntimeError):
    """Raised when a parameter is read while its initialization waits for its shape.

    Examples
    --------
    >>> from fastopt.parameter import DeferredInitializationError, Parameter
    >>> weight = Parameter("weight", shape=(3, 0), allow_deferred_init=True)
    >>> weight.initialize("zeros")
    >>> try:
    ...     weight.data()
    ... except DeferredInitializationError:
    ...     weight.shape = (3, 2)
    >>> weight.data().shape
    (3, 2)
    """
