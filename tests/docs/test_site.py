"""``docs/check_site.py`` finds links that lead nowhere."""

import importlib

import pytest

from helpers.paths import DOCS


@pytest.fixture
def site(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("check_site")


def test_links_anchors_and_pictures_that_are_missing_are_named(site, tmp_path):
    good = '<p id="top"><a href="b/c.html?v=1#down"></a><a href="#top"></a><a href="//x.org/y"></a>'
    (tmp_path / "a.html").write_text(f'{good}<a href="https://x.org/#y"></a><img src="p%20q.png">')
    (tmp_path / "p q.png").write_bytes(b"")
    (tmp_path / "b").mkdir()
    bad = ["../a.html#bottom", "../d.html", "lost.png", "#up"]
    links = "".join(f'<a href="{link}"></a>' for link in bad) + '<img src="lost.png">'
    (tmp_path / "b" / "c.html").write_text(f'<p id="down"><a href="../a.html#top"></a>{links}')
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "template.html").write_text('<a href="nowhere"></a>')
    assert sorted(site.broken_links(tmp_path)) == sorted(f"b/c.html: {link}" for link in bad)
