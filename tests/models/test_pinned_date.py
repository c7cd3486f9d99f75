"""A chat template is given the recipe's date, whatever clock, zone and locale the machine has."""

from datetime import UTC, date, datetime, timedelta

import pytest
from transformers import PreTrainedTokenizerFast

from vantage.models.chat_template import render_turns
from vantage.models.pinned_date import pin_date, strftime_of

DIRECTIVES = "aAbBcdDeFgGhHIjmMnprRStTuUVwWxXyYzZ%"


@pytest.mark.parametrize("directive", DIRECTIVES)
def test_a_format_says_what_the_library_says_in_english(directive: str) -> None:
    """On days of all months and days of the week the text is that of Python's own function in the locale C, in which
    tests run."""
    for number in range(0, 800, 29):
        day = date(2023, 1, 1) + timedelta(days=number)
        moment = datetime(day.year, day.month, day.day, tzinfo=UTC)
        assert strftime_of(day)(f"%{directive}") == moment.strftime(f"%{directive}")


def test_flags_and_text_around_directives() -> None:
    written = strftime_of(date(2025, 3, 4))
    assert written("%-d %B, %%d = %d, %^b %Ey %s") == "4 March, %d = 04, MAR 25 1741046400"


def test_the_clock_of_the_machine_is_in_no_format(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        assert strftime_of(date(2025, 3, 4))("%F %T %s %z %Z") == "2025-03-04 00:00:00 1741046400 +0000 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("template", "default", "pinned"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024", "01 Feb 2031"),
        ("{{ date_string }}", "26 Jul 2024", "01 Feb 2031"),
        ("{% if strftime_now is defined %}{{ strftime_now('%F') }}{% endif %}", "2024-07-26", "2031-02-01"),
        ("{% macro now() %}{{ strftime_now('%y') }}{% endmacro %}{{ now() }}", "24", "31"),
    ],
)
def test_a_template_writes_the_default_date_or_the_recipes(
    byte_tokenizer: PreTrainedTokenizerFast, template: str, default: str, pinned: str
) -> None:
    byte_tokenizer.chat_template = template
    assert render_turns(byte_tokenizer, "a") == default
    assert render_turns(pin_date(byte_tokenizer, date(2031, 2, 1)), "a") == pinned
