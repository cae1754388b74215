"""The pictures of the documentation show what its tables say."""

import importlib
import json
import re
from pathlib import Path

import pytest

from fastopt import lr_scheduler
from helpers.paths import DOCS

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow

PAGE = (DOCS / "performance.md").read_text(encoding="utf-8")


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("pictures")


def words(path):
    """The texts of a picture, in order."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


def shown(draw, files, page, folder):
    """Light pictures of a page, drawn anew, and their words, which are those of the dark ones."""
    draw(folder)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for light, dark in zip(files(), files("dark"), strict=True):
        assert f"]({light})" in text
        assert words(folder / light) == words(folder / dark)
        yield light, words(folder / light)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_comparison_is_drawn_from_the_page_as_it_is(pictures, theme, tmp_path):
    pictures.draw_comparison(pictures.rows(PAGE), tmp_path)
    name = f"comparison-{theme}.svg"
    drawn, kept = words(tmp_path / name), words(DOCS / "_static" / name)
    assert len(kept) > 15
    assert drawn == kept


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_words_of_the_comparison_have_its_numbers(pictures, page):
    text = " ".join((DOCS.parent / page).read_text(encoding="utf-8").split())
    (described,) = re.findall(r"Time of a step of Adam relative to fastopt: ([^\"\]]*)", text)
    numbers = [ratio for row in pictures.rows(PAGE) for ratio in row.ratios.values()]
    assert re.findall(r"\d+\.\d", described) == [f"{number:.1f}" for number in numbers]


def test_every_schedule_is_drawn_and_shown(pictures, tmp_path):
    assert {*pictures.drawn_schedules()} == {*lr_scheduler.scheduler_registry}
    of_schedules = pictures.draw_schedules, pictures.schedule_files
    for light, drawn in shown(*of_schedules, "schedules", tmp_path):
        assert drawn[-1] == Path(light).stem.removesuffix("-light")


def test_errors_in_8_bits_are_drawn_and_shown(pictures, tmp_path):
    for _, drawn in shown(pictures.draw_codes, pictures.code_files, "8-bit-state", tmp_path):
        assert {"m alone, linear", "√v, as stored", "√v, linear"} <= {*drawn}
    errors = {name: dict(zip(*pair, strict=True)) for name, pair in pictures.code_errors().items()}
    assert all(error[1.0] < 1e-6 for error in errors.values())
    assert max(error for x, error in errors["√v, as stored"].items() if x > 2e-6) < 0.26
    assert max(x for x, error in errors["√v, linear"].items() if error > 0.99) > 1e-3


def test_the_comparison_of_optimizers_is_drawn_and_shown(pictures, tmp_path):
    found = json.loads(pictures.COMPARED.read_text(encoding="utf-8"))
    titles = pictures.losses_title(found), pictures.profiles_title(found)
    of_runs = pictures.draw_compared, pictures.compared_files
    files = shown(*of_runs, "which-optimizer", tmp_path)
    for (_, drawn), title in zip(files, titles, strict=True):
        assert title in drawn
        assert any("Muon" in each for each in drawn)


def test_the_layers_are_those_of_the_page(pictures, tmp_path):
    layers = pictures.layers((DOCS / "architecture.md").read_text(encoding="utf-8"))
    for _, drawn in shown(pictures.draw_layers, pictures.layer_files, "architecture", tmp_path):
        for name, modules in layers.items():
            assert {name, *modules} <= {*" ".join(drawn).split()}


@pytest.mark.usefixtures("pictures")
def test_every_line_of_the_history_has_results_of_the_repository():
    history = importlib.import_module("history")
    found = history.commits()
    assert len(found) >= 3
    for benchmark, chosen in history.LINES.values():
        assert history.value(found[-1][2], benchmark, chosen) is not None
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert "](_static/schedules/history-light.svg)" in page
