"""In-place optimizer updates for NumPy training loops, at memory speed."""

from fastopt import initializer as initializer
from fastopt import lr_scheduler as lr_scheduler
from fastopt import optimizer as optimizer
from fastopt.averages import EMA as EMA
from fastopt.averages import SWA as SWA
from fastopt.averages import Lookahead as Lookahead
from fastopt.device import cpu as cpu
from fastopt.device import cuda as cuda
from fastopt.kernels.rule import rule as rule
from fastopt.optimizer import Updater as Updater
from fastopt.optimizer import get_updater as get_updater
from fastopt.parameter import Parameter as Parameter
from fastopt.scope import name_scope as name_scope
from fastopt.sparse import RowSparse as RowSparse
from fastopt.trainer import Trainer as Trainer

__version__ = "0.1.0"
