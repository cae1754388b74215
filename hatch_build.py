"""Metadata of the package that depend on the project's addresses: description and URLs."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["Addresses", "description", "urls"]

TRY = re.compile(r"^## Try it\n.*?(?=^## )", re.DOTALL | re.MULTILINE)
"""The section with commands for a clone of the repository."""

INSTALL = """\
```sh
python -m pip install fastopt
```

"""
"""What stands there instead on the page of a package index."""

PICTURE = re.compile(r'<picture>.*?<img src="([^"]+)" alt="([^"]+)">.*?</picture>', re.DOTALL)
LINK = re.compile(r"(?<!!)(\[[^\]]+\])\((?!https?:)([^)#]*)(#[^)]*)?\)")


def description(readme: str, source: str, documentation: str, tag: str) -> str:
    """Return README.md as it can be read without the repository.

    The commands for a clone become the installation from the index, and links and pictures have
    the addresses of the pages and files of this version.

    Parameters
    ----------
    readme : str
        Text of README.md.
    source : str
        Address of the repository.
    documentation : str
        Address of the built documentation.
    tag : str
        Name of the version's tag.
    """

    def absolute(link: re.Match[str]) -> str:
        words, path, title = link[1], link[2], link[3] or ""
        page = re.fullmatch(r"docs/([\w/-]+)\.md", path)
        address = f"{source}/blob/{tag}/{path or 'README.md'}"
        return f"{words}({f'{documentation}/{page[1]}.html' if page else address}{title})"

    text = TRY.sub("", readme).replace("\n## ", f"\n{INSTALL}## ", 1)
    text = PICTURE.sub(lambda found: f"![{found[2]}]({source}/raw/{tag}/{found[1]})", text)
    return LINK.sub(absolute, text)


def urls(source: str, documentation: str) -> dict[str, str]:
    """Return the links that a package index shows beside the description."""
    return {
        "Documentation": documentation,
        "Source": source,
        "Changelog": f"{source}/blob/main/CHANGELOG.md",
        "Issues": f"{source}/issues",
    }


class Addresses(MetadataHookInterface):
    """Sets the fields ``readme`` and ``urls`` when a wheel or an sdist is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the fields."""
        source, documentation = self.config["source"], self.config["documentation"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = description(text, source, documentation, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(source, documentation)
