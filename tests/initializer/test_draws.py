import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fastopt import initializer
from fastopt.initializer import InitDesc
from fastopt.initializer.draws import BLOCK
from helpers.initializers import LIBRARY, made, named
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
    """The global generator of NumPy is neither read nor moved."""
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1:]  # noqa: NPY002
    first = drawn(name, 5)
    np.testing.assert_equal(np.random.get_state()[1:], before)  # noqa: NPY002
    np.random.seed(7)  # noqa: NPY002
    assert np.array_equal(first, drawn(name, 5))
    assert not np.array_equal(first, drawn(name, 6))
    assert not np.array_equal(drawn(name, None), drawn(name, None))


@every
def test_a_generator_is_used_as_it_is_and_shared(name):
    rng = np.random.default_rng(0)
    one, two, alone = make(name, rng), make(name, rng), make(name)
    assert one.rng is two.rng is rng
    for init in [one, two, one]:
        numbers = [fill(each, np.empty(shape_for(name))) for each in (init, alone)]
        assert np.array_equal(*numbers)


@pytest.mark.parametrize("kind", [int, np.atleast_1d, np.random.SeedSequence, np.random.PCG64])
def test_seeds_of_every_kind(kind):
    wanted = np.random.default_rng(kind(3)).standard_normal(4)
    assert np.array_equal(fill(initializer.Normal(1, rng=kind(3)), np.empty(4)), wanted)


@pytest.mark.parametrize("own", ['["normal", {"sigma": 1}]', "he_normal"])
def test_an_initializer_from_text_draws_from_the_one_that_made_it(own):
    def both(rng):
        init = initializer.Uniform(rng=rng)
        return [named(init, "scale", (3, 4), own=own) for _ in range(2)]

    first, second = both(0)
    assert not np.array_equal(first, second)
    assert np.array_equal([first, second], both(0))


def test_an_initializer_of_an_array_keeps_its_own_generator():
    for own in ('["normal", {"sigma": 1, "rng": 3}]', initializer.Normal(1, rng=3)):
        arr = named(initializer.Uniform(rng=0), "scale", 4, own=own)
        assert np.array_equal(arr, np.random.default_rng(3).standard_normal(4))


def test_threads_that_share_an_initializer_get_different_numbers():
    init = initializer.Normal(1, rng=0)
    with ThreadPoolExecutor(4) as pool:
        arrays = [*pool.map(lambda _: fill(init, np.empty(5000)), range(4))]
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


@every
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_layout_in_memory_does_not_change_the_numbers(name, dtype):
    arr, expected = np.zeros(shape_for(name), dtype), drawn(name, dtype=dtype)
    swapped = arr.astype(arr.dtype.newbyteorder())
    for laid in (swapped, *(layout(arr) for layout in LAYOUTS.values())):
        assert np.array_equal(fill(make(name), laid), expected)


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


@every
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_random_numbers_need_floats_and_a_refused_array_is_as_it_was(name, dtype):
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
