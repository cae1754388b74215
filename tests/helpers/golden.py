"""The checker that came with the numbers of MXNet, and what it replays."""

import importlib.util
import json
import sys

import pytest

from helpers.paths import GOLDEN, TESTS

__all__ = ["checker", "manifest", "replay"]


@pytest.fixture(scope="module")
def checker():
    spec = importlib.util.spec_from_file_location("check_golden", GOLDEN / "check_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def replay(checker):
    folder = checker.Folder(str(GOLDEN))
    adapter = checker.load_adapter(str(TESTS / "golden_adapter.py"))
    yield lambda run, only, *options: getattr(checker, run)(folder, adapter, only, *options)
    sys.modules.pop("golden_adapter", None)


def manifest():
    return json.loads((GOLDEN / "manifest.json").read_text())
