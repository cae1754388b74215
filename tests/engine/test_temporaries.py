"""Whoever holds the address of an array keeps the array alive."""

import ast

from helpers import temporaries
from helpers.cases import CHOICES, every_choice


@every_choice
def test_gradients_that_the_caller_does_not_keep_have_the_bits_of_those_that_he_keeps(
    choice, run_python
):
    """Freed memory is overwritten, so that what is read from it differs."""
    code = f"from helpers import temporaries; temporaries.main({choice!r})"
    lines = run_python(code, PYTHONMALLOC="debug", MALLOC_PERTURB_="165", timeout=3600).splitlines()
    assert lines[:-1] == []
    assert int(lines[-1]) > 100


@every_choice
def test_freed_memory_is_not_read(choice, run_python):
    """Its bytes change no bit, which compiled sums over tensors show first."""
    code = f"from helpers import temporaries; print(temporaries.ends({choice!r}))"
    lines = run_python(code, PYTHONMALLOC="debug", MALLOC_PERTURB_="165", timeout=3600)
    expected, found = temporaries.ends(choice), ast.literal_eval(lines)
    assert len(expected) == len(CHOICES[choice])
    assert [name for name in expected if found[name] != expected[name]] == []
