"""On pages no text becomes markup, and tables say what their cells are."""

import pytest

from vantage.ledger.pages.elements import Table, cut, page, rows, safe


def test_no_text_leaves_its_element_or_its_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-0123456789")
    assert safe("<b a=\"x\" c='y'>&\x1b canary-0123456789") == (
        "&lt;b a=&quot;x&quot; c='y'&gt;&amp;\\u001b ***"
    )


def test_a_long_text_says_how_much_is_left_out() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("a" * 1234, 3) == "aaa… (1,231 more characters)"


def test_a_table_names_its_columns_and_rows() -> None:
    shown = rows(Table("T", "", ("step", "n", "why"), (("a", "1", "because"),), text=(2,)))
    assert (
        '<th scope="col" class="text">step</th><th scope="col">n</th><th scope="col" class="text">why'
        in shown
    )
    assert '<th scope="row" class="text">a</th><td>1</td><td class="text">because</td>' in shown
    assert 'tabindex="0" role="region" aria-label="T"' in shown, "its frame scrolls by the keyboard"


def test_a_table_of_numbers_alone_has_no_heading_of_a_row() -> None:
    shown = rows(Table("T", "", ("step", "n"), (("1", "2"),), left=0))
    assert "<td>1</td><td>2</td>" in shown and 'scope="row"' not in shown


def test_a_page_allows_nothing_but_itself() -> None:
    text = page("<i>", "<p>body</p>")
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert text.count("&lt;i&gt;") == 2 and "<i>" not in text
    assert '<html lang="en">' in text and text.index('class="skip"') < text.index("<main")
