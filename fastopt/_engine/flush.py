"""Flush of deferred weight decay: all rows of a weight get the decay that they lack.

Tests: ``tests/engine/test_lazy_decay.py``.
"""

from contextlib import nullcontext

import numpy as np

from fastopt._engine.device_tables import no_rows, table_of_parameter
from fastopt._engine.enrolment import Enrolment
from fastopt._engine.owner import Updating
from fastopt._engine.parameters import Parameter, Record
from fastopt._engine.per_index import Index
from fastopt._engine.record_rows import Deferred, decay_of, row_layout
from fastopt._engine.validate import Array, check_like
from fastopt._interrupts import uninterrupted
from fastopt._kernels import cpu
from fastopt._kernels import record_words as w
from fastopt._kernels.chunks import PARALLEL_FROM, chunks_of
from fastopt._kernels.device_memory import host
from fastopt._kernels.devices import Header, header
from fastopt._kernels.layout import KEY, WIDTH
from fastopt._kernels.numpy_abi import address_of
from fastopt._kernels.threads import may_run_parallel, turn
from fastopt.sparse import REALS


def flush(updater: Updating, index: Index, weight: Array, state: object) -> bool:
    """Apply the deferred decay of all rows of `weight`; return whether there is any."""
    parameter = updater.parameters.of(index)
    optimizer, of = parameter.optimizer, header(weight)
    if index not in optimizer.row_decay or optimizer.rule_for(index) is None:
        return False
    if optimizer.sparse_decay == "touched":
        rows, total = optimizer.row_decay[index]
        if np.any(host(rows) != total):
            raise ValueError(
                f"{parameter.context}: rows lack the decay of steps with another sparse_decay than "
                "'touched': assign it again, call flush(), then change it"
            )
        return False
    check_like(parameter.context, "weight", of, REALS, np.shape(of))
    with uninterrupted:  # between marking rows as decayed and copying the weight back
        if isinstance(of, Header):
            table = table_of_parameter(parameter, weight, no_rows(of), state)
            rows, total = decay_of(optimizer, index, of)
            table.apply_decay(rows, total, total, at_once=False)
            table.flush_decay()
            table.copy_back()
            optimizer.row_decay[index] = rows, total  # moved to the weight's device if needed
        else:
            _flush(updater, parameter, of)
    return True


def _flush(updater: Updating, of: Parameter, weight: Array) -> None:
    """Flush a weight on the host, with the row of its record."""
    records, optimizer, index = updater.records, of.optimizer, of.index
    if records.version != optimizer.version:
        records.refresh(updater)
    records.drop(index)
    enrolment = Enrolment(records, updater, [index], [weight])
    grads = enrolment.checked([no_rows(weight)])
    enrolment.enroll(grads, known=False)
    records.find_counts(optimizer)  # the record stays, for the next call
    enrolment.compile_missing(grads, dense=False)
    record, (rows, total) = of.record, decay_of(optimizer, index, weight)
    assert isinstance(record, Record)
    layout = row_layout(of.context, optimizer, record.layout, record.block)
    assert isinstance(record.deferred, Deferred)
    assert layout is not None
    lies = weight if layout.pitched else np.require(weight, None, ["C", "A"])
    row = record.deferred.enter(rows, total, total)
    row[KEY], row[record.words[w.WEIGHT_COLUMN]] = 0, address_of(lies)
    chunks, size = chunks_of((len(weight), int(row[WIDTH])))
    parallel = size >= PARALLEL_FROM and may_run_parallel()
    kernel, table = cpu.flush_decay(layout, parallel), row[: layout.first_grad + 1]
    with turn() if parallel else nullcontext():
        kernel(chunks, table.view(np.uint64).reshape(1, -1))
    if lies is not weight:
        weight[...] = lies
    optimizer.row_decay[index] = rows, total
    enrolment.copy_back()
    enrolment.drop_single()
