"""What the metadata of the package say, which an index shows without the repository."""

import importlib.util
import re
import shutil
import tomllib

import pytest

import fastopt
from fastopt._console import EXTRAS
from helpers.paths import ROOT
from helpers.processes import run

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = METADATA["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPT = (ROOT / ".ci" / "run").read_text("utf-8")


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
    assert re.search(r"<\w+[^>]*(?:src|srcset|href)=", text) is None
    assert "\n![Time of a step of Adam" in text


def test_links_lead_to_the_pages_and_files_of_the_version():
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    picture = '<picture>\n<source srcset="d.svg">\n<img src="docs/l.svg" alt="Times">\n</picture>'
    links = "[page](docs/a/b.md#c), [file](LICENSE), [title](#why), [site](https://d.org)\n"
    readme = f"# a\n\n{picture}\n\n## Try it\n\npip install .\n\n## Why\n\n{links}"
    expected = """\
# a

![Times](https://src.org/raw/v1/docs/l.svg)

```sh
python -m pip install fastopt
```

## Why

[page](https://doc.org/a/b.html#c), [file](https://src.org/blob/v1/LICENSE), \
[title](https://src.org/blob/v1/README.md#why), [site](https://d.org)
"""
    assert module.description(readme, "https://src.org", "https://doc.org", "v1") == expected


def test_urls_are_below_the_addresses_that_stand_in_one_place(metadata):
    addresses = METADATA["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    assert all(url.startswith(tuple(addresses.values())) for url in metadata.urls.values())
    found = [path.name for path in texts() if addresses["source"] in path.read_text("utf-8")]
    assert found == ["pyproject.toml"]


def texts():
    """The files in which code and documentation are."""
    roots = ("fastopt", "docs", "asv_benchmarks", "packaging")
    files = [path for root in roots for path in (ROOT / root).rglob("*")]
    files += ROOT.glob("*.*")
    suffixes = {".py", ".md", ".rst", ".toml", ".json", ".yaml", ".sh", ".cff"}
    read = [path for path in files if path.suffix in suffixes and "_build" not in path.parts]
    assert len(read) > 200
    return read


UNUSED = """
import array, sys
import numpy as np
import fastopt, fastopt.__main__, fastopt.adapters
updater = fastopt.Updater("sgd")
updater(0, array.array("f", [1]), array.array("f", [1]))
updater.step({"a": np.ones(2)}, {"a": np.ones(2)})
print(sorted({*sys.argv[1:]} & {*sys.modules}))
fastopt.EmbeddingTable
"""


def test_nothing_is_imported_that_is_not_used(run_python):
    libraries = "sklearn tqdm matplotlib mpi4py thinc river pennylane torch jax"
    assert run_python(UNUSED, *libraries.split(), "fastopt.demo", "fastopt.table") == "[]\n"


def test_readme_is_short():
    assert README.count("\n") <= 150


def test_extras_are_those_that_messages_name():
    extras = PROJECT["optional-dependencies"]
    for name, packages in EXTRAS.items():
        assert set(extras[name]) <= set(packages), name


def test_platforms_are_those_of_the_classifiers():
    text = (ROOT / "docs/platforms.md").read_text(encoding="utf-8")
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line]
    assert f"| Linux | x86-64 | {versions[0]} to {versions[-1]} | tested |" in text
    assert versions == [f"3.{minor}" for minor in range(11, 11 + len(versions))]
    assert PROJECT["requires-python"] == f">={versions[0]}"


def test_citation_has_the_version_and_license_of_the_package():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fastopt.__version__}\n" in text
    assert f"\nlicense: {PROJECT['license']}\n" in text


def test_the_description_alone_installs_fastopt_from_an_index():
    """All other commands work from a clone."""
    pattern = re.compile(r"pip install(?: -\S+)* [\"']?fastopt\b")
    found = [path for path in texts() if pattern.search(path.read_text(encoding="utf-8"))]
    assert found == [ROOT / "hatch_build.py"]


@pytest.mark.skipif(shutil.which("git") is None, reason="a release is a tag of git")
def test_a_release_is_refused_until_each_of_its_steps_is_done(tmp_path):
    for name in ("packaging/release.sh", "fastopt/__init__.py", "CITATION.cff", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    citation, changes = tmp_path / "CITATION.cff", tmp_path / "CHANGELOG.md"
    text = re.sub("date-released.*\n", "", citation.read_text(encoding="utf-8"))
    citation.write_text(text, encoding="utf-8")
    changes.write_text("# Changelog\n\n## [Unreleased]\n", encoding="utf-8")
    version = fastopt.__version__

    def git(*command):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        run("git", *identity, *command, cwd=tmp_path)

    def release():
        return run("bash", "packaging/release.sh", status=1, cwd=tmp_path).stderr

    def commit():
        git("add", "--all")
        git("commit", "--message", "release")

    git("init")
    commit()
    assert "CITATION.cff has no date-released" in release()
    citation.write_text(f"{text}date-released: 2030-01-02\n", encoding="utf-8")
    assert f"CHANGELOG.md has no ## [{version}] - DATE" in release()
    changes.write_text(f"# Changelog\n\n## [{version}] - 2030-01-02\n", encoding="utf-8")
    assert "not committed" in release()
    commit()
    assert f"not tagged v{version}" in release()
    git("tag", f"v{version}")
    assert "pyproject.toml has no addresses yet" in release()
    citation.write_text(text.replace(f"version: {version}", "version: 0.0.1"), encoding="utf-8")
    assert "another version" in release()


# .ci/run: README's commands come first, with nothing installed but what they install


def test_the_commands_of_the_readme_run_in_a_new_environment():
    script, _, _ = SCRIPT.partition('step "$command"')
    assert 'python3 -m venv "$temporary/venv"' in script
    assert "system-site-packages" not in script
    assert "pip install" not in script


@pytest.mark.parametrize("tests", ["tests/adapters", "tests/pytorch"])
def test_no_test_of_another_library_is_skipped(tests):
    lines = SCRIPT.replace("\\\n", "").splitlines()
    (line,) = (each for each in lines if re.search(rf"pytest +-n 2 (-m .not gpu. )?+{tests}", each))
    assert "FASTOPT_TEST_SKIPS=fail" in line


def test_an_unknown_argument_is_refused():
    done = run("bash", ROOT / ".ci" / "run", "exhausting", status=2)
    assert done.stdout == ""
    assert done.stderr == ".ci/run: the only argument is exhaustive, got exhausting\n"


@pytest.mark.parametrize(("last", "status"), [("echo two", 0), ("false", 1)])
def test_it_ends_with_the_time_of_each_step(last, status, tmp_path):
    """Up to the first step it is the script itself, without its environment."""
    script, _, _ = SCRIPT.partition("commands=$(")
    script = script.replace('python3 -m venv "$temporary/venv"\n', "")
    script += f"step true\nstep '{last}'\n"
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(script, "utf-8")
    done = run("bash", tmp_path / ".ci" / "run", status=status)
    table = done.stdout.partition("Minutes of each step\n")[2]
    assert re.findall(r"^ +0:0\d  (.*)$", table, re.MULTILINE) == ["true", last]
