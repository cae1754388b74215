"""Kernels of optimizers whose second moments are those of rows and columns.

They run on one thread. Arrays are in C order; matrices are a batch of shape (count, rows, columns),
or the rows along the last axis. The update subtracts ``lr`` times a step from ``shrink`` times the
target; from 0 with rates of 0 and -1 it writes the step. `hyper` is an array of one record.

Tests: ``tests/optimizer/test_matrices.py``, ``tests/optimizer/test_packages.py``.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from fastopt._kernels.compiling import compiled
from fastopt._kernels.lanes import LANES, MAXIMUM, PART, add, add_squares, larger, scratch, total
from fastopt._kernels.storage import inside, private, shifted
from fastopt.kernels.rule import scalar
from fastopt.kernels.scalars import rescaled

SCALED = ("rescale_grad", "clip_gradient", "shrink", "lr")
"""Fields of `hyper` that every kernel reads."""

raise_to, highest, *_ = MAXIMUM


@scalar
def shrunk(target, step, h):
    """Return a weight after decay and a step."""
    return h.shrink * target - h.lr * step


@scalar
def lower(x, y):
    """Return the smaller one of two numbers, or NaN if one is NaN."""
    return x if x < y or x != x else y


@scalar
def rooted(rows, columns, scales, sums, share):
    """Blend the means of columns from their sums, and write the inverse roots of both moments."""
    height, width, one, mean = len(rows), len(columns), np.float64(1), 0.0
    for i in range(height):
        mean += rows[i]
    mean /= height
    for i in range(height):
        scales[i] = one / np.sqrt(np.float64(rows[i] / mean))
    for j in range(width):
        columns[j] += (sums[j] / height - columns[j]) * share
        scales[height + j] = one / np.sqrt(np.float64(columns[j]))


@scalar
def plus_terms(totals, terms, n):
    """Add terms to the sums of columns."""
    for j in range(n):
        totals[j] += np.float64(terms[j])


@cache
def factored(real: type) -> Callable:
    """Kernel ``(source, weight, rows, columns, scales, sums, share, floor, hyper)``.

    Moves `rows` and `columns` by `share` towards the means of the squared gradients plus `floor`,
    and writes their inverse roots to `scales`, one vector for each matrix, those of the rows
    divided by the mean of the rows. Returns the sum of squares of the gradients multiplied by
    both, and that of the weight.
    """

    def factored(source, weight, rows, columns, scales, sums, share, floor, hyper):
        h, least, squares, sizes = private(hyper, 0), real(floor), 0.0, 0.0
        count, height, width = source.shape
        lanes, terms = scratch(3, LANES, np.float64), scratch(1, PART, real)
        values = scratch(1, PART, real)
        for b in range(count):
            sums[:width] = 0
            for i in range(height):
                at = (b * height + i) * width
                for first in range(0, width, PART):
                    n = min(PART, width - first)
                    (grads,) = shifted(inside(source), at + first)
                    (weights,) = shifted(inside(weight), at + first)
                    for j in range(n):
                        grad = rescaled(grads[j], h)
                        terms[0][j] = grad * grad + least
                        values[0][j] = weights[j]
                    plus_terms(shifted(inside(sums), first)[0], terms[0], n)
                    add(lanes[:1], terms, n)
                    add_squares(lanes[1:2], values, n)
                rows[b, i] += (total(lanes[:1])[0] / width - rows[b, i]) * share
            sizes += total(lanes[1:2])[0]
            rooted(rows[b], columns[b], scales[b], sums, share)
            for i in range(height):
                at, scale = (b * height + i) * width, scales[b, i]
                for first in range(0, width, PART):
                    n = min(PART, width - first)
                    (grads,) = shifted(inside(source), at + first)
                    (roots,) = shifted(inside(scales), b * (height + width) + height + first)
                    for j in range(n):
                        terms[0][j] = rescaled(grads[j], h) * scale * roots[j]
                    add_squares(lanes[2:], terms, n)
            squares += total(lanes[2:])[0]
        return squares, sizes

    return compiled(factored, None, parallel=False)


@cache
def confident(real: type) -> Callable:
    """Kernel ``(source, mean, rows, columns, scales, sums, factor, fresh, share, floor, hyper)``.

    Moves `mean` by `fresh` towards the steps of :func:`stepped` times `factor`, and `rows` and
    `columns` by `share` towards the means of the squares of what remains between both, plus
    `floor`. Replaces `scales` by the inverse roots of these moments.
    """

    def confident(source, mean, rows, columns, scales, sums, factor, fresh, share, floor, hyper):
        h, least, part, bound = private(hyper, 0), real(floor), real(fresh), real(factor)
        count, height, width = source.shape
        lanes, terms = scratch(1, LANES, np.float64), scratch(1, PART, real)
        for b in range(count):
            sums[:width] = 0
            for i in range(height):
                at, scale = (b * height + i) * width, scales[b, i] * bound
                for first in range(0, width, PART):
                    n = min(PART, width - first)
                    (grads,) = shifted(inside(source), at + first)
                    (means,) = shifted(inside(mean), at + first)
                    (roots,) = shifted(inside(scales), b * (height + width) + height + first)
                    for j in range(n):
                        terms[0][j] = rescaled(grads[j], h) * scale * roots[j]
                    for j in range(n):
                        step = terms[0][j]
                        moved = means[j] + part * (step - means[j])
                        rest = step - moved
                        means[j] = moved
                        terms[0][j] = rest * rest + least
                    plus_terms(shifted(inside(sums), first)[0], terms[0], n)
                    add(lanes, terms, n)
                rows[b, i] += (total(lanes)[0] / width - rows[b, i]) * share
            rooted(rows[b], columns[b], scales[b], sums, share)

    return compiled(confident, None, parallel=False)


@cache
def stepped() -> Callable:
    """Kernel ``(source, scales, target, hyper)``: a step along scaled gradients."""

    def stepped(source, scales, target, hyper):
        h = private(hyper, 0)
        count, height, width = source.shape
        for b in range(count):
            for i in range(height):
                scale = scales[b, i]
                (grads,) = shifted(inside(source), (b * height + i) * width)
                (weights,) = shifted(inside(target), (b * height + i) * width)
                (roots,) = shifted(inside(scales), b * (height + width) + height)
                for j in range(width):
                    weights[j] = shrunk(weights[j], rescaled(grads[j], h) * scale * roots[j], h)

    return compiled(stepped, None, parallel=False)


@cache
def covered(real: type, averages: bool) -> Callable:
    """Kernel ``(source, target, mean, ahead, columns, raised, highs, lengths, place, hyper)``.

    A step along gradients divided by the roots of upper bounds of their sums of squares, or along
    the moving average `mean` of these quotients. `ahead` has the accumulators of all axes but the
    last one, of `lengths`, one after the other, and `columns` those of the last; `raised`, `highs`
    and `place` are scratch memory like `ahead`, `columns` and `lengths`.
    """

    def covered(source, target, mean, ahead, columns, raised, highs, lengths, place, hyper):
        h, zero = private(hyper, 0), real(0)
        height, width = source.shape
        lanes, (bounds, steps, peaks) = scratch(1, LANES, np.float64), scratch(3, PART, real)
        place[:] = 0
        raised[:] = 0
        highs[:] = 0
        for i in range(height):
            at, start, cover = i * width, 0, real(np.inf)
            for axis in range(len(lengths)):
                cover = lower(ahead[start + place[axis]], cover)
                start += lengths[axis]
            for first in range(0, width, PART):
                n = min(PART, width - first)
                (grads,) = shifted(inside(source), at + first)
                (weights,) = shifted(inside(target), at + first)
                (before,) = shifted(inside(columns), first)
                (after,) = shifted(inside(highs), first)
                for j in range(n):
                    grad = rescaled(grads[j], h)
                    bound = lower(before[j], cover) + grad * grad
                    root = math.sqrt(bound + h.eps)
                    steps[j] = grad / root if root != zero else zero
                    bounds[j], peaks[j] = bound, larger(peaks[j], bound)
                for j in range(n):
                    after[j] = larger(after[j], bounds[j])
                if averages:
                    (means,) = shifted(inside(mean), at + first)
                    for j in range(n):
                        steps[j] = means[j] = h.momentum * means[j] + h.fresh * steps[j]
                for j in range(n):
                    weights[j] = shrunk(weights[j], steps[j], h)
            raise_to(lanes, (peaks,), PART)
            for j in range(PART):
                peaks[j] = zero
            high, start = real(highest(lanes)[0]), 0
            for axis in range(len(lengths)):
                raised[start + place[axis]] = larger(raised[start + place[axis]], high)
                start += lengths[axis]
            axis = len(lengths) - 1
            while axis >= 0:
                place[axis] += 1
                if place[axis] < lengths[axis]:
                    break
                place[axis] = 0
                axis -= 1
        ahead[:] = raised
        columns[:] = highs

    return compiled(covered, None, parallel=False)


@cache
def shared(real: type) -> Callable:
    """Kernel ``(source, target, mean, var, rows, share, var_scale, epsilon, hyper)``.

    A step along `mean`, which moves by ``fresh`` towards the gradient, divided by the root of the
    mean square of `rows` rows together, which moves by `share`; `var` has it for each row.
    """

    def shared(source, target, mean, var, rows, share, var_scale, epsilon, hyper):
        h, lanes, terms = private(hyper, 0), scratch(1, LANES, np.float64), scratch(1, PART, real)
        size = rows * source.shape[1]
        for b in range(len(var) // rows):
            for first in range(0, size, PART):
                n = min(PART, size - first)
                (grads,) = shifted(inside(source), b * size + first)
                for j in range(n):
                    terms[0][j] = rescaled(grads[j], h)
                add_squares(lanes, terms, n)
            square = var[b * rows] + (total(lanes)[0] / size - var[b * rows]) * share
            for i in range(rows):
                var[b * rows + i] = square
            scale = real(np.float64(h.mean_scale) / (np.sqrt(square * var_scale) + epsilon))
            (grads,) = shifted(inside(source), b * size)
            (means,) = shifted(inside(mean), b * size)
            (weights,) = shifted(inside(target), b * size)
            for j in range(size):
                moved = means[j] + h.fresh * (rescaled(grads[j], h) - means[j])
                means[j] = moved
                weights[j] = shrunk(weights[j], moved * scale, h)

    return compiled(shared, None, parallel=False)
