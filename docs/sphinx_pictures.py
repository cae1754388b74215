"""An extension of Sphinx: draws pictures from the library, and shows dark ones on dark pages."""

from typing import Any

import history
import pictures
from docutils import nodes
from sphinx.transforms import SphinxTransform

__all__ = ["DarkPictures", "setup"]


class DarkPictures(SphinxTransform):
    """Puts the picture for dark pages beside each one for light pages; the theme shows one."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Copy the nodes of such images."""
        for image in list(self.document.findall(nodes.image)):
            if image["uri"].endswith("-light.svg"):
                dark = image.deepcopy()
                dark["uri"] = image["uri"].replace("-light.svg", "-dark.svg")
                image["classes"].append("only-light")
                dark["classes"].append("only-dark")
                image.parent.insert(image.parent.index(image) + 1, dark)


def setup(app: Any) -> dict[str, Any]:
    """Draw the pictures before pages are read, and copy images while they are."""
    app.add_transform(DarkPictures)
    app.connect("builder-inited", lambda _: pictures.draw_schedules())
    app.connect("builder-inited", lambda _: pictures.draw_codes())
    app.connect("builder-inited", lambda _: pictures.draw_compared())
    app.connect("builder-inited", lambda _: pictures.draw_layers())
    app.connect("builder-inited", lambda _: history.draw_history())
    return {"parallel_read_safe": True}
