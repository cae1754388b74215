"""What every updater promises, whatever its settings: one table of settings for all promises."""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numba
import numpy as np
import pytest

import fastopt
from fastopt import EMA, SWA, Lookahead, RowSparse, optimizer
from fastopt._kernels.threads import use_threads
from fastopt.amp import LossScaler
from fastopt.lr_scheduler import FactorScheduler
from helpers.cases import CASES, LIGHT, OF_STEPS, Case, marks_of
from helpers.matrix_rules import FORMS
from helpers.resuming import WAYS, resumed
from helpers.tensor_lists import as_list, dtype_of, everything, frozen, laid, one_by_one
from helpers.written_headers import read_in_python

SHAPES = {"embed.weight": (6, 4), "body.weight": (4, 6), "body.bias": (5,), "norm.scale": (3,)}
PARALLEL = {name: (7_000, *shape[1:]) for name, shape in SHAPES.items()}
LARGE = {"a": (40, 200), "b": (5000,), "c": (64, 64)}
MATRICES = {"embed.weight": (6, 4), "body.weight": (4, 6), 7: (5, 3)}


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
        return not {"groups", "clip_adaptive"} & {*self.settings()}

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

    def takes_rates(self, step):
        """Whether a call asks for learning rates: the last of a window that is not skipped."""
        settings = self.settings()
        is_last = (step + 1) % settings.get("accumulate", 1) == 0
        return is_last and not ("loss_scaler" in settings and step == 2)

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
            rows, whole = rng.permutation(6)[:2], grads["embed.weight"]
            grads["embed.weight"] = RowSparse(whole[rows], rows, whole.shape)
        if "loss_scaler" in self.settings() and step == 2:
            grads["body.bias"][0] = np.inf
        return grads

    def train(self, updater, weights, steps, way=as_list):
        for step in steps:
            grads = self.gradients(weights, step)
            way(updater, weights, grads.values(), weights.values())


def cast(grad, dtype):
    if isinstance(grad, RowSparse):
        return RowSparse(grad.values.astype(dtype), grad.indices, grad.shape)
    return grad.astype(dtype)


def adam(**kwargs):
    return optimizer.Adam(learning_rate=0.1, wd=0.1, seed=3, **kwargs)


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
    "stochastic rounding": Setting(partial(adam, rounding="stochastic"), dtype="float16"),
    "bfloat16 state": Setting(partial(adam, state_dtype="bfloat16")),
    "8-bit state": Setting(partial(adam, state_dtype="int8"), shapes=LARGE),
    "schedule": Setting(lambda: optimizer.Adam(lr_scheduler=FactorScheduler(2))),
    "maximize": Setting(partial(adam, maximize=True)),
    "stochastic rounding of bfloat16": Setting(
        partial(adam, rounding="stochastic", state_dtype="bfloat16"), dtype="bfloat16"
    ),
    "noise": Setting(lambda: optimizer.SGLD(multi_precision=True, seed=3), dtype="float16"),
    "lazy rows": Setting(partial(adam, lazy_update=True), rows=True),
    "rows of masters": Setting(partial(adam, **MASTERS), dtype="bfloat16", rows=True),
    "windows of rows": Setting(adam, lambda: {"accumulate": 3}, rows=True, period=3),
    "deferred decay": Setting(
        lambda: optimizer.AdamW(lr=0.1, wd=0.1, sparse_decay="catch_up"), rows=True
    ),
    "sums of gradients": Setting(
        lambda: optimizer.LBSGD(momentum=0.9, batch_scale=2, multi_precision=True, lr=0.1),
        dtype="float16",
        period=2,
    ),
    "decay of all rows": Setting(
        lambda: optimizer.AdamW(lr=0.1, wd=0.1, sparse_decay="dense"), rows=True
    ),
    "sums of rows": Setting(lambda: optimizer.LBSGD(batch_scale=2, lr=0.1), rows=True, period=2),
}
"""Settings of an optimizer."""


def settings_of(name, in_groups):
    made = dict(UPDATERS[name], **({"groups": groups()} if in_groups else {}))
    return made | ({"loss_scaler": LossScaler(8.0)} if "loss_scaler" in made else {})


WHOLE = "clip_global_norm", "loss_scaler"
ROWS = "EMA", "SWA", "Lookahead", "clip_adaptive", *WHOLE
TABLE = {
    **{
        name + (" in groups" if in_groups else ""): Setting(
            adam, partial(settings_of, name, in_groups), is_whole=name in WHOLE, period=3
        )
        for name in UPDATERS
        for in_groups in (False, True)
    },
    "groups": Setting(adam, lambda: {"groups": groups()}),
    **{
        name + " of rows": Setting(
            partial(adam, lazy_update=name != "EMA"),
            partial(settings_of, name, False),
            rows=True,
            is_whole=name in WHOLE,
            period=3,
        )
        for name in ROWS
    },
    **OPTIMIZERS,
    **{
        f"{form}{', masters' if half else ''}": Setting(
            partial(make, lr=0.01, wd=0.1, fallback="adamw", **(MASTERS if half else {})),
            dtype="float16" if half else "float32",
            is_elementwise=False,
        )
        for form, make in FORMS.items()
        for half in (False, True)
    },
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


def all_of(updater, weights):
    """All that a call may change, with averages."""
    return everything(updater, weights), frozen(dict(updater.averages))


@every_setting(lambda setting: not setting.is_whole and setting.is_elementwise)
def test_a_list_has_the_bits_of_single_calls(setting):
    """Also of a part of the list in another order, so that counts differ."""
    ends = []
    for way in (as_list, one_by_one):
        updater, weights = setting.updater(), setting.weights()
        part = dict(list(weights.items())[:0:-1])
        setting.train(updater, weights, range(2), way)
        setting.train(updater, part, range(2, 4), way)
        setting.train(updater, weights, range(4, 7), way)
        ends.append(all_of(updater, weights))
    assert ends[0] == ends[1]


@every_setting(sample=[str(case) for case in CASES if not case.recorded])
def test_a_resumed_run_has_the_same_bits(setting, tmp_path):
    """By every way of saving, in the middle of windows and periods too."""
    for calls in range(2, 2 + setting.period):
        updater, weights = setting.updater(), setting.weights()
        setting.train(updater, weights, range(calls))
        resumes = [
            (resumed(way, updater, setting.fresh(), tmp_path), copy.deepcopy(weights))
            for way in WAYS
            if way != "get_states" or updater.loss_scaler is None  # MXNet's bytes have no place
        ]
        resumes.append((copy.deepcopy(updater), copy.deepcopy(weights)))
        setting.train(updater, weights, range(calls, calls + 4))
        expected = all_of(updater, weights)
        for again, own in resumes:
            setting.train(again, own, range(calls, calls + 4))
            assert frozen((own, again.states, again.averages)) == frozen(
                (weights, updater.states, updater.averages)
            )
            assert all_of(again, own)[0][-1] == expected[0][-1]
            assert again.optimizer._index_update_count == updater.optimizer._index_update_count


def bad_shape(updater, grads, weights, last):
    grads[last] = np.ones((9, 9), np.float32)


def bad_dtype(updater, grads, weights, last):
    grads[last] = np.ones(grads[last].shape, "i4")


def bad_rate(updater, grads, weights, last):
    updater.optimizer.lr_mult[last] = float("nan")


def bad_schedule(updater, grads, weights, last):
    updater.optimizer.lr_scheduler = lambda count: 1 / 0


def overlap(updater, grads, weights, last):
    grads[last] = weights[last]


@every_setting()
def test_a_failed_call_changes_nothing(setting):
    """Neither the first call nor a later one; the next is that of an updater without failures."""
    updater, twin = setting.updater(), setting.updater()
    weights, others = setting.weights(), setting.weights()
    last, schedule = list(weights)[-1], updater.optimizer.lr_scheduler
    for step in range(5):
        for spoil in (bad_shape, bad_dtype, overlap, bad_rate, bad_schedule):
            if spoil in (bad_rate, bad_schedule) and not setting.takes_rates(step):
                continue
            if spoil is bad_rate and isinstance(updater.optimizer, optimizer.Test):
                continue  # it has none
            if spoil is overlap and "accumulate" in setting.settings():
                continue  # gradients are added to a sum
            grads = setting.gradients(weights, step)
            spoil(updater, grads, weights, last)
            before = all_of(updater, weights)
            for _ in range(2):
                with pytest.raises((TypeError, ValueError, ZeroDivisionError)):
                    as_list(updater, weights, grads.values(), weights.values())
                assert all_of(updater, weights) == before
            updater.optimizer.lr_mult.pop(last, None)
            updater.optimizer.lr_scheduler = schedule
        setting.train(updater, weights, [step])
        setting.train(twin, others, [step])
    assert all_of(updater, weights) == all_of(twin, others)


@every_setting(lambda setting: not setting.rows and setting.is_elementwise)
def test_arrays_in_any_layout_give_the_same_weights(setting):
    ends = []
    for layout in ("plain", "fortran", "strided"):
        updater = setting.updater()
        weights = {name: laid(weight, layout) for name, weight in setting.weights().items()}
        for step in range(3):
            grads = setting.gradients(weights, step).values()
            as_list(updater, weights, [laid(grad, layout) for grad in grads], weights.values())
        ends.append([weight.astype(np.float64) for weight in weights.values()])
    for end in ends[1:]:
        for weight, expected in zip(end, ends[0], strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.further
@every_setting()
def test_records_have_the_bits_of_updates_one_by_one(setting):
    """In lists, in parts of them and alone, so that both may update the same parameters."""
    ends = []
    for on_records in (True, False):
        updater, weights = setting.updater(), setting.weights()
        updater = updater if on_records else read_in_python(updater)
        part = dict(list(weights.items())[:0:-1])
        setting.train(updater, weights, range(3))
        setting.train(updater, part, range(3, 5), as_list if setting.is_whole else one_by_one)
        setting.train(updater, weights, range(5, 8))
        ends.append(all_of(updater, weights))
    assert ends[0] == ends[1]


@every_setting(lambda setting: setting.shapes is SHAPES and setting.is_elementwise)
def test_any_number_of_threads_gives_the_same_bits(setting):
    large = dataclasses.replace(setting, shapes=PARALLEL)
    ends = []
    for threads in {1, numba.get_num_threads()}:
        updater, weights = large.updater(), large.weights()
        with use_threads(threads):
            large.train(updater, weights, range(3))
        ends.append(all_of(updater, weights))
    assert all(end == ends[0] for end in ends)


@every_setting(lambda setting: setting.make is adam and setting.is_float32())
def test_masters_give_the_rounded_steps_of_float32(setting, half):
    """And have the averages of float32."""
    halves, floats = setting.updater(), setting.updater()
    halves.optimizer.multi_precision = True
    weights = {name: weight.astype(half) for name, weight in setting.weights().items()}
    exact = {name: weight.astype(np.float32) for name, weight in weights.items()}
    for step in range(6):
        grads = setting.gradients(weights, step)
        as_list(halves, weights, grads.values(), weights.values())
        wide = [cast(grad, np.float32) for grad in grads.values()]
        as_list(floats, exact, wide, exact.values())
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, exact[name].astype(half))
    assert frozen(dict(halves.averages)) == frozen(dict(floats.averages))
