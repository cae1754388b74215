"""Sphinx configuration: ``sphinx-build -W --keep-going -b html docs docs/_build/html``."""

import inspect
import re
import sys
from pathlib import Path

from numpydoc.xref import DEFAULT_LINKS

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
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_links",
    "sphinx_pictures",
    "sphinx-mathjax-offline",  # MathJax is part of the build and not loaded from a network
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

# A part of each inventory, so that a build needs no network.
intersphinx_mapping = {
    "numpy": ("https://numpy.org/doc/stable", "inventories/numpy.inv"),
    "python": ("https://docs.python.org/3", "inventories/python.inv"),
    "scipy": ("https://docs.scipy.org/doc/scipy", "inventories/scipy.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.inv"),
}

autodoc_mock_imports = ["mpi4py"]  # needs an MPI library
autodoc_typehints = "none"  # types are in the numpydoc sections
OUTSIDE = "numpy.dtype", "numpy.ndarray", "os.PathLike", "torch.Tensor", "threading.RLock"
numpydoc_show_class_members = False
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"  # but for these
numpydoc_xref_aliases = {
    **{name: name for name in DEFAULT_LINKS},  # links of each int and float are of no use
    **{name: f":obj:`{name}`" for name in OUTSIDE},
    "LossScaler": "fastopt.amp.LossScaler",
    "Optimizer": "fastopt.optimizer.Optimizer",
    "Parameter": "fastopt.parameter.Parameter",
    "ParameterDict": "fastopt.parameter.ParameterDict",
    "RowSparse": "fastopt.sparse.RowSparse",
    "Updater": "fastopt.optimizer.Updater",
}
# No PR04: a parameter without a type is described in the docstring of another class.
numpydoc_validation_checks = {
    *("GL01", "GL03", "GL05", "GL06", "GL07", "GL08", "GL09", "GL10"),
    *("SS01", "SS02", "SS03", "SS04", "SS06"),
    *("PR01", "PR02", "PR03", "PR05", "PR10"),
}
numpydoc_validation_exclude = {
    r"\.Communicator$",  # a protocol, without a constructor
    r"\.(Rule|Scope|SGLD|Test)$",  # created by functions, or with the base class's constructor
    r"\.JointSums$",  # arguments are those of Optimizer
    r"\.ShardedUpdater\.",  # methods with the same arguments as those of Updater
    r"\.kernels\.scalars\.",  # arguments are those of update rules
    # fields of named tuples, with generated docstrings
    r"\.(StepInfo|SlowCalls|Functional)\.",
    r"\.JitFunctions\.(init|update|update_rows)$",
    r"\.MXNetStates\.optimizer$",  # None, whose class has no docstring
}

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["fastopt.css"]
html_title = f"fastopt {release}"
html_favicon = "_static/favicon.svg"
html_sidebars = {"**": ["contents.html"]}
html_theme_options = {
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "footer_start": [],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_copy_source = html_show_sourcelink = False


NAMES = {
    "betas": [
        "betas : tuple of float, optional",
        "    Another name of `beta1` and `beta2` together.",
    ],
    "eps": ["eps : float, optional", "    Another name of `epsilon`."],
    "epsilon": ["epsilon : float, optional", "    Another name of `eps`."],
}
COMMON = re.compile(r"\*\*common\n    .*\n(?=\n)", re.MULTILINE)


def described(kinds: list[type]) -> dict[str, list[str]]:
    """Return the docstring lines of each argument that the docstrings of classes describe."""
    found = {}
    for base in kinds:
        text = inspect.cleandoc(base.__doc__ or "").partition("\nParameters\n----------\n")[2]
        for part in re.split(r"\n(?=[\w*])", text.partition("\n\n")[0]):
            names, is_typed, _ = part.partition(" : ")
            if is_typed and "*" not in names:
                found |= dict.fromkeys(names.split(", "), part.splitlines())
    return found


def list_all_arguments(app, what, name, obj, options, lines):
    """Replace ``**common`` by the arguments of the base classes."""
    text = "\n".join(lines)
    if what != "class" or not COMMON.search(text):
        return
    listed = re.findall(r"^[\w, ]+(?= : |$)", text, re.MULTILINE)
    known = {each for line in listed for each in line.split(", ")}
    named = re.findall(r":class:`~fastopt\.optimizer\.(\w+)`", COMMON.search(text)[0])
    others = [getattr(fastopt.optimizer, each) for each in named]
    known_text = NAMES | described([*reversed(obj.__mro__[1:]), *others])
    names = [each for each in inspect.signature(obj).parameters if each not in known]
    added = {each: None for name in names for each in ["\n".join(known_text[name])]}
    lines[:] = COMMON.sub(lambda _: "\n".join(added) + "\n", text).splitlines()


def setup(app):
    """Connect :func:`list_all_arguments`, to run before numpydoc."""
    app.connect("autodoc-process-docstring", list_all_arguments, priority=400)
