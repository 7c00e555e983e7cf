"""The site is whole, its search finds what readers type, and its front page leads to answers."""

from __future__ import annotations

import functools
import http.server
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import running_browser
from tests.commandline import output_of
from tests.pages import ROOT, links
from tests.prose import read


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder, built strictly: no page, link or anchor is missing."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    output_of(*command, cwd=ROOT, env=environment)
    return folder


def test_the_site_is_built_strictly_with_the_readme_as_its_front_page(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")

    assert "Ten minutes without a GPU" in front
    assert (site / "source" / "examples" / "policy" / "tenants.py").exists(), (
        "a file that is linked"
    )
    assert 'href="source/envoy/index.html"' in front, "a page outside of docs/"


def test_nothing_on_the_site_is_fetched_from_another_host(site: Path) -> None:
    fetched = (
        r'<(?:script|img|iframe)[^>]+src="(https?:[^"]+)"'
        r'|<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(https?:[^"]+)"'
    )
    found = {
        "".join(match.groups(default=""))
        for page in site.rglob("*.html")
        for match in re.finditer(fetched, page.read_text(encoding="utf-8"))
    }

    assert found == set()


# --- the search ----------------------------------------------------------------------------------

SEARCHES = {
    "customer-07 is slow": "troubleshooting.html",
    "429": "troubleshooting.html",
    "canary": "canary.html",
    "OpenShift": "openshift.html",
}
"""Words that readers type, and a page that must be among the first five found."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site, served."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("words", SEARCHES)
async def test_the_search_finds_the_page(address: str, words: str) -> None:
    """As a reader types them, in a real browser."""
    found = ".md-search-result__item > a"
    async with running_browser() as browser:
        page = await browser.open(f"{address}/index.html")
        await page.fill(".md-search__input", words)
        await page.wait_for(f"document.querySelector('{found}')")
        urls = await page.evaluate(
            f"[...document.querySelectorAll('{found}')].map(each => new URL(each.href).pathname)"
        )

    assert SEARCHES[words] in [url.removeprefix("/") for url in urls[:5]]


# --- readers' questions --------------------------------------------------------------------------

MAX_LINKS = 3
QUESTIONS = {
    "how do I declare an adapter?": (
        "docs/declare-adapters.md",
        "Declare adapters in one of four ways, and the router has your pods load them:",
    ),
    "what is a 503 `conflict`?": (
        "docs/errors.md",
        "It means that pods already have something else under that name: their base model, or an "
        "adapter from another path.",
    ),
    "how do I run three routers?": (
        "docs/several-routers.md",
        "Give all routers the same configuration.",
    ),
    "what does it cost?": (
        "docs/performance.md",
        "At saturation a request of 308 bytes takes 150 us of CPU with the default policy, so a "
        "core is full at 6,600 requests a second.",
    ),
    "what happens when the router dies?": (
        "docs/operate.md",
        "The new process begins with an empty queue, reads the pods' load from their reports, and "
        "takes requests once ready.",
    ),
}
"""For each question the page that answers it, and the sentence there; a code span reads as X."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_reader_s_question_is_answered_near_the_front_page(question: str) -> None:
    page, answer = QUESTIONS[question]
    way = _shortest_way(ROOT / "README.md", ROOT / page)

    assert 1 <= len(way) <= MAX_LINKS, way
    assert answer in " ".join(read((ROOT / page).read_text(encoding="utf-8")).sentences)


def _shortest_way(start: Path, page: Path) -> list[Path]:
    """The pages behind the links to follow from one page to another."""
    ways: dict[Path, list[Path]] = {start: []}
    waiting = [start]
    for here in waiting:
        for there in sorted({linked for _, linked, _ in links(here)} - ways.keys()):
            ways[there] = [*ways[here], there]
            if there.suffix == ".md":
                waiting.append(there)
    return ways.get(page, [])
