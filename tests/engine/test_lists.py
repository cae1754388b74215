"""Lists of tensors: the bits of one call after the other, and all or nothing."""

import numpy as np
import pytest

from fastopt import optimizer
from helpers.tensor_lists import Tensor, as_list, everything, frozen


@pytest.mark.slow
def test_products_and_corrections_advance_in_the_order_of_the_list(rng):
    weights, grads = rng.normal(size=(2, 3, 4))
    for name in ("nadam", "lars"):
        results = []
        for order in ([0, 1, 2], [2, 0, 1]):
            updater = optimizer.get_updater(
                optimizer.create(name, learning_rate=0.1, lr_scheduler=lambda n: 0.1 / n)
            )
            own = [weight.copy() for weight in weights]
            updater(2, grads[2], own[2])
            for _ in range(2):
                as_list(updater, order, [grads[k] for k in order], [own[k] for k in order])
            results.append(frozen(own))
        assert results[0] != results[1], name


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
def test_what_is_no_list_is_refused_clearly(seen):
    weights, grads = [np.ones(3), np.ones(3)], [np.ones(3), np.ones(3)]
    updater = optimizer.get_updater(optimizer.Adam())
    if seen:
        updater([0, 1], grads, weights)
    before = everything(updater, weights)
    for wrong in ((g for g in grads), np.ones((2, 3)), dict(enumerate(grads)), grads[:1], None):
        with pytest.raises(TypeError, match="list of as many gradients"):
            updater([0, 1], wrong, weights)
        words = "a call takes" if wrong is None else "list of as many weights"
        with pytest.raises(TypeError, match=words):
            updater([0, 1], grads, wrong)
    for wrong in ((i for i in (0, 1)), np.arange(2), {0, 1}, None):
        with pytest.raises(TypeError, match="index must be"):
            updater(wrong, grads, weights)
    for wrong in ([0, np.arange(2)], [0, None], [0, [1]]):
        with pytest.raises(TypeError, match="index must be"):
            updater(wrong, grads, weights)
    assert everything(updater, weights) == before


FORTRAN = Tensor((4, 3), weight="fortran")
ROWS = Tensor((4, 3), gradient="rows")


def test_a_list_with_an_index_twice_that_fails_restores_copies_too():
    def schedule(update):
        if update == 3:
            raise RuntimeError("no rate")
        return 0.1

    updater = optimizer.get_updater(optimizer.SGD(momentum=0.9, lr_scheduler=schedule))
    weight, copy = FORTRAN.make(0), np.zeros((4, 3), np.float16, order="F")
    updater.set_copy(0, copy)
    updater(0, FORTRAN.slope(1), weight)
    before = everything(updater, [weight, copy])
    with pytest.raises(RuntimeError, match="no rate"):
        updater([0, 0], [FORTRAN.slope(2), ROWS.slope(3)], [weight, weight])
    assert everything(updater, [weight, copy]) == before
