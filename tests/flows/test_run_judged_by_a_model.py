"""Runs whose reward asks a language model of the run have transformers' scores, and survive reruns, kills and audits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.answered_runs import go, ref_of
from vantage.flows.garbage_collection import collect
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs.workspace import Workspace
from vantage.schemas.records.stored_answers import answers_key
from vantage.storage.refs import Ref
from vantage.tasks.rewards import judging_model_scores
from vantage.tasks.training.scratch import ANSWERS

RECIPE = """\
recipe: judged
seed: 5
model: {source: "builtin:tiny"}
models: {grader: {source: "builtin:tiny"}}
data:
  questions: {source: questions.jsonl, split: {validation: 2, test: 2}}
rewards:
  main:
    terms:
    - judge: {model: grader, criteria: {right: "right?", short: "short?"}, prompt: "{prompt}{response}{criterion}", scale: [0, 9]}
      weight: 50.0
      scores: {right: {}, short: {weight: -1.0}}
    - judge: {name: rival, model: model, against: answer, prompt: "{prompt}{first}{second}"}
stages:
  collected: {kind: rollout_collection, policy: model, prompts: questions, reward: main, samples_per_prompt: 3,
              held_out_samples_per_prompt: 2, batch_size: 15, microbatch_size: 60}
  policy: {kind: policy_optimization, algorithm: {preset: grpo, samples_per_prompt: 4}, init: model, reward: main, prompts: questions, iterations: 2,
           batch_size: 8, minibatch_size: 8, microbatch_size: 60, checkpoint_every: 1, validate_every: 2, validation_samples: 2}
generation: {max_prompt_tokens: 24, max_response_tokens: 8}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{a}+{b}?", "answer": str(a + b)} for a in range(2, 5) for b in range(3)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "judged.yaml"
    path.write_text(RECIPE)
    return path


def answers_of(workspace: Workspace, ref: Ref) -> Path:
    kept = workspace.storage.find(answers_key(ref.artifact.stage_key))
    assert kept is not None
    return workspace.storage.folder(kept.artifact) / ANSWERS


@pytest.mark.slow
def test_scores_are_those_of_transformers_and_of_the_kept_answers(workspace: Workspace, recipe: Path) -> None:
    record = go(workspace, recipe, until="policy")
    ref = ref_of(workspace, record, "collected")
    grader = ref_of(workspace, record, "models.grader")
    folder = workspace.storage.folder(grader.artifact)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def mean(text: str) -> float:
        ids = tokenizer(text)["input_ids"]
        ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
        with torch.no_grad():
            last = model(torch.tensor([ids])).logits[0, -1].softmax(dim=-1)
        weights = [last[tokenizer.convert_tokens_to_ids(str(number))].item() for number in range(10)]
        return sum(number * weight for number, weight in enumerate(weights)) / sum(weights)

    rows: list[dict[str, Any]] = []
    for split in ("train", "validation", "test"):
        with pa.memory_map(str(workspace.storage.folder(ref.artifact) / f"{split}.arrow")) as file:
            rows += pa.ipc.open_file(file).read_all().to_pylist()
    assert len(rows) == 5 * 3 + 2 * 2 + 2 * 2
    lines = [json.loads(line) for line in answers_of(workspace, ref).read_text().splitlines()]
    kept = {each["asked"]["question"]: json.loads(each["answer"]) for each in lines}
    for row in rows[::4]:
        text = row["prompt"] + row["response"]
        right, short = mean(text + "right?"), mean(text + "short?")
        assert (row["score.judge.right"], row["score.judge.short"]) == pytest.approx((right, short), abs=1e-4)
        assert set(kept[text + "right?"]) == set("0123456789")
        assert row["score"] == pytest.approx(50 * (right - short) + row["score.rival"], abs=1e-2)
    assert {each["asked"]["model"] for each in lines} == {
        ref_of(workspace, record, name).artifact.digest for name in ("models.grader", "model")
    }
    criteria, _ = ref.key_parts["rewards"]["reward"]["terms"]
    assert criteria["judge"]["model"] == grader.artifact.digest and "grader" not in json.dumps(ref.key_parts)
    assert ref.artifact.parents["reward.main.0"] == grader.artifact.digest
    assert "not_bitwise" not in ref.provenance


def lose(workspace: Workspace, ref: Ref, *folders: Path) -> None:
    """Remove an artifact, its scratch folder, and other folders of the store."""
    for folder in (workspace.storage.folder(ref.artifact), *folders):
        shutil.rmtree(folder)
    workspace.storage.discard_scratch(ref.artifact.stage_key)


@pytest.mark.slow
def test_a_rerun_has_the_same_bits_with_and_without_the_kept_answers(
    workspace: Workspace, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is made three times: whole, then anew with two interruptions while its judge is asked, then from kept answers."""
    passes, stops = 0, set[int]()
    computed = judging_model_scores.label_logprobs

    def counted(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes in stops:
            raise KeyboardInterrupt
        return computed(*given)

    monkeypatch.setattr(judging_model_scores, "label_logprobs", counted)
    go(workspace, recipe, until="policy")
    before_policy = passes
    record = go(workspace, recipe)
    ref = ref_of(workspace, record, "policy")
    with Evidence(workspace) as evidence:
        checks = [
            check
            for artifact in audit(evidence, record.run_id).artifacts
            for check in artifact.checks
            if check.subject == "stored answers"
        ]
    assert [check.outcome for check in checks] == ["ok", "ok"]
    before = answers_of(workspace, ref).read_bytes()

    lose(workspace, ref, answers_of(workspace, ref).parent)
    last = passes + (passes - before_policy)
    stops |= {last - 4, last - 2}
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            go(workspace, recipe)
    assert ref_of(workspace, go(workspace, recipe), "policy").artifact.digest == ref.artifact.digest
    assert answers_of(workspace, ref).read_bytes() == before

    collect(workspace)
    lose(workspace, ref)
    monkeypatch.setattr(judging_model_scores, "label_logprobs", None)
    assert ref_of(workspace, go(workspace, recipe), "policy").artifact.digest == ref.artifact.digest
    assert answers_of(workspace, ref).read_bytes() == before
