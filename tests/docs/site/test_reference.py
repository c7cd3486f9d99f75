"""The reference is made from the code, and is complete."""

import ast
import json
import re
from collections.abc import Mapping
from functools import cache

import pytest

from docs.site import commands, hooks, links, recipe_fields, refusals
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.jobs import key_parts_of
from vantage.runs.resolving import load_resolved
from vantage.schemas.kinds import STAGES
from vantage.schemas.loading.json_schema import recipe_schema, sweep_schema
from vantage.schemas.recipe.presets import PRESETS
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies


@cache
def generated_pages() -> Mapping[str, str]:
    """Return all pages of the reference, made when the first test asks for them."""
    return hooks.generated_pages()


def stages_page() -> str:
    """Return the page of the kinds of stages."""
    return generated_pages()[recipe_fields.STAGES_PAGE]


def rows(section: str, page: str) -> dict[str, list[str]]:
    """Return the first cell → all cells of the table under a heading."""
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines}


def test_every_field_of_a_recipe_is_described_once_with_type_default_effect_and_key() -> None:
    for name in recipe_schema()["definitions"]:
        page = generated_pages()[recipe_fields.page_of(name)]
        section = recipe_fields.STAGE_CLASSES.get(name, name)
        found = rows(section, page)
        if name in recipe_fields.STAGE_CLASSES:
            found |= rows("Fields of every stage", page) | rows("Fields of every stage that trains", page)
        definition = recipe_fields._definition(name)
        assert definition["properties"].keys() <= found.keys(), name
        assert all(len(cells) == 6 and all(cells) for cells in found.values()), name


def test_every_field_of_a_sweep_is_described() -> None:
    schema, page = sweep_schema(), generated_pages()[recipe_fields.SWEEP_PAGE]
    assert rows("Sweep", page).keys() == schema["properties"].keys()
    for name, definition in schema["definitions"].items():
        assert rows(name, page).keys() == definition["properties"].keys(), name


def test_every_kind_and_every_preset_has_its_place() -> None:
    assert all(f"\n## {kind}\n" in stages_page() for kind in STAGES)
    assert rows("Presets", generated_pages()[recipe_fields.ALGORITHM_PAGE]).keys() == PRESETS.keys()


def key(step: str, *overrides: str) -> str:
    """Return the key of a step of the quickstart, with made-up digests of its inputs."""
    recipe, _ = load_resolved("quickstart", list(overrides))
    inputs = dict.fromkeys(dependencies(recipe)[step], "0" * 64)
    return stage_key(key_parts_of(recipe, step, inputs))


@pytest.mark.parametrize(
    "step, field, value",
    [
        ("policy", "iterations", 8),
        ("policy", "learning_rate", 1e-3),
        ("policy", "checkpoint_every", 3),
        ("policy", "microbatch_size", 8),
        ("policy", "gradient_checkpointing", True),
        ("policy", "validate_every", 2),
        ("policy", "seed", 3),
        ("policy", "resources", {"cpus": 2}),
        ("reward", "lm_coef", 0.5),
        ("reward", "gate", {"metric": "pair_accuracy", "at_least": 0.9}),
        ("sft", "packing", True),
        ("sft", "schedule", "constant"),
    ],
)
def test_a_field_enters_the_key_as_the_reference_describes(step: str, field: str, value: object) -> None:
    kind = {"policy": "policy_optimization", "reward": "reward_model", "sft": "sft"}[step]
    found = rows("Fields of every stage", stages_page())
    found |= rows("Fields of every stage that trains", stages_page())
    described = (found | rows(kind, stages_page()))[field][-1]
    changes = key(step, f"stages.{step}.{field}={json.dumps(value)}") != key(step)
    assert {"stage": True, "none": False}[described] == changes


def test_types_ranges_units_and_defaults_are_those_of_the_classes() -> None:
    sft = rows("sft", stages_page())
    assert sft["epochs"][1:4] == ["number > 0", "passes", "`1.0`"]
    assert sft["data"][3] == "required"
    training = rows("Fields of every stage that trains", stages_page())
    assert training["schedule"][1:4] == ["`constant`, `linear`, `cosine`", "–", '`"constant"`']
    assert (
        rows("Gate", generated_pages()[recipe_fields.RECIPE_PAGE])["confidence"][1]
        == "number ≥ 0.5 and < 1 or none"
    )


def test_every_command_and_every_exit_code_has_its_row() -> None:
    page = generated_pages()[commands.COMMANDS_PAGE]
    for name in commands.parser().commands:
        assert f"\n### vantage {name}\n" in page
    assert "| `--until STAGE`" in page
    codes = re.findall(r"^\| (\d+) \|", generated_pages()[commands.EXIT_CODES_PAGE], re.MULTILINE)
    assert list(map(int, codes)) == list(ExitCode)


def test_refusals_are_divided_into_what_is_refused_and_the_remedy() -> None:
    found = dict(refusals.refusals("schemas")["schemas/recipe/stages.py"])
    refused = "batch_size={batch_size} is not a multiple of minibatch_size={minibatch_size}"
    assert found[refused] == "use minibatch_size: {batch_size} or a divisor of it"
    assert (
        refused.replace("_", r"\_").replace("{", r"\{").replace("}", r"\}")
        in generated_pages()[refusals.REFUSALS_PAGE]
    )


def test_a_remedy_that_depends_on_the_recipe_is_shown_with_each_of_its_forms() -> None:
    found = dict(refusals.refusals("schemas")["schemas/checks/references.py"])
    assert found["'{target}' has no gate that could pass"] == "use one of: {gated}, or: give a stage a gate"
    assert found["{none} is called {name}"] == refusals.SUGGESTED
    found = dict(refusals.refusals("schemas")["schemas/checks/cycles.py"])
    assert found["stages wait for one another: {listed}"] == "name a stage before them in one of these fields"


MESSAGES_IN_TURN = """
LAST = "give it a name"
def check(names, path):
    message = "the first thing is wrong"
    yield Problem(path, message, "mend it")
    if names:
        message = "the second thing is wrong"
    else:
        message = "the third thing is wrong"
        if path:
            return
    yield Problem(path, message, LAST)
    raise ValueError("the size must be below 3")
"""


def test_a_message_is_that_of_its_place_in_the_code() -> None:
    found = [refusals._divided(each) for each in refusals._messages(ast.parse(MESSAGES_IN_TURN))]
    assert found == [
        ("the first thing is wrong", "mend it"),
        ("the second thing is wrong", "give it a name"),
        ("the third thing is wrong", "give it a name"),
        ("the size", "must be below 3"),
    ]


def test_reasons_have_the_remedy_of_the_messages_that_quote_them() -> None:
    for begin, remedy in refusals.REASONS.items():
        folders = ("runs", "models", "tasks")
        files = (file for folder in folders for file in (refusals.ROOT / folder).rglob("*.py"))
        assert any(remedy in file.read_text(encoding="utf-8") for file in files), begin


def test_a_refusal_without_a_remedy_is_rare_and_not_one_of_the_command_line() -> None:
    without = [
        f"{module}: {refused}"
        for folder in refusals.READ
        for module, messages in refusals.refusals(folder).items()
        for refused, remedy in messages
        if not remedy
    ]
    assert len(without) <= 40
    assert [each for each in without if each.startswith("cli/")] == []


def test_the_names_of_generated_pages_are_known_without_making_them() -> None:
    assert generated_pages().keys() == set(hooks.GENERATED)


def test_links_out_of_the_pages_lead_to_pages_of_the_site() -> None:
    text = "[a](../schemas/kinds.py) [b](decisions) [c](gpus.md#x) `[d](../README.md)`\n```\n[e](../README.md)\n```\n"
    shown = links.with_links_in_site(text, "algorithms.md")
    assert shown.startswith("[a](repository/schemas/kinds.py.md) [b](decisions/index.md) [c](gpus.md#x)")
    assert "\n[e](../README.md)\n" in shown, "code stays as it is"
    outside = links.outside_pages()
    assert "repository/deploy/backup/README.md" in outside, "a page that only a page outside links to"
    assert outside["repository/schemas/kinds.py.md"].startswith("# schemas/kinds.py\n\n~~~~python\n")
