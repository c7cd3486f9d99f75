"""A pass that only keeps step with other ranks changes no weight, no metric and no count, in whatever stage.

On several ranks, those with fewer rows compute their first row again, with weight 0. Here one rank does so after each batch.
"""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from vantage.ledger.journal import read
from vantage.schemas.kinds import resolve_work
from vantage.schemas.metric_names import OF_MACHINE, PASSES
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization
from vantage.schemas.recipe.unpaired import KahnemanTverskyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.rows import read_rows, write_rows
from vantage.tasks.stages import run_stage
from vantage.tasks.training import passes
from vantage.tasks.training.passes import Pass
from vantage.tasks.training.scratch import JOURNAL
from vantage.tasks.training.step_metrics import Speed

ON_DATA = {"epochs": 0.1, "batch_size": 7, "learning_rate": 1e-3, "microbatch_size": 3}
AGAINST_MODEL: dict[str, Any] = {**ON_DATA, "init": "sft", "reference": "model", "data": "data", "beta": 0.3}
SAMPLED = {"iterations": 1, "validation_samples": 2, "test_samples": 2, "microbatch_size": 3}
VALUE = {"iterations": 1, "test_samples": 2, "microbatch_size": 3}
STAGES: dict[str, Any] = {
    "sft": ("sft", ON_DATA),
    "pairs": ("reward", {**ON_DATA, "lm_coef": 0.5, "centre_coef": 0.1}),
    "rankings": ("reward", {**ON_DATA, "lm_coef": 0.0, "centre_coef": 0.0}),
    "dpo": ("sft", DirectPreferenceOptimization(kind="dpo", **AGAINST_MODEL)),
    "kto": ("sft", KahnemanTverskyOptimization(kind="kto", **AGAINST_MODEL)),
    "value": ("value", VALUE),
    "policy": ("policy", SAMPLED),
}


def write_data(pipeline: Any, folder: Path, stage: str) -> Path:
    """Write the pairs of the pipeline as labelled responses, or as rankings of two."""
    for split in ("train", "validation", "test"):
        pairs = read_rows(pipeline.inputs({"data": "preferences"})["data"], split)
        rows: list[Any] = [
            {"prompt": pair["prompt"], "responses": [pair["chosen"], pair["rejected"]], "ranks": [1.0, 2.0]}
            for pair in pairs
        ]
        if stage == "kto":
            rows = [
                {"prompt": pair["prompt"], "response": pair[side], "label": side == "chosen"}
                for pair in pairs
                for side in ("chosen", "rejected")
            ]
        write_rows(folder, split, rows)
    return folder


def job_of(stage: str, pipeline: Any, folder: Path) -> StageJob:
    name, changes = STAGES[stage]
    if isinstance(changes, dict):
        job: StageJob = pipeline.job(name, folder=folder, **changes)
    else:
        job = pipeline.job(name, folder=folder).model_copy(update={"work": changes})
    inputs = dict(job.inputs)
    if stage in ("dpo", "kto"):
        inputs = pipeline.inputs({"init": "sft", "reference": "model", "data": "preferences"})
    if stage in ("rankings", "kto"):
        (folder / "data").mkdir()
        inputs["rankings" if stage == "rankings" else "data"] = write_data(pipeline, folder / "data", stage)
    if stage == "rankings":
        del inputs["data"]
    changed = {"work": resolve_work(job.work), "inputs": inputs, "digests": pipeline.digests(inputs)}
    return job.model_copy(update=changed)


def ran(job: StageJob, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Run the stage. Returns its weights, its metrics, those of its steps, and the tokens of each step."""
    counts: list[int] = []
    monkeypatch.setattr(Speed, "after", lambda _, num_tokens: counts.append(num_tokens) or 1.0)
    result = run_stage(job)
    weights = {
        name: tensor.tolist()
        for path in sorted(job.output.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    left_out = {*OF_MACHINE, *PASSES, "prompt_reads", "ended_rows_share"}
    steps = [
        {name: value for name, value in entry.metrics.items() if name not in left_out}
        for entry in read(job.scratch / JOURNAL)
    ]
    return weights, result.metrics, steps, counts


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_that_keeps_step_changes_nothing(
    stage: str, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = ran(job_of(stage, pipeline, tmp_path / "without"), monkeypatch)
    in_step, idle = passes.in_step, [0]

    def with_one_more(mine: list[Pass], count: int) -> list[Pass]:
        idle[0] += 1
        return [*in_step(mine, count), Pass([0], weight=0.0)]

    monkeypatch.setattr(passes, "in_step", with_one_more)
    found = ran(job_of(stage, pipeline, tmp_path / "with"), monkeypatch)
    assert idle[0] > 3
    for now, before in zip(found, without, strict=True):
        assert now == before
