"""The page of samples is whole and safe, and shows the texts as they are."""

import re
from typing import Any

import pytest

from tests.ledger.test_critic_page import Page
from vantage.ledger.samples_page import MAX_SHOWN, samples_page


def row(prompt: str, response: str, judgement: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "response": response, "ended": True, "judgement": judgement, **more}


def test_prompt_responses_and_judgements_stand_side_by_side() -> None:
    ours = [row("你好，世界?", "好\n第二行", 1.0, also_judgement=0.25)]
    theirs = [row("你好，世界?", "no", 0.0, also_judgement=-1.5) | {"ended": False}]
    page = Page(samples_page("Samples of evaluation", ours, theirs))
    shown = [text.strip() for text in page.texts if text.strip()]
    assert shown[-5:] == [
        "你好，世界?",
        "baseline · judgement 0 · also judgement -1.5 · cut off",
        "no",
        "candidate · judgement 1 · also judgement 0.25",
        "好\n第二行",
    ]
    assert page.references == ["#main"]


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", "</pre></div></body>", '"><img src=x onerror=alert(1)>', "a & b &lt;"],
)
def test_no_text_becomes_markup(text: str) -> None:
    html = samples_page(text, [row(text, text)], [row(text, text)])
    page = Page(html)
    assert not {"script", "img"} & set(page.tags)
    assert "".join(page.texts).count(text) == 5, "title, heading, prompt and both responses, as they are"


def test_a_browser_runs_and_fetches_nothing_in_it() -> None:
    html = samples_page("t", [row("a", "b")], [row("a", "c")])
    assert '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';' in html
    assert html.index("Content-Security-Policy") < html.index("<style>"), "before anything that it is about"


def test_control_characters_and_lone_surrogates_do_not_get_through() -> None:
    html = samples_page("t", [row("a\x1b[31m", "b\ud800")], [row("a\x1b[31m", "\u202ec")])
    assert "\x1b" not in html and "\u202e" not in html
    html.encode("utf-8")


def test_the_first_that_differ_come_first_each_prompt_once_whoever_won() -> None:
    ours = [row("same", "x"), row("p", "1", 0.0), row("p", "2", 1.0), row("q", "1", 1.0), row("r", "1")]
    theirs = [row("same", "x"), row("p", "3", 1.0), row("p", "4", 0.0), row("q", "3", 0.0), row("r", "3")]
    html = samples_page("t", ours, theirs)
    assert re.findall(r'class="prompt">(.*?)</pre>', html) == ["p", "q", "r", "same"]
    assert re.findall(r'class="(side(?: [^"]*)?)"', html) == [
        *("side won", "side lost"),
        *("side lost", "side won"),
        *("side", "side", "side", "side"),
    ]
    assert "4 of 4 prompts" in html


def test_a_long_evaluation_has_a_page_that_opens() -> None:
    ours = [row(f"p{place}", "1") for place in range(MAX_SHOWN + 5)]
    theirs = [row(f"p{place}", "2") for place in range(MAX_SHOWN + 5)]
    html = samples_page("t", ours, theirs)
    assert html.count("<section ") == MAX_SHOWN
    assert f"{MAX_SHOWN} of {MAX_SHOWN + 5} prompts" in html
