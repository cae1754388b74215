"""One table of settings of updaters and optimizers, for promises that hold whatever they are."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

import fastopt
from fastopt import EMA, SWA, Lookahead, RowSparse, optimizer
from fastopt._engine.validate import leaves
from fastopt.amp import LossScaler
from fastopt.lr_scheduler import FactorScheduler
from helpers.cases import CASES, CHOICES, LIGHT, OF_STEPS, Case, marks_of
from helpers.matrix_rules import FORMS
from helpers.tensor_lists import as_list, dtype_of
from helpers.users import RowAdam

SHAPES = {"embed.weight": (6, 4), "body.weight": (4, 6), "body.bias": (5,), "norm.scale": (3,)}
LARGE = {"a": (40, 200), "b": (5000,), "c": (64, 64)}
MATRICES = {"embed.weight": (6, 4), "body.weight": (4, 6), "head.weight": (5, 3)}


@dataclass(frozen=True)
class Setting:
    """An updater, and the weights and gradients that it is given."""

    make: Callable[[], optimizer.Optimizer]
    settings: Callable[[], dict] = dict
    """Arguments of the updater, made again for each, as scalers have a state."""
    dtype: str = "float32"
    rows: bool = False
    """Whether the embedding has row-sparse gradients."""
    is_whole: bool = False
    """Whether the step of a list depends on all its tensors."""
    is_elementwise: bool = True
    """Whether it is none of the optimizers of matrices, whose table has these promises."""
    period: int = 1
    """Calls of one update, or of a period of an average."""
    case: Case | None = None
    shapes: Mapping = field(default_factory=lambda: SHAPES)

    def is_float32(self):
        """Whether masters take the same steps: no weight in half precision is measured."""
        measured = self.case is not None and self.case.name == "lars"
        halves = self.dtype in ("float16", "bfloat16")
        return not (measured or halves or {"groups", "clip_adaptive"} & {*self.settings()})

    def updater(self):
        return fastopt.Updater(self.make(), **self.settings())

    def fresh(self):
        """An updater that takes a checkpoint: of this class with its defaults, and other groups."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ccSGD is deprecated")
            made = type(self.make())()
        settings = self.settings()
        if "groups" in settings:
            settings["groups"] = {"^x": {"wd": 3.0}}  # replaced by those of a checkpoint
        return fastopt.Updater(made, **settings)

    def sums(self):
        """Whether the optimizer adds up gradients itself."""
        return isinstance(self.make(), optimizer.LBSGD)

    def takes_rates(self, name):
        """Whether each call asks the updater's optimizer for a rate; parts of windows do not."""
        if "groups" in self.settings() and name.endswith(".weight"):
            return False
        has_none = self.case is not None and self.case.name == "test"
        return not has_none and not {"accumulate", "loss_scaler"} & {*self.settings()}

    def takes_once(self):
        """Whether an index is at most once in a list."""
        return self.is_whole or bool({"accumulate", "clip_adaptive"} & {*self.settings()})

    def weights(self):
        if self.dtype == "bfloat16":
            pytest.importorskip("ml_dtypes")
        rng, dtype = np.random.default_rng(1), dtype_of(self.dtype)
        return {name: rng.normal(size=shape).astype(dtype) for name, shape in self.shapes.items()}

    def gradients(self, weights, step):
        """Gradients of a step; with dynamic scales one of them is not finite."""
        rng = np.random.default_rng([2, step])
        grads = {n: rng.normal(size=w.shape).astype(w.dtype) for n, w in weights.items()}
        if self.rows and "embed.weight" in grads:
            whole = grads["embed.weight"]
            rows = rng.integers(0, len(whole), max(2, len(whole) // 2))
            rows[: len(rows) // 3] = 5  # a row that is repeated often
            grads["embed.weight"] = RowSparse(whole[rows], rows, whole.shape)
        if "loss_scaler" in self.settings() and step == 2:
            grads["body.bias"][0] = np.inf
        return grads

    def train(self, updater, weights, steps, way=as_list):
        for step in steps:
            grads = self.gradients(weights, step)
            way(updater, weights, grads.values(), weights.values())


adam = partial(optimizer.Adam, learning_rate=0.1, wd=0.1, seed=3)
adamw = partial(optimizer.AdamW, lr=0.1, wd=0.1)
row_adam = partial(RowAdam, learning_rate=0.1, lazy_update=True)


def groups():
    return {
        r"bias$|norm": {"wd_mult": 0.0},
        r"^embed": {"lr_mult": 0.1, "beta1": 0.5},
        r"^body.w": {"optimizer": optimizer.SGD(learning_rate=1.0, momentum=0.9)},
    }


MASTERS = {"multi_precision": True}
UPDATERS = {
    "accumulate": {"accumulate": 3},
    "EMA": {"average": EMA(0.9)},
    "EMA with warm-up": {"average": EMA(0.9, warmup=True)},
    "EMA with correction": {"average": EMA(0.9, bias_correction=True)},
    "SWA": {"average": SWA(start=1, every=2)},
    "Lookahead": {"average": Lookahead(k=2, alpha=0.3)},
    "clip_adaptive": {"clip_adaptive": 0.05},
    "clip_global_norm": {"clip_global_norm": 0.5},
    "loss_scaler": {"loss_scaler": True},
    "all": {"accumulate": 2, "average": EMA(0.9), "clip_adaptive": 0.05},
    "all with SWA": {"accumulate": 2, "average": SWA(start=1, every=2), "clip_adaptive": 0.05},
}
"""Settings of an updater."""

OPTIMIZERS = {
    "split masters": Setting(partial(adam, **MASTERS, master="split"), dtype="bfloat16"),
    "masters": Setting(partial(adam, **MASTERS), dtype="float16"),
    "stochastic rounding": Setting(
        partial(adam, rounding="stochastic", state_dtype="bfloat16"), dtype="float16"
    ),
    "bfloat16 state": Setting(partial(adam, state_dtype="bfloat16")),
    "8-bit state": Setting(partial(adam, state_dtype="int8"), shapes=LARGE),
    "schedule": Setting(lambda: optimizer.Adam(lr_scheduler=FactorScheduler(2))),
    "ascent from a count": Setting(partial(adam, maximize=True, begin_num_update=5)),
    "initial sums": Setting(
        partial(optimizer.RMSProp, 0.01, initial_accumulator_value=1.0, momentum=0.9), rows=True
    ),
    "noise": Setting(lambda: optimizer.SGLD(multi_precision=True, seed=3), dtype="float16"),
    "lazy rows": Setting(partial(adam, lazy_update=True), rows=True),
    "rows of masters": Setting(partial(adam, **MASTERS), dtype="bfloat16", rows=True),
    "deferred decay": Setting(partial(adamw, sparse_decay="catch_up"), rows=True),
    "sums of gradients": Setting(
        lambda: optimizer.LBSGD(momentum=0.9, batch_scale=2, multi_precision=True, lr=0.1),
        dtype="float16",
        period=2,
    ),
    "decay of all rows": Setting(partial(adamw, sparse_decay="dense"), rows=True),
    "state of rows and of elements": Setting(row_adam, rows=True, shapes=MATRICES),
    "sums of rows": Setting(lambda: optimizer.LBSGD(batch_scale=2, lr=0.1), rows=True, period=2),
}
"""Settings of an optimizer."""


def settings_of(name, in_groups=False):
    made = dict(UPDATERS[name] if name else {}, **({"groups": groups()} if in_groups else {}))
    return made | ({"loss_scaler": LossScaler(8.0)} if "loss_scaler" in made else {})


WHOLE = "clip_global_norm", "loss_scaler"


def updating(name, make, in_groups=False, **kwargs):
    settings = partial(settings_of, name, in_groups)
    return Setting(make, settings, is_whole=name in WHOLE, period=3, **kwargs)


ROWS = "accumulate", "EMA", "SWA", "Lookahead", "clip_adaptive", *WHOLE
TABLE = {
    **{
        name + (" in groups" if in_groups else ""): updating(name, adam, in_groups)
        for name in UPDATERS
        for in_groups in (False, True)
    },
    "groups": Setting(adam, lambda: {"groups": groups()}),
    **{
        name + " of rows": updating(name, partial(adam, lazy_update=name != "EMA"), rows=True)
        for name in ROWS
    },
    **OPTIMIZERS,
    **{
        f"{form}{', masters' if half else ''}": Setting(
            partial(make, lr=0.01, wd=0.1, fallback="adamw", **(MASTERS if half else {})),
            dtype="float16" if half else "float32",
            is_elementwise=False,
            shapes={**SHAPES, "head.weight": (4, 6), "kernel.weight": (2, 3, 2, 2)},
        )
        for form, make in FORMS.items()
        for half in (False, True)
    },
    "matrices in groups": Setting(
        partial(FORMS["muon"], lr=0.01, wd=0.1, fallback="adamw"),
        lambda: {
            "groups": {
                **groups(),
                r"^embed": {"optimizer": optimizer.Adam(learning_rate=0.2)},
                r"^body.w": {"lr_mult": 2.0, "clip_gradient": 0.3},
            }
        },
        is_elementwise=False,
    ),
    **{
        str(case): Setting(
            partial(case.make, wd=case.wd),
            dtype="float64",
            is_whole=case.name in OF_STEPS,
            case=case,
            shapes=MATRICES,
        )
        for case in CASES
    },
}


def every_setting(choose=lambda setting: True, sample=LIGHT):
    """Parameters: all settings, but of the forms in `CASES` by default only `sample`."""
    chosen = {name: setting for name, setting in TABLE.items() if choose(setting)}
    marks = {
        name: marks_of(setting.case) if setting.case and name not in sample else ()
        for name, setting in chosen.items()
    }
    values = [pytest.param(setting, marks=marks[name]) for name, setting in chosen.items()]
    return pytest.mark.parametrize("setting", values, ids=list(chosen))


def ends(choice):
    """All bits after some steps of each case, which do not depend on memory that is free."""
    found = {}
    for name in map(str, CHOICES[choice]):
        updater, weights = TABLE[name].updater(), TABLE[name].weights()
        TABLE[name].train(updater, weights, range(4))
        arrays = [*weights.values(), *leaves(list(updater.states.values()))]
        found[name] = [array.tobytes() for array in arrays]
    return found
