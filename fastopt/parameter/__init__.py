"""Model parameters with their gradients, and dicts of parameters."""

from fastopt.parameter.collection import ParameterDict as ParameterDict
from fastopt.parameter.parameter import Constant as Constant
from fastopt.parameter.parameter import DeferredInitializationError as DeferredInitializationError
from fastopt.parameter.parameter import Parameter as Parameter

__all__ = ["Constant", "DeferredInitializationError", "Parameter", "ParameterDict"]
