"""The report in a real browser without a network: it draws, plays, zooms, fits laptop and phone in dark and light."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from echofree.report import write_report
from unit.report.fake import fake_run

pytestmark = pytest.mark.slow  # a browser starts, and draws 20 pages
SIZES = {"laptop": (1280, 800), "phone": (390, 844)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a run, of a comparison and of a sweep, by kind."""
    root = tmp_path_factory.mktemp("pages")
    one = fake_run(root / "one" / "tiny")
    other = fake_run(root / "other" / "small", best=0.1, settings={"optim.lr": 3e-4})
    for number in range(6):
        best = 0.3 if number % 2 else 0.5
        fake_run(
            root / "sweep" / str(number),
            best=best + number / 100,
            settings={"optim.lr": (1e-3, 1e-4)[number % 2], "seed": number // 2},
            evaluated=number == 1,
        )
    return {
        "run": write_report([one]),
        "compare": write_report([one, other], root / "both.html"),
        "sweep": write_report([root / "sweep"]),
    }


class Opened:
    """A page in a browser, with everything that went wrong on it."""

    def __init__(self, browser: Any, path: Path, size: str = "laptop", scheme: str = "light"):
        width, height = SIZES[size]
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True, has_touch=size == "phone"
        )
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on(
            "console", lambda said: self.faults.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("request", lambda asked: self.asked.append(asked.url))
        self.asked: list[str] = []
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=true]", timeout=20_000)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: Any) -> None:
        self.context.close()


@pytest.mark.parametrize("kind", ["run", "compare", "sweep"])
@pytest.mark.parametrize("size", ["laptop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_draws_without_a_fault_and_fits(browser, pages, kind, size, scheme):
    opened = Opened(browser, pages[kind], size, scheme)
    with opened as page:
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide == 0, f"{wide} pixels stick out"
        assert page.locator(".chart svg path").count() > 5
        assert [url for url in opened.asked if not url.startswith(("file:", "data:", "blob:"))] == []
        sections = page.locator("section h2").all_inner_texts()
        assert "Which setting matters" in sections if kind == "sweep" else "Scores" in sections
        ink, paper = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor].map("
            "(c) => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) / 3)"
        )
        assert (ink > paper) == (scheme == "dark")
        assert abs(ink - paper) > 150
        assert opened.faults == []


def test_curves_tell_their_values_and_zoom_together(browser, pages):
    with Opened(browser, pages["run"]) as page:
        plot = page.locator("#curves .plot").first
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] / 2, middle)
        tip = page.locator("#curves .tip.on")
        assert tip.count() == 1
        assert "training" in tip.inner_text()
        assert 20 <= int(re.search(r"step (\d+)", tip.inner_text())[1]) <= 40  # of 1 to 60
        assert page.locator("#curves .reset:visible").count() == 0
        page.mouse.move(box["x"] + 0.4 * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=4)
        page.mouse.up()
        charts = page.locator("#curves .chart").count()
        assert page.locator("#curves .reset:visible").count() == charts >= 4
        labels = page.locator("#curves .chart").nth(1).locator("text").all_text_contents()
        steps = [float(t) for t in labels if t.replace(".", "").isdigit() and 15 < float(t) < 45]
        assert steps
        assert not any(t in labels for t in ("10", "50", "60"))
        page.locator("#curves .reset:visible").first.click()
        assert page.locator("#curves .reset:visible").count() == 0
        key = page.locator("#curves .key", has_text="valid")
        before = page.locator("#curves .chart").first.locator("path").count()
        key.click()
        assert page.locator("#curves .chart").first.locator("path").count() < before
        assert key.get_attribute("aria-pressed") == "false"


def until(page, expression: str) -> None:
    """Waits until it is true; the page's own policy forbids wait_for_function, which evaluates text inside."""
    end = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def test_clips_play_in_sync_and_switch_without_losing_the_place(browser, pages):
    with Opened(browser, pages["run"]) as page:
        players = page.locator(".player")
        assert players.count() == 4
        first = players.first
        first.scroll_into_view_if_needed()
        page.wait_for_selector(".player.loaded")
        pictures = first.locator("canvas")
        assert pictures.count() == 5
        for index in (0, 2, 3, 4):  # the far end of near-end talk is silent, and stays dark
            shades = pictures.nth(index).evaluate(
                "(c) => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
            )
            assert shades > 20, index
        assert first.locator(".track.on .signal").inner_text().endswith("model")
        first.locator(".play").click()
        until(page, "Player.all[0].at > 0.05")
        gains = page.evaluate(
            "new Promise((done) => { const p = Player.all[0]; p.seek(0.2); p.choose(0);"
            "const look = () => { if (p.gains && p.gains[0].gain.value > 0.9) done(p.gains.map((g) => g.gain.value));"
            "else setTimeout(look, 20) }; look(); })"
        )
        assert len(gains) == 5
        assert max(gains[1:]) < 0.1
        second = players.nth(1)
        second.scroll_into_view_if_needed()
        second.locator(".play").click()
        until(page, "Player.all[1].playing && !Player.all[0].playing")
        place = page.evaluate("(() => { Player.all[1].seek(0.5); return Player.all[1].at; })()")
        assert place == 0.5


def test_the_worst_clip_is_first_and_tables_sort(browser, pages):
    with Opened(browser, pages["run"]) as page:
        table = page.locator(".clips table")
        first = lambda: table.locator("tbody tr").first.inner_text()  # noqa: E731
        assert "the output is silent </script><b>" in first()
        table.locator("button.sort", has_text="SI-SDR").click()
        down = first()
        table.locator("button.sort", has_text="SI-SDR").click()
        assert first() != down
        names = page.locator("article.clip h3").all_inner_texts()
        assert "number 1 of the worst" in names[0]


def test_the_theme_can_be_chosen(browser, pages):
    with Opened(browser, pages["run"], scheme="light") as page:
        paper = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
        light = paper()
        page.locator("#theme").click()
        assert paper() == light
        page.locator("#theme").click()
        assert paper() != light


def test_a_sweep_names_the_setting(browser, pages):
    with Opened(browser, pages["sweep"]) as page:
        said = page.locator(".verdict").inner_text()
        assert "optim.lr" in said
        assert page.locator(".bar code").first.inner_text() == "optim.lr"
        assert page.locator("#runs tbody tr.best").inner_text().startswith("job 1")
        assert page.locator("#settings-effect circle.run").count() == 12


def test_a_comparison_shows_what_differs(browser, pages):
    with Opened(browser, pages["compare"]) as page:
        settings = page.locator("#settings").inner_text()
        assert "optim.lr" in settings
        assert "0.0003" in settings
        heads = page.locator("#scores thead").first.inner_text()
        assert "one/tiny" in heads
        assert "other/small" in heads
