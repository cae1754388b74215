"""Scopes: where the parameters of a model get their names, their defaults and their sharing."""

from fastopt.scope.base import Scope as Scope
from fastopt.scope.entered import current_scope as current_scope
from fastopt.scope.entered import get_parameter as get_parameter
from fastopt.scope.entered import name_scope as name_scope
