"""Words that are used alike in the pages of Python's ``help``, found by word vectors.

A word's vector is trained to distinguish its neighbours in the text from random words (Mikolov et
al. 2013, arXiv:1310.4546). A step changes few rows of the two tables.
"""

import re
from collections import Counter
from pydoc_data.topics import topics

import numpy as np

import fastopt

SIZE, WINDOW, NEGATIVES, LEAST, THRESHOLD, BATCH, EPOCHS = 64, 5, 5, 2, 3e-4, 128, 3
SHOWN = ("tuple", "integer", "dictionary", "exception", "import", "iterator", "async", "method")


def vocabulary(text, least):
    """Words from the commonest one, their counts, and the text as numbers of words."""
    tokens = re.findall(r"[^\W\d_]{2,}", text.lower())
    counts = {word: count for word, count in Counter(tokens).most_common() if count >= least}
    numbers = {word: number for number, word in enumerate(counts)}
    known = [numbers[token] for token in tokens if token in numbers]
    return [*counts], np.array([*counts.values()]), np.array(known)


def pairs(counts, text, rng, window, threshold):
    """Words and words near them, in random order; frequent words are thinned out."""
    excess = counts / (threshold * counts.sum())
    text = text[rng.random(len(text)) < ((np.sqrt(excess) + 1) / excess)[text]]
    reach, found = rng.integers(1, window + 1, len(text)), []
    for distance in range(1, window + 1):
        both = np.stack([text[:-distance], text[distance:]], axis=1)
        found.append(both[reach[:-distance] >= distance])
        found.append(both[reach[distance:] >= distance, ::-1])
    return rng.permutation(np.concatenate(found))


class SkipGram:
    """Vectors of words, and of words as neighbours."""

    def __init__(self, rng, counts, size):
        vectors = rng.uniform(-0.5 / size, 0.5 / size, (len(counts), size)).astype(np.float32)
        self.weights = [vectors, np.zeros_like(vectors)]
        share = np.cumsum(counts**0.75)
        self.cumulative = share / share[-1]

    def gradients(self, batch, negatives, rng):
        """Mean loss of the pairs, and for each table values and row indices of the gradient."""
        words, neighbours = batch.T
        drawn = np.searchsorted(self.cumulative, rng.random((len(batch), negatives)))
        others = np.column_stack([neighbours, drawn])
        v, u = self.weights[0][words], self.weights[1][others]
        scores = (u @ v[:, :, np.newaxis])[:, :, 0]
        scores[:, 0] *= -1  # column 0 is the neighbour, which should have a high score
        loss = float(np.logaddexp(0, scores).sum()) / len(batch)
        slope = 1 / (1 + np.exp(-scores))
        slope[:, 0] *= -1
        to_words = (slope[:, np.newaxis] @ u)[:, 0]
        to_others = slope[:, :, np.newaxis] * v[:, np.newaxis]
        return loss, [(to_words, words), (to_others.reshape(-1, v.shape[1]), others.ravel())]


def nearest(vectors, word):
    """Rows in the order of the cosine of their vectors with that of a word, without the word."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = np.argsort(-(unit @ unit[word]), kind="stable")
    return rows[rows != word]


def train(optimizer, seed):
    """Train vectors; return the words, the mean loss of each epoch, and the vectors."""
    rng, losses = np.random.default_rng(seed), []
    words, counts, text = vocabulary("\n".join(topics.values()), LEAST)
    model, updater = SkipGram(rng, counts, SIZE), fastopt.Updater(optimizer)
    for _ in range(EPOCHS):
        drawn, total = pairs(counts, text, rng, WINDOW, THRESHOLD), 0.0
        for start in range(0, len(drawn), BATCH):
            batch = drawn[start : start + BATCH]
            loss, grads = model.gradients(batch, NEGATIVES, rng)
            updater.step(grads, model.weights)
            total += loss * len(batch)
        losses.append(total / len(drawn))
    return words, losses, model.weights[0]


def main():
    """Print the nearest of the 600 commonest words to some of them."""
    words, losses, vectors = train(fastopt.AdaGrad(lr=0.1), seed=0)
    print("loss of a pair of words by epoch:", *(f"{loss:.2f}" for loss in losses))
    common = words[:600]
    for word in filter(common.__contains__, SHOWN):
        rows = nearest(vectors[:600], common.index(word))[:5]
        print(f"{word:11}", *(common[row] for row in rows))


if __name__ == "__main__":
    main()
