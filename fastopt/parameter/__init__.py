"""Parameters of models, with their gradients, and dicts of them.

A :class:`Parameter` is built up in layers, each a module: its attributes, its arrays, what gives
them other numbers, and at last its gradient and its place with a trainer.
"""

from fastopt.parameter.collection import ParameterDict as ParameterDict
from fastopt.parameter.constant import Constant as Constant
from fastopt.parameter.parameter import Parameter as Parameter
from fastopt.parameter.stored import DeferredInitializationError as DeferredInitializationError

__all__ = ["Constant", "DeferredInitializationError", "Parameter", "ParameterDict"]
