"""Settings of Sphinx: ``sphinx-build -W --keep-going -b html docs docs/_build/html``."""

import sys
from pathlib import Path

import fastopt

sys.path.insert(0, str(Path(__file__).parent))

project = "fastopt"
author = "The fastopt developers"
version = release = fastopt.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx_design",
    "sphinx_pictures",
    "sphinx-mathjax-offline",  # formulas are drawn by scripts of the build, not of a network
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_mock_imports = ["mpi4py"]  # which needs a library outside of Python
autodoc_typehints = "none"  # numpydoc says them in words
numpydoc_show_class_members = False
# A parameter without a type is described where its class is.
numpydoc_validation_checks = {
    *("GL01", "GL03", "GL05", "GL06", "GL07", "GL08", "GL09", "GL10"),
    *("SS01", "SS02", "SS03", "SS04", "SS06"),
    *("PR01", "PR02", "PR03", "PR05", "PR10"),
}
numpydoc_validation_exclude = {
    r"\.(Rule|Scope|SGLD|Test)$",  # made by functions; or with the constructor of the base class
    r"\.ShardedUpdater\.",  # its methods take what those of Updater do
    r"\.kernels\.scalars\.",  # arguments of rules, all of them
    r"\.MXNetStates\.optimizer$",  # None, whose class has no docstring
}

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["fastopt.css"]
html_title = f"fastopt {release}"
html_sidebars = {"**": ["contents.html"]}
html_theme_options = {
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "footer_start": [],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
html_copy_source = html_show_sourcelink = False
