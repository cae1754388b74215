"""The examples of the page on several processes, on any number of ranks."""

import contextlib
import doctest
import io
import os
from importlib import import_module
from pkgutil import iter_modules

import numpy as np
from ranks_common import comm

from fastopt import distributed
from helpers.pages import blocks, printed
from helpers.paths import ROOT

PAGE = ROOT / "docs" / "distributed.md"


def said(code, namespace):
    """What a program prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, str(PAGE), "exec"), namespace)
    return out.getvalue().splitlines()


def check_docstrings_are_right(folder):
    if comm.size > 1:
        return  # they show one rank
    found = [module.name for module in iter_modules(distributed.__path__, "fastopt.distributed.")]
    flags = doctest.NORMALIZE_WHITESPACE
    results = [doctest.testmod(import_module(name), optionflags=flags) for name in found]
    assert not any(failed for failed, _ in results)
    assert sum(tried for _, tried in results) > 20


def check_examples_print_what_they_say(folder):
    os.chdir(folder)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(PAGE, "py"):
        if "import torch" in code:  # torchrun starts it
            continue
        assert said("\n" * line + code, namespace) == printed(code)
        comm.Barrier()


def check_three_lines_change_from_one_process_to_many(folder):
    ((_, change),) = blocks(PAGE, "diff")
    lines = change.splitlines()
    assert sum(line.startswith("+") for line in lines) == 3
    ends = []
    for sign in "-+":
        code = "\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign))
        namespace = {}
        assert said(code, namespace) == printed(code)
        assert len(printed(code)) == 1
        ends.append(np.append(namespace["weight"], namespace["bias"]))
    np.testing.assert_allclose(*ends, rtol=1e-5)
