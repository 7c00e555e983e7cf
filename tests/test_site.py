"""The site is whole, its search finds what readers type, and its front page leads to answers."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prose import read

ROOT = Path(__file__).parents[1]
FRONT = "README.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder, built strictly: no page, link or anchor is missing."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )

    assert built.returncode == 0, built.stderr
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


@pytest.mark.slow
@pytest.mark.parametrize("words", SEARCHES)
def test_the_search_finds_the_page(address: str, words: str) -> None:
    """As a reader types them, in a real browser."""
    api = pytest.importorskip("playwright.sync_api")
    chromium = Path("/usr/bin/chromium")
    if not chromium.exists():
        pytest.skip("no chromium")
    with api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=str(chromium), args=arguments)
        page = browser.new_page()
        page.goto(f"{address}/index.html")
        page.locator(".md-search__input").fill(words)
        page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
        links = page.locator(".md-search-result__item > a")
        found = [links.nth(place).get_attribute("href") or "" for place in range(links.count())]
        browser.close()

    pages = [link.partition("#")[0].partition("?")[0].rpartition("/")[2] for link in found]
    assert SEARCHES[words] in pages[:5]


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
        "The default policy costs about half of an empty ext_proc server: a Python server on "
        "grpc.aio and uvloop that only finds X and answers with one header.",
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
    way = _shortest_way(FRONT, page)

    assert 1 <= len(way) <= MAX_LINKS, way
    assert answer in " ".join(read((ROOT / page).read_text(encoding="utf-8")).sentences)


def _shortest_way(start: str, page: str) -> list[str]:
    """The pages behind the links to follow from one page to another."""
    ways: dict[str, list[str]] = {start: []}
    waiting = [start]
    for here in waiting:
        for there in sorted(_links(here) - ways.keys()):
            ways[there] = [*ways[here], there]
            if there.endswith(".md") and (ROOT / there).exists():
                waiting.append(there)
    return ways.get(page, [])


def _links(page: str) -> set[str]:
    """The files that a page links to, as paths in the repository."""
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
    folder = os.path.dirname(page)
    return {os.path.normpath(os.path.join(folder, each)) for each in targets if ":" not in each}
