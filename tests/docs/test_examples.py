"""The examples of the documentation: they run and find what their pages say, which include them."""

import re
import sys

import pytest

from helpers.paths import DOCS
from helpers.processes import run

EXAMPLES = {
    "nearest_words": ("sparse-embeddings.md", r"^exception +.*\b(clause|handler|raise|raised)\b"),
    "recommend": ("embedding-tables.md", r"^epoch 5: 1[345]\.\d%"),
}
"""The page of each example, and what it prints."""


def test_every_example_is_included_in_its_page():
    assert {path.stem for path in (DOCS / "examples").glob("*.py")} == set(EXAMPLES)
    for name, (page, _) in EXAMPLES.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        assert f"```{{literalinclude}} examples/{name}.py\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_and_find_what_they_should(name):
    done = run(sys.executable, "-W", "error", DOCS / "examples" / f"{name}.py")
    assert re.search(EXAMPLES[name][1], done.stdout, re.MULTILINE), done.stdout
