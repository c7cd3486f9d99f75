"""The drawn page is whole and the same for the same report, describes its drawings and verdicts in words, and stays small."""

import itertools
import re
import time
from dataclasses import replace

import pytest

from tests.ledger.test_critic_page import Page
from tests.review.reports.samples import curves, report, verdict
from vantage.review.reports.gathered import Answer, Report, Sample, Token
from vantage.review.reports.page import report_page
from vantage.review.reports.words import about, duration, energy, number, verdict_sentence


@pytest.fixture(scope="module")
def text() -> str:
    return report_page(report(2))


def test_it_is_whole_and_deterministic(text: str) -> None:
    """The page needs no other file, and is the same for the same report."""
    page = Page(text)
    assert page.tags.count("svg") == 2 + 2 * 5 + 2 + 2
    assert report_page(report(2)) == text
    headings = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))


def test_every_drawing_has_a_label_and_every_table_scopes(text: str) -> None:
    assert all('role="img"' in each and "aria-label=" in each for each in re.findall("<svg[^>]*>", text))
    assert not re.findall(r"<th(?![^>]*scope=)(?!ead)[^>]*>", text)


def test_names_of_drawn_parts_are_their_own(text: str) -> None:
    """A part that is used from within a closed section would not be drawn elsewhere."""
    ids = re.findall(r'<(?:path|clipPath|g)[^>]* id="([0-9a-z]{8,})"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#(m[0-9a-f]+)"', text)) <= set(ids)


def test_first_things_first(text: str) -> None:
    """The verdict, alarms and answers come first on the page, in this order."""
    order = [
        "the stages of recipe hand",
        "Verdict: gate closed; learned nothing; better",
        "policy is better than sft: accuracy 0.900 against 0.600",
        "A gate is closed",
        "Gates: 1 passed, 1 closed, 1 not reached.",
        "Learned nothing</strong> in policy",
        "is closed: accuracy_gain",
        "approved by grace",
        "hand@champion",
        "hand version 3 (stage policy)",
        "Change something",
        "Lineage",
        "It asks for",
    ]
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    assert "8 more tokens" not in text and "7 more tokens were not recorded" in text
    assert "(1,000 more characters)" in text
    assert "a␣b" in text and "⏎" in text


def test_cost_by_hand(text: str) -> None:
    """The run took 8 GPUs for 150 s, of which the last of two attempts took 100 s."""
    said = " ".join(Page(text).texts)
    for each in ("1,200", "1.5 billion", "25 %", "100 s", "2 min 30 s"):
        assert each in said
    without = " ".join(Page(report_page(replace(report(1), costs=()))).texts)
    assert "Nothing was computed" in without


def test_energy_by_hand(text: str) -> None:
    """One of two attempts measured 7,200 J, which are 2 Wh. One step measured 90 J of the CPU, and the other none."""
    said = " ".join(Page(text).texts)
    for each in (
        "2 Wh (1 of 2 attempts)",
        "not measured",
        "90 J",
        "at most 90 J",
        "own counters (NVML)",
        "whole packages (RAPL)",
    ):
        assert each in said
    costs = tuple(replace(cost, energy=None) for cost in report(1).costs)
    without = " ".join(Page(report_page(replace(report(1), costs=costs))).texts)
    assert "Energy was not measured: the machine has no counter" in without and "2 Wh" not in without
    assert [energy(each) for each in (0.25, 999.0, 2500.0, 3600.0, 45_000.0, 3.6e6, 7.2e9)] == [
        "0.25 J", "999 J", "2500 J", "1 Wh", "12.5 Wh", "1 kWh", "2 MWh",
    ]  # fmt: skip


def test_tokens_are_read_by_their_legend(text: str) -> None:
    """The first token was nearly certain, and has the highest value; the second was drawn against the odds, with the lowest."""
    boxes = re.findall(
        r'<span class="token (s\d)"><bdi>(.*?)</bdi><small>(\S+)</small><small>V (\S+)</small><i><b style="width:(\d+)%"',
        text,
    )
    assert boxes[:2] == [("s0", "a␣b", "0.00", "0.50", "100"), ("s3", "⏎", "-3.50", "-1.50", "0")]
    assert "How to read the tokens" in text and "the critic of <strong>value</strong>" in text
    assert text.count('<details class="by-token" open>') == 1, "the first sample is open"
    tokens = (Token("a", -0.05), Token("b", -0.5), Token("c", -1.5), Token("d", -9.0))
    alone = Sample("p", Answer("abcd", (), True, tokens), Answer("abcd", (), True, tokens))
    compared = replace(report(1).comparisons[0], samples=(alone,), critic=None)
    page = report_page(replace(report(1), comparisons=(compared,)))
    assert re.findall(r'<span class="token (s\d)"><bdi>', page)[:4] == ["s0", "s1", "s2", "s3"]
    assert "number after V" not in page and "token by token: log-probability</summary>" in page


def test_a_comparison_begins_with_its_summary(text: str) -> None:
    assert re.search(
        r"<h3>[^<]*sft \(before\) and policy \(after\)</h3>\s*<p>accuracy 0\.9 against 0\.6</p>", text
    )


def test_texts_of_both_directions_are_shown_in_their_own(text: str) -> None:
    assert text.count('<pre dir="auto">') == 4 and text.count('<pre class="prompt" dir="auto">') == 2


def test_what_differs_between_steps_is_shown_apart(text: str) -> None:
    part = text[text.index("Different from step to step") :]
    assert "NVIDIA H200" in part and "2.13.0" not in part


def test_sentences_of_verdicts_by_hand() -> None:
    assert verdict_sentence(verdict(confidence=0.9)) == (
        "It asks for at least 0.02. Measured was 0.25 over 256 independent prompts; the 90 % interval is 0.2 to 0.3. "
        "The lower end of the interval was compared with it."
    )
    undefined = verdict().model_copy(update={"measured": None, "interval": None, "n": None, "reason": "why"})
    assert verdict_sentence(undefined) == (
        "It asks for at least 0.02. It is undefined for these data, which closes a gate. Why."
    )


def test_numbers_by_hand() -> None:
    assert [number(each) for each in (None, 3.0, 12345.0, 0.123456, 1e-7)] == [
        "undefined", "3", "12,345", "0.1235", "1e-07",
    ]  # fmt: skip
    assert [duration(each) for each in (0.84, 45, 119.6, 125, 7200, 12_000)] == [
        "0.8 s", "45 s", "2 min 0 s", "2 min 5 s", "2 h 0 min", "3 h 20 min",
    ]  # fmt: skip
    assert [about(each) for each in (12, 1_500, 123_456, 7.7e9)] == [
        "12",
        "1.5 thousand",
        "123 thousand",
        "7.7 billion",
    ]


@pytest.mark.slow
def test_thirty_stages_and_ten_thousand_rows_stay_small_and_quick() -> None:
    """The page shows 9,900 rows; only the seconds of this process count, since others may compute beside it."""
    many = replace(
        report(30), curves=tuple(replace(curves("s", 67), step=f"s{place}") for place in range(30))
    )
    many = replace(many, curves=tuple(replace(each, curves=each.curves[:3]) for each in many.curves))
    began = time.process_time()
    page = report_page(many)
    assert time.process_time() - began < 20
    assert len(page) < 4_000_000


def test_an_empty_run_has_a_page() -> None:
    empty = Report("0001-a-aaaaaa", "a", "a.yaml", (), "failed", "now", 0, ())
    assert "A stage failed" in report_page(empty)


def test_minutes_are_shown_below_two_hours() -> None:
    shown = [duration(each) for each in (9.96, 119.4, 120, 3600, 7199.4, 7199.6)]
    assert shown == ["10.0 s", "119 s", "2 min 0 s", "60 min 0 s", "119 min 59 s", "2 h 0 min"]
