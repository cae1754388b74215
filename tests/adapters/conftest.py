"""Tests of adapters are skipped where their library is missing, but not in ``.ci/run``."""

import os
from importlib.util import find_spec

NEEDS = {
    "test_thinc.py": "thinc",
    "test_spacy.py": "spacy",
    "test_scikit_learn.py": "sklearn",
    "test_river.py": "river",
    "test_pennylane.py": "pennylane",
}
collect_ignore = [name for name, library in NEEDS.items() if find_spec(library) is None]
if os.environ.get("FASTOPT_TEST_SKIPS") == "fail":
    collect_ignore = []
