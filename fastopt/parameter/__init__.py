"""Model parameters with their gradients, and dicts of parameters.

A :class:`Parameter` is built in layers, one module each: attributes, arrays, writing of new
values, and finally the gradient and the link to a trainer.
"""

from fastopt.parameter.collection import ParameterDict as ParameterDict
from fastopt.parameter.constant import Constant as Constant
from fastopt.parameter.parameter import Parameter as Parameter
from fastopt.parameter.stored import DeferredInitializationError as DeferredInitializationError

__all__ = ["Constant", "DeferredInitializationError", "Parameter", "ParameterDict"]
