"""Initializers that create a weight together with its copy in another precision."""

from fastopt.precision.external import ExternalInitializer as ExternalInitializer
from fastopt.precision.info import ParameterInfo as ParameterInfo
from fastopt.precision.initializers import Initializer as Initializer
from fastopt.precision.initializers import PseudoFP16Initializer as PseudoFP16Initializer
from fastopt.precision.initializers import (
    ReversePseudoFP16Initializer as ReversePseudoFP16Initializer,
)
from fastopt.precision.initializers import update_initializer as update_initializer
