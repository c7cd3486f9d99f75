"""Two real runs of a small recipe, of which the second has other demonstrations: what the tests of a comparison read."""

import json
from pathlib import Path

from flows.runs.publishing import publish
from flows.runs.record import RunRecord
from flows.runs.workspace import Workspace
from schemas.records.attempt import RUN_STAGE
from tests.flows.orchestrated import attempt_all, orchestrated

RECIPE = """\
recipe: compared
seed: 3
model: {source: "builtin:tiny"}
generation: {max_prompt_tokens: 48, max_response_tokens: 6}
data:
  demonstrations: {source: demonstrations.jsonl, split: {validation: 0.1, test: 0.2}}
  prompts: {source: "builtin:arithmetic/prompts", rows: 120, split: {validation: 0.1, test: 0.2}}
stages:
  sft: {kind: sft, data: demonstrations, epochs: 0.5, batch_size: 8, learning_rate: 1.0e-3}
  evaluation:
    kind: evaluation
    candidate: sft
    baseline: model
    judge: {verifier: arithmetic}
    prompts: prompts
    samples_per_prompt: 2
    gate: {metric: accuracy_gain, at_least: -1.0}
publish:
  - {stage: sft, registered_model: compared, alias: champion, after: evaluation}
"""
CHANGES = (
    "data.demonstrations.source=other.jsonl",
    "stages.sft.learning_rate=3.0e-3",
    'stages.evaluation.gate=[{"metric": "accuracy_gain", "at_least": 0.9, "on_fail": "continue"}]',
)
"""Overrides of the second run."""


def demonstrations(numbers: range) -> str:
    """Lines of JSON, one row for each number."""
    rows = ({"prompt": f"{n} + {n} =", "response": f" {2 * n}"} for n in numbers)
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def make_two_runs(folder: Path) -> tuple[Workspace, Path, tuple[RunRecord, RunRecord]]:
    """The workspace, the recipe's file, and both runs. B has rows 3 to 67 of A's 0 to 63: three less, four more."""
    recipe = folder / "compared.yaml"
    recipe.write_text(RECIPE)
    (folder / "demonstrations.jsonl").write_text(demonstrations(range(64)))
    (folder / "other.jsonl").write_text(demonstrations(range(3, 68)))
    workspace = Workspace(folder / "workspace")
    changes = [CHANGES[0].replace("other", f"{folder}/other"), *CHANGES[1:]]
    return workspace, recipe, (_run(workspace, recipe), _run(workspace, recipe, *changes))


def _run(workspace: Workspace, recipe: Path, *overrides: str) -> RunRecord:
    with orchestrated(workspace, recipe, *overrides, stage_function=RUN_STAGE) as orchestrator:
        attempt_all(orchestrator)
        for publication in orchestrator.recipe.publish:
            publish(publication, orchestrator)
        orchestrator.end()
        return orchestrator.run.record
