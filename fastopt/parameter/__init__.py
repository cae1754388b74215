"""Model parameters with their gradients, and dicts of parameters.

A :class:`Parameter` is built in layers, one module each: attributes, arrays, writing of new
values, and finally the gradient and the link to a trainer.
"""

from fastopt.parameter.collection import ParameterDict as ParameterDict
from fastopt.parameter.constant import Constant as Constant
from fastopt.parameter.deferred import DeferredInitializationError as DeferredInitializationError
from fastopt.parameter.parameter import Parameter as Parameter

__all__ = ["Constant", "DeferredInitializationError", "Parameter", "ParameterDict"]
