"""Updaters whose arrays Python reads, as where compiled code must not read their headers."""

from fastopt._engine.reader import Reader


def read_in_python(updater):
    """Let Python write what compiled code reads of the arrays of an updater; return it."""
    records = updater.records
    records.enter, records.entry = None, lambda: Reader(records)
    records.forget()
    return updater
