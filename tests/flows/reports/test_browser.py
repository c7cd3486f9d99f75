"""The page in a real browser: nothing is asked of a network, everything is seen, and the keyboard suffices."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.reports.page import report_page
from tests.flows.reports.browser import Tab, binary, opened_tab
from tests.flows.reports.samples import report

pytestmark = pytest.mark.skipif(binary() is None, reason="no Chromium: set VANTAGE_CHROMIUM to its binary")

PHONE, DESK = 390, 1280
SIZES = (
    "[...document.querySelectorAll('svg')].filter(e => !e.closest('details:not([open])'))"
    ".map(e => [e.getBoundingClientRect().width, e.getBoundingClientRect().height])"
)
"""Of every drawing that is not in a closed section."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(report_page(report()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with opened_tab() as opened:
        yield opened


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_is_seen_and_nothing_is_fetched(tab: Tab, page: Path, width: int, dark: bool) -> None:
    tab.show(page, width=width, dark=dark)
    assert tab.complaints() == []
    assert tab.requests() == [page.as_uri()]
    assert tab.value("document.documentElement.scrollWidth") <= width, "nothing is wider than the screen"
    sizes = tab.value(SIZES)
    assert len(sizes) == 1 + 6 * 5 + 2 + 1, "the tokens of the first sample are open, those of others are not"
    assert all(across > 100 and down > 60 for across, down in sizes)
    assert tab.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(17, 21, 26)" if dark else "rgb(255, 255, 255)"
    )


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_also_with_everything_opened(tab: Tab, page: Path, width: int) -> None:
    tab.show(page, width=width)
    tab.value("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert tab.value("document.documentElement.scrollWidth") <= width
    sizes = tab.value(SIZES)
    assert len(sizes) == 1 + 6 * 5 + 2 + 2
    assert all(across > 100 and down > 60 for across, down in sizes)
    smallest = tab.value(
        "Math.min(...[...document.querySelectorAll('p, td, th, li, dd, summary, pre')].map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 13


def test_lines_and_texts_of_plots_have_the_pages_colours(tab: Tab, page: Path) -> None:
    tab.show(page, width=DESK, dark=True)
    assert tab.value("getComputedStyle(document.querySelector('figure svg text')).fill") != "rgb(0, 0, 0)"
    strokes = tab.value(
        "[...new Set([...document.querySelectorAll('.plots svg path')].map(e => getComputedStyle(e).stroke))]"
    )
    assert "rgb(98, 171, 240)" in strokes, "--one of the dark colours"


def test_the_keyboard_reaches_everything(tab: Tab, page: Path) -> None:
    tab.show(page, width=PHONE, height=800)
    tab.press("Tab", 9)
    assert tab.value("document.activeElement.className") == "skip"
    assert tab.value("document.activeElement.getBoundingClientRect().left") >= 0, (
        "it is seen when it has the focus"
    )
    wanted = tab.value("document.querySelectorAll('a, summary, [tabindex=\"0\"]').length")
    reached = 1
    while reached < wanted + 5:
        tab.press("Tab", 9)
        if tab.value("document.activeElement === document.body"):
            break
        assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        reached += 1
    hidden = tab.value(
        "document.querySelectorAll('details [tabindex=\"0\"], details details summary').length"
    )
    assert reached >= wanted - hidden
