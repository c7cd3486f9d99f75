"""The first screen has in this order what a person needs to decide, and nothing that the record does not contain."""

import re
from dataclasses import replace

from tests.ledger.test_critic_page import Page
from tests.review.reports.samples import DECISION, report
from vantage.review.reports.first_screen import first_screen
from vantage.review.reports.gathered import Decision, ModelFact, Report
from vantage.schemas.records.alarms import Alarm
from vantage.schemas.records.conclusions import Conclusion, Judged


def shown(decision: Decision | None, **changed: object) -> str:
    return first_screen(replace(report(2), decision=decision, **changed))  # type: ignore[arg-type]


def text_of(html: str) -> str:
    return " ".join(Page(html).texts)


def facts(html: str) -> dict[str, str]:
    return dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", html))


def test_the_verdict_contains_the_difference_its_interval_and_against_what() -> None:
    said = text_of(shown(DECISION))
    assert (
        "policy is better than sft: accuracy 0.900 against 0.600, a difference of +0.300 "
        "(95 % interval 0.25 to 0.35; 256 prompts)." in said
    )


def test_who_when_what_and_which_model() -> None:
    found = facts(shown(DECISION))
    assert found["model"] == "hand version 3 (stage policy)" and found["digest"] == "ab" * 32
    assert found["author"] == "ada" and found["started"] == "2026-01-01 00:00 UTC, opened 2 times"
    assert found["ended"] == "2026-01-01 01:30 UTC" and found["check it"] == "vantage audit 0001-hand-aaaaaa"
    assert found["task"].startswith("last compares policy with sft on the test prompts of prompts")
    assert found["loosened"] == "no gate" and found["approved"] == "1 answer by people"


def test_an_alarm_is_red_and_above_all_publications() -> None:
    html = shown(DECISION)
    assert '<div class="advice bad alarm"><strong>Learned nothing</strong>' in html
    assert (
        html.index("Learned nothing</strong>") < html.index("approved by grace") < html.index("is published")
    )


def test_what_is_unknown_is_named_so() -> None:
    """A record of an earlier version has no version of the model, and a run that failed early compared nothing."""
    bare = Decision(Conclusion("bad", "failed"), models=(ModelFact("policy", "hand", None, None),))
    html = shown(bare, loosened=())
    assert facts(html)["model"] == "hand, version not recorded (stage policy)"
    assert facts(html)["digest"] == "none" and facts(html)["author"] == "unknown"
    assert "Nothing was compared" in text_of(html) and 'class="advice bad first"' in html
    none = shown(replace(bare, models=()))
    assert facts(none)["model"] == "none: no stage has made one"


def test_a_report_whose_verdict_cannot_be_gathered_has_the_rest() -> None:
    html = shown(None)
    assert "Verdict" not in html and "A gate is closed" in html and "started" in facts(html)


def test_hostile_text_is_escaped() -> None:
    attack = '<img src=x onerror="alert(1)">'
    effects = tuple(replace(each, name=attack) for each in DECISION.judged[0].effects)
    hostile = Decision(
        conclusion=Conclusion("bad", attack),
        judged=(Judged(attack, attack, attack, effects),),
        alarms=(Alarm(attack, attack, attack),),
        models=(ModelFact(attack, attack, attack, attack),),
        task=(attack,),
        author=attack,
        began=attack,
        ended=attack,
        approvals=((attack, attack),),
        waiting=(attack,),
    )
    html = shown(hostile, recipe=attack, source=attack, overrides=(attack,))
    assert "<img" not in html and html.count("&lt;img") >= 18


def test_it_is_short_with_a_hundred_evaluations() -> None:
    many = replace(DECISION, judged=DECISION.judged * 100, task=DECISION.task * 100)
    said = text_of(shown(many))
    assert said.count("is better than") == 4 and "96 more evaluations" in said
    assert said.count("compares policy with sft") == 4


def test_loosened_gates_are_counted() -> None:
    changed: Report = replace(
        report(2), loosened=(("value", "explained_variance: closed >= 0.3, now >= 0.1"),)
    )
    html = first_screen(changed)
    assert facts(html)["loosened"] == "1 gate" and "was loosened: explained_variance" in text_of(html)
