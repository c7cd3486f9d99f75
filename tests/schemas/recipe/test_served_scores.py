"""Terms that servers score: what a recipe may say of them, and what of it is in a stage's key."""

from itertools import permutations
from typing import Any

import pytest
from pydantic import ValidationError

from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.resolved import ResolvedRolloutCollection
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.served_scores import JudgeServer, RewardServer
from vantage.schemas.records.stage_key import differences, key_parts, stage_key
from vantage.tasks.rewards.judge_questions import questions

JUDGE = {"url": "http://127.0.0.1:8000/v1", "model": "critic"}
HTTP = {"url": "https://scores.example.org/score", "version": "1"}


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (
            {"judge": JUDGE, "verifier": "arithmetic"},
            "a judge, a reward server (http) or a length; give exactly one of them",
        ),
        ({"judge": {**JUDGE, "url": "http://user:password@host/v1"}}, "String should match pattern"),
        ({"judge": {**JUDGE, "prompt": "Good? {prompt}"}}, "prompt has no {response}; write each field"),
        (
            {"judge": {**JUDGE, "against": "answer", "prompt": "{prompt} {response}"}},
            "no {first} and no {second}",
        ),
        ({"judge": {**JUDGE, "scale": [5, 1]}}, "scale=[5.0, 1.0] does not ascend"),
        ({"judge": {**JUDGE, "against": "answer", "scale": [1, 5]}}, "scale is read only without against"),
        (
            {"judge": {**JUDGE, "criteria": {"kind": "?"}, "prompt": "{prompt} {response} mankind"}},
            "prompt mentions neither {criteria} nor kind",
        ),
        ({"judge": {**JUDGE, "request": {"stream": True}}}, "request.stream is set by other fields"),
        ({"judge": {**JUDGE, "budget": {}}}, "a budget gives tokens or cost"),
        ({"judge": {**JUDGE, "budget": {"cost": 5.0}}}, "budget.cost=5 needs the price of tokens"),
        ({"judge": {**JUDGE, "api_key_variable": "CRITIC"}}, "would not be masked in logs"),
        ({"judge": {**JUDGE, "api_key_variable": "MLFLOW_API_KEY"}}, "that stages do not get"),
        ({"http": {**HTTP, "names": ["a", "a"]}}, "names has 'a' twice"),
        (
            {"http": {**HTTP, "names": ["a"]}, "offset": 1.0},
            "clip, offset and whiten are of one score, and this term has a",
        ),
        ({"http": {**HTTP, "names": ["a"]}, "whiten": True}, "clip, offset and whiten are of one score"),
        ({"http": HTTP, "scores": {"a": {}}}, "the term has one score without a name; leave scores out"),
        ({"http": {**HTTP, "names": ["a"]}, "scores": {"b": {}}}, "scores names b, and the term has a"),
        ({"http": {**HTTP, "names": ["a", "b"]}, "scores": {"b": {}}}, "scores has no a; add it"),
    ],
)
def test_what_contradicts_itself_is_refused(term: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Reward.model_validate({"terms": [term]})
    assert message in str(refused.value)


def test_two_judges_have_names_of_their_own() -> None:
    with pytest.raises(ValidationError, match="terms name 'judge' twice"):
        Reward.model_validate({"terms": [{"judge": JUDGE}, {"judge": JUDGE}]})
    whole = Reward.model_validate({"terms": [{"judge": JUDGE}, {"judge": {**JUDGE, "name": "second"}}]})
    assert [term.name for term in whole.terms] == ["judge", "second"]


def parts(term: dict[str, Any]) -> dict[str, Any]:
    work = ResolvedRolloutCollection.model_validate(
        {
            "kind": "rollout_collection",
            "policy": "model",
            "prompts": "prompts",
            "reward": "main",
            "samples_per_prompt": 2,
            "held_out_samples_per_prompt": 2,
        }
    )
    digests = {"policy": "a" * 64, "prompts": "b" * 64}
    rewards = {"main": Reward.model_validate({"terms": [term]})}
    return key_parts(work, generation=Generation(), rewards=rewards, seed=1, inputs=digests, extra={})


OF_PLACE = {
    "judge": {
        "url": "http://elsewhere/v1",
        "api_key_variable": "CRITIC_API_KEY",
        "at_once": 3,
        "request_seconds": 9.0,
        "requests_per_minute": 60.0,
        "patience_seconds": 7.0,
        "price": {"question": 1.0, "answer": 2.0},
        "budget": {"tokens": 9},
    },
    "http": {"url": "http://elsewhere", "api_key_variable": "S_TOKEN", "at_once": 3, "batch": 2},
}
OF_ANSWERS = {
    "judge": {
        "model": "another",
        "prompt": "{prompt} {response}",
        "scale": [1, 5],
        "criteria": {"kind": "?"},
        "against": "answer",
        "temperature": 1.0,
        "max_answer_tokens": 9,
        "request": {"seed": 1},
        "unreadable": 0.0,
        "ask_again": 0,
        "name": "x",
    },
    "http": {"version": "2", "names": ["a"], "unreadable": 1.0, "ask_again": 1, "name": "x"},
}


@pytest.mark.parametrize(("kind", "fields"), [("judge", JUDGE), ("http", HTTP)])
def test_the_key_holds_what_decides_the_scores_and_not_where_it_is_asked(
    kind: str, fields: dict[str, Any]
) -> None:
    before = parts({kind: fields})
    assert parts({kind: {**fields, **OF_PLACE[kind]}}) == before
    for field, value in OF_ANSWERS[kind].items():
        changed = differences(before, parts({kind: {**fields, field: value}}))
        assert len(changed) >= 1, field
        assert any(f".{kind}.{field}" in each for each in changed), field


def test_every_field_is_one_or_the_other() -> None:
    for kind, server in (("judge", JudgeServer), ("http", RewardServer)):
        named = OF_PLACE[kind].keys() | OF_ANSWERS[kind].keys()
        rest = {"request_seconds", "requests_per_minute", "patience_seconds"} if kind == "http" else set()
        assert named | rest == server.model_fields.keys()


def test_our_own_question_is_in_the_key_with_its_text() -> None:
    (term,) = parts({"judge": JUDGE})["rewards"]["reward"]["terms"]
    assert "[Response]\n{response}" in term["judge"]["prompt"]


def key_of(**fields: Any) -> str:
    return stage_key(parts({"judge": {**JUDGE, **fields}}))


def test_the_order_of_criteria_is_in_the_key_where_the_question_lists_them() -> None:
    names = ("correct", "kind", "short")
    keys, asked = {}, {}
    for order in permutations(names):
        criteria = {name: f"Is it {name}?" for name in order}
        keys[order] = key_of(criteria=criteria)
        (request,) = questions(JudgeServer.model_validate({**JUDGE, "criteria": criteria}), "p", "r", None)
        asked[order] = request["messages"][0]["content"]
    assert len(set(keys.values())) == len(set(asked.values())) == 6
    (term,) = parts({"judge": {**JUDGE, "criteria": dict.fromkeys(names, "?")}})["rewards"]["reward"]["terms"]
    assert "criteria_order" not in term["judge"], "keys of sorted criteria are those of earlier versions"


def test_the_order_of_criteria_is_in_no_key_where_the_prompt_names_them_itself() -> None:
    prompt = "{prompt} {response} Give b and a."
    one, other = (key_of(prompt=prompt, criteria=dict.fromkeys(order, "?")) for order in ("ab", "ba"))
    assert one == other
