import math
import threading

import numpy as np
import pytest

from fastopt import initializer
from fastopt.initializer import InitDesc
from fastopt.initializer.draws import BLOCK
from helpers.initializers import LIBRARY, made
from helpers.plans import LAYOUTS

FIXED = ("bilinear", "constant", "lstmbias", "one", "ones", "zero", "zeros")
CLASSES = {initializer.initializer_registry[name]: name for name in LIBRARY if name not in FIXED}
RANDOM = sorted(CLASSES.values())
NORMAL = {"fusedrnn": {"init": '["normal", {"sigma": 1}]', "mode": "lstm"}}
every = pytest.mark.parametrize("name", RANDOM)


def make(name, rng=0):
    return made(name, rng=rng, **NORMAL.get(name, {}))


def shape_for(name, shape=(8, 4)):
    return (math.prod(shape) * 8 + 2 * 8 * 4,) if name == "fusedrnn" else shape


def fill(init, arr):
    init(InitDesc("fc_weight"), arr)
    return arr


def drawn(name, rng=0, shape=(8, 4), dtype=np.float32):
    return fill(make(name, rng), np.full(shape_for(name, shape), -9, dtype))


@every
def test_a_seed_gives_the_same_numbers_and_no_seed_others(name):
    assert np.array_equal(drawn(name, 5), drawn(name, 5))
    assert not np.array_equal(drawn(name, 5), drawn(name, 6))
    assert not np.array_equal(drawn(name, None), drawn(name, None))


@every
def test_a_generator_is_used_as_it_is_and_shared(name):
    rng = np.random.default_rng(0)
    one, two = make(name, rng), make(name, rng)
    assert one.rng is two.rng is rng
    alone = make(name)
    for init in [one, two, one]:
        assert np.array_equal(
            fill(init, np.empty(shape_for(name))), fill(alone, np.empty(shape_for(name)))
        )


@pytest.mark.parametrize("kind", [int, list, np.random.SeedSequence, np.random.PCG64])
def test_seeds_of_every_kind(kind):
    def seed():
        return [1, 2] if kind is list else kind(3)

    wanted = np.random.default_rng(seed()).standard_normal(4)
    assert np.array_equal(fill(initializer.Normal(1, rng=seed()), np.empty(4)), wanted)


@every
def test_the_global_generator_of_numpy_is_neither_read_nor_moved(name):
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1:]  # noqa: NPY002
    first = drawn(name, 1)
    after = np.random.get_state()[1:]  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    np.random.seed(7)  # noqa: NPY002
    assert np.array_equal(first, drawn(name, 1))


@pytest.mark.parametrize("own", ['["normal", {"sigma": 1}]', "he_normal"])
def test_an_initializer_from_text_draws_from_the_one_that_made_it(own):
    def both(rng):
        init = initializer.Uniform(rng=rng)
        desc = InitDesc("scale", {"__init__": own})
        arrays = [np.empty((3, 4)) for _ in range(2)]
        for arr in arrays:
            init(desc, arr)
        return arrays

    first, second = both(0)
    assert not np.array_equal(first, second)
    assert np.array_equal([first, second], both(0))


@pytest.mark.parametrize(
    "own", ['["normal", {"sigma": 1, "rng": 3}]', lambda: initializer.Normal(1, rng=3)]
)
def test_an_initializer_of_an_array_keeps_its_own_generator(own):
    arr = np.empty(4)
    own = own() if callable(own) else own
    initializer.Uniform(rng=0)(InitDesc("scale", {"__init__": own}), arr)
    assert np.array_equal(arr, np.random.default_rng(3).standard_normal(4))


def test_threads_that_share_an_initializer_get_different_numbers():
    init = initializer.Normal(1, rng=0)
    arrays = [np.empty(5000) for _ in range(4)]
    threads = [threading.Thread(target=fill, args=(init, arr)) for arr in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(np.unique(arrays)) == 20000


@pytest.fixture
def seeded():
    """The function that seeds initializers; after the test they are as before."""
    yield initializer.seed
    initializer.seed()


@every
def test_one_seed_serves_all_initializers_without_one_of_their_own(name, seeded):
    init = make(name, None)
    fill(init, np.empty(shape_for(name), np.float32))  # entropy of its own, until now

    def numbers():
        return fill(init, np.empty(shape_for(name), np.float32)), drawn(name, None), drawn(name, 5)

    seeded(0)
    first, second, own = numbers()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(drawn(name, 5), own)
    seeded(0)
    np.testing.assert_array_equal(numbers(), (first, second, own))
    seeded(1)
    assert not np.array_equal(numbers()[0], first)
    seeded()
    assert not np.array_equal(numbers()[0], numbers()[0])


def test_what_is_no_seed_changes_nothing(seeded):
    seeded(0)
    with pytest.raises(TypeError, match="a non-negative seed, got 'x'"):
        seeded("x")
    first = drawn("normal", None)
    seeded(0)
    np.testing.assert_array_equal(drawn("normal", None), first)


@every
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_layout_in_memory_does_not_change_the_numbers(name, dtype):
    arr, expected = np.zeros(shape_for(name), dtype), drawn(name, dtype=dtype)
    swapped = arr.astype(arr.dtype.newbyteorder())
    for laid in (swapped, *(layout(arr) for layout in LAYOUTS.values())):
        assert np.array_equal(fill(make(name), laid), expected)


def test_elements_between_those_of_a_strided_array_are_left_alone():
    whole = np.full((6, 6), -9.0)
    fill(initializer.Normal(rng=0), whole[::2, ::3])
    whole[::2, ::3] = -9
    assert (whole == -9).all()


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_large_arrays_are_one_draw(size):
    arr = fill(initializer.Normal(1, rng=0), np.empty(size, np.float32))
    wanted = np.random.default_rng(0).standard_normal(size, np.float32)
    assert np.array_equal(arr, wanted)


@every
def test_half_precision_rounds_the_numbers_of_single_precision(name):
    wide = drawn(name)
    assert np.array_equal(drawn(name, dtype=np.float16), wide.astype(np.float16))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    narrow = drawn(name, dtype=ml_dtypes.bfloat16)
    assert np.array_equal(narrow, wide.astype(ml_dtypes.bfloat16))


def test_fixed_values_in_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arr = np.empty((2, 2), ml_dtypes.bfloat16)
    value = np.array([0.5, 3], ml_dtypes.bfloat16)
    assert fill(initializer.Constant(value), arr).astype("f4").tolist() == [[0.5, 3], [0.5, 3]]
    assert fill(initializer.Constant(value), np.empty(2, "f2")).tolist() == [0.5, 3]
    assert fill(initializer.One(), arr).astype("f4").tolist() == [[1, 1], [1, 1]]


@every
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.longdouble])
def test_random_numbers_need_floats_and_a_refused_array_is_as_it_was(name, dtype):
    if np.dtype(dtype) == np.float64:
        pytest.skip("long double is float64 here")
    arr = np.full(shape_for(name), 3, dtype)
    message = "arr must have one of the dtypes float16, bfloat16, float32, float64 for random"
    with pytest.raises(TypeError, match=message):
        fill(make(name), arr)
    assert (arr == 3).all()


@every
def test_vectors_are_refused_where_layers_have_inputs_and_outputs(name):
    if name.startswith(("uniform", "normal", "truncated", "fusedrnn")):
        assert (drawn(name, shape=(6,)) != -9).all()
        return
    arr = np.full(6, -9.0)
    with pytest.raises(ValueError, match=r"^fc_weight: \w+ needs two dimensions, got shape \(6,\)"):
        fill(make(name), arr)
    assert (arr == -9).all()
