"""The colours of all pages let text be read in light and in dark mode."""

import pytest

from vantage.ledger.pages.style import DARK, LIGHT, STYLE


def luminance(colour: str) -> float:
    """Return the relative luminance, WCAG 2.2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_measure_is_that_of_the_standard() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read(colours: dict[str, str]) -> None:
    contrasts = {
        f"{text} on {behind}": contrast(colours[text], colours[behind])
        for text in ("ink", "soft", "good", "note", "warning", "bad", "one", "two")
        for behind in ("page", "card")
    }
    assert {each: found for each, found in contrasts.items() if found < 4.5} == {}


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_of_a_drawing_can_be_seen(colours: dict[str, str]) -> None:
    assert contrast(colours["other"], colours["page"]) >= 3.0


def test_both_have_every_colour_and_nothing_is_fetched() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert "url(" not in STYLE and "@import" not in STYLE
    assert all(f"var(--{name})" in STYLE for name in ("ink", "page", "card", "soft", "line"))
