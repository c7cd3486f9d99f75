"""What has to be written for a stage kind, or a kind of reward term, that Vantage does not have: two worked examples.

Each is written into a copy of the tree, and then a recipe that uses it is loaded, planned, and run stage by stage as
plain functions.
"""

import filecmp
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.packages import ROOT, copy_packages

STAGE_CLASS = '''
"""Counting: how many demonstrations are longer than a limit."""

from typing import Literal

from vantage.schemas.recipe.fields import Count, Name
from vantage.schemas.recipe.stage import Stage


class LengthCount(Stage):
    """How many demonstrations are longer than a limit; the artifact says it."""

    kind: Literal["length_count"]
    data: Name
    """A dataset of demonstrations."""
    longest: Count = 3
    """Characters of the longest response that is not counted."""
'''
STAGE_TASK = '''
"""Count the responses that are longer than a limit."""

from vantage.schemas.recipe.length_count import LengthCount
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.data.rows import read_rows, write_rows
from vantage.tasks.data.splits import TRAIN


def run(job: StageJob[LengthCount]) -> StageResult:
    """Write down the long ones."""
    rows = read_rows(job.inputs["data"], TRAIN)
    long = [row for row in rows if len(row["response"]) > job.work.longest]
    write_rows(job.output, "long", long)
    return StageResult(metrics={"train_rows": len(long), "source_rows": len(rows)})
'''
STAGE_ROW = """
    Kind(
        work=LengthCount,
        module="vantage.tasks.length_count",
        makes="evaluation",
        revision=1,
        data={"data": "demonstrations"},
        numbers=("train_rows", "source_rows"),
    ),
"""
STAGE_RECIPE = """
recipe: counted
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 200}
stages:
  long: {kind: length_count, data: demonstrations, longest: 30, gate: {metric: train_rows, at_least: 1}}
"""

TERM_CLASS = '''
class LengthTerm(RewardTerm):
    """Minus the characters of a response beyond a limit."""

    max_length: Annotated[int, Field(ge=0, strict=True)]
    """Characters that cost nothing."""

    @property
    def name(self) -> str:
        """Its only one."""
        return "max_length"


'''
TERM_ROW = """
    TermKind(term=LengthTerm, field="max_length", module="vantage.tasks.rewards.length_scores"),
"""
TERM_SCORER = '''
"""A term that takes off what is too long."""

import torch
from torch import Tensor

from vantage.schemas.recipe.terms import LengthTerm
from vantage.tasks.rewards.term_scores import Responses, Source, TermScores


def load(term: LengthTerm, source: Source) -> TermScores:
    """Minus the characters beyond the term's limit."""

    def scores(given: Responses) -> Tensor:
        beyond = [min(term.max_length - len(response), 0) for response in given.responses]
        return torch.tensor(beyond, dtype=torch.float32, device=given.device)

    return scores
'''
TERM_RECIPE = """
recipe: shortened
model: {source: "builtin:tiny"}
generation: {max_response_tokens: 8}
data:
  prompts: {source: "builtin:arithmetic/prompts", rows: 20, split: {validation: 8, test: 8}}
rewards:
  short: {terms: [{max_length: 2, weight: 0.5}, {verifier: arithmetic}]}
stages:
  best:
    {kind: best_of_n, init: model, reward: short, prompts: prompts, iterations: 1, batch_size: 8, minibatch_size: 2,
     samples_per_prompt: 4, validation_samples: 8, learning_rate: 1.0e-4}
"""

DRIVE = """
import json, sys
from pathlib import Path

from vantage.attempts.jobs import key_parts_of, rewards_of, seed_of, work_of
from vantage.runs.resolving import load_resolved
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.tasks.stages import run_stage

recipe, _ = load_resolved(sys.argv[1], [])
folder, digests, metrics = Path(sys.argv[2]), {}, {}
for step in ordered_steps(recipe):
    inputs = dependencies(recipe)[step]
    key = stage_key(key_parts_of(recipe, step, {role: digests[read] for role, read in inputs.items()}))
    output = folder / "made" / step
    output.mkdir(parents=True)
    job = StageJob(
        run_id="r", name=step, attempt=1, stage_key=key, seed=seed_of(recipe, step), work=work_of(recipe, step),
        generation=recipe.generation, rewards=rewards_of(recipe, step), scratch=folder / "scratch" / key, output=output,
        inputs={role: folder / "made" / read for role, read in inputs.items()},
    )
    digests[step] = key
    metrics[step] = run_stage(type(job).model_validate_json(job.model_dump_json())).metrics
journals = {step: (folder / "scratch" / key / "journal.jsonl") for step, key in digests.items()}
curves = {step: path.read_text() for step, path in journals.items() if path.is_file()}
print(json.dumps({"metrics": metrics, "curves": curves, "keys": digests}))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages."""
    folder = tmp_path / "tree"
    copy_packages(folder)
    return folder


def insert(file: Path, text: str, *, before: str) -> None:
    """Put lines before the one place that begins with ``before``."""
    written = file.read_text()
    assert written.count(before) == 1, before
    file.write_text(written.replace(before, text.strip("\n") + ("\n" if text.strip() else "") + before))


def touched(folder: Path) -> list[str]:
    """Files of the copy that the tree has not, or has otherwise."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    return [
        str(file)
        for file in files
        if not (ROOT / file).is_file() or not filecmp.cmp(ROOT / file, folder / file, shallow=False)
    ]


def run_in(tree: Path, *arguments: str) -> str:
    """What a Python process prints whose packages are the copy's."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={"PATH": "", "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def planned(tree: Path, recipe: str) -> str:
    (tree / "own.yaml").write_text(recipe)
    return run_in(
        tree,
        "-c",
        "from vantage.cli.main import main; main()",
        "plan",
        "own.yaml",
        "--workspace",
        str(tree / "workspace"),
    )


def driven(tree: Path) -> dict[str, dict[str, dict[str, float]]]:
    (tree / "drive.py").write_text(DRIVE)
    told: dict[str, dict[str, dict[str, float]]] = json.loads(
        run_in(tree, "drive.py", "own.yaml", str(tree / "results")).splitlines()[-1]
    )
    (tree / "drive.py").unlink()
    return told


def test_a_stage_kind_is_its_class_its_task_and_its_row(tree: Path) -> None:
    (tree / "schemas" / "recipe" / "length_count.py").write_text(STAGE_CLASS.lstrip())
    (tree / "tasks" / "length_count.py").write_text(STAGE_TASK.lstrip())
    kinds = tree / "schemas" / "kinds.py"
    insert(
        kinds,
        "from vantage.schemas.recipe.length_count import LengthCount",
        before="from vantage.schemas.recipe.stages import (",
    )
    insert(kinds, STAGE_ROW, before=")\n\nKINDS: Mapping")
    assert touched(tree) == ["schemas/kinds.py", "schemas/recipe/length_count.py", "tasks/length_count.py"]

    plan = planned(tree, STAGE_RECIPE)
    assert "long  " in plan and "for data.demonstrations" in plan
    measured = driven(tree)["metrics"]["long"]
    assert measured["source_rows"] > 100
    assert 0 < measured["train_rows"] < measured["source_rows"]
    assert touched(tree) == ["schemas/kinds.py", "schemas/recipe/length_count.py", "tasks/length_count.py"]


def test_a_reward_term_is_its_class_its_scorer_and_its_row(tree: Path) -> None:
    terms = tree / "schemas" / "recipe" / "terms.py"
    (tree / "tasks" / "rewards" / "length_scores.py").write_text(TERM_SCORER.lstrip())
    insert(terms, "from pydantic import Field", before="from pydantic import ValidatorFunction")
    insert(terms, TERM_CLASS, before="@dataclass(frozen=True, kw_only=True)\nclass TermKind")
    insert(terms, TERM_ROW, before=')\n"""Every kind of reward term."""')
    assert touched(tree) == ["schemas/recipe/terms.py", "tasks/rewards/length_scores.py"]

    assert "best" in planned(tree, TERM_RECIPE)
    told = driven(tree)
    (curve,) = (json.loads(line) for line in str(told["curves"]["best"]).splitlines())
    metrics = curve["metrics"]
    assert metrics["score_mean"] == pytest.approx(
        0.5 * metrics["score_mean_max_length"] + metrics["score_mean_arithmetic"]
    )
    assert metrics["score_mean_max_length"] < 0


def test_what_is_there_has_the_same_key_beside_a_new_kind(tree: Path) -> None:
    """A new kind of term leaves every stage key alone: its fields stand in its own class."""
    keys = "from tests.attempts.test_recorded_keys import *; test_no_key_and_no_recorded_recipe_has_moved(Path('rec').absolute())"
    terms = tree / "schemas" / "recipe" / "terms.py"
    insert(terms, "from pydantic import Field", before="from pydantic import ValidatorFunction")
    insert(terms, TERM_CLASS, before="@dataclass(frozen=True, kw_only=True)\nclass TermKind")
    insert(terms, TERM_ROW, before=')\n"""Every kind of reward term."""')
    (tree / "tests" / "attempts").mkdir(parents=True)
    for name in ("test_recorded_keys.py", "recorded_keys.json"):
        shutil.copy(ROOT / "tests" / "attempts" / name, tree / "tests" / "attempts")
    (tree / "rec").mkdir()
    run_in(tree, "-c", keys)
