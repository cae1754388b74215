"""An EmbeddingTable against a dictionary of rows and a plain Updater."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import fastopt
from fastopt import optimizer
from helpers.embedding_machine import Tables


def masters(**kwargs):
    return optimizer.SGD(learning_rate=0.1, momentum=0.5, multi_precision=True, **kwargs)


FORMS = {
    "adam": {},
    "8 bits": {"make": lambda: optimizer.Adam(lr=0.1, state_dtype="int8", state_min_size=1)},
    "min_count": {"min_count": 3},
    "half_life": {"half_life": 1.5},
    "masters": {"make": masters, "dtype": "float16"},
    "split": {"make": lambda: masters(master="split"), "dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
    "catch_up": {
        "make": lambda: optimizer.AdamW(learning_rate=0.1, wd=0.5, sparse_decay="catch_up")
    },
    "dense": {"make": lambda: optimizer.SGD(learning_rate=0.1, wd=0.5, sparse_decay="dense")},
    "rows": {"make": lambda: optimizer.GroupAdaGrad(learning_rate=0.1)},
    "previous": {"make": lambda: optimizer.DCASGD(momentum=0.5, wd=0.1, lazy_update=True)},
    "norms": {"make": lambda: optimizer.LAMB(wd=0.1, lazy_update=True)},
    "carried": {"make": lambda: optimizer.Nadam(wd=0.1, lazy_update=True)},
    "steps": {"make": lambda: optimizer.Rprop(lazy_update=True)},
    "schedule": {
        "make": lambda: optimizer.Adam(
            lr=fastopt.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.5)
        )
    },
    "free": {"make": lambda: optimizer.ScheduleFreeAdamW(learning_rate=0.1, lazy_update=True)},
}
DEFAULT = ("adam", "8 bits", "min_count")


@pytest.mark.parametrize(
    "form",
    [
        name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow("exhaustive"))
        for name in FORMS
    ],
)
def test_a_table_is_a_dictionary_of_rows_and_an_updater(form):
    fields = {
        name: staticmethod(value) if callable(value) else value
        for name, value in FORMS[form].items()
    }
    if form == "split":
        pytest.importorskip("ml_dtypes")
    machine = type(f"Tables_{form}", (Tables,), fields)
    few = settings(max_examples=12, stateful_step_count=15, deadline=None, derandomize=True)
    run_state_machine_as_test(machine, settings=few)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("given", ["float16", "bfloat16", "float64", ">f4", "longdouble"])
def test_gradients_of_any_real_dtype_are_converted(dtype, given):
    """As `Updater` does, as rows -= grads would."""
    if given == "bfloat16":
        given = pytest.importorskip("ml_dtypes").bfloat16
    ids, grads = np.array([3, 8, 3]), np.linspace(-1, 1, 6).reshape(3, 2).astype(given)
    adam = {"learning_rate": 0.1, "multi_precision": dtype == "float16"}
    kind = {"dtype": dtype, "init": "zeros"}
    tables = [fastopt.EmbeddingTable(2, fastopt.Adam(**adam), **kind) for _ in range(2)]
    tables[0].update(ids, grads)
    tables[1].update(ids, grads if grads.dtype == dtype else grads.astype(np.float32))
    assert tables[0].lookup([3, 8]).tobytes() == tables[1].lookup([3, 8]).tobytes()
    tables[0].update(ids, grads.astype(np.float64).tolist())  # a list of floats too
