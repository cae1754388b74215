"""Tests of adapters are skipped where their library is missing, but not in ``.ci/run``."""

import os
from importlib.util import find_spec

NAMES = {"scikit_learn": "sklearn"}
collect_ignore = [
    f"test_{name}.py"
    for name in ("thinc", "spacy", "scikit_learn", "river", "pennylane")
    if find_spec(NAMES.get(name, name)) is None and os.environ.get("FASTOPT_TEST_SKIPS") != "fail"
]
