"""Pairs are sampled from a policy, and all stages that learn from pairs use them. Stages are real but small."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.flows.orchestrator import Orchestrator
from vantage.flows.publishing.publishing import publish
from vantage.runs.planning import plan
from vantage.runs.record import StageRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.metric_names import UNCOMPILED
from vantage.schemas.records.artifacts import Dataset, PolicyCheckpoint, RolloutsArtifact
from vantage.schemas.records.attempt import RUN_STAGE
from vantage.schemas.records.metrics import headline_metric_names
from vantage.tasks.data.rows import read_rows

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

RECIPE = """\
recipe: pairs
seed: 3
model: {source: "builtin:tiny"}
generation: {max_prompt_tokens: 48, max_response_tokens: 16}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 160}
  prompts: {source: "builtin:arithmetic/prompts", rows: 32, split: {validation: 8, test: 8}}
rewards:
  learned: {terms: [{model: reward}], missing_eos: {subtract: 0.5}}
  right: {terms: [{verifier: arithmetic, wrong: -1.0}]}
stages:
  sft: {kind: sft, data: demonstrations, epochs: 0.5, batch_size: 8, learning_rate: 1.0e-3}
  imitated: {kind: preference_collection, policy: sft, demonstrations: demonstrations, batch_size: 64}
  reward: {kind: reward_model, init: sft, data: imitated, epochs: 0.5, batch_size: 8, learning_rate: 1.0e-3}
  judged:
    kind: preference_collection
    policy: sft
    prompts: prompts
    judge: {reward: learned}
    samples_per_prompt: 3
    gate: {metric: tied_share, at_most: 0.5}
  dpo: {kind: dpo, init: sft, data: judged, epochs: 1, batch_size: 8, learning_rate: 1.0e-4}
  collected: {kind: rollout_collection, policy: sft, prompts: prompts, reward: right, samples_per_prompt: 2, batch_size: 32}
  value:
    kind: value_pretraining
    policy: sft
    init: sft
    reward: right
    prompts: prompts
    rollouts: collected
    iterations: 2
    batch_size: 16
    minibatch_size: 8
    validation_samples: 16
    learning_rate: 1.0e-3
  best:
    kind: best_of_n
    init: dpo
    reward: right
    prompts: prompts
    samples_per_prompt: 4
    batch_size: 16
    minibatch_size: 4
    iterations: 2
    validation_samples: 8
    learning_rate: 1.0e-4
publish:
  - {stage: dpo, registered_model: pairs-dpo, alias: champion, after: judged}
  - {stage: best, registered_model: pairs-best}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "pairs.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def lived(
    tmp_path_factory: pytest.TempPathFactory, ledger_database: str, recipe: Path
) -> Iterator[tuple[Orchestrator, dict[str, StageRecord]]]:
    """Run all steps of the recipe once, and publish its models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", ledger_database)
        patch.setenv("OMP_NUM_THREADS", "1")
        workspace = Workspace(tmp_path_factory.mktemp("pairs") / "workspace")
        with orchestrated(workspace, recipe, in_process=True, stage_function=RUN_STAGE) as orchestrator:
            stages = attempt_all(orchestrator)
            for publication in orchestrator.recipe.publish:
                publish(publication, orchestrator)
            orchestrator.run.update(status=orchestrator.run.outcome())
            yield orchestrator, stages


def test_every_stage_completes_and_measures_what_the_page_says(
    lived: tuple[Orchestrator, dict[str, StageRecord]],
) -> None:
    orchestrator, stages = lived
    assert {name: stage.status for name, stage in stages.items()} == dict.fromkeys(
        orchestrator.inputs, "completed"
    ), {name: stage.reason for name, stage in stages.items()}
    for name in ("imitated", "judged", "collected", "best"):
        kind = orchestrator.recipe.stages[name].kind
        assert set(stages[name].metrics) == headline_metric_names(kind) - {
            "validation_watch_score",  # metrics of a stage with a watch
            *UNCOMPILED,
        }, name
    assert set(stages["dpo"].metrics) == headline_metric_names("dpo") - {
        "tied_share",  # metrics of collected responses
        *UNCOMPILED,
    }
    assert stages["judged"].verdicts[0].passed


def test_collected_pairs_are_a_dataset_of_preferences_with_their_parents(
    lived: tuple[Orchestrator, dict[str, StageRecord]],
) -> None:
    orchestrator, _ = lived
    of = orchestrator.artifacts
    for name, parents in {
        "imitated": {"policy": "sft", "demonstrations": "data.demonstrations"},
        "judged": {"policy": "sft", "prompts": "data.prompts", "reward.learned.0": "reward"},
    }.items():
        artifact = of[name]
        assert isinstance(artifact, Dataset)
        assert artifact.content == "preferences"
        assert artifact.parents == {role: of[step].digest for role, step in parents.items()}
        files = {path.name for path in orchestrator.store.folder(artifact).iterdir()}
        parquet = {"train.parquet", "validation.parquet", "test.parquet"}
        assert files == {*parquet, "report.json", "metrics.json", "manifest.json"}
        assert files == {path.name for path in orchestrator.store.folder(of["data.prompts"]).iterdir()}
        for split in ("train", "validation", "test"):
            rows = read_rows(orchestrator.store.folder(artifact), split)
            assert len(rows) == artifact.metrics[f"{split}_rows"] > 0


def test_collected_responses_are_an_artifact_that_others_name_as_their_parent(
    lived: tuple[Orchestrator, dict[str, StageRecord]],
) -> None:
    orchestrator, _ = lived
    of = orchestrator.artifacts
    collected = of["collected"]
    assert isinstance(collected, RolloutsArtifact)
    assert collected.parents == {"policy": of["sft"].digest, "prompts": of["data.prompts"].digest}
    assert collected.tokenizer_digest == of["sft"].tokenizer_digest  # type: ignore[union-attr]
    files = {path.name for path in orchestrator.store.folder(collected).iterdir()}
    arrow = {"train.arrow", "validation.arrow", "test.arrow"}
    assert files == {*arrow, "rollouts.json", "metrics.json", "manifest.json"}
    assert of["value"].parents["rollouts"] == collected.digest


def test_what_learns_from_the_pairs_names_them_as_its_parent(
    lived: tuple[Orchestrator, dict[str, StageRecord]],
) -> None:
    orchestrator, _ = lived
    of = orchestrator.artifacts
    assert of["reward"].parents == {"init": of["sft"].digest, "data": of["imitated"].digest}
    assert of["dpo"].parents == {
        "init": of["sft"].digest,
        "reference": of["sft"].digest,
        "data": of["judged"].digest,
    }
    assert of["best"].parents == {"init": of["dpo"].digest, "prompts": of["data.prompts"].digest}
    assert isinstance(of["dpo"], PolicyCheckpoint)
    assert isinstance(of["best"], PolicyCheckpoint)
    assert of["dpo"].digest != of["sft"].digest


def test_both_policies_are_published(lived: tuple[Orchestrator, dict[str, StageRecord]]) -> None:
    orchestrator, _ = lived
    assert orchestrator.watcher.lines[-2:] == [  # type: ignore[attr-defined]
        "  published dpo as pairs-dpo@champion: version 1",
        "  published best as pairs-best: version 1",
    ]


def test_a_second_run_would_reuse_everything_and_another_batch_size_collects_again(
    lived: tuple[Orchestrator, dict[str, StageRecord]],
) -> None:
    orchestrator, _ = lived
    runs = read_runs(orchestrator.run.workspace)
    assert {step.action for step in plan(orchestrator.recipe, orchestrator.store, runs)} == {"reuse"}
    judged = orchestrator.recipe.stages["judged"].model_copy(update={"batch_size": 128})
    changed = orchestrator.recipe.model_copy(
        update={"stages": {**orchestrator.recipe.stages, "judged": judged}}
    )
    steps = {step.name: step for step in plan(changed, orchestrator.store, runs)}
    assert {name for name, step in steps.items() if step.action != "reuse"} == {"judged", "dpo", "best"}
    assert steps["judged"].reasons == ("configuration.batch_size: 256 → 128",)
