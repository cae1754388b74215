"""An extension of Sphinx: links that need no markup, the list of all classes, page descriptions.

Objects of NumPy, SciPy, torch and Python are those of ``inventories``: the build needs no network.
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

__all__ = ["ClassLinks", "Siblings", "Summaries", "WordLinks", "setup"]

LINKED = re.compile(r"(arXiv:\d{4}\.\d{4,5}|\btorch\.optim\.[A-Z]\w+)")
"""Words that are links wherever they stand."""

OUTSIDE = re.compile(r"(np|numpy|scipy|torch)((?:\.\w+)+)(?:\(.*\))?")
"""Code that is a link if another project's inventory has the object."""

TABLES = re.compile(r"^\.\. autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", re.MULTILINE)
"""The names of each table in the page of a module."""

ELSEWHERE = ("fastopt", "fastopt.torch")
"""Modules whose names :class:`Summaries` leaves to their pages: other modules have them too."""


class WordLinks(SphinxTransform):
    """Makes links of arXiv numbers and of the names of other projects' objects."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Split the texts that contain them, and wrap the literals that are them."""
        unlinked = (nodes.reference, nodes.literal_block, nodes.title, pending_xref)
        for text in list(self.document.findall(nodes.Text)):
            above = list(_above(text))
            if any(isinstance(each, unlinked) for each in above):
                continue
            if isinstance(text.parent, nodes.literal):
                found = OUTSIDE.fullmatch(text)
                if found:
                    name = f"{'numpy' if found[1] == 'np' else found[1]}{found[2]}"
                    text.parent.replace_self(self._object(name, text.parent.deepcopy()))
            elif len(parts := LINKED.split(text)) > 1:
                text.parent.replace(text, [self._link(part) for part in parts if part])

    def _link(self, part: str) -> nodes.Node:
        """Return the text, as a link if it is a word of :data:`LINKED`."""
        if not LINKED.fullmatch(part):
            return nodes.Text(part)
        kind, _, number = part.partition(":")
        if kind == "arXiv":
            return nodes.reference("", part, refuri=f"https://arxiv.org/abs/{number}")
        return self._object(part, nodes.inline("", part))

    def _object(self, name: str, content: nodes.Node) -> nodes.Node:
        return _xref(self, "obj", name, content, refwarn=False)


def _above(node: Any) -> Iterator[Any]:
    while node := node.parent:
        yield node


def _xref(
    transform: SphinxTransform, role: str, name: str, content: nodes.Node, refwarn: bool
) -> nodes.Node:
    """Return a reference to a Python object, which Sphinx resolves."""
    target = {"refdomain": "py", "reftype": role, "reftarget": name, "refwarn": refwarn}
    return pending_xref("", content, refdoc=transform.env.docname, **target)


class ClassLinks(SphinxTransform):
    """Links the names in the first column of a table of optimizers to the pages of classes."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Replace the literals."""
        for row in self.document.findall(nodes.row):
            for literal in list(row[0].findall(nodes.literal)):
                known = opt_registry.get(literal.astext())
                if known is not None:
                    name = f"fastopt.optimizer.{known.__name__}"
                    link = _xref(self, "class", name, literal.deepcopy(), refwarn=True)
                    literal.parent.replace(literal, link)


class Siblings(SphinxDirective):
    """Links a class to the others of its table in the page of its module, and to the guide."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a box, or nothing for a class that has no siblings."""
        path = Path(self.env.doc2path("api/fastopt.optimizer"))
        self.env.note_dependency(str(path))
        for table in TABLES.findall(path.read_text(encoding="utf-8")):
            names = table.split()
            if self.arguments[0] in names and names[0] != "Optimizer":
                others = [f":class:`{name}`" for name in names if name != self.arguments[0]]
                guide = ":doc:`/which-optimizer`, :doc:`/optimizers`"
                text = f".. seealso::\n\n   {', '.join([guide, *others])}\n"
                return self.parse_text_to_nodes(text)
        return []


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
        tables = TABLES.findall(text)
        if module in ELSEWHERE or not tables:
            return found
        return f"{found}.. autosummary::\n   :nosignatures:\n\n{''.join(tables)}\n"


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
    app.add_transform(WordLinks)
    app.add_transform(ClassLinks)
    app.add_directive("siblings", Siblings)
    app.add_directive("summaries", Summaries)
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True}
