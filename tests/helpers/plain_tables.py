"""Print what a table of embeddings holds after lookups, updates and evictions; run as a process."""

import numpy as np

import fastopt
from fastopt import initializer


def main():
    initializer.seed(0)
    for init in ("uniform", "normal"):
        adam = fastopt.AdamW(learning_rate=0.1, wd=0.5, sparse_decay="catch_up")
        table = fastopt.EmbeddingTable(2, adam, init=init, min_count=2, half_life=3.0, name="t")
        for step in range(4):
            ids = np.array([1, 2, 1, 10**15, -7, 2**40 + step, 5, 5, step])
            table.lookup(ids)
            table.update(ids, np.full((len(ids), 2), 0.5 - step, np.float32))
            if step == 2:
                table.evict(keep=[1, 5, -7])
        table.lookup([9, 9, 9, 9])
        table.flush()
        for id in table.ids().tolist():
            print(init, id, *table.lookup([id])[0].tolist())
