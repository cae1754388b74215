"""An extension of Sphinx: links that need no markup, the list of all classes, page descriptions.

It needs no network: addresses of other projects' objects stand in :data:`OBJECTS`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from fastopt.optimizer import opt_registry

__all__ = ["OBJECTS", "ArxivLinks", "ClassLinks", "Summaries", "setup"]

ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")

NUMPY, PYTHON = "https://numpy.org/doc/stable/reference", "https://docs.python.org/3/library"
OBJECTS = {
    "numpy.ndarray": f"{NUMPY}/generated/numpy.ndarray.html",
    "numpy.dtype": f"{NUMPY}/generated/numpy.dtype.html",
    "numpy.asarray": f"{NUMPY}/generated/numpy.asarray.html",
    "numpy.random.default_rng": f"{NUMPY}/random/generator.html#numpy.random.default_rng",
    "numpy.random.Generator": f"{NUMPY}/random/generator.html#numpy.random.Generator",
    "torch.Tensor": "https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor",
    "torch.optim.Optimizer": "https://docs.pytorch.org/docs/stable/optim.html#torch.optim.Optimizer",
    "scipy.optimize.minimize": "https://docs.scipy.org/doc/scipy/reference/generated/"
    "scipy.optimize.minimize.html",
    "os.PathLike": f"{PYTHON}/os.html#os.PathLike",
}
"""Objects of other projects that pages and docstrings refer to."""

ELSEWHERE = ("fastopt", "fastopt.torch")
"""Modules whose names :class:`Summaries` leaves to their pages: other modules have them too."""


class ArxivLinks(SphinxTransform):
    """Makes links of arXiv numbers."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Split the texts that contain numbers."""
        for text in list(self.document.findall(nodes.Text)):
            parts = ARXIV.split(text)
            outer = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title)
            if len(parts) > 1 and not any(isinstance(each, outer) for each in _above(text)):
                text.parent.replace(text, list(_linked(parts)))


def _above(node: Any) -> Iterator[Any]:
    while node := node.parent:
        yield node


def _linked(parts: list[str]) -> Iterator[nodes.Node]:
    """Yield texts, and links of the numbers between them."""
    for k, part in enumerate(parts):
        if k % 2:
            link = f"arXiv:{part}"
            yield nodes.reference("", link, refuri=f"https://arxiv.org/abs/{part}")
        elif part:
            yield nodes.Text(part)


class ClassLinks(SphinxTransform):
    """Links the names in the first column of a table of optimizers to the pages of classes."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Replace the literals."""
        for row in self.document.findall(nodes.row):
            for literal in list(row[0].findall(nodes.literal)):
                known = opt_registry.get(literal.astext())
                if known is not None:
                    link = pending_xref(
                        "",
                        literal.deepcopy(),
                        refdomain="py",
                        reftype="class",
                        reftarget=f"fastopt.optimizer.{known.__name__}",
                        refdoc=self.env.docname,
                        refwarn=True,
                    )
                    literal.parent.replace(literal, link)


class Summaries(SphinxDirective):
    """Lists classes and functions, with a line for each: modules in its content, then others."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Read the pages of the modules, and list what they list."""
        folder = Path(self.get_source_info()[0]).parent
        others = sorted(page.stem for page in folder.glob("fastopt*.rst"))
        modules = dict.fromkeys([*filter(None, self.content), *others])
        text = "\n".join(self._of(folder / f"{module}.rst") for module in modules)
        return self.parse_text_to_nodes(text, allow_section_headings=True)

    def _of(self, page: Path) -> str:
        self.env.note_dependency(str(page))
        text = page.read_text(encoding="utf-8")
        title, module = f":doc:`{page.stem}`", page.stem
        head, *_ = re.split(r"^\.\. (?:autosummary|class|data)::", text, maxsplit=1, flags=re.M)
        first = head.partition(f".. currentmodule:: {module}\n")[2].strip().partition("\n\n")[0]
        first = "" if re.search(r"^(-{4}|={4})", first, re.M) else first
        found = f"{title}\n{'-' * len(title)}\n\n.. currentmodule:: {module}\n\n{first}\n\n"
        tables = re.findall(r"^\.\. autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", text, re.M)
        if module in ELSEWHERE or not tables:
            return found
        return f"{found}.. autosummary::\n   :nosignatures:\n\n{''.join(tables)}\n"


def link_outside(app: Any, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """Return a link to an object of :data:`OBJECTS`."""
    address = OBJECTS.get(node["reftarget"])
    return address and nodes.reference("", "", content, refuri=address, internal=False)


def describe(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Describe a page to search engines by its first paragraph."""
    if tree is None:
        return
    if page == app.config.root_doc:
        context["title"] = "in-place optimizers for NumPy"
    first = next((p.astext() for p in tree.findall(nodes.paragraph)), "")
    text = " ".join(first.split()).replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    context["metatags"] += f'<meta name="description" content="{text[:300]}">'


def setup(app: Any) -> dict[str, Any]:
    """Register all of it."""
    app.add_transform(ArxivLinks)
    app.add_transform(ClassLinks)
    app.add_directive("summaries", Summaries)
    app.connect("missing-reference", link_outside)
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True}
