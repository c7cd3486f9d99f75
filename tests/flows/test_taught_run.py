"""Runs with a teacher behind a server record its answers for audits; a rerun and a resumed run ask nothing twice."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.test_judged_run import answers_of, audited, found, go, ref_of
from tests.support.fake_vllm_server import FakeServer
from vantage.attempts.exit_codes import ExitCode
from vantage.runs.workspace import Workspace

RECIPE = """\
recipe: taught
seed: 5
model: {{source: "builtin:tiny"}}
data:
  questions: {{source: "builtin:arithmetic/prompts", rows: 48, split: {{validation: 4, test: 4}}}}
rewards:
  main: {{terms: [{{verifier: arithmetic}}]}}
stages:
  student: {{kind: distillation, init: model, kl: sampled, reward: main, prompts: questions, iterations: 3, batch_size: 8,
            minibatch_size: 8, checkpoint_every: 1, validate_every: 3, validation_samples: 4,
            teacher_server: {{url: "{url}", model: served, at_once: 1, patience_seconds: 0.5}}}}
generation: {{max_prompt_tokens: 48, max_response_tokens: 12}}
"""


@pytest.fixture
def recipe(workspace: Workspace, tmp_path: Path) -> Path:
    path = tmp_path / "taught.yaml"
    path.write_text(RECIPE.format(url="http://127.0.0.1:9"))
    return path


@pytest.fixture
def server(workspace: Workspace, recipe: Path) -> Iterator[FakeServer]:
    """Yield a server of another model with the student's tokenizer."""
    record = go(workspace, recipe, until="student")
    served = FakeServer(workspace.storage.folder(ref_of(workspace, record, "model").artifact))
    recipe.write_text(RECIPE.format(url=served.url))
    yield served
    served.stop()


@pytest.mark.slow
def test_answers_are_recorded_audited_and_replayed(
    workspace: Workspace, recipe: Path, server: FakeServer
) -> None:
    record = go(workspace, recipe)
    ref = ref_of(workspace, record, "student")
    assert ref.provenance["not_bitwise"] == (
        "a server gave the teacher's log-probabilities; a rerun is bitwise equal with its stored answers"
    )
    assert ref.key_parts["configuration"]["teacher_server"] == {"model": "served"}
    path, answers = answers_of(workspace, ref)
    rows = [each for each in answers if "response_ids" in each["asked"]]
    assert len(rows) == len(server.seen.read) and {each["asked"]["model"] for each in answers} == {"served"}
    assert len({each["asked"]["tokenizer"] for each in rows}) == 1 and rows[0]["asked"]["tokenizer"]
    assert len(found(audited(workspace, record.run_id), "ok")) == 1
    # The artifact is lost, and the server is gone: the answers are enough for the same bits.
    before = path.read_bytes()
    shutil.rmtree(workspace.storage.folder(ref.artifact))
    workspace.storage.discard_scratch(ref.artifact.stage_key)
    server.stop()
    again = go(workspace, recipe)
    assert ref_of(workspace, again, "student").artifact.digest == ref.artifact.digest
    assert path.read_bytes() == before
    # An answer of another model is found.
    path.chmod(0o644)
    path.write_bytes(before.replace(b'"model":"served"', b'"model":"others"', 1))
    assert len(found(audited(workspace, record.run_id), "wrong")) == 1


@pytest.mark.slow
def test_a_stage_whose_teacher_dies_goes_on_where_it_was(
    workspace: Workspace, recipe: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends in the second rollout; the stage ends with exit code 75, and asks only for what is missing then."""
    read = server.read

    def dying(ids: list[int]) -> Any:
        if len(server.seen.read) == 11:
            server.stop()
            raise ConnectionError
        return read(ids)

    monkeypatch.setattr(server, "read", dying)
    failure = go(workspace, recipe).stages["student"]
    assert (failure.status == "completed", failure.exit_code) == (False, ExitCode.RESUME)
    asked_before = len(server.seen.read)
    assert asked_before == 11
    monkeypatch.setattr(server, "read", read)
    server.start()
    assert go(workspace, recipe).stages["student"].status == "completed"
    assert len(set(map(tuple, server.seen.read))) == len(server.seen.read) > asked_before
