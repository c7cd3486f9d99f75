"""Terms that servers score: what a recipe may contain, and what of it is in a stage's key."""

from itertools import permutations
from typing import Any

import pytest
from pydantic import ValidationError

from vantage.schemas.recipe.called_server import TeacherServer
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
        (
            {"judge": {**JUDGE, "request": {"a": {"b": [{"c": 1e13}]}}}},
            "request.a.b.0.c is 1e+13, and must be between -1e+12 and 1e+12",
        ),
        ({"judge": {**JUDGE, "request": {"a": [10**400]}}}, "request.a.0 is a number of 1329 bits"),
        ({"judge": {**JUDGE, "request": {"a": [float("nan")]}}}, "request.a.0 is nan, and must be"),
        ({"judge": {**JUDGE, "request": {"a": [float("-inf")]}}}, "request.a.0 is -inf, and must be"),
        (
            {"judge": {**JUDGE, "request": {"a": {"b": {1: 2}}}}},
            "request.a.b has the name 1, which is no text",
        ),
        ({"judge": {**JUDGE, "request": {"a": {"b": {2}}}}}, "request.a.b is a set; use texts, numbers"),
        (
            {"judge": {**JUDGE, "request": {"a": [[[[[[[[[]]]]]]]]]}}},
            "request.a.0.0.0.0.0.0.0.0 is within 8 mappings and lists, which is the most",
        ),
        (
            {"judge": {**JUDGE, "request": {"a": {"b": "x" * 20_000}}}},
            "request.a has 20009 characters as JSON, and may have 20000",
        ),
        ({"judge": {**JUDGE, "budget": {}}}, "a budget gives tokens or cost"),
        ({"judge": {**JUDGE, "budget": {"cost": 5.0}}}, "budget.cost=5 needs the price of tokens"),
        ({"judge": {**JUDGE, "api_key_variable": "CRITIC"}}, "would not be masked in logs"),
        ({"judge": {**JUDGE, "api_key_variable": "MLFLOW_API_KEY"}}, "that stages do not get"),
        (
            {"judge": {**JUDGE, "key_header": "api-key"}},
            "key_header=api-key holds the API key, and api_key_variable names none; add it",
        ),
        (
            {"judge": {**JUDGE, "api_key_variable": "A_KEY", "key_header": "Content-Type"}},
            "key_header=Content-Type is a header that every request has",
        ),
        (
            {"http": {**HTTP, "api_key_variable": "A_KEY", "key_header": "x\r\ny"}},
            "String should match pattern",
        ),
        *(
            (
                {"http": {**HTTP, "url": f"https://scores.example.org/score?v=1&{name}=1"}},
                f"url has a query with '{name}', which may be a key, and recipes are kept as text",
            )
            for name in ("key", "api_key", "api-key", "subscription-key", "access_token", "code", "sig")
        ),
        ({"http": {**HTTP, "url": "https://scores.example.org/score?v=1#x"}}, "String should match pattern"),
        ({"http": {**HTTP, "names": ["a", "a"]}}, "names has 'a' twice"),
        (
            {"http": {**HTTP, "names": ["a"]}, "offset": 1.0},
            "clip, offset and whiten apply to one score, and this term has a",
        ),
        ({"http": {**HTTP, "names": ["a"]}, "whiten": True}, "clip, offset and whiten apply to one score"),
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
        "url": "http://elsewhere/v1?api-version=2026-01-01",
        "api_key_variable": "CRITIC_API_KEY",
        "key_header": "api-key",
        "at_once": 3,
        "request_seconds": 9.0,
        "requests_per_minute": 60.0,
        "patience_seconds": 7.0,
        "price": {"question": 1.0, "answer": 2.0},
        "budget": {"tokens": 9},
    },
    "http": {
        "url": "http://elsewhere",
        "api_key_variable": "S_TOKEN",
        "key_header": "x-key",
        "at_once": 3,
        "batch": 2,
    },
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


@pytest.mark.parametrize(
    ("term", "digest"),
    [
        (
            {
                "judge": {
                    **JUDGE,
                    "criteria": {"a": "?", "b": "?"},
                    "request": {"top_p": 0.5, "seed": 1},
                    "api_key_variable": "A_KEY",
                }
            },
            "ea858216abe0d054e10327ec6d6dc58692565e0dfb2d3d0ab2d1f4a72225678b",
        ),
        (
            {"http": {**HTTP, "names": ["b", "a"]}},
            "826cabe0df7040290bc6cead87ea3467a4153661951bbdeccebce35139aa2705",
        ),
    ],
)
def test_a_terms_part_of_the_key_is_that_of_earlier_versions(term: dict[str, Any], digest: str) -> None:
    """The digests were written down before settings could be nested and addresses could have a query."""
    (found,) = parts(term)["rewards"]["reward"]["terms"]
    assert stage_key(found) == digest


def test_a_nested_setting_is_in_the_key_with_its_order() -> None:
    """A server may write an answer's fields in the order of its ``response_format``."""
    one, other = {"properties": {"reason": {}, "a": {}}}, {"properties": {"a": {}, "reason": {}}}
    keys = {key_of(request={"response_format": each}) for each in (one, other, [other], {})}
    assert len(keys) == 4
    (term,) = parts({"judge": {**JUDGE, "request": {"x": other}}})["rewards"]["reward"]["terms"]
    assert "request_order" not in term["judge"]


def test_a_query_stays_behind_the_path() -> None:
    for url, path, called in (
        ("https://h/v1?api-version=2", "/chat/completions", "https://h/v1/chat/completions?api-version=2"),
        ("https://h/v1/?a=1&b=2", "/chat/completions", "https://h/v1/chat/completions?a=1&b=2"),
        ("https://h/score/?a=1", "", "https://h/score/?a=1"),
        ("https://h?a=1", "/x", "https://h/x?a=1"),
    ):
        assert RewardServer(url=url, version="1").address(path) == called


def test_a_teachers_address_is_read_without_its_query() -> None:
    with pytest.raises(ValidationError, match="ends in /v1"):
        TeacherServer(url="http://h/v1?x=1", model="m")
