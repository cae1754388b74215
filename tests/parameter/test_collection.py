"""Dicts of parameters: sharing, selection, initialization, files."""

import sys
import types

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import fastopt
from fastopt import checkpoint, initializer
from fastopt.device import cpu
from fastopt.parameter import Constant, ParameterDict, collection
from fastopt.trainer import Trainer
from helpers.memory import at_most
from helpers.refusals import check_refused, each

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def model(**kwargs):
    params = ParameterDict("net_")
    params.get("fc_weight", shape=(3, 2), **kwargs)
    params.get("fc_bias", shape=3, init="zeros", **kwargs)
    return params


def ready(**kwargs):
    params = model(**kwargs)
    params.initialize(initializer.Normal(rng=0))
    return params


def contents(params):
    return {name: p.data().tolist() for name, p in params.items()}


# Names and sharing


def test_a_dict_is_a_mapping_of_full_names_in_order():
    params = model()
    assert list(params) == [p.name for p in params.values()] == ["net_fc_weight", "net_fc_bias"]
    assert (len(params), params.prefix, "fc_bias" in params) == (2, "net_", False)
    assert repr(params).splitlines() == [
        "ParameterDict('net_'):",
        "  Parameter(name='net_fc_weight', shape=(3, 2), dtype=float32)",
        "  Parameter(name='net_fc_bias', shape=(3,), dtype=float32)",
    ]
    with pytest.raises(KeyError):
        params["fc_bias"]


def test_get_makes_a_parameter_once_and_shares_it():
    first = model()
    second = ParameterDict("net_", shared=first)
    third = ParameterDict("net_", shared=second)
    assert third.get("fc_weight") is first["net_fc_weight"] is first.get("fc_weight")
    assert list(second) == []
    own = second.get("other", shape=1)
    assert "net_other" not in first
    assert third.get("other") is own


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
def test_get_merges_shapes(data, shape):
    params = ParameterDict()
    known = [False] * len(shape)
    for _ in range(3):
        asked = data.draw(st.tuples(*(st.sampled_from([n, 0, -1, None]) for n in shape)))
        known = [k or a == n for k, a, n in zip(known, asked, shape, strict=True)]
        got = params.get("w", shape=asked)
        assert params.get("w", shape=None) is got
        assert got.shape == tuple(n if k else -1 for n, k in zip(shape, known, strict=True))
    params.get("w", shape=shape)
    for wrong in ((*shape, 1), tuple(n + 1 for n in shape)):
        with pytest.raises(ValueError, match="Parameter 'w': shape"):
            params.get("w", shape=wrong)
    assert params["w"].shape == shape


def test_what_agrees_with_a_parameter_is_accepted():
    params = ParameterDict()
    weight = params.get("w", init=initializer.Xavier(magnitude=2))
    same = initializer.Xavier(magnitude=2, rng=3)
    assert params.get("w", init=same, dtype=np.float32, grad_req=None, lr_mult=1) is weight
    plain = params.get("plain")
    assert params.get("plain", init="ones") is plain
    assert plain.init == "ones"


def test_constants_are_found_by_name_and_value():
    params = ParameterDict("a_")
    mean = params.get_constant("mean", [1, 2])
    assert (mean.name, mean.dtype) == ("a_mean", np.float32)
    shared = ParameterDict("a_", shared=params)
    assert shared.get_constant("mean") is mean is params.get_constant("mean", [1, 2])


def test_select_matches_the_beginning_of_full_names():
    params = model()
    assert dict(params.select(".*bias")) == {"net_fc_bias": params["net_fc_bias"]}
    assert list(params.select("fc")) == []
    assert list(params.select("net_fc_bias$|net_fc_w")) == list(params)


# All parameters


def test_initialize_uses_one_initializer_for_all_without_their_own():
    def values():
        params = ParameterDict()
        for name in "ab":
            params.get(name, shape=3)
        params.get("c", shape=3, init="uniform")
        params.initialize(initializer.Uniform(rng=1), device=[cpu(0), cpu(1)])
        return [p.data().tolist() for p in params.values()]

    assert values() == values()
    assert len({tuple(v) for v in values()}) == 3
    params = model()
    with pytest.warns(DeprecationWarning, match="ctx"):
        params.initialize("ones", ctx=cpu(1))
    assert params.list_device() == [cpu(1)]
    assert contents(params) == {"net_fc_weight": [[1, 1]] * 3, "net_fc_bias": [0, 0, 0]}


def test_initialize_accepts_a_function_and_shared_parameters_once():
    params, other, calls = ParameterDict(), ParameterDict(), []
    weight = other.get("w", shape=2)
    params.update(other)
    params.update({"alias": weight})
    assert params["w"] is params["alias"] is weight
    params.initialize(lambda name, array: calls.append(str(name)))
    assert calls == ["w"]
    with pytest.warns(UserWarning, match="'w' is already initialized"):
        params.initialize()


def test_verbose_initialization_is_logged(caplog):
    params = model()
    with caplog.at_level("INFO", "fastopt.initializer"):
        params.initialize("ones", verbose=True)
    assert ["net_fc_weight" in r.getMessage() for r in caplog.records] == [True, False]


def test_a_progress_bar_is_for_large_models_with_tqdm(monkeypatch):
    params, bars = model(), []
    fake = types.SimpleNamespace(tqdm=lambda items, *args, **kwargs: bars.append(items) or items)
    for large, module, shown in ((9, fake, 1), (10, fake, 0), (9, None, 0)):
        bars.clear()
        monkeypatch.setitem(sys.modules, "tqdm", module)
        monkeypatch.setattr(collection, "LARGE", large)
        params.initialize("ones", force_reinit=True)
        assert [len(items) for items in bars] == [2] * shown
        assert params["net_fc_weight"].data().all()


def test_gradients_devices_and_attributes_of_all():
    params = ready()
    for parameter in params.values():
        parameter.set_grad(np.ones(parameter.shape))
    params.zero_grad()
    assert not any(parameter.grad().any() for parameter in params.values())
    params.reset_device([cpu(0), cpu(3)])
    assert params.list_device() == [cpu(0), cpu(3)]
    params.setattr("grad_req", "null")
    params.setattr("dtype", "float16")
    kinds = {(p.grad_req, a.dtype.name) for p in params.values() for a in p.list_data()}
    assert kinds == {("null", "float16")}


# Files


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=3)), max_size=4
    ),
    st.booleans(),
)
def test_parameters_come_back_bit_for_bit(tmp_path_factory, kinds, wait):
    """Also into parameters that wait for a shape."""
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    params, other, places = ParameterDict(), ParameterDict(), [cpu(2), cpu(0)]
    for i, (dtype, shape) in enumerate(kinds):
        params.get(f"p{i}", shape=tuple(shape), dtype=dtype)
        other.get(f"p{i}", shape=(0,) * len(shape), dtype=dtype, allow_deferred_init=True)
    params.initialize(device=[cpu(0), cpu(1)])
    params.save(path)
    if wait:
        other.initialize(device=places)
    other.load(path, device=None if wait else places)
    for name, parameter in params.items():
        assert other[name].list_device() == places
        expected = parameter.data(cpu(1))
        for array in other[name].list_data():
            assert array.shape == expected.shape
            assert array.tobytes() == expected.tobytes()


def test_files_are_plain_safetensors_with_native_types(tmp_path):
    params = ready()
    params.get_constant("steps", np.array([5, 6]))
    params.get("half", shape=2, dtype="bfloat16", init="ones")
    params.select(".*(steps|half)").initialize()
    weight = params["net_fc_weight"]
    weight._data[0] = np.asfortranarray(weight.data())
    params.save(tmp_path / "file")
    with safetensors.safe_open(tmp_path / "file", "np") as file:
        kinds = [file.get_slice(f"net_{k}").get_dtype() for k in ("fc_bias", "steps", "half")]
        np.testing.assert_array_equal(file.get_tensor("net_fc_weight"), weight.data())
    assert kinds == ["F32", "I64", "BF16"]


def test_files_are_written_and_read_without_a_second_copy(tmp_path):
    params, other = (ParameterDict() for _ in range(2))
    for some in (params, other):
        some.get("w", shape=(2000, 1000)).initialize("ones")
    params["w"]._data[0] = np.asfortranarray(params["w"].data())
    size = 8_000_000
    with at_most(1.2 * size):  # their mean is a copy
        params.save(tmp_path / "file")
    with at_most(1.2 * size):
        other.load(tmp_path / "file")


def test_loading_writes_what_is_there_of_the_names_without_a_prefix(tmp_path):
    """Into the same arrays; what is missing or more must be allowed."""
    params, path = ready(), tmp_path / "file"
    params.save(path, strip_prefix="net_")
    assert set(safetensors.numpy.load_file(path)) == {"fc_weight", "fc_bias"}
    saved, arrays = contents(params), [p.data() for p in params.values()]
    for array in arrays:
        array[...] = 7
    params.select(".*weight").load(path, restore_prefix="net_", ignore_extra=True)
    assert contents(params) == {**saved, "net_fc_bias": [7] * 3}
    params.load(path, restore_prefix="net_")
    params.select(".*bias").save(path)
    params.load(path, allow_missing=True)
    assert contents(params) == saved
    assert [id(p.data()) for p in params.values()] == [*map(id, arrays)]


@pytest.mark.parametrize("there", [True, False])
def test_dtypes_must_agree_or_be_cast_to_either(tmp_path, there):
    written = ready(dtype="bfloat16")
    written.save(tmp_path / "file")
    for source, dtype in (("current", np.float32), ("saved", ml_dtypes.bfloat16)):
        params = model()
        if there:
            params.initialize()
        params.load(tmp_path / "file", cast_dtype=True, dtype_source=source)
        assert params["net_fc_weight"].data().dtype == dtype
        assert contents(params) == contents(written)


def test_constants_and_copies_that_differ_are_saved_as_mean(tmp_path):
    params = ParameterDict()
    params.update({"mean": Constant([1.0, 2.0])})
    params.get("table", shape=(2, 2), stype="row_sparse", init="ones")
    params.initialize(device=[cpu(0), cpu(1)])
    trainer = Trainer(params)  # which the rows of the table come from
    params["mean"].data(cpu(1))[...] = 4
    params.save(tmp_path / "file")
    params["mean"].set_data([0, 0])
    params.load(tmp_path / "file")
    np.testing.assert_array_equal(params["mean"].data(), [2.5, 3])
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "file")["table"], 1)
    del trainer


# Refusals

REFUSED = {
    **each("child.get('w', {})", "ValueError: Parameter 'w' exists with dtype=",
           "dtype='float16'", "shape=(2, 2), dtype='float16'"),
    "child.get('w', lr_mult=2.0)": "ValueError: Parameter 'w' exists with lr_mult=1.0, got 2.0",
    "child.get('w', grad_req='add')":
        "ValueError: Parameter 'w' exists with grad_req='write', got 'add'",
    "child.get('w', init='zeros')": "ValueError: Parameter 'w' exists with init=",
    "child.get('w', stype='row_sparse')": "ValueError: Parameter 'w' exists with stype=",
    "child.get('w', color='red')": "TypeError: Parameter 'w' has no attribute 'color'",
    "child.get_constant('mean', [1, 3])": "ValueError: 'mean' exists with another value",
    "child.get_constant('std')": "ValueError: 'std' does not exist; pass a value",
    "child.get_constant('w', 1)": "ValueError: 'w'.* is not a Constant",
    **each("{}", "TypeError: must be a",
           "ParameterDict(1)", "ParameterDict('', {})", "child.get(1)"),
    "params.update({'new': Parameter(), 'net_fc_bias': Parameter()})":
        "ValueError: another Parameter 'net_fc_bias'",
    "params.update({'new': np.ones(3)})": "TypeError: other must hold Parameters by name",
    "params.select('(')": "ValueError: pattern must be a regular expression",
    "params.setattr('shape', (3, 2))": "ValueError: 'net_fc_bias': shape",
    **each("params.setattr({})", "ValueError: grad_re|_data",
           "'grad_rek', 'null'", "'_data', None", "'grad_req', 'never'"),
    "late.initialize('xavier', force_reinit=True)": "ValueError: net_vector",
    "late.reset_device(cpu(4))": "ValueError: 'net_vector' is not initialized",
    "params.save(path, strip_prefix='x_')": "ValueError: 'net_fc_weight' does not start with 'x_'",
    "params.load(path, restore_prefix='x_')":
        "ValueError: 'net_fc_weight' does not start with 'x_'",
    "params.load(path, device=cpu(1))":
        r"ValueError: cannot be loaded on \[cpu\(1\)\], it is on \[cpu\(0\)",
    "params.load(half)":
        "ValueError: 'net_fc_weight' is float32 and was saved as float16; cast_dtype=True",
    "params.load(half, cast_dtype=True, dtype_source='file')":
        "ValueError: 'net_fc_weight': dtype_source must be one of",
    "params.load(folder / 'nothing')": "FileNotFoundError: nothing",
    "params.load(broken)": "CheckpointError: broken: not a safetensors file",
    "late.load(path)": r"ValueError: file lacks \['net_vector'\]; allow_missing=True",
    "params.select('.*weight').load(path)":
        r"ValueError: file also has \['net_fc_bias'\]; ignore_extra=True",
    "wide.load(path)": r"ValueError: 'net_fc_bias': shape \(3,\) does not agree with",
    "listed.load(whole, cast_dtype=True, dtype_source='saved')":
        "TypeError: 'net_fc_bias': values must be .*, got int32",
    **each("params.load(imaginary, cast_dtype=True, dtype_source='{}')",
           "TypeError: 'net_fc_weight': dtype must be a type of real numbers", "current", "saved"),
    "named.save(path)": "ValueError: '__metadata__' cannot name an array",
    "late.save(path)": "RuntimeError: 'net_vector' is not initialized",
    "waiting.save(path)": "DeferredInitializationError: 'net_fc_bias'",
    "rows.save(path)": "RuntimeError: 'table' is row-sparse and has no Trainer",
}  # fmt: skip


def test_what_is_wrong_is_refused_and_changes_nothing(tmp_path):
    params, source, folder = ready(), ParameterDict(), tmp_path
    late, wide, listed, waiting = (ParameterDict("net_") for _ in range(4))
    source.get("w", shape=(2, 0), init="ones")
    source.get_constant("mean", [1, 2])
    child, named, rows = ParameterDict(shared=source), ParameterDict(), ParameterDict()
    late.update(params)
    late.get("vector", shape=3)
    for made, kwargs in ((wide, {"shape": (3, 1)}), (listed, {"grad_stype": "row_sparse"})):
        made.get("fc_weight", shape=(3, 2))
        made.get("fc_bias", **{"shape": 3, **kwargs})
        made.initialize("zeros")
    listed["net_fc_bias"].add_grad(np.ones(3))
    waiting.get("fc_bias", shape=0, allow_deferred_init=True).initialize()
    named.get("__metadata__", shape=3).initialize()
    rows.get("table", shape=(2, 2), stype="row_sparse", init="ones").initialize()
    path, half, whole, imaginary, broken = (tmp_path / n for n in ("file", *"hwi", "broken"))
    params.save(path)
    for file, dtype in ((half, "float16"), (whole, "int32"), (imaginary, "complex64")):
        arrays = {name: p.data().astype(dtype) for name, p in params.items()}
        safetensors.numpy.save_file(arrays, file)
    broken.write_bytes(b"something else")

    def held():
        dicts = [(repr(d), d.list_device(), contents(d)) for d in (params, wide, listed)]
        names = [*late, *child], repr(source), late["net_vector"].shape
        return dicts, names, {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    names, before = globals() | vars(fastopt.parameter) | vars(checkpoint), held()
    for code, error in REFUSED.items():
        check_refused(code, error, names | locals())
        assert held() == before, code
