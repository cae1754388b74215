"""Skip-gram word vectors in plain NumPy: vocabulary, pairs of words, loss and gradients."""

import re
from collections import Counter
from copy import copy
from dataclasses import dataclass

import numpy as np

from fastopt.reference import Array
from fastopt.sparse import RowSparse

WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True)
class Corpus:
    """A text as word indices: word `i` is ``words[i]`` and occurs ``counts[i]`` times."""

    words: list[str]
    counts: Array
    tokens: Array

    @classmethod
    def of(cls, text: str, least: int) -> "Corpus":
        """Read a text, keeping words of two letters or more that occur at least `least` times."""
        tokens = WORD.findall(text.lower())
        counts = {word: n for word, n in Counter(tokens).most_common() if n >= least}
        numbers = {word: number for number, word in enumerate(counts)}
        known = [numbers[token] for token in tokens if token in numbers]
        return cls(list(counts), np.array([*counts.values()], int), np.array(known, int))

    def pairs(self, rng: np.random.Generator, window: int, threshold: float) -> Array:
        """Return pairs of words and words near them, in random order, as an array of two columns.

        Words whose frequency exceeds `threshold` are dropped at random, and each word is paired
        with up to `window` words on either side (Mikolov et al. 2013, arXiv:1310.4546).
        """
        excess = self.counts / (threshold * self.counts.sum())
        chance = (np.sqrt(excess) + 1) / excess
        text = self.tokens[rng.random(len(self.tokens)) < chance[self.tokens]]
        reach = rng.integers(1, window + 1, len(text))
        found = [np.empty((0, 2), int)]
        for distance in range(1, window + 1):
            both = np.stack([text[:-distance], text[distance:]], axis=1)
            found.append(both[reach[:-distance] >= distance])
            found.append(both[reach[distance:] >= distance, ::-1])
        return rng.permutation(np.concatenate(found))


class SkipGram:
    """Word vectors trained to distinguish a word's neighbours from words drawn at random.

    The loss of a word with vector `v` and a neighbour with vector `u`, in a second table, is
    ``-log(sigmoid(u v))``; the loss of each word drawn at random is ``-log(sigmoid(-u v))``.
    """

    def __init__(self, rng: np.random.Generator, corpus: Corpus, size: int, dtype: str) -> None:
        shape = len(corpus.words), size
        vectors = rng.uniform(-0.5 / size, 0.5 / size, shape).astype(dtype)
        self.weights = [vectors, np.zeros(shape, dtype)]
        share = np.cumsum(corpus.counts**0.75)
        self.cumulative = share / share[-1]

    def padded(self, height: int) -> "SkipGram":
        """Return a copy whose tables are padded to `height` rows, which no word uses."""
        other = copy(self)
        other.weights = [np.pad(w, ((0, height - len(w)), (0, 0))) for w in self.weights]
        return other

    def backward(
        self, pairs: Array, negatives: int, rng: np.random.Generator
    ) -> tuple[float, list[RowSparse]]:
        """Return the mean loss of the pairs, and the gradient of the summed loss by table."""
        vectors, contexts = self.weights
        words, neighbours = pairs.T
        drawn = np.searchsorted(self.cumulative, rng.random((len(pairs), negatives)))
        others = np.column_stack([neighbours, drawn])
        v, u = vectors[words], contexts[others]
        scores = (u @ v[:, :, np.newaxis])[:, :, 0]
        scores[:, 0] *= -1  # column 0 is the neighbour, which should have a high score
        loss = float(np.logaddexp(0, scores).sum()) / len(pairs)
        slope = 1 / (1 + np.exp(-scores))
        slope[:, 0] *= -1
        to_words = (slope[:, np.newaxis] @ u)[:, 0]
        to_others = (slope[:, :, np.newaxis] * v[:, np.newaxis]).reshape(-1, v.shape[1])
        return loss, [
            RowSparse(to_words, words, vectors.shape),
            RowSparse(to_others, others.reshape(-1), contexts.shape),
        ]


def nearest(vectors: Array, word: int, number: int) -> tuple[Array, Array]:
    """Return the rows whose vectors have the largest cosine with row `word`, and the cosines."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit[word]
    cosines[word] = -np.inf
    rows = np.argsort(-cosines, kind="stable")[:number]
    return rows, cosines[rows]
