"""Scopes, which give parameters of a model their names and defaults, and share them."""

from fastopt.scope.base import Scope as Scope
from fastopt.scope.entered import current_scope as current_scope
from fastopt.scope.entered import get_parameter as get_parameter
from fastopt.scope.entered import name_scope as name_scope
