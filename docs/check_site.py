"""Check the built site: ``python docs/check_site.py docs/_build/html [--browser PROGRAM]``.

Every link, anchor and picture on its own pages exists. With a browser, such as ``chromium``, and
``pip install playwright``: at three widths, light and dark, no page scrolls sideways, loads from
elsewhere or lacks a picture, tables fit a wide window, and the search finds what is asked for most.
Links to other sites: ``sphinx-build -b linkcheck docs docs/_build/linkcheck``.
"""

import argparse
import functools
import re
import shutil
import threading
from collections.abc import Iterator
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

WIDTHS = 1280, 768, 420
SEARCHES = {
    "weight decay": "Weight decay",
    "clipping": "Clipping",
    "learning rate": "Learning rate",
    "embedding": "Embedding",
}
"""Words to search for, and how the title of one of the first results begins."""

STATE = """() => ({
    sideways: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    cut: [...document.querySelectorAll(".bd-article table")].filter(
        table => table.scrollWidth > table.clientWidth + 1).length,
    missing: [...document.images].filter(image => image.complete && !image.naturalWidth
        && getComputedStyle(image).display != "none").map(image => image.src)})"""


def pages(site: Path) -> list[Path]:
    """Return the pages, without templates of the theme."""
    return [page for page in site.rglob("*.html") if "_static" not in page.parts]


def broken_links(site: Path) -> Iterator[str]:
    """Yield the local links of all pages that lead nowhere."""
    texts = {page.resolve(): page.read_text(encoding="utf-8") for page in pages(site)}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    for page, text in texts.items():
        for link in sorted(set(re.findall(r'\b(?:href|src)="([^"]*)"', text))):
            target = urlsplit(unescape(link))
            if target.scheme or target.netloc:
                continue
            path = (page.parent / unquote(target.path)).resolve() if target.path else page
            wanted = unquote(target.fragment)
            known = anchors.get(path)
            if not path.is_file() or (wanted and known is not None and wanted not in known):
                yield f"{page.relative_to(site.resolve())}: {link}"


class Handler(SimpleHTTPRequestHandler):
    """Serves files in silence."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def seen_faults(site: Path, browser: str) -> Iterator[str]:
    """Yield what a browser shows to be wrong."""
    from playwright.sync_api import sync_playwright

    serve = functools.partial(Handler, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    names = sorted(page.name for page in site.glob("*.html"))
    names += ["api/index.html", "api/generated/fastopt.optimizer.Adam.html"]
    with sync_playwright() as playwright:
        program = playwright.chromium.launch(
            executable_path=shutil.which(browser), args=["--no-sandbox"]
        )
        for theme in ("light", "dark"):
            for width in WIDTHS:
                view = {"width": width, "height": 900}
                page = program.new_page(viewport=view, color_scheme=theme)
                for name in names:
                    for fault in page_faults(page, home, name, width):
                        yield f"{name}, {width} pixels, {theme}: {fault}"
                page.close()
        page = program.new_page()
        for words, title in SEARCHES.items():
            found = results(page, home, words)
            if not any(each.startswith(title) for each in found[:5]):
                yield f"search for {words!r}: {found[:5]}"
    server.shutdown()


def page_faults(page: Any, home: str, name: str, width: int) -> Iterator[str]:
    """Yield what is wrong with a page in a window of this width."""
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(home + name)
    page.wait_for_load_state("networkidle")
    state = page.evaluate(STATE)
    yield from errors
    yield from (f"loads {url}" for url in requests if not url.startswith((home, "data:", "blob:")))
    yield from (f"lacks {url}" for url in state["missing"])
    if state["sideways"]:
        yield "scrolls sideways"
    if state["cut"] and width == max(WIDTHS):
        yield f"{state['cut']} tables are cut off"


def results(page: Any, home: str, words: str) -> list[str]:
    """Return the titles that a search finds, best first."""
    page.goto(f"{home}search.html?q={words.replace(' ', '+')}")
    page.wait_for_selector("#search-results ul.search li a")
    page.wait_for_timeout(1000)
    return [link.inner_text() for link in page.query_selector_all("ul.search li > a")]


def main() -> None:
    """Print all faults, and exit with status 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", help="program such as chromium; needs playwright")
    given = parser.parse_args()
    faults = list(broken_links(given.site))
    if given.browser:
        faults += seen_faults(given.site, given.browser)
    print(*faults, sep="\n")
    print(f"{len(pages(given.site))} pages, {len(faults)} faults")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
