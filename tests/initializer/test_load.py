import logging

import numpy as np
import pytest
import safetensors.numpy

from fastopt import initializer
from fastopt.initializer import Load, Mixed
from helpers.initializers import named
from helpers.refusals import check_refused


def test_the_first_pattern_that_matches_from_the_start_decides():
    init = Mixed(["bias", "fc.*", ".*"], [initializer.Zero(), initializer.Constant(3), "ones"])
    assert set(named(init, "fc_weight").ravel()) == {3}
    assert set(named(init, "bias_weight").ravel()) == {0}
    assert set(named(init, "other_bias_weight").ravel()) == {1}
    assert not named(init, "fc_bias").any()  # it goes by the name


ARRAYS = {
    "arg:fc_weight": np.arange(6, dtype=np.float32).reshape(3, 2),
    "aux:bn_moving_mean": np.ones(2, np.float16),
    "arg:arg:x": np.full(2, 4, np.int64),
    "steps": np.array(5, np.int32),
}


@pytest.fixture(params=["dict", "npz", "safetensors"])
def source(request, tmp_path):
    path = tmp_path / f"arrays.{request.param}"
    if request.param == "npz":
        np.savez(path, **ARRAYS)
    elif request.param == "safetensors":
        safetensors.numpy.save_file(ARRAYS, path)
    return ARRAYS if request.param == "dict" else str(path) if request.param == "npz" else path


def test_arrays_are_loaded_by_name_without_prefix(source):
    init = Load(source)
    assert named(init, "fc_weight").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert named(init, "bn_moving_mean", (2,), np.float32).tolist() == [1, 1]
    assert named(init, "arg:x", (2,), own="ones").tolist() == [4, 4]
    assert named(init, "steps", (), np.int32) == 5


def test_other_arrays_get_the_default():
    for default in (initializer.Constant(3), '["constant", {"value": 3}]'):
        init = Load(ARRAYS, default)
        assert set(named(init, "other_weight").ravel()) == {3}
        assert not named(init, "other_bias").any()
        assert named(init, "foo", (2,), own="ones").tolist() == [1, 1]


def test_bfloat16_files_load_into_every_float(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numbers = np.array([1, -2.5, 3e38, np.inf], ml_dtypes.bfloat16)
    safetensors.numpy.save_file({"x": numbers}, tmp_path / "a.safetensors")
    for source in (tmp_path / "a.safetensors", {"x": numbers}):
        for dtype in [np.float32, np.float64, ml_dtypes.bfloat16]:
            assert np.array_equal(named(Load(source), "x", 4, dtype), numbers.astype(dtype))
    assert np.array_equal(named(Load({"x": numbers[:2]}), "x", 2, np.float16), [1, -2.5])


def test_loading_is_logged(caplog):
    caplog.set_level(logging.INFO, "fastopt.initializer")
    named(Load(ARRAYS), "fc_weight")
    for name in ("fc_weight", "other_weight"):
        named(Load(ARRAYS, initializer.One(), verbose=True), name)
    ends = ["fc_weight by loading", "other_weight by default"]
    assert caplog.messages == [f"Initialized {end}" for end in ends]


WRONG = {
    "Mixed(['.*'], [])": "ValueError: got 1 patterns and 0 initializers",
    "Mixed('.*', ['zeros'])": r"TypeError: patterns must be a list, got '\.\*'",
    "Mixed(['.*'], 'ones')": "TypeError: initializers must be a list, got 'ones'",
    "Mixed(['a', '('], ['ones'] * 2)": r"ValueError: patterns\[1\] must be a regular",
    "Mixed(['a'], [initializer.Zero])":
        r"TypeError: initializers\[0\] must be an initializer, its text or name, or a function",
    "named(Mixed(['a', 'bias'], ['ones'] * 2), 'fc_bias')":
        r"ValueError: ^fc_bias does not match, from its first character on, any of .* 'a', 'b",
    "Load(3)": "TypeError: param must be a mapping or the path of a file, got 3",
    "Load('a.pdparams')": "ValueError: param must be a .safetensors, .npz or .par",
    "Load({'x': 'a'})": r"TypeError: param\['x'\] must hold real numbers, got dtyp",
    "Load({'x': 1, 'arg:x': 2})": "ValueError: param has 'x' twice, with and witho",
    "Load({}, 3)": "TypeError: default_init must be an initializer, its text or",
    "Load({})(InitDesc('x'), arr)":
        "ValueError: x is not among the loaded arrays, and default_init is None",
    "Load({'x': np.ones((2, 3))})(InitDesc('x'), arr)":
        r"ValueError: x: the loaded array has shape \(2, 3\), expected \(3, 2\)",
    "Load({'x': np.ones((3, 2))})(InitDesc('x'), arr.view(np.int64))":
        r"TypeError: x: the loaded array \(float64\) does not fit into int64",
    "Load({'x': np.ones((3, 2))})(InitDesc('x'), arr.tolist())":
        "TypeError: x: arr must be a NumPy array, got list",
}  # fmt: skip


@pytest.mark.parametrize("code", WRONG)
def test_wrong_arguments_are_named_and_change_nothing(code):
    arr = np.full((3, 2), -9.0)
    check_refused(code, WRONG[code], vars(initializer) | globals() | {"arr": arr})
    assert (arr == -9).all()


@pytest.mark.parametrize("kind", ["npz", "safetensors", "params"])
def test_a_broken_file_is_named(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(ValueError, match=rf"param must be an intact file, got .*a\.{kind}"):
        Load(path)
