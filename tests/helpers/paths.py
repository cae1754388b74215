"""Folders of the repository."""

from pathlib import Path

__all__ = ["DOCS", "GOLDEN", "ROOT", "TESTS"]

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DOCS, GOLDEN = ROOT / "docs", TESTS / "golden"
