"""Every built-in recipe plans, and two iterations of each of its stages run in this process, on the tiny model.

The data is a few rows in the columns of the recipe's own data. Where an optional package is not installed, a rule of the same
kind stands for the verifier that needs it, so that the rest of the recipe runs everywhere.
"""

import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from vantage.attempts.jobs import request_for, steps_of, with_bases
from vantage.attempts.run_attempt import run_attempt
from vantage.runs.planning import plan
from vantage.runs.resolving import load_resolved
from vantage.schemas.loading.recipe_file import builtin_recipes, find_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.storage.storage import open_storage
from vantage.tasks.stages import run_stage

pytestmark = pytest.mark.timeout(600)  # seconds of CPU, but many of a busy machine

NUMBERS = range(30)
ROLLOUTS = {
    "iterations": 2,
    "batch_size": 4,
    "minibatch_size": 4,
    "validate_every": 2,
    "validation_samples": 2,
}
SMALL: dict[str, dict[str, Any]] = {
    "sft": {"epochs": 0.2, "batch_size": 2},
    "reward_model": {"epochs": 0.2, "batch_size": 2},
    "dpo": {"epochs": 0.2, "batch_size": 2},
    "value_pretraining": ROLLOUTS,
    "policy_optimization": ROLLOUTS,
    "best_of_n": {**ROLLOUTS, "minibatch_size": 2, "samples_per_prompt": 2},
    "evaluation": {"samples_per_prompt": 2},
}
"""Kind of stage → fields that make two iterations (or optimiser steps) of it."""

SPLIT = {"validation": 0.25, "test": 0.25}

INSTRUCTIONS = [{"instruction": f"Count to {n}.", "input": "", "output": f"{n - 1}, {n}"} for n in NUMBERS]
PAIRS = [{**row, "chosen": row["output"], "rejected": "no"} for row in INSTRUCTIONS]
SUMS = [{"question": f"{n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in NUMBERS]
CONVERSATIONS = [
    {
        "conversations": [{"from": "human", "value": f"从一数到{n}。"}],
        "chosen": {"from": "gpt", "value": f"{n}"},
        "rejected": {"from": "gpt", "value": "不"},
    }
    for n in NUMBERS
]
TASKS = [
    {
        "question": f"{n} + 1 =",
        "answer": str(n + 1),
        "entry": json.dumps(
            {"question": f"{n} + 1 =", "answer": str(n + 1), "metadata": {"source_dataset": "chain_sum"}}
        ),
    }
    for n in NUMBERS
]
OWN = {"demonstrations": INSTRUCTIONS, "preferences": PAIRS}


@dataclass(frozen=True)
class Case:
    """What a recipe needs in order to be tried."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Dataset that the recipe leaves open → rows."""
    package: str | None = None
    """An optional package that its verifiers import."""
    sets: tuple[str, ...] = ()


CASES = {
    "quickstart": Case(),
    "long_dial": Case(),
    "reward_hacking": Case(),
    "smollm2": Case(OWN),
    "instruct": Case(OWN),
    "dpo": Case(OWN),
    "best_of_n": Case(OWN),
    "lora_7b": Case(OWN, sets=("model.lora.rank=2",)),
    "gsm8k_vapo": Case({"demonstrations": SUMS, "problems": SUMS}),
    "zh_rlhf": Case({"demonstrations": INSTRUCTIONS, "preferences": CONVERSATIONS}),
    "rloo_sentiment": Case(package="vaderSentiment"),
    "reasoning_gym_dapo": Case(
        {"demonstrations": TASKS, "tasks": TASKS},
        package="reasoning_gym",
        sets=("stages.policy.algorithm.max_sampling_rounds=2",),
    ),
}


def plain(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))
    return read


def is_tried(name: str) -> bool:
    """Return whether the recipe is tried here: sweeps and studies are of the long dial, whose stages are tried."""
    return "sweep" not in plain(name) and not name.startswith("study_")


class InThisProcess:
    """A launcher that computes in this process, since stages of a tenth of a second need none of their own."""

    def launch(self, job: StageJob, **_: Any) -> StageResult:
        return run_stage(job)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one store for all recipes: what has the same key is made once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def overrides(name: str, files: Path) -> list[str]:
    """Return the overrides that put the recipe on the tiny model, with two iterations of each stage, and with data
    where it leaves that open.
    """
    case, recipe = CASES[name], plain(name)
    sets = [
        "model.source=builtin:tiny",
        "generation.max_prompt_tokens=128",
        "generation.max_response_tokens=20",
    ]
    for data, rows in case.rows.items():
        file = files / f"{name}-{data}.json"
        file.write_text(json.dumps(rows, ensure_ascii=False))
        sets.append(f"data.{data}.source={file}")
    for data in recipe["data"]:
        sets += [f"data.{data}.split={json.dumps(SPLIT)}", f"data.{data}.max_dropped=0.9"]
        sets += [f"data.{data}.rows=24"]
    for stage, fields in recipe["stages"].items():
        small = dict(SMALL[fields["kind"]])
        if "group" in fields["kind"]:
            small["group_by_length"] = False
        sets += [f"stages.{stage}.{key}={value}" for key, value in small.items()]
        algorithm = fields.get("algorithm")
        if isinstance(algorithm, dict) and "samples_per_prompt" in algorithm:
            sets.append(f"stages.{stage}.algorithm.samples_per_prompt=2")
    return [*sets, *case.sets, *stand_ins(name, files)]


def stand_ins(name: str, files: Path) -> list[str]:
    """Return verifiers in the place of those whose package is not installed."""
    package = CASES[name].package
    if package is None or importlib.util.find_spec(package) is not None:
        return []
    sets = []
    for verifier, fields in plain(name)["verifiers"].items():
        file = files / f"{verifier}.py"
        function = fields.get("function", "verify")
        file.write_text(f"def {function}(prompt, response, answer):\n    return len(response) % 2 == 0\n")
        sets.append(f"verifiers.{verifier}.source={file}")
    return sets


def run_all(recipe: ResolvedRecipe, store: Path) -> dict[str, Artifact]:
    """Return step → artifact, computed here or, where another recipe has made it, reused."""
    storage = open_storage(str(store))
    made: dict[str, Artifact] = {}
    read = dependencies(recipe)
    for step in ordered_steps(recipe):
        inputs = with_bases({role: made[source] for role, source in read[step].items()}, made.values())
        request = request_for(
            steps_of(recipe)[step], inputs, run_id="0001-recipes", storage=str(store), log=store / "log"
        )
        outcome = run_attempt(request, storage=storage, launcher=InThisProcess())
        assert outcome.artifact is not None, f"{step}: {outcome.failure}"
        made[step] = outcome.artifact
    return made


def test_every_recipe_is_tried() -> None:
    assert set(CASES) == {name for name in builtin_recipes() if is_tried(name)}


@pytest.mark.slow
@pytest.mark.parametrize("recipe_name", CASES)
def test_it_plans_and_two_iterations_of_each_stage_run(recipe_name: str, store: Path, files: Path) -> None:
    """The recipe plans, and two iterations of each of its stages run."""
    recipe, _ = load_resolved(recipe_name, overrides(recipe_name, files))
    planned = plan(recipe, None, [])
    assert {step.action for step in planned} == {"run", "wait"}
    made = run_all(recipe, store)
    assert set(made) >= set(recipe.stages)
    for name, stage in recipe.stages.items():
        asked = {gate.metric for gate in stage.gate}
        assert asked <= set(made[name].metrics), "what its gates ask about is measured"


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].rows])
def test_without_its_data_it_says_what_to_give(name: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_resolved(name)
    left_open = {problem.path: problem.remedy for problem in refused.value.problems}
    for data in CASES[name].rows:
        assert left_open["data", data, "source"] == f"give it with --set data.{data}.source=…"


def test_every_recipe_is_in_the_index_of_the_pages_and_every_link_there_leads_to_a_page() -> None:
    pages = Path(__file__).parents[1] / "docs" / "recipes"
    index = (pages / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(([^)#]+)", index, re.MULTILINE))
    assert set(rows) == set(CASES) - {"long_dial"}
    for name, link in rows.items():
        page = (pages / link).read_text(encoding="utf-8")
        if link.endswith(f"{name}.md"):
            assert f"vantage run {name} " in page, "the command"
            assert "## Result" in page or "## Estimate" in page, name
            assert "## What differs from" in page, name
            assert "## Limits" in page, name
