"""The page of a load test, as text and in a real browser."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from typer.testing import CliRunner

from extproc.commands.main import app
from extproc.commands.twins import twins_of
from extproc.loadtest.report.page import page_of, render
from extproc.loadtest.report.plots import colours_of, rate_curves
from extproc.loadtest.results import LoadResult, RunResult, save, single_run
from tests.browser import Page, running_browser
from tests.loadtest.loads import SLO, records, result, run, suite
from tests.sim.trials.test_report import Checker

TARGETS = ("policy:round_robin", "policy:least_pending", "policy:founding", "envoy:round_robin")
NUM_CHARTS = 4


def full() -> LoadResult:
    """Four targets, two rates, virtual twins where there are any."""
    real = [
        run(target, rate_rps=rate_rps, ttft_s=0.05 * (number + 1))
        for rate_rps in (20.0, 40.0)
        for number, target in enumerate(TARGETS)
    ]
    twins = twins_of(suite(), real, more_rates=1)
    return result(*real, *twins, suite=suite())


@pytest.fixture(scope="module")
def page() -> str:
    return render(full(), link="small.json")


def test_the_page_is_well_formed_and_fetches_nothing(page: str) -> None:
    checker = Checker()
    checker.feed(page)

    assert checker.open == []
    assert checker.fetched == ["small.json"]
    assert set(re.findall(r"url\((.)", page)) == {"#"}
    assert "http://www.w3.org/" in page
    assert len(re.findall(r"https?://(?!www.w3.org/)", page)) == 0


def test_real_runs_are_points_and_virtual_ones_lines_of_the_same_colour() -> None:
    made = full()
    series = rate_curves(made.runs, "ttft_mean_s", colours_of(made))
    lines = {each.colour: each for each in series if each.form != "o"}
    dots = {each.colour: each for each in series if each.form == "o"}

    assert len(lines) == 4
    assert dots.keys() < lines.keys()
    assert [each.name for each in lines.values() if each.form == "o-"] == ["envoy:round_robin"]
    assert {each.name for each in dots.values()} == {""}
    assert {len(each.points) for each in lines.values()} == {2, 3}
    assert {len(each.points) for each in dots.values()} == {2}


def test_the_table_has_both_and_whether_the_order_agrees(page: str) -> None:
    table = page[page.index("<table>") : page.index("</table>")]
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", table)

    assert [h for h in heads if h in ("real", "virtual")] == ["real", "virtual"] * 4
    assert "order as the laboratory predicts" in heads
    for name in ("finished per second", "first token, 99th percentile", "SLO attainment"):
        assert name in table
    assert "S-LoRA satisfaction" in table
    assert "adapter loads per 1,000" in table
    # Real ones are made up here: the policy that should be best is third.
    assert re.search(r'class="wrong">no: [^<]*founding', table)


def test_the_page_says_how_late_the_generator_was_and_what_failed(page: str) -> None:
    assert "The generator kept up: the median request was sent 0.0 ms late" in page
    assert "3 of 60 failed: 3 http_503" in page
    assert "24 failed." in page


def test_a_lagging_generator_is_reported_first() -> None:
    late = single_run(records(late_s=0.02), name="x", target="url:http://h", slo=SLO, date="d")

    page = render(late)

    warning = "In 1 of 1 runs the generator lagged"
    assert page.index(warning) < page.index("<h2>")
    assert "THE GENERATOR LAGGED: the median request was sent 20.0 ms late" in page


def test_a_single_run_of_an_endpoint_needs_neither_suite_nor_twin() -> None:
    made = single_run(
        records(), name="mine", target="url:http://h:1", slo=SLO, date="2026-11-21", about="A <b>."
    )

    page = render(made)

    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    text = " ".join(checker.words)
    assert "virtual runs" not in text
    assert "predict" not in text
    assert "adapter loads per 1,000</td>" not in page  # not known of its pods
    assert "A &lt;b&gt;." in page
    assert "adapter-01" in page
    assert "tenant-2" in page


def test_popular_and_rare_adapters_are_shown_with_a_gap_between(page: str) -> None:
    assert "adapter-01" in page
    assert '<td colspan="10" class="none">…</td>' in page


def test_without_real_runs_there_is_no_page() -> None:
    virtual = msgspec.structs.replace(run("policy:a"), kind="virtual")

    with pytest.raises(ValueError, match="without real runs"):
        render(result(virtual))


def test_nothing_answered_is_a_page_too() -> None:
    nothing = [
        msgspec.structs.replace(r, error="connect", first_token_s=None, num_tokens=0, gaps_s=())
        for r in records()
    ]

    page = render(single_run(nothing, name="x", target="url:http://h", slo=SLO, date="d"))

    assert "60 of 60 failed: 60 connect" in page


def test_lab_report_takes_a_load_tests_result(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save(full(), path)

    done = CliRunner().invoke(app, ["lab", "report", str(path)])

    assert done.exit_code == 0, done.output
    assert (tmp_path / "mine.html").read_text(encoding="utf-8") == page_of(path)


def test_lab_report_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"format": "extproc-loadtest-2", "name": 3}')

    done = CliRunner().invoke(app, ["lab", "report", str(path)])

    assert done.exit_code == 1
    assert "not a load test's result" in " ".join(done.output.split())


# --- in a browser ---------------------------------------------------------------------------


@asynccontextmanager
async def served(page: str) -> AsyncIterator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html")

    application = web.Application()
    application.router.add_get("/page", answer)
    application.router.add_get("/favicon.ico", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/page"
    finally:
        await runner.cleanup()


@pytest.mark.slow
async def test_a_browser_shows_it_on_wide_and_narrow_screens_light_and_dark(
    page: str, tmp_path: Path
) -> None:
    async with served(page) as url, running_browser() as browser:
        backgrounds = []
        for width, scheme in ((1280, "light"), (400, "light"), (400, "dark")):
            shown = await browser.open(url, width=width, scheme=scheme)  # type: ignore[arg-type]
            assert shown.problems == []
            assert await shown.evaluate("document.documentElement.scrollWidth") == width
            assert await shown.evaluate("document.querySelectorAll('svg').length") == NUM_CHARTS
            assert await overflowing(shown) == []
            backgrounds.append(
                await shown.evaluate("getComputedStyle(document.body).backgroundColor")
            )
            path = tmp_path / f"{width}-{scheme}.png"
            await shown.screenshot(path)
            assert path.stat().st_size > 50_000

        assert backgrounds[0] == backgrounds[1] != backgrounds[2]


@pytest.mark.slow
async def test_details_open_in_a_browser(page: str) -> None:
    async with served(page) as url, running_browser() as browser:
        shown = await browser.open(url)
        height = await shown.evaluate("document.documentElement.scrollHeight")
        await shown.evaluate("document.querySelector('details summary').click()")

        await shown.wait_for(f"document.documentElement.scrollHeight > {height} + 100")
        assert "http_503" in await shown.evaluate("document.querySelector('details').innerText")


async def overflowing(page: Page) -> Sequence[str]:
    """Elements that stick out of the window, other than in what scrolls by itself."""
    found: list[str] = await page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.wide') && "
        "!e.closest('details:not([open])') && e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"
    )
    return found


def test_runs_are_of_one_or_several_seeds() -> None:
    runs: list[RunResult] = [run("policy:founding", seed=seed) for seed in (1, 2)]

    page = render(result(*runs))

    assert "2 real runs" in page
