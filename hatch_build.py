"""The description of the package in its metadata: README.md as it can be read anywhere."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["StandaloneReadme", "standalone"]

LAST = "## Documentation"
"""From this title on README.md describes what only a clone has."""


def standalone(readme: str) -> str:
    """Take pictures, relative links and the sections about the clone out of README.md."""
    text, _, _ = readme.partition(f"{LAST}\n")
    text = re.sub(r"<picture>.*?</picture>\n\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^The \[measurements\].*?\n\n", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text).rstrip() + "\n"


class StandaloneReadme(MetadataHookInterface):
    """Sets the field ``readme`` when a wheel or an sdist is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the field."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": standalone(text)}
