"""Whoever holds the address of an array keeps the array alive."""

from helpers.cases import every_or_few


@every_or_few
def test_gradients_that_the_caller_does_not_keep_have_the_bits_of_those_that_he_keeps(
    choice, run_python
):
    """Freed memory is overwritten, so that what is read from it differs."""
    code = f"from helpers import temporaries; temporaries.main({choice!r})"
    lines = run_python(code, PYTHONMALLOC="debug", MALLOC_PERTURB_="165", timeout=3600).splitlines()
    assert lines[:-1] == []
    assert int(lines[-1]) > 100
