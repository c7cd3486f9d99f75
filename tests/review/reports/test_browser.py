"""In a real browser the page asks no network for anything, shows everything, and can be used with the keyboard alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.review.reports.browser import Tab, opened_tab
from tests.review.reports.samples import report
from vantage.review.reports.page import report_page

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

PHONE, DESK = 390, 1280
SIZES = (
    "[...document.querySelectorAll('svg')].filter(e => !e.closest('details:not([open])') && getComputedStyle(e).display != 'none')"
    ".map(e => [e.getBoundingClientRect().width, e.getBoundingClientRect().height])"
)
"""[Width, height] of every drawing outside of closed sections. The width decides which of two lineages is shown."""


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


def test_a_phone_has_the_lineage_in_a_column_and_a_desk_in_rows(tab: Tab, page: Path) -> None:
    for width, shown in ((PHONE, "lineage narrow"), (DESK, "lineage wide")):
        tab.show(page, width=width)
        seen = tab.value(
            "[...document.querySelectorAll('.lineage')].filter(e => getComputedStyle(e).display != 'none').map(e => e.className.baseVal)"
        )
        assert seen == [shown]
    tab.show(page, width=PHONE)
    frame = "document.querySelector('figure .scroll')"
    assert tab.value(f"{frame}.scrollWidth <= {frame}.clientWidth"), "it need not be moved sideways"


CONTRASTS = """
(() => {
  const canvas = document.createElement('canvas'); canvas.width = canvas.height = 1;
  const context = canvas.getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    context.clearRect(0, 0, 1, 1); context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const box = at.querySelector(':scope > rect.box');
      const colour = rgba(box ? getComputedStyle(box).fill : getComputedStyle(at).backgroundColor);
      if (colour[3] == 255) return colour;
    }
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.getClientRects().length || element.closest('.skip, title')) continue;
    const style = getComputedStyle(element);
    const ink = light(rgba(element.closest('svg') ? style.fill : style.color)), back = light(behind(element));
    found.push([(Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05), walker.currentNode.data.slice(0, 40), element.className.baseVal ?? element.className]);
  }
  return found;
})()
"""
"""[Contrast by WCAG 2, text, style] of every visible text, by the colour that is really behind it."""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_asks_for(tab: Tab, page: Path, dark: bool) -> None:
    tab.show(page, width=DESK, dark=dark)
    tab.value("document.querySelectorAll('details').forEach(each => { each.open = true })")
    found = tab.value(CONTRASTS)
    assert len(found) > 500
    assert any("s3" in style or "token" in style for _, _, style in found)
    assert [each for each in found if each[0] < 4.5] == []


def test_sections_open_by_the_keyboard(tab: Tab, page: Path) -> None:
    tab.show(page, width=DESK)
    tab.value("document.querySelector('#numbers ~ details summary').focus()")
    is_open = "document.querySelector('#numbers ~ details').open"
    assert not tab.value(is_open)
    tab.press("Enter", 13, text="\r")
    assert tab.value(is_open)
    tab.press(" ", 32, text=" ")
    assert not tab.value(is_open)


def test_the_order_of_the_keyboard_is_that_of_the_page(tab: Tab, page: Path) -> None:
    tab.show(page, width=DESK)
    assert tab.value("document.querySelectorAll('[tabindex]:not([tabindex=\"0\"])').length") == 0
    headings = tab.value("[...document.querySelectorAll('nav a')].map(e => e.getAttribute('href').slice(1))")
    assert headings == tab.value("[...document.querySelectorAll('h2[id]')].map(e => e.id)")


def test_on_paper_everything_is_open_and_in_black_on_white(tab: Tab, page: Path) -> None:
    """This also holds for a reader whose screen is in dark mode."""
    seen = "[...document.querySelectorAll('details > :not(summary)')].map(e => e.checkVisibility())"
    tab.show(page, width=DESK, dark=True)
    assert not all(tab.value(seen))
    tab.call(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    try:
        assert all(tab.value(seen))
        assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert tab.value("getComputedStyle(document.querySelector('.token')).printColorAdjust") == "exact"
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")
