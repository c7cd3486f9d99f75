"""Answers of servers are committed before the artifact that depends on them, stay beside it, and replace every question of a rerun."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.attempts.test_keeping_state import before_commit_of
from tests.support.answering_work import QUESTIONS
from tests.support.extended_work import Killed
from tests.support.orchestrated import InProcess, attempt_all, events, orchestrated
from vantage.attempts.keeping_answers import unequal_bits
from vantage.attempts.run_attempt import run_attempt
from vantage.flows.garbage_collection import collect
from vantage.review.audit import answers as checks
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.rollout import Ahead
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.records.attempt import AttemptOutcome, AttemptRequest
from vantage.schemas.records.stored_answers import answers_key
from vantage.storage.refs import Ref
from vantage.tasks.training.scratch import ANSWERS

pytestmark = pytest.mark.usefixtures("unsent")

WORK = "tests.support.answering_work.run_stage"
RECIPE = """\
recipe: fake
seed: 17
model: {source: "builtin:tiny"}
data:
  prompts: {source: "builtin:arithmetic/prompts"}
rewards:
  main: {terms: [{judge: {url: "http://127.0.0.1:9/v1", model: critic}}]}
stages:
  policy: {kind: policy_optimization, algorithm: grpo, init: model, reward: main, prompts: prompts}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


def go(workspace: Workspace, recipe: Path, *overrides: str) -> RunRecord:
    with orchestrated(
        workspace, recipe, *overrides, in_process=True, stage_function=WORK, makes_report=False
    ) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.end()
    return read_runs(workspace)[0]


@contextmanager
def asked(workspace: Workspace, recipe: Path) -> Iterator[AttemptRequest]:
    with orchestrated(workspace, recipe, in_process=True, stage_function=WORK) as orchestrator:
        attempt_all(orchestrator, until="policy")
        request = orchestrator.request("policy")
        assert request is not None
        yield request


def attempted(workspace: Workspace, request: AttemptRequest) -> AttemptOutcome:
    return run_attempt(request, storage=workspace.storage, launcher=InProcess())


def refs_of(workspace: Workspace, record: RunRecord) -> tuple[Ref, Ref]:
    """Return the policy's ref, and that of its answers."""
    key = record.stages["policy"].stage_key
    assert key is not None
    policy, answers = workspace.storage.find(key), workspace.storage.find(answers_key(key))
    assert policy is not None and answers is not None
    return policy, answers


def num_asked(workspace: Workspace) -> int:
    return sum("asked" in event for event in events(workspace))


def about_answers(workspace: Workspace, record: RunRecord) -> list[tuple[str, str]]:
    """Return outcome and detail of the audit's checks of stored answers."""
    with Evidence(workspace) as evidence:
        report = audit(evidence, record.run_id)
    return [
        (check.outcome, check.detail)
        for artifact in report.artifacts
        for check in artifact.checks
        if check.subject == "stored answers"
    ]


def rewrite(folder: Path, change: Any) -> None:
    file = folder / ANSWERS
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.chmod(0o644)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_answers_are_an_artifact_of_their_own(workspace: Workspace, recipe_file: Path) -> None:
    record = go(workspace, recipe_file)
    policy, answers = refs_of(workspace, record)
    assert answers.artifact.kind == "answers"
    assert answers.artifact.metrics == {
        "questions": 3.0,
        "answers": 3.0,
        "question_tokens": 6.0,
        "answer_tokens": 3.0,
    }
    lines = (workspace.storage.folder(answers.artifact) / ANSWERS).read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    assert questions == sorted(questions) and len(questions) == len(QUESTIONS)
    assert "answers" not in policy.artifact.parents
    assert policy.provenance["not_bitwise"] == (
        "servers gave scores; a rerun is bitwise equal with their stored answers"
    )


def test_a_stage_that_vllm_samples_for_says_that_it_may_have_other_bits(
    workspace: Workspace, recipe_file: Path
) -> None:
    work = go(workspace, recipe_file).recipe.stages["policy"]
    assert isinstance(work, PolicyOptimization)
    by_vllm = work.model_copy(update={"rollout": Ahead(engine="vllm")})
    assert unequal_bits(work, {}, []) == {}
    assert unequal_bits(by_vllm, {}, []) == {
        "not_bitwise": "vllm samples its responses; a rerun may sample others (rollout.engine: loop would not)"
    }
    ranks = {"not_bitwise": "begun on 2 processes, continued on 1"}
    assert unequal_bits(by_vllm, {}, [ranks])["not_bitwise"].startswith(
        "begun on 2 processes, continued on 1; vllm"
    )


def test_a_stage_without_servers_leaves_no_answers(workspace: Workspace, recipe_file: Path) -> None:
    record = go(workspace, recipe_file, "rewards.main={terms: [{verifier: arithmetic}]}")
    key = record.stages["policy"].stage_key
    assert key is not None and workspace.storage.find(answers_key(key)) is None
    ref = workspace.storage.find(key)
    assert ref is not None and "not_bitwise" not in ref.provenance
    assert about_answers(workspace, record) == []


def test_a_kill_between_both_commits_asks_nothing_again(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise Killed

    with asked(workspace, recipe_file) as request:
        key = request.stage_key
        before_commit_of(key, die, monkeypatch)
        with pytest.raises(Killed):
            attempted(workspace, request)
        answers = workspace.storage.find(answers_key(key))
        assert answers is not None and workspace.storage.find(key) is None
        assert attempted(workspace, request).status == "made"
    again = workspace.storage.find(answers_key(key))
    assert again is not None and again.artifact == answers.artifact
    assert num_asked(workspace) == 3


def test_a_rerun_reads_the_stored_answers(workspace: Workspace, recipe_file: Path) -> None:
    record = go(workspace, recipe_file)
    policy, answers = refs_of(workspace, record)
    shutil.rmtree(workspace.storage.folder(policy.artifact))
    workspace.storage.discard_scratch(policy.artifact.stage_key)
    again, same = refs_of(workspace, go(workspace, recipe_file))
    assert (again.artifact, same.artifact) == (policy.artifact, answers.artifact)
    assert (again.attempt, num_asked(workspace)) == (2, 3)


def test_damaged_answers_are_not_read(workspace: Workspace, recipe_file: Path) -> None:
    policy, answers = refs_of(workspace, go(workspace, recipe_file))
    shutil.rmtree(workspace.storage.folder(policy.artifact))
    workspace.storage.discard_scratch(policy.artifact.stage_key)
    rewrite(workspace.storage.folder(answers.artifact), lambda lines: lines[0].update(answer="score: 9"))
    _, same = refs_of(workspace, go(workspace, recipe_file))
    assert same.artifact == answers.artifact
    assert num_asked(workspace) == 6


def test_a_collector_keeps_answers_as_long_as_their_stage(workspace: Workspace, recipe_file: Path) -> None:
    policy, answers = refs_of(workspace, go(workspace, recipe_file))
    collect(workspace)
    assert workspace.storage.find(answers.artifact.stage_key) == answers
    assert workspace.storage.verify(answers.artifact) == []
    assert workspace.storage.find(policy.artifact.stage_key) == policy


def test_an_audit_checks_every_answer(workspace: Workspace, recipe_file: Path) -> None:
    record = go(workspace, recipe_file)
    _, answers = refs_of(workspace, record)
    assert about_answers(workspace, record) == [("ok", "3 answers to 3 questions")]
    with Evidence(workspace) as evidence:
        evidence.hash_objects([answers.artifact.digest])
        problems = list(checks._line_problems(evidence, answers, {"another"}))
    assert problems[0] == "line 1: critic answered, and the stage key names another"
    folder = workspace.storage.folder(answers.artifact)
    rewrite(folder, lambda lines: lines[0].update(answer="score: 9"))
    ((outcome, detail),) = about_answers(workspace, record)
    assert outcome == "wrong" and ANSWERS in detail
    shutil.rmtree(folder)
    assert about_answers(workspace, record) == [("unchecked", "the store has no answers of its servers")]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines[0]["asked"].update(model="other"), "line 1: an answer names the question"),
        (lambda lines: lines.append(dict(lines[0])), "line 4: a second answer 0 to the question"),
        (lambda lines: lines.pop(), "they are 2 answers, and the ref counts 3.0"),
    ],
)
def test_an_audit_finds_answers_that_contradict_themselves(
    workspace: Workspace, recipe_file: Path, change: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit finds such answers also where manifest and digest were made again to fit them."""
    record = go(workspace, recipe_file)
    _, answers = refs_of(workspace, record)
    rewrite(workspace.storage.folder(answers.artifact), change)
    data = (workspace.storage.folder(answers.artifact) / ANSWERS).read_bytes()
    with Evidence(workspace) as evidence:
        assert evidence.store is not None
        monkeypatch.setattr(evidence.store, "read_file", lambda digest, path: data)
        assert problem in "; ".join(checks._line_problems(evidence, answers, {"critic"}))
