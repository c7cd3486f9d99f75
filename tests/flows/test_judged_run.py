"""Runs whose reward asks a judge and a reward server have scores that are recomputed by hand, and survive kills, reruns and audits."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.answered_runs import go, ref_of
from tests.support.fake_judge_server import FakeJudge
from vantage.attempts.exit_codes import ExitCode
from vantage.flows.garbage_collection import collect
from vantage.ledger.operations import LogMetrics
from vantage.ledger.replay import read_replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs.workspace import Workspace
from vantage.schemas.records.audit import AuditReport
from vantage.schemas.records.stored_answers import answers_key
from vantage.storage.refs import Ref
from vantage.tasks.training.scratch import ANSWERS

RECIPE = """\
recipe: judged
seed: 5
model: {{source: "builtin:tiny"}}
data:
  questions: {{source: questions.jsonl, split: {{validation: 4, test: 4}}}}
verifiers:
  equal: {{source: "builtin:exact_match"}}
rewards:
  main:
    terms:
    - verifier: equal
      weight: 5.0
      wrong: -1.0
    - judge:
        name: critic
        url: {judge}/v1
        model: critic-7b
        api_key_variable: CRITIC_API_KEY
        criteria: {{clear: "Is it clear?", kind: "Is it kind?"}}
        scale: [1, 10]
        price: {{question: 2.0, answer: 8.0}}
        patience_seconds: 2.0
      weight: 0.5
      scores:
        clear: {{weight: 2.0, clip: {{low: 3, high: 8}}}}
        kind: {{weight: -1.0, offset: -5.0}}
    - judge: {{name: rival, url: {judge}/v1, model: critic-7b, against: answer, api_key_variable: CRITIC_API_KEY,
              patience_seconds: 2.0}}
      weight: 3.0
    - http: {{url: {server}, version: "2024-1", names: [brief], batch: 3, patience_seconds: 2.0}}
      weight: 0.25
stages:
  collected: {{kind: rollout_collection, policy: model, prompts: questions, reward: main, samples_per_prompt: 3,
              held_out_samples_per_prompt: 2, batch_size: 12}}
  policy: {{kind: policy_optimization, algorithm: {{preset: grpo, samples_per_prompt: 4}}, init: model, reward: main, prompts: questions, iterations: 3,
           batch_size: 8, minibatch_size: 8, checkpoint_every: 1, validate_every: 3, validation_samples: 4}}
generation: {{max_prompt_tokens: 48, max_response_tokens: 12}}
"""
KEY = "canary-key-of-the-critic"


@pytest.fixture
def servers() -> Iterator[tuple[FakeJudge, FakeJudge]]:
    with FakeJudge(key=KEY, names=("clear", "kind", "score")) as judge, FakeJudge(names=("brief",)) as server:
        yield judge, server


@pytest.fixture
def recipe(tmp_path: Path, servers: tuple[FakeJudge, FakeJudge], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRITIC_API_KEY", KEY)
    rows = [{"prompt": f"{a}+{b}?", "answer": str(a + b)} for a in range(2, 8) for b in range(3)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "judged.yaml"
    path.write_text(RECIPE.format(judge=servers[0].url, server=servers[1].url))
    return path


def answers_of(workspace: Workspace, ref: Ref) -> tuple[Path, list[dict[str, Any]]]:
    kept = workspace.storage.find(answers_key(ref.artifact.stage_key))
    assert kept is not None
    path = workspace.storage.folder(kept.artifact) / ANSWERS
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def by_hand(row: dict[str, Any], answers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the scores of a response and their sum, from the stored answers and the recipe's text alone."""
    prompt, response, answer = row["prompt"], row["response"], row["answer"]
    chat = {
        each["asked"]["messages"][0]["content"]: each["answer"]
        for each in answers
        if "messages" in each["asked"]
    }
    alone = next(
        chat[text] for text in chat if f"[Prompt]\n{prompt}\n\n[Response]\n{response}\n\nGive" in text
    )
    clear, kind = (float(line.split(": ")[1]) for line in alone.splitlines()[:2])
    first, second = (
        next(
            chat[text]
            for text in chat
            if f"{prompt}\n\n[Response A]\n{a}\n\n[Response B]\n{b}\n\nDecide" in text
        )
        for a, b in ((response, answer), (answer, response))
    )
    last = {"A": 1.0, "tie": 0.5, "B": 0.0}
    rival = (last[first.splitlines()[-1][7:]] + 1 - last[second.splitlines()[-1][7:]]) / 2
    item = {"prompt": prompt, "response": response, "answer": answer}
    brief = next(json.loads(each["answer"])["brief"] for each in answers if each["asked"].get("item") == item)
    right = response.strip() == answer
    return {
        "equal": 1.0 if right else -1.0,
        "critic.clear": clear,
        "critic.kind": kind,
        "rival": rival,
        "http.brief": brief,
        "sum": 5 * (1 if right else -1)
        + 0.5 * (2 * min(max(clear, 3), 8) - (kind - 5))
        + 3 * rival
        + 0.25 * brief,
    }


def curves_of(workspace: Workspace, run_id: str) -> dict[str, list[float]]:
    """Return metric → its values, in the order of their steps, as the run has recorded them."""
    data = workspace.records.read_outbox(run_id)
    assert data is not None
    curves: dict[str, list[float]] = {}
    for line in read_replay(data, run_id=run_id).lines:
        for name, value, *_ in line.operation.rows if isinstance(line.operation, LogMetrics) else ():
            curves.setdefault(name, []).append(value)
    return curves


def audited(workspace: Workspace, target: str) -> AuditReport:
    with Evidence(workspace) as evidence:
        return audit(evidence, target)


def found(report: AuditReport, outcome: str) -> list[str]:
    return [
        check.detail
        for artifact in report.artifacts
        for check in artifact.checks
        if check.subject == "stored answers" and check.outcome == outcome
    ]


def test_scores_are_those_of_the_stored_answers(
    workspace: Workspace, recipe: Path, servers: tuple[FakeJudge, FakeJudge]
) -> None:
    record = go(workspace, recipe, until="policy")
    ref = ref_of(workspace, record, "collected")
    _, answers = answers_of(workspace, ref)
    folder = workspace.storage.folder(ref.artifact)
    rows = []
    for split in ("train", "validation", "test"):
        with pa.memory_map(str(folder / f"{split}.arrow")) as file:
            rows += pa.ipc.open_file(file).read_all().to_pylist()
    assert len(rows) == 10 * 3 + 4 * 2 + 4 * 2
    for row in rows:
        scores = by_hand(row, answers)
        assert row["score"] == pytest.approx(scores.pop("sum"), rel=1e-5)
        assert {name: row[f"score.{name}"] for name in scores} == pytest.approx(scores)
    assert len({row["score"] for row in rows}) > 10
    assert ref.provenance["not_bitwise"].startswith("servers gave scores")
    assert set(servers[0].seen.questions.values()) == {1} == set(servers[1].seen.questions.values())
    curves = curves_of(workspace, record.run_id)
    for name in ("critic.clear", "critic.kind", "rival", "http.brief"):
        assert len(curves[f"score_mean_{name}"]) == len(curves[f"score_p50_{name}"]) > 0
    judged = [each for each in answers if "messages" in each["asked"]]
    tokens = [sum(each[f"{kind}_tokens"] for each in judged) for kind in ("question", "answer")]
    assert sum(curves["judge_tokens"]) == sum(tokens)
    critic = [each for each in judged if "Give a number" in each["asked"]["messages"][0]["content"]]
    cost = sum(2 * each["question_tokens"] + 8 * each["answer_tokens"] for each in critic) / 1e6
    assert sum(curves["judge_cost"]) == pytest.approx(cost)
    assert sum(curves["judge_answers"]) == len(answers)
    # The key names the model and not its address; no file has the API key.
    parts = json.dumps(ref.key_parts)
    assert "critic-7b" in parts and "127.0.0.1" not in parts and "CRITIC_API_KEY" not in parts
    files = [path for path in workspace.root.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_an_audit_finds_answers_that_were_replaced_as_a_whole(
    workspace: Workspace, recipe: Path, servers: tuple[FakeJudge, FakeJudge]
) -> None:
    """Each file, digest and ref of the new answers is as it should be; only the stage knows which answers it was given."""
    record = go(workspace, recipe, until="policy")
    ref = ref_of(workspace, record, "collected")
    key = answers_key(ref.artifact.stage_key)
    kept = workspace.storage.find(key)
    assert kept is not None
    assert ref.provenance["answers"] == kept.artifact.digest
    assert len(found(audited(workspace, record.run_id), "ok")) == 1
    _, answers = answers_of(workspace, ref)
    answers[0]["answer"] = "another"
    storage = workspace.storage
    with storage.exclusive(key, holder="a forger"):
        attempt = storage.next_attempt(key)
        folder = storage.staging_folder(key, attempt)
        (folder / ANSWERS).write_text("".join(json.dumps(each) + "\n" for each in answers))
        forged = storage.commit(
            folder,
            stage_key=key,
            attempt=attempt,
            run_id=record.run_id,
            description={"kind": "answers", "parents": {}, "metrics": kept.artifact.metrics},
            key_parts=kept.key_parts,
            provenance=kept.provenance,
        )
    assert found(audited(workspace, record.run_id), "wrong") == [
        f"they are {forged.digest[:12]}, and the stage was given {kept.artifact.digest[:12]}"
    ]


@pytest.mark.slow
def test_a_rerun_replays_every_answer_and_an_audit_reads_them(
    workspace: Workspace, recipe: Path, servers: tuple[FakeJudge, FakeJudge]
) -> None:
    record = go(workspace, recipe)
    refs = {stage: ref_of(workspace, record, stage) for stage in ("collected", "policy")}
    assert len(found(audited(workspace, record.run_id), "ok")) == 2
    collect(workspace)
    before = {stage: answers_of(workspace, ref)[0].read_bytes() for stage, ref in refs.items()}
    # The artifacts are lost, and the servers are gone: the answers are enough for the same bits.
    for ref in refs.values():
        shutil.rmtree(workspace.storage.folder(ref.artifact))
        workspace.storage.discard_scratch(ref.artifact.stage_key)
    for server in servers:
        server.stop()
    again = go(workspace, recipe)
    for stage, ref in refs.items():
        assert ref_of(workspace, again, stage).artifact.digest == ref.artifact.digest
        assert answers_of(workspace, ref)[0].read_bytes() == before[stage]
    # A changed answer in the file is found, also where the line is complete.
    path, answers = answers_of(workspace, refs["policy"])
    answers[0]["asked"]["model"] = "another"
    path.chmod(0o644)
    path.write_text("".join(json.dumps(each) + "\n" for each in answers))
    assert len(found(audited(workspace, record.run_id), "wrong")) == 1


@pytest.mark.slow
def test_a_stage_whose_servers_die_goes_on_where_it_was(
    workspace: Workspace, recipe: Path, servers: tuple[FakeJudge, FakeJudge], tmp_path: Path
) -> None:
    judge, _ = servers
    whole = go(Workspace.at(tmp_path / "other"), recipe)
    number = judge.seen.num_requests
    judge.seen.questions.clear()
    requests_of_policy = len({id(body) for body in judge.seen.bodies}) // 2
    judge.faults.dies_at = number + requests_of_policy + 20
    record = go(workspace, recipe)
    failure = record.stages["policy"]
    assert failure.status != "completed"
    assert failure.exit_code == ExitCode.RESUME
    judge.faults.dies_at = None
    judge.start()
    record = go(workspace, recipe)
    assert set(judge.seen.questions.values()) == {1}
    one = ref_of(Workspace.at(tmp_path / "other"), whole, "policy")
    other = ref_of(workspace, record, "policy")
    assert one.artifact.digest == other.artifact.digest
