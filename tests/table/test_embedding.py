"""An EmbeddingTable against a dictionary of rows and a plain Updater."""

import numpy as np
import pytest

import fastopt
from helpers.cases import kept
from helpers.embedding_machine import FORMS, Tables, check_machine


@pytest.mark.parametrize("form", kept(FORMS, "adam", "8 bits", "min_count"))
def test_a_table_is_a_dictionary_of_rows_and_an_updater(form):
    check_machine(Tables, form, max_examples=12, stateful_step_count=15, derandomize=True)


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
