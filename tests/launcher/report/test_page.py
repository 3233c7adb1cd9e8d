"""The page of a report in a real browser: drawn whole, without errors or requests.

The tests sort and hover, and use a small screen and the dark theme. Screenshots are
kept in artefacts/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go
import pytest
from playwright.sync_api import Browser, Page

from launcher.report.facts import Facts, gather
from launcher.report.page import to_html
from launcher.report.plots_of_run import memory, plots_of_run
from launcher.report.plots_of_runs import plots_of_runs
from launcher.report.read import read_runs
from tests.launcher.report.browser import ARTEFACTS, chromium
from tests.report_runs import Story, write_run
from tests.scenarios import ROOT

ALL_PLOTS = 7  # of all runs together
OWN_PLOTS = 8  # of each run
DRAWN = "document.documentElement.dataset.drawn === 'yes'"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    folder = tmp_path_factory.mktemp("runs")
    quick = write_run(folder / "quick", Story(iterations=30))
    for path in quick.glob("events/*"):
        path.write_text(path.read_text() + _again(path))
    slow = write_run(
        folder / "slow",
        Story(iterations=30, speed=1.5, fault_after=None),
        policy="gemini",
    )
    return [gather(run) for run in read_runs([quick, slow])]


def _again(path: Path) -> str:
    """Return the line of another recovery, in which no rank replays."""
    (rejoined,) = (
        json.loads(line)
        for line in path.read_text().splitlines()
        if '"Rejoined"' in line
    )
    return (
        json.dumps({**rejoined, "t_s": 40.0, "iteration": 30, "executed_iters": 0})
        + "\n"
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


class Seen:
    """An opened page, with its console messages, errors and requests to the network."""

    def __init__(
        self,
        browser: Browser,
        html: str,
        folder: Path,
        *,
        size: str = "desktop",
        theme: str = "light",
    ) -> None:
        path = folder / "report.html"
        path.write_text(html)
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if theme == "dark" else "light",
            has_touch=size == "phone",
            is_mobile=size == "phone",
        )
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.page.on(
            "console",
            lambda message: self.complaints.append(f"{message.type}: {message.text}"),
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function(DRAWN)

    def _asked(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.complaints.append(f"asked for {url}")

    def keep(self, name: str) -> None:
        ARTEFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"report-{name}.png", full_page=True)


@pytest.fixture(scope="module")
def seen(
    browser: Browser, runs: list[Facts], tmp_path_factory: pytest.TempPathFactory
) -> Seen:
    """Return the page of both runs; each test leaves the page as found."""
    return Seen(browser, to_html(runs), tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize(("size", "theme"), [("desktop", "light"), ("phone", "dark")])
def test_everything_is_drawn(
    browser: Browser,
    runs: list[Facts],
    seen: Seen,
    tmp_path: Path,
    size: str,
    theme: str,
) -> None:
    if size == "phone":
        seen = Seen(browser, to_html(runs), tmp_path, size=size, theme=theme)
    seen.keep(f"{size}-{theme}")
    drawn = seen.page.eval_on_selector_all(
        ".plot",
        "all => all.map(each => each.querySelectorAll('.trace, .bars .point,"
        " .heatmaplayer image').length)",
    )
    # the run without a fault has no recoveries and lost no tokens
    assert len(drawn) == ALL_PLOTS + 2 * OWN_PLOTS - 4
    assert all(drawn), drawn
    assert seen.page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]
    assert seen.complaints == []


def test_themes_color_what_is_drawn(seen: Seen) -> None:
    fill = "getComputedStyle(document.querySelector('#plot-time .bars path')).fill"
    assert seen.page.evaluate(fill) == "rgb(47, 111, 168)"
    seen.page.emulate_media(color_scheme="dark")
    seen.page.wait_for_function(f"{fill} === 'rgb(77, 143, 203)'")
    seen.page.emulate_media(color_scheme="light")
    seen.page.wait_for_function(f"{fill} === 'rgb(47, 111, 168)'")


def test_the_table_of_recoveries_has_room(
    browser: Browser, runs: list[Facts], tmp_path: Path
) -> None:
    """At 1280 pixels, no column of a run's own page is beyond the edge."""
    alone = Seen(browser, to_html(runs[:1]), tmp_path)
    inside, there = alone.page.evaluate(
        "(e => [e.scrollWidth,"
        " e.clientWidth])(document.querySelector('#table-recoveries-0').parentElement)"
    )
    assert inside <= there


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_the_parts_of_memory_have_a_colour_each(runs: list[Facts], theme: int) -> None:
    ((_, shown),) = memory(runs[0]).choices
    style = (
        (ROOT / "launcher" / "report" / "page.css")
        .read_text()
        .split("@media (prefers-color-scheme: dark)")[theme]
    )
    colors = dict(re.findall(r"(--[\w-]+): (#\w+)", style))
    filled = [
        colors[trace["fillcolor"]] for trace in shown["data"] if "fillcolor" in trace
    ]
    assert len(filled) == 5
    assert len(set(filled)) == len(filled)


def test_a_click_on_a_heading_sorts(seen: Seen) -> None:
    column = "#table-time-of-ranks-0 tbody td:first-child"
    heading = seen.page.locator("#table-time-of-ranks-0 th button").first
    assert seen.page.locator(column).all_text_contents() == ["0", "1", "2", "3"]
    heading.click()
    assert seen.page.locator(column).all_text_contents() == ["3", "2", "1", "0"]
    heading.click()
    assert seen.page.locator(column).all_text_contents() == ["0", "1", "2", "3"]
    seen.page.locator("#table-runs th button").first.click()
    assert seen.page.locator(
        "#table-runs tbody td:first-child"
    ).all_text_contents() == ["slow", "quick"]
    assert seen.complaints == []


def test_numbers_sort_as_numbers_and_what_is_not_known_comes_last(seen: Seen) -> None:
    headings = seen.page.locator("#table-runs th")
    labels = [each.split("\n")[0] for each in headings.all_inner_texts()]
    number = labels.index("tokens lost")
    for _ in range(2):
        headings.nth(number).locator("button").click()
        cells = seen.page.locator(
            f"#table-runs tbody tr td:nth-child({number + 1})"
        ).all_text_contents()
        assert cells == ["22", "-"]


def test_words_and_points_explain_themselves(seen: Seen) -> None:
    seen.page.mouse.move(0, 0)
    assert seen.page.locator("#tip").is_hidden()
    seen.page.locator(".number [data-tip]", has_text="ETTR").first.hover()
    assert "effective training time ratio" in seen.page.locator("#tip").inner_text()
    bar = seen.page.locator("#plot-time .bars path").first
    bar.scroll_into_view_if_needed()
    bar.hover(force=True)  # another element above the bar takes the pointer
    hover = seen.page.locator("#plot-time .hoverlayer .hovertext")
    hover.first.wait_for()
    assert re.fullmatch(
        r"quickcompute: [\d.]+ s, [\d.]+ %", hover.first.text_content() or ""
    )


def test_a_recovery_is_chosen(seen: Seen) -> None:
    replayed = "document.querySelectorAll('#plot-recoveries-0 .point').length"
    first = seen.page.evaluate(replayed)
    seen.page.get_by_label("Recoveries: which").select_option(index=1)
    seen.page.wait_for_function(f"{replayed} !== {first}")
    table = "document.querySelector('#table-recoveries-0').parentElement"
    assert seen.page.evaluate(f"{table}.scrollWidth === {table}.clientWidth"), (
        "nothing is cut off"
    )
    assert seen.complaints == []


def test_damage_is_said_and_numbers_are_explained(
    browser: Browser, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "a </script><b> & run", Story(iterations=6))
    with (run / "events" / "rank0001.jsonl").open("a") as file:
        file.write('{"t_s": 1, "event": "Sung"}\n{"t_s": 1')
    (run / "events" / "rank0002.jsonl").unlink()
    (run / "run.json").write_text('{"</script><b>": 1, "world_size": 4}')
    assert_says(
        browser,
        tmp_path,
        run,
        [
            "rank 1: the last line is half-written",
            "of another version: 1 x event Sung",
            "no events of rank 2, of 4 ranks",
            "</script>",
            "tokens whose updates were lost, over all MoE layers",
        ],
    )


def test_a_run_without_events_has_a_page(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Story(ranks=1))
    (run / "events" / "rank0000.jsonl").unlink()
    assert_says(browser, tmp_path, run, ["no events in"])


def assert_says(browser: Browser, folder: Path, run: Path, said: list[str]) -> None:
    seen = Seen(browser, to_html([gather(read_runs([run])[0])]), folder)
    text = seen.page.locator("main").inner_text()
    assert [each for each in said if each not in text] == []
    assert seen.complaints == []


def test_figures_are_what_plotly_takes(runs: list[Facts]) -> None:
    plots = [
        *plots_of_runs(runs),
        *(plot for facts in runs for plot in plots_of_run(facts)),
    ]
    figures = [each for plot in plots for _, each in plot.choices]
    # experts are in two orders, and there are two recoveries
    assert len(figures) == ALL_PLOTS + 2 * OWN_PLOTS - 4 + 3
    for each in figures:
        colored = json.loads(
            re.sub(r'"--[\w-]+"', '"#123456"', json.dumps(each, allow_nan=False))
        )
        assert go.Figure(colored).to_dict()["data"]
    assert all(plot.choices or plot.missing for plot in plots)
    assert all(_has_units(each["layout"]) for each in figures)


def _has_units(layout: dict) -> bool:
    titles = [layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis")]
    return (
        all(title for title in titles)
        or layout["yaxis"].get("type") == "category"
        or "autorange" in layout["yaxis"]
    )


def test_colors_that_are_named_are_there(runs: list[Facts]) -> None:
    html = to_html(runs)
    styles = html.partition("<style>")[2].partition("</style>")[0]
    light, dark = styles.split("@media", 1)
    used = set(
        re.findall(
            r'"(--[\w-]+)"', html.partition('id="plots">')[2].partition("</script>")[0]
        )
    )
    assert used
    for theme in (light, dark):
        assert used <= set(re.findall(r"(--[\w-]+):", theme))


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "long",
        Story(ranks=1, iterations=3000, fault_after=None, with_experts=False),
    )
    html = to_html([gather(read_runs([run])[0])])
    assert re.search(
        r"[\d,]+ of 3,000 iterations are shown, with the least and the most of each"
        r" stretch",
        html,
    )


def test_nothing_is_asked_of_the_network(runs: list[Facts]) -> None:
    own = re.sub(
        r"<script>/\*\*\n\* plotly\.js.*?</script>", "", to_html(runs), flags=re.DOTALL
    )
    assert "http" not in own.replace("https://ui.perfetto.dev", "")
