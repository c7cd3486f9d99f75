"""Elements of a page. Every text may contain anything, and is escaped here."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from vantage.ledger.pages.style import STYLE
from vantage.ledger.pages.svg_plots import Plot
from vantage.schemas.safe_text import safe_text

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Content-Security-Policy: the page runs no script and loads nothing from a network."""


@dataclass(frozen=True)
class Table:
    """A table as text."""

    title: str
    good: str
    """Meaning of the numbers, and what good values are, for a reader who sees such a table for the first time."""
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    """Number of leading columns that are text, aligned left."""
    text: tuple[int, ...] = ()
    """Further columns that are text."""
    whole: tuple[int, ...] = ()
    """Columns of short text, which is not broken into lines."""


def safe(text: str) -> str:
    """Return the text as HTML, without secrets and control characters; it also fits an attribute in double quotes."""
    return escape(safe_text(text), quote=False).replace('"', "&quot;")


def cut(text: str, characters: int) -> str:
    """Return the beginning of a longer text, with the number of omitted characters."""
    left_out = len(text) - characters
    return text if left_out <= 0 else f"{text[:characters]}… ({left_out:,} more characters)"


def page(title: str, body: str, *, style: str = "") -> str:
    """Return a whole page, from its heading to its end.

    Args:
        title: text of the browser's tab and of the heading.
        body: HTML after the heading.
        style: rules of this page alone.
    """
    shown = safe(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown}</title><style>{STYLE}{style}</style></head><body>\n"
        f'<a class="skip" href="#main">Skip to the content</a>\n<main id="main">\n<h1>{shown}</h1>\n'
        f"{body}\n</main></body></html>\n"
    )


def figures(plots: Sequence[Plot]) -> str:
    """Lay plots side by side, as many as fit into the page's width."""
    return '<div class="plots">' + "".join(map(figure, plots)) + "</div>" if plots else ""


def figure(plot: Plot) -> str:
    """Return a plot with its title and its note."""
    note = f'<span class="soft">{safe(plot.note)}</span>' if plot.note else ""
    return f"<figure><figcaption>{safe(plot.title)}{note}</figcaption>{plot.svg}</figure>"


def table(shown: Table) -> str:
    """Return a table under its title."""
    return (
        f'<section class="table"><h3>{safe(shown.title)}</h3><p>{safe(shown.good)}</p>{rows(shown)}</section>'
    )


def rows(shown: Table) -> str:
    """Return the table alone, which scrolls sideways inside its own frame, also by the keyboard."""
    head = "".join(
        f'<th scope="col"{_side(shown, place)}>{safe(each)}</th>' for place, each in enumerate(shown.headings)
    )
    body = "\n".join(_row(shown, cells) for cells in shown.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{safe(shown.title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(shown: Table, cells: Sequence[str]) -> str:
    tags = [("th", ' scope="row"') if not place and shown.left else ("td", "") for place in range(len(cells))]
    return (
        "<tr>"
        + "".join(
            f"<{tag}{scope}{_side(shown, place)}>{safe(cell)}</{tag}>"
            for place, (cell, (tag, scope)) in enumerate(zip(cells, tags, strict=True))
        )
        + "</tr>"
    )


def _side(shown: Table, place: int) -> str:
    if place in shown.whole:
        return ' class="whole"'
    return ' class="text"' if place < shown.left or place in shown.text else ""
