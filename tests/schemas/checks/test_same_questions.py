"""Two servers of one stage that would be asked equal questions are refused: one of them would get the scores of the other."""

from itertools import combinations
from typing import Any

import pytest
import yaml

from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.served_scores import JudgeServer, RewardServer
from vantage.schemas.records.stored_answers import question_digest
from vantage.tasks.rewards.judge_questions import questions

HERE, THERE = "http://127.0.0.1:8001", "http://127.0.0.1:8002"
HTTP = {"http": {"url": HERE, "version": "1", "name": "helpful"}}
OTHER_HTTP = {"http": {"url": THERE, "version": "1", "name": "harmless"}}
JUDGE = {"judge": {"url": f"{HERE}/v1", "model": "critic"}}
OTHER_JUDGE = {"judge": {"url": f"{THERE}/v1", "model": "critic", "name": "second"}}


def problems(
    plain: dict[str, Any], main: list[dict[str, Any]], watched: list[dict[str, Any]] | None = None
) -> list[str]:
    """Return the problems of a recipe whose policy is scored by some terms, and watched by others."""
    plain["rewards"]["main"]["terms"] = [{"model": "reward"}, *main]
    if watched is not None:
        plain["rewards"]["other"] = {"terms": watched}
        plain["stages"]["policy"]["watch"] = {"judge": {"reward": "other"}}
    try:
        parse_recipe(yaml.safe_dump(plain, sort_keys=False))
    except RecipeError as error:
        return [f"{problem.field}: {problem.message}; {problem.remedy}" for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("one", "other", "remedy"),
    [(HTTP, OTHER_HTTP, "give this server another version"), (JUDGE, OTHER_JUDGE, "give both the same url")],
)
def test_a_second_server_with_the_same_questions_is_refused_once(
    plain: dict[str, Any], one: dict[str, Any], other: dict[str, Any], remedy: str
) -> None:
    """Two stages read the reward."""
    (kind,) = one
    (found,) = problems(plain, [one, other])
    assert found.startswith(f"rewards.main.terms.2.{kind}.url: {other[kind]['url']} is asked the same")
    assert f"as rewards.main.terms.1.{kind}.url ({one[kind]['url']})" in found
    assert remedy in found


def test_a_watch_is_of_the_same_stage(plain: dict[str, Any]) -> None:
    (found,) = problems(plain, [HTTP], [OTHER_HTTP])
    assert found.startswith(f"rewards.other.terms.0.http.url: {THERE} is asked the same")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (HTTP, {"http": OTHER_HTTP["http"] | {"version": "2"}}),
        (HTTP, {"http": OTHER_HTTP["http"] | {"names": ["harmless"]}}),
        (HTTP, {"http": OTHER_HTTP["http"] | {"url": HERE}}),
        (JUDGE, {"judge": OTHER_JUDGE["judge"] | {"model": "another"}}),
        (JUDGE, {"judge": OTHER_JUDGE["judge"] | {"url": f"{HERE}/v1/"}}),
        (JUDGE, HTTP),
    ],
)
def test_other_questions_or_the_same_server_are_accepted(
    plain: dict[str, Any], one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert problems(plain, [one, other]) == []


def test_stages_of_their_own_keep_answers_of_their_own(plain: dict[str, Any]) -> None:
    plain["rewards"]["judged"] = {"terms": [OTHER_HTTP]}
    plain["stages"]["evaluation"]["judge"] = {"reward": "judged"}
    del plain["stages"]["evaluation"]["gate"], plain["publish"]
    assert problems(plain, [HTTP]) == []


JUDGES = [
    {},
    {"name": "second", "url": f"{THERE}/v1", "at_once": 3, "unreadable": 0.0, "scale": [1.0, 10.0]},
    {"model": "another"},
    {"criteria": {"clear": "Is it clear?"}},
    {"criteria": {"clear": "Is it clear?", "a_kind": "Is it kind?"}},
    {"criteria": {"a_kind": "Is it kind?", "clear": "Is it clear?"}},
    {"scale": [1, 5]},
    {"against": "answer"},
    {"against": "answer", "name": "second"},
    {"prompt": "{prompt} {response}"},
    {"prompt": "{prompt} {response}", "scale": [1, 5]},
    {"temperature": None},
    {"temperature": 1.0},
    {"max_answer_tokens": 9},
    {"request": {"seed": 1}},
    {"request": {"seed": True}},
    {"request": {"max_completion_tokens": 9}},
    {"request": {"max_completion_tokens": 9}, "max_answer_tokens": 99},
]


def test_judges_have_equal_fields_exactly_where_they_ask_equal_questions() -> None:
    judges = [JudgeServer.model_validate(JUDGE["judge"] | each) for each in JUDGES]
    asked = [[question_digest(each) for each in questions(judge, "p", "r", "a")] for judge in judges]
    fields = [question_digest(judge.question_fields()) for judge in judges]
    equal = [one for one in combinations(range(len(judges)), 2) if fields[one[0]] == fields[one[1]]]
    assert equal == [(0, 1), (7, 8), (9, 10), (16, 17)]
    assert equal == [one for one in combinations(range(len(judges)), 2) if asked[one[0]] == asked[one[1]]]


def test_a_reward_servers_limits_are_no_part_of_its_questions() -> None:
    one, other = (
        RewardServer(url=url, version="1", batch=batch, name=name)
        for url, batch, name in ((HERE, 2, "a"), (THERE, 16, "b"))
    )
    assert one.question_fields() == other.question_fields()
