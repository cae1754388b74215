"""QK-Clip: rows of heads with large logits are scaled down."""

import numpy as np
import pytest

from fastopt.optimizer import clip_attention
from helpers.refusals import check_refused


def logits(query, key, inputs, heads):
    """The largest logit of each head of `query`, which may share those of `key`."""
    of_head = len(query) // heads
    q = (inputs @ query.T).reshape(len(inputs), heads, of_head)
    k = (inputs @ key.T).reshape(len(inputs), -1, of_head)
    k = np.repeat(k, heads // k.shape[1], axis=1)
    return np.abs(np.einsum("ihd,jhd->hij", q, k)).max(axis=(1, 2))


@pytest.mark.parametrize("keys", [4, 2, 1])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_logit_exceeds_the_limit(keys, share, dtype, rng):
    inputs = rng.normal(size=(7, 5))
    query, key = (
        rng.normal(size=(12, 5)).astype(dtype),
        rng.normal(size=(3 * keys, 5)).astype(dtype),
    )
    query[:3] *= 10
    before = logits(query, key, inputs, 4)
    limit = float(np.sort(before)[1])
    first = query.copy(), key.copy()
    clip_attention(query, key, before, limit, share)
    after = logits(query, key, inputs, 4)
    np.testing.assert_array_less(after, limit * (1 + 1e-5))
    np.testing.assert_allclose(after.max(), limit, rtol=1e-5)
    if keys == 4:  # each head has its own key
        np.testing.assert_allclose(after, np.minimum(before, limit), rtol=1e-5)
        same = np.repeat(before <= limit, 3)
        np.testing.assert_array_equal(query[same], first[0][same])
        np.testing.assert_array_equal(key[same], first[1][same])


WRONG = {
    "largest=[1.0] * 5": "ValueError: cannot be divided among 5 heads",
    "largest=[-1.0]": "ValueError: largest must have",
    "largest=[]": "ValueError: largest must have",
    "limit=0.0": "ValueError: limit",
    "share=2.0": "ValueError: share",
    "query=np.ones((4, 2), 'f2')": "TypeError: query: weight must have dtype float32",
    "key=np.ones((3, 2))": "ValueError: 3 of key cannot be divided",
    "key=[1.0]": "TypeError: must be a NumPy array",
}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_arguments_are_refused_and_nothing_changes(argument):
    given = {"query": np.ones((4, 2)), "key": np.ones((4, 2)), "largest": [200.0, 1.0]}
    names = {"np": np, "clip_attention": clip_attention, "given": given}
    check_refused(f"clip_attention(**(given | dict({argument})))", WRONG[argument], names)
    assert (given["query"] == 1).all()
    assert (given["key"] == 1).all()
