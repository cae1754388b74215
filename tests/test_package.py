"""What the metadata of the package say, which an index shows without the repository."""

import importlib.util
import re
import tomllib

import pytest

import fastopt
from fastopt._console import EXTRAS
from helpers.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def metadata():
    """The metadata as hatchling builds them."""
    core = pytest.importorskip("hatchling.metadata.core")
    manager = pytest.importorskip("hatchling.plugin.manager").PluginManager()
    return core.ProjectMetadata(str(ROOT), manager).core


def test_the_description_stands_alone(metadata):
    text = metadata.readme
    assert metadata.readme_content_type == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert re.search(r"<\w+[^>]*(?:src|srcset|href)=|!\[", text) is None
    assert ".md" not in text


def test_the_description_has_the_commands_the_example_and_the_features(metadata):
    text = metadata.readme
    assert text.startswith("# fastopt\n\nfastopt updates the weights of NumPy training loops")
    for part in re.findall(r"^```\w+\n.*?^```$", README, re.MULTILINE | re.DOTALL):
        assert part in text
    for title in ("## Try it", "## When to use it", "## When not to", "## Features"):
        assert f"\n{title}\n" in text


def test_links_become_their_words():
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = "See [a page](docs/a.md) and [a site](https://a.org).\n\n## Documentation\n\nmore\n"
    assert module.standalone(readme) == "See a page and [a site](https://a.org).\n"


def test_readme_is_short():
    assert README.count("\n") <= 180


def test_extras_are_those_that_messages_name():
    extras = PROJECT["optional-dependencies"]
    for name, packages in EXTRAS.items():
        assert set(extras[name]) <= set(packages), name


def test_python_versions_are_those_that_the_package_asks_for():
    first, *_ = (line for line in PROJECT["classifiers"] if "Python :: 3." in line)
    assert PROJECT["requires-python"] == f">={first.rpartition(' ')[2]}"


def test_citation_has_the_version_and_license_of_the_package():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fastopt.__version__}\n" in text
    assert f"\nlicense: {PROJECT['license']}\n" in text


def test_no_text_installs_fastopt_from_an_index():
    """There is none: all commands work from a clone."""
    pattern = re.compile(r"pip install(?: -\S+)* [\"']?fastopt\b")
    roots = ("fastopt", "docs", "asv_benchmarks")
    files = [path for root in roots for path in (ROOT / root).rglob("*")]
    files += ROOT.glob("*.*")
    suffixes = {".py", ".md", ".rst", ".toml", ".json"}
    read = [path for path in files if path.suffix in suffixes and "_build" not in path.parts]
    assert len(read) > 200
    found = [path for path in read if pattern.search(path.read_text(encoding="utf-8"))]
    assert found == []
