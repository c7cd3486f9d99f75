"""Make runs of a small recipe whose artifacts are written here and not computed: rows, judged responses, metrics.

Store, refs, records, keys and verdicts are the real ones, and ``vantage.algorithms.uncertainty`` computes the metrics.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vantage.algorithms.uncertainty import clustered_mean
from vantage.attempts.jobs import gates_of, key_parts_of, work_of
from vantage.ledger.operations import Input
from vantage.runs.gates import check_gates
from vantage.runs.record import RunRecord, StageRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run
from vantage.runs.workspace import Workspace
from vantage.schemas.kinds import KINDS
from vantage.schemas.records.environment import Environment, Installed
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.storage.environments import keep_environment

RECIPE = """\
recipe: compared
seed: 3
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: demonstrations.jsonl}
  prompts: {source: "builtin:arithmetic/prompts", rows: 200}
stages:
  sft: {kind: sft, data: demonstrations, learning_rate: 1.0e-3}
  evaluation:
    kind: evaluation
    candidate: sft
    baseline: model
    judge: {verifier: arithmetic}
    prompts: prompts
    samples_per_prompt: 2
    gate: {metric: accuracy_gain, at_least: -1.0}
"""

PROVENANCE = {"code": "c" * 64, "torch": "2.13.0", "device": "cpu"}
"""As a version before identities recorded it."""

Judge = Callable[[str, int], float]
"""(Prompt, sample) → 1 for a right response."""


def environment(**versions: str) -> Environment:
    """Return an environment with these distributions."""
    installed = [
        Installed(name=name, version=version, license="MIT") for name, version in sorted(versions.items())
    ]
    return Environment(
        python="3.11.7",
        implementation="CPython",
        system="Debian 12",
        machine="x86_64",
        installed=tuple(installed),
    )


def demonstrations(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each number."""
    return [{"prompt": f"{n} + {n} =", "response": f" {2 * n}"} for n in numbers]


def write_recipe(folder: Path, numbers: Sequence[int], *, name: str = "compared") -> Path:
    """Return the recipe's file beside its demonstrations; they have a row for each number."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) for row in demonstrations(numbers))
    (folder / "demonstrations.jsonl").write_text("".join(f"{line}\n" for line in lines))
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE)
    return path


def make_run(
    workspace: Workspace,
    recipe: Path,
    *overrides: str,
    judge: Judge = lambda prompt, sample: 0.0,
    prompts: Sequence[str] = ("1 + 1 =", "2 + 2 =", "3 + 3 =", "4 + 4 =", "5 + 5 ="),
    weights: str = "",
    provenance: Mapping[str, str] = PROVENANCE,
    installed: Environment | None = None,
    until: str | None = None,
) -> RunRecord:
    """Make a run of the recipe, which reuses what the store has already.

    Args:
        judge: judges the candidate's responses; the baseline's are all wrong.
        prompts: the evaluation's prompts.
        weights: a text in the models' files, so that models of the same key differ; with one, nothing is reused.
        installed: the environment to record; None: none is recorded.
        until: the step that fails; the steps after it are not made.
    """
    resolved, _ = load_resolved(recipe, overrides)
    storage = workspace.storage
    if installed is not None:
        provenance = {**provenance, "environment": keep_environment(storage, installed)}
    with acquire_run(workspace, resolved, source=str(recipe), overrides=overrides) as run:
        resolved = run.record.recipe  # with the values that a run pins
        made: dict[str, Any] = {}
        for step in ordered_steps(resolved):
            if step == until:
                break
            inputs = {role: made[name] for role, name in dependencies(resolved)[step].items()}
            parts = key_parts_of(resolved, step, {role: each.digest for role, each in inputs.items()})
            key, work = stage_key(parts), work_of(resolved, step)
            ref = None if weights else storage.find(key)
            if ref is None:
                number = storage.next_attempt(key)
                folder = storage.staging_folder(key, number)
                description = _write(folder, work, parts, weights, judge, prompts)
                storage.commit(
                    folder,
                    stage_key=key,
                    attempt=number,
                    run_id=run.record.run_id,
                    description={
                        **description,
                        "kind": KINDS[work.kind].makes,
                        "parents": {role: each.digest for role, each in inputs.items()},
                    },
                    key_parts=parts,
                    provenance=provenance,
                )
                ref = storage.find(key)
                assert ref is not None
            made[step] = ref.artifact
            read = {
                role: Input(stage=name, artifact=made[name])
                for role, name in dependencies(resolved)[step].items()
            }
            verdicts = check_gates(resolved, step, ref.artifact, read) if gates_of(resolved, step) else ()
            stage = StageRecord(
                status="completed",
                stage_key=key,
                digest=ref.artifact.digest,
                metrics=ref.artifact.metrics,
                verdicts=verdicts,
                key_parts=parts,
                provenance=ref.provenance,
            )
            run.set_stage(step, stage)
        run.update(status="completed" if until is None else "failed")
        return run.record


def _write(
    folder: Path, work: Any, parts: Mapping[str, Any], weights: str, judge: Judge, prompts: Sequence[str]
) -> dict[str, Any]:
    """Write the files of an artifact, with these fields of its description."""
    if work.kind == "prepare_data":
        path = work.data.origin.path if hasattr(work.data.origin, "path") else None
        rows = (
            [json.loads(line) for line in path.read_text().splitlines()] if path else demonstrations(range(9))
        )
        _write_rows(folder / "train.parquet", rows)
        return {"content": work.content, "metrics": {"train_rows": float(len(rows))}}
    if work.kind == "evaluation":
        return _write_evaluation(folder, judge, prompts)
    (folder / "weights.txt").write_text(
        f"{parts['seed']} {parts['inputs']} {parts['configuration']} {weights}"
    )
    if work.kind == "check_rows":
        return {"metrics": {}}
    return {"tokenizer_digest": "d" * 64, "metrics": {"test_nll": 0.5} if work.kind == "sft" else {}}


def _write_evaluation(folder: Path, judge: Judge, prompts: Sequence[str]) -> dict[str, Any]:
    pairs = [(prompt, sample) for prompt in prompts for sample in range(2)]
    right = torch.tensor([judge(prompt, sample) for prompt, sample in pairs], dtype=torch.float64)
    wrong = torch.zeros(len(pairs), dtype=torch.float64)
    for role, judgements in (("candidate", right), ("baseline", wrong)):
        rows = [
            {"prompt": prompt, "response": " 2", "ended": True, "judgement": value}
            for (prompt, _), value in zip(pairs, judgements.tolist(), strict=True)
        ]
        _write_rows(folder / f"{role}.parquet", rows)
    clusters = torch.tensor([list(prompts).index(prompt) for prompt, _ in pairs])
    estimates = {
        name: clustered_mean(values, clusters)
        for name, values in {"accuracy": right, "accuracy_gain": right - wrong}.items()
    }
    return {
        "metrics": {**{name: each.value for name, each in estimates.items()}, "reward_spread": 1.0},
        "uncertainty": {
            name: Uncertainty(
                n=each.num_clusters, rows=each.num_rows, standard_error=each.standard_error
            ).model_dump(mode="json")
            for name, each in estimates.items()
        },
    }


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(list(map(dict, rows))), path)
