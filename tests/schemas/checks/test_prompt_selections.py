"""Datasets selected from collected responses are written, read by the right stages, and refused where they are wrong."""

from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.support.every import every
from vantage.schemas.loading.json_schema import recipe_schema
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.prompt_selection import PromptSelection
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.steps import dependencies
from vantage.schemas.verifier_uses import uses_of

COLLECTED = "  collected: {kind: rollout_collection, policy: sft, prompts: tasks, reward: main, samples_per_prompt: 4}\n"
SELECTED = "  middling: {from: collected, pass_rate: [0.2, 0.8]}\n"


@pytest.fixture
def text(text: str) -> str:
    """Return a recipe with a policy that learns from selected prompts."""
    text = text.replace("stages:\n", f"stages:\n{COLLECTED}", 1).replace("data:\n", f"data:\n{SELECTED}", 1)
    begin = text.index("  policy:\n")
    return text[:begin] + text[begin:].replace("prompts: tasks", "prompts: middling", 1)


def problems(text: str) -> list[str]:
    try:
        parse_recipe(text)
    except RecipeError as error:
        return str(error).splitlines()
    return []


def test_a_selected_dataset_is_a_stage_that_reads_the_collection_and_its_prompts(text: str) -> None:
    recipe = parse_recipe(text)
    stage = recipe.stages["middling"]
    assert isinstance(stage, PromptSelection)
    assert (stage.rollouts, stage.prompts, stage.pass_rate) == ("collected", "tasks", (0.2, 0.8))
    assert "middling" not in recipe.data
    steps = dependencies(recipe)
    assert steps["middling"] == {"rollouts": "collected", "prompts": "data.tasks"}
    assert steps["policy"]["prompts"] == "middling"
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    written = text.replace(SELECTED, "").replace(
        COLLECTED,
        COLLECTED
        + "  middling: {kind: prompt_selection, rollouts: collected, prompts: tasks, pass_rate: [0.2, 0.8]}\n",
    )
    assert parse_recipe(written).stages["middling"] == stage


@pytest.mark.parametrize("part", ["data", "stages"])
def test_a_recipe_whose_parts_are_no_mappings_is_refused(text: str, part: str) -> None:
    recipe = yaml.safe_load(text)
    recipe[part] = 3
    assert any(f": {part}: " in problem for problem in problems(yaml.safe_dump(recipe, sort_keys=False)))


def test_a_verifier_is_tried_on_the_prompts_that_are_selected_from(text: str, tmp_path: Path) -> None:
    """The dry run cannot use the selection, which waits for the collection, which waits for the verifier."""
    (tmp_path / "mine.py").write_text("def verify(prompt, response, answer):\n    return True\n")
    text = text.replace("data:\n", "verifiers:\n  mine: {source: mine.py}\ndata:\n", 1)
    begin, end = text.index("rewards:\n"), text.index("stages:\n")
    text = text[:begin] + "rewards:\n  main: {terms: [{model: reward}, {verifier: mine}]}\n" + text[end:]
    steps = dependencies(parse_recipe(text, folder=tmp_path))
    assert set(steps["verifiers.mine"].values()) == {"data.tasks"}


@every(
    ("old", "new", "message"),
    [
        ("from: collected", "from: collectd", "data.middling.from: 'collectd' is no rollout_collection stage; use one of: collected"),
        ("from: collected", "from: sft", "data.middling.from: 'sft' is no rollout_collection stage; use one of: collected"),
        ("pass_rate: [0.2, 0.8]", "pass_rate: [0.8, 0.2]",
         "data.middling: pass_rate=[0.8, 0.2] is an empty range; write the lower bound first"),
        ("pass_rate: [0.2, 0.8]", "pass_rat: [0.2, 0.8]", "data.middling.pass_rat: there is no field 'pass_rat' here"),
        ("pass_rate: [0.2, 0.8]", "pass_rate: [0.2, 1.8]", "data.middling.pass_rate"),
        ("pass_rate: [0.2, 0.8]", "pass_rate: [0.2, 0.8], term: juge", "data.middling.term: 'juge' is no score of 'main'"),
        ("pass_rate: [0.2, 0.8]", "pass_rate: [0.2, 0.8], prompts: demos",
         "data.middling.prompts: 'demos' is not the dataset whose prompts 'collected' has responses to ('tasks')"),
        (", samples_per_prompt: 4", "",
         "data.middling.from: 'collected' has one response to each training prompt, so that every pass rate is 0 or 1; raise "
         "samples_per_prompt of 'collected'"),
        ("  middling: {from", "  sft: {from", "data.sft: a stage is called 'sft' too, and both are read as data"),
    ],
)  # fmt: skip
def test_what_cannot_be_selected_is_refused_where_it_is_written(
    text: str, old: str, new: str, message: str
) -> None:
    assert old in text
    found = problems(text.replace(old, new, 1))
    assert any(message in problem for problem in found), found


def test_without_a_collection_the_remedy_is_one(text: str) -> None:
    assert any(
        "'collected' is no rollout_collection stage; add a rollout_collection stage" in problem
        for problem in problems(text.replace(COLLECTED, ""))
    )


@every(
    ("more", "message"),
    [
        ("    gate: {metric: prompts_impossible, at_most: 5}\n",
         "'prompts_impossible' is measured only where the passes of prompts are counted; add difficulty: {} to the stage"),
        ("    guards: [{metric: prompts_too_easy, above: 5}]\n",
         "prompts_too_easy is measured only where the stage has difficulty; add difficulty: {}, or leave the guard out"),
        ("    difficulty: {term: juge}\n", "stages.policy.difficulty.term: 'juge' is no score of 'main'; use one of: reward"),
    ],
)  # fmt: skip
def test_what_is_not_counted_is_refused(text: str, more: str, message: str) -> None:
    found = problems(text.replace("    algorithm: vapo\n", f"    algorithm: vapo\n{more}"))
    assert any(message in problem for problem in found), found


NAMED = """\
  main:
    terms:
      - model: reward
      - {verifier: open}
      - {verifier: listed, scores: {facts: {}, style: {weight: 0.5}}}
      - judge: {url: "http://judge/v1", model: m, criteria: {facts: right, style: good}}
      - judge: {name: one, url: "http://judge/v1", model: m}
      - http: {name: served, url: "http://scores", version: "1", names: [a, b]}
"""
REWARD_NAMES = "reward, open, listed.facts, listed.style, judge.facts, judge.style, one, served.a, served.b"


@pytest.fixture
def named(text: str, tmp_path: Path) -> Callable[[str], Recipe]:
    """Return what reads a recipe with this term for both, the pass rate of a selection and the difficulty of a stage."""
    (tmp_path / "mine.py").write_text("def verify(prompt, response, answer):\n    return True\n")
    text = text.replace(
        "data:\n", "verifiers:\n  open: {source: mine.py}\n  listed: {source: mine.py}\ndata:\n", 1
    )
    begin, end = text.index("rewards:\n"), text.index("stages:\n")
    text = f"{text[:begin]}rewards:\n{NAMED}{text[end:]}"

    def read(term: str) -> Recipe:
        whole = text.replace("pass_rate: [0.2, 0.8]", f"pass_rate: [0.2, 0.8], term: {term}")
        whole = whole.replace(
            "    algorithm: vapo\n", f"    algorithm: vapo\n    difficulty: {{term: {term}}}\n"
        )
        return parse_recipe(whole, folder=tmp_path)

    return read


@every("term", ["reward", "open", "open.facts", "listed.facts", "judge.style", "one", "served.b"])
def test_passes_are_counted_by_any_score_that_the_reward_may_have(
    term: str, named: Callable[[str], Recipe]
) -> None:
    recipe = named(term)
    places = ["stages.policy.difficulty.term", "stages.middling.term"]
    for verifier in ("open", "listed"):  # the dry runs of verifiers compare the name with what they return
        found = {use.path: use.score for use in uses_of(recipe, verifier) if use.score is not None}
        assert found == (dict.fromkeys(places, term) if term.startswith(verifier) else {})


@every(
    "term",
    [
        "reward.facts",
        "listed",
        "listed.fact",
        "judge",
        "judge.rigour",
        "one.score",
        "served",
        "opened.facts",
        "main",
    ],
)
def test_a_score_that_the_reward_never_has_is_refused(term: str, named: Callable[[str], Recipe]) -> None:
    with pytest.raises(RecipeError) as refused:
        named(term)
    for path in ("data.middling.term", "stages.policy.difficulty.term"):
        assert f"{path}: '{term}' is no score of 'main'; use one of: {REWARD_NAMES}" in str(refused.value)


def test_a_curriculum_needs_pass_rates(text: str) -> None:
    ordered = text.replace("    algorithm: vapo\n", "    algorithm: vapo\n    curriculum: easy_first\n")
    assert problems(ordered) == []
    [problem] = problems(ordered.replace("prompts: middling", "prompts: tasks"))
    assert (
        "stages.policy.curriculum: easy_first orders prompts by their pass rate, and 'tasks' has none"
        in problem
    )


def test_new_fields_that_are_left_out_change_no_recipe(text: str) -> None:
    stage = parse_recipe(text).stages["policy"].model_dump()
    assert not {"curriculum", "difficulty"} & stage.keys()


def test_an_editor_s_schema_accepts_both_forms_of_a_dataset() -> None:
    schema = recipe_schema()
    check = jsonschema.Draft7Validator({**schema["properties"]["data"], "definitions": schema["definitions"]})
    assert check.is_valid(
        {
            "tasks": {"source": "builtin:arithmetic/prompts"},
            "middling": {"from": "collected", "pass_rate": [0.2, 0.8]},
        }
    )
    assert not check.is_valid({"middling": {"from": "collected"}})
    assert not check.is_valid({"middling": {"pass_rate": [0.2, 0.8]}})
    assert not check.is_valid(
        {"middling": {"from": "collected", "pass_rate": [0.2, 0.8], "source": "rows.jsonl"}}
    )
