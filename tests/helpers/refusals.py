"""Tables of errors: code, and its error as ``Kind: pattern of the message``."""

import builtins

import pytest


def check_refused(code, error, names):
    """Run code with `names`, which raises the error, in one line."""
    kind, _, words = error.partition(": ")
    with pytest.raises({**vars(builtins), **names}[kind], match=words) as caught:
        eval(code, names)
    assert "\n" not in str(caught.value)


def each(code, error, *values):
    """Rows of a table for code with one of the values in its braces."""
    return {code.format(value): error for value in values}
