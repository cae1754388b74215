"""Optimizers, their base class and registry, and the updater."""

from fastopt.optimizer.adam import Adam as Adam
from fastopt.optimizer.base import Optimizer as Optimizer
from fastopt.optimizer.base import create as create
from fastopt.optimizer.base import register as register
from fastopt.optimizer.sgd import SGD as SGD
from fastopt.optimizer.updater import Updater as Updater
from fastopt.optimizer.updater import get_updater as get_updater

create_optimizer = Optimizer.create_optimizer
opt_registry = Optimizer.opt_registry
