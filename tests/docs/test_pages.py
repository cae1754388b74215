"""The documentation: its code runs, and its lists are complete."""

import doctest
import importlib
import json
import os
import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import fastopt
from fastopt import lr_scheduler, optimizer
from helpers import defaults
from helpers.cases import CASES, OF_MATRICES, kept
from helpers.pages import blocks, printed
from helpers.paths import DOCS, ROOT
from helpers.processes import run

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
PAGES.remove(DOCS / "cuda.md")  # see tests/gpu
WORKED = DOCS / "add-an-optimizer.md"
QUOTING = ("recipes.md", "torch.md")
"""Pages whose code has tests of its own: it quotes scripts, or needs torch (tests/pytorch)."""
FIRST_READ = (str(ROOT / "README.md"), str(DOCS / "quick-start.md"))
"""What a newcomer sees first."""
ALL = {case.name for case in CASES} | {*OF_MATRICES}


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    "page",
    kept([page for page in PAGES if page.name not in QUOTING], *FIRST_READ),
    ids=lambda page: page.name,
)
def test_code_runs_and_prints_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(page, "python", "pycon"):
        if code.startswith('"""'):
            continue  # a whole module: see test_worked_example_passes_the_tests_of_the_library
        if code.startswith(">>>"):
            session = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), line)
            session.globs = namespace
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            runner = doctest.DebugRunner(verbose=False, optionflags=flags)
            runner.run(session, clear_globs=False)
            continue
        capsys.readouterr()
        # Blank lines in front make tracebacks show the lines of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
        assert capsys.readouterr().out.splitlines() == printed(code)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_pool_that_forks_after_an_update_trains_in_its_workers(run_python):
    page = DOCS / "loops.md"
    train = next(code for _, code in blocks(page, "python") if "def train(" in code)
    ((_, pool),) = blocks(page, "py")
    code = "\n".join([next(blocks(page, "python"))[1], train, pool])
    assert run_python(code).splitlines()[-1:] == printed(pool)


def test_the_table_of_defaults_is_that_of_the_signatures():
    text = (DOCS / "formulas.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| `(\w+)` \| (`\w+`) \| (\S+) \| (\S+) \| (`\S+`) \|$", re.MULTILINE)
    assert row.findall(text) == list(defaults.rows())


def anchors(page):
    """The anchors of the headings of a page, as forges and the built site name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        targets = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text)
        targets += [(path, "") for path in re.findall(r'(?:src|srcset)="([^"]+)"', text)]
        for target, anchor in targets:
            if target.startswith("_static/schedules/"):
                continue  # drawn by the build: see test_pictures.py
            path = page.parent / target if target else page
            assert path.is_file(), f"{page.name}: {target}"
            if anchor:
                assert anchor in anchors(path), f"{page.name}: {target}#{anchor}"


def test_the_page_of_ranks_lists_the_optimizers_with_sums_of_whole_tensors():
    page = (DOCS / "distributed.md").read_text(encoding="utf-8")
    listed = next(line for line in page.split("\n- ") if "sums of whole tensors" in line)
    for case in CASES:
        made = case.make()
        if made.rule is not None and made.rule.passes:
            variants = [name for name in ("cautious", "stable") if getattr(made, name, False)]
            assert all(name in listed for name in variants or [type(made).__name__]), case


def test_the_table_lists_every_optimizer_and_says_which_states_are_coded():
    text = (DOCS / "optimizers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (yes)? ?\|", text, re.MULTILINE)
    coded, others = set(), set()
    assert sorted(name for name, _ in rows) == sorted({*ALL})
    for name, _ in rows:
        made = optimizer.create(name) if name != "ccsgd" else optimizer.SGD(momentum=0.9)
        if hasattr(made, "momentum") and made.native:
            made = type(made)(momentum=0.9)
        coded |= {name} if made.native and made.rule.codes else set()
        others |= set() if made.native else {name}
    assert {name for name, takes in rows if takes} == coded
    assert others == {*OF_MATRICES}, "the page says that these alone take no rows and no CUDA"


def test_pages_count_the_optimizers():
    count = len(ALL - {"test", "ccsgd"})
    for page, words in (
        ("README.md", f"Adam, SGD and {count - 2} other optimizers"),
        ("README.md", f"[{count}](docs/optimizers.md)"),
        ("docs/index.md", f"Adam, SGD and {count - 2} other optimizers"),
        ("docs/index.md", f"All {count}, and which"),
        ("docs/quick-start.md", f"[All {count} optimizers]"),
        ("docs/coming-from.md", f"| optimizers | [{count}](optimizers.md) |"),
    ):
        assert words in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_schedules_page_lists_every_schedule_of_the_library():
    text = (DOCS / "schedules.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)\(", text, re.MULTILINE)
    assert {*listed} == {*lr_scheduler.scheduler_registry}


def test_differences_page_mentions_every_quirk_that_the_recorded_cases_show():
    manifest = json.loads((ROOT / "tests" / "golden" / "manifest.json").read_text())
    cases = manifest["optimizer_cases"] + manifest["lr_scheduler_cases"]
    quirks = {case.get("quirk") for case in cases} - {None}
    text = (DOCS / "mxnet-differences.md").read_text(encoding="utf-8")
    assert len(quirks) > 25
    assert quirks - set(re.findall(r"`(Q-[A-Z0-9.-]+)`", text)) == set()


@pytest.mark.filterwarnings("ignore:.* replaces base_lr=7.0 of FactorScheduler")
def test_default_rates_are_those_that_the_schedules_page_lists():
    text = (DOCS / "schedules.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^These classes have a default rate: (.*?)\.$", text, re.M | re.S)
    said = {}
    for names, rate in re.findall(r"([\w,\s]+?)\s\(([\d.]+)\)", listed):
        said |= dict.fromkeys(re.findall(r"\w+", names.lower()), float(rate))
    actual = {}
    for name in ALL - {"ccsgd"}:
        schedule = lr_scheduler.FactorScheduler(step=1, base_lr=7.0)
        rate = optimizer.create(name, lr_scheduler=schedule).learning_rate
        if rate != 7:
            actual[name] = rate
    assert said == actual


@pytest.mark.slow("exhaustive")
def test_worked_example_passes_the_tests_of_the_library(tmp_path):
    """In a copy of the package: the new file, and the added lines of the page."""
    (module,) = (code for _, code in blocks(WORKED, "python") if code.startswith('"""'))
    row, line = (code.removeprefix("+") for _, code in blocks(WORKED, "diff"))
    ignored = shutil.ignore_patterns("__pycache__", "golden", ".*")
    shutil.copytree(Path(fastopt.__file__).parent, tmp_path / "fastopt", ignore=ignored)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert re.match(r"\| `qhm` \| .* \| .* \|$", line)

    (tmp_path / "fastopt" / "optimizer" / "qhm.py").write_text(module)
    cases = tmp_path / "tests" / "helpers" / "cases.py"
    cases.write_text(cases.read_text().replace("CASES = [\n", f"CASES = [\n{row}"))
    names = "optimizer/test_every_optimizer", "kernels/test_cpu", "test_advice"
    tests = [*(f"tests/{name}.py" for name in names), "fastopt/optimizer/qhm.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    # Options of the whole suite, as those for its coverage, are not for this part.
    changes = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTEST_ADDOPTS": ""}
    done = run(*command, "-k", "qhm or registered", cwd=tmp_path, **changes)
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 9


def test_index_leads_to_every_page():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(?::[^\n]*\n)+\n(.*?)^```$", text, re.M | re.S)
    entries = [entry for tree in trees for entry in tree.splitlines()]
    assert len(trees) == text.count(":caption: ")
    for page in {page.stem for page in PAGES[1:]} - {"index"}:
        assert any(fnmatch(page, entry) for entry in entries), page


EXAMPLES = {
    "nearest_words": ("sparse-embeddings.md", r"^exception +.*\b(clause|handler|raise|raised)\b"),
    "recommend": ("embedding-tables.md", r"^epoch 5: 1[345]\.\d%"),
}
"""The page of each example, and what it prints."""


def test_every_example_is_included_in_its_page():
    assert {path.stem for path in (DOCS / "examples").glob("*.py")} == {*EXAMPLES}
    for name, (page, _) in EXAMPLES.items():
        assert f"```{{literalinclude}} examples/{name}.py\n" in (DOCS / page).read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_and_find_what_they_should(name):
    done = run(sys.executable, "-W", "error", DOCS / "examples" / f"{name}.py")
    assert re.search(EXAMPLES[name][1], done.stdout, re.MULTILINE), done.stdout


def test_links_anchors_and_pictures_of_the_site_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    good = '<p id="top"><a href="b/c.html?v=1#down"></a><a href="#top"></a><a href="//x.org/y"></a>'
    (tmp_path / "a.html").write_text(f'{good}<a href="https://x.org/#y"></a><img src="p%20q.png">')
    (tmp_path / "p q.png").write_bytes(b"")
    for folder in ("b", "_static"):
        (tmp_path / folder).mkdir()
    bad = ["../a.html#bottom", "../d.html", "lost.png", "#up"]
    links = "".join(f'<a href="{link}"></a>' for link in bad) + '<img src="lost.png">'
    (tmp_path / "b" / "c.html").write_text(f'<p id="down"><a href="../a.html#top"></a>{links}')
    (tmp_path / "_static" / "template.html").write_text('<a href="nowhere"></a>')
    found = sorted(importlib.import_module("check_site").broken_links(tmp_path))
    assert found == sorted(f"b/c.html: {link}" for link in bad)
