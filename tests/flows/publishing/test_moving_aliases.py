"""People move aliases after a run has ended. Movements are checked, and recorded or refused; MLflow is a real one."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from tests.support.orchestrated import Witness, attempt_all, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.flows.execution import exit_code
from vantage.flows.publishing.moving_aliases import publish_again, roll_back
from vantage.flows.publishing.publishing import publish
from vantage.ledger.alias_moves import AliasMoves
from vantage.ledger.operations import MoveAlias, Publish, from_json
from vantage.ledger.outbox import operation_in
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.to_mlflow.published_models import find_version
from vantage.runs.alias_history import Pointed, movements, pointed_to
from vantage.runs.approving import answer
from vantage.runs.origin import user
from vantage.runs.record import RunRecord
from vantage.runs.run import read_run, read_runs
from vantage.runs.workspace import RunError, Workspace

RECIPE = """\
recipe: small
model: {source: "builtin:tiny"}
data: {demonstrations: {source: "builtin:arithmetic/demonstrations"}}
stages: {sft: {kind: sft, data: demonstrations, gate: {metric: test_nll, at_most: 1.0}}}
publish: [{stage: sft, registered_model: small, alias: champion}]
"""
APPROVE = "publish=[{stage: sft, registered_model: small, alias: champion, approve: true}]"


class Place:
    """A workspace with its own MLflow."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder / "workspace")
        self.recipe = folder / "small.yaml"
        self.recipe.write_text(RECIPE)
        self.said: list[str] = []
        self.client = MlflowClient(tracking_uri=f"sqlite:///{self.workspace.root / 'mlflow.db'}")

    def run(self, *overrides: str) -> RunRecord:
        """Run to the end, as `vantage run` of a recipe does."""
        with orchestrated(
            self.workspace, self.recipe, *overrides, stage_function="tests.support.fake_models.run_stage"
        ) as orchestrator:
            attempt_all(orchestrator)
            for publication in orchestrator.recipe.publish:
                publish(publication, orchestrator)
            orchestrator.end()
            orchestrator.ledger.close()
            assert isinstance(orchestrator.watcher, Witness)
            self.said = orchestrator.watcher.lines
            return orchestrator.run.record

    def back(self, *, to: str | None = None, reason: str = "worse on the held-out slice") -> str:
        moved = roll_back(
            self.workspace, "small", "champion", to=to, by="ada", reason=reason, watcher=Witness()
        )
        return f"{moved.from_version} → {moved.to_version}"

    @property
    def champion(self) -> str:
        return str(self.client.get_model_version_by_alias("small", "champion").version)

    def unannounced(self) -> list[str]:
        folders = sorted((self.workspace.root / "runs").glob("*/ledger"))
        return [move.to_version for folder in folders for move in AliasMoves(folder).waiting()]

    def operations(self, run_id: str) -> list[object]:
        lines = (self.workspace.records.read_outbox(run_id) or b"").splitlines()
        return [from_json(operation_in(line)) for line in lines]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Yield a place in which three runs have published versions 1, 2 and 3."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        found = Place(tmp_path_factory.mktemp("aliases"))
        for seed in (1, 2, 3):
            found.run(f"seed={seed}")
        yield found


def test_back_step_by_step_and_forth_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    third, second, first = read_runs(place.workspace)
    assert place.champion == "3"
    assert place.unannounced() == ["1", "2", "3"]
    assert place.back() == "3 → 2"
    assert place.unannounced() == [], "no Prefect server is configured, so nobody waits for it"
    assert place.champion == "2"
    [moved] = [each for each in place.operations(second.run_id) if isinstance(each, MoveAlias)]
    assert (moved.from_version, moved.to_version, moved.by, moved.login) == ("3", "2", "ada", user())
    assert (moved.digest, moved.reason) == (second.stages["sft"].digest, "worse on the held-out slice")
    tag = json.loads(place.client.get_registered_model("small").tags["vantage.alias.champion"])
    assert tag == {
        "version": "2",
        "time": moved.time,
        "run_id": second.run_id,
        "by": "ada",
        "reason": moved.reason,
    }
    [run] = place.client.search_runs(
        [each.experiment_id for each in place.client.search_experiments()],
        f"tags.`vantage.run_id` = '{second.run_id}' AND tags.`vantage.stage` = 'sft'",
    )
    assert (
        run.data.tags["vantage.alias.small.champion"] == "version 3 → 2, by ada: worse on the held-out slice"
    )
    assert run.info.status == "FINISHED"
    parent = place.client.get_run(run.data.tags["mlflow.parentRunId"])
    assert parent.info.status == "FINISHED", "the run was not opened again"
    assert read_run(place.workspace, second.run_id).status == "completed"

    assert place.back() == "2 → 1", "not back to what was rolled back"
    with pytest.raises(RunError, match="small@champion has pointed to no other version before.*--to"):
        place.back()
    with pytest.raises(RunError, match="points to version 1 already"):
        place.back(to="1")
    with pytest.raises(RunError, match="no registered model small with the version 9"):
        place.back(to="9")

    outcomes = publish_again(place.workspace, third.run_id, Witness(), model=None, alias=None)
    assert (outcomes, place.champion) == ({"small@champion": "published"}, "3")
    told = [each for each in place.operations(third.run_id) if isinstance(each, Publish)]
    assert [each.by for each in told] == [None, user()]
    assert place.back(to="1") == "3 → 1"
    assert place.back(to="3") == "1 → 3"

    # An outbox that is sent again from its beginning undoes nothing that came later.
    (place.workspace.folder(first.run_id) / "ledger" / "sent.json").unlink()
    with Ledger(None, place.workspace.root, "small") as ledger:
        assert ledger.flush()
    assert place.champion == "3"

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match="does not answer"):
        place.back(to="1")


def test_a_damaged_copy_gets_no_alias(place: Place) -> None:
    before = place.champion
    location = find_version(f"sqlite:///{place.workspace.root / 'mlflow.db'}", "small", version="2").location
    weights = Path(unquote(urlsplit(location).path)) / "model" / "weights.txt"
    kept = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
    try:
        with pytest.raises(RunError, match="MLflow's copy of small version 2 is damaged: model: weights.txt"):
            place.back(to="2")
    finally:
        weights.write_bytes(kept)
    assert place.champion == before
    assert place.back(to="2") == f"{before} → 2"


def test_an_alias_that_somebody_moved_by_hand_is_told(place: Place) -> None:
    before = place.champion
    place.client.set_registered_model_alias("small", "champion", "1")
    try:
        with pytest.raises(RunError, match="no run of this workspace has recorded that it was moved there"):
            place.back()
    finally:
        place.client.set_registered_model_alias("small", "champion", before)


def test_a_version_whose_gate_did_not_pass_gets_no_alias(place: Place) -> None:
    before = place.champion
    gate = "stages.sft.gate={metric: test_nll, at_most: 0.1, on_fail: continue}"
    record = place.run("seed=4", gate)
    assert place.champion == before
    assert any(
        "champion stays where it is: gate of sft: test_nll 0.500 <= 0.1: CLOSED" in line
        for line in place.said
    )
    version = max(int(each.version) for each in place.client.search_model_versions("name = 'small'"))
    with pytest.raises(
        RunError, match=f"version {version} of small .run {record.run_id}. must not get champion: gate"
    ):
        place.back(to=str(version))
    outcomes = publish_again(place.workspace, record.run_id, Witness(), model="small", alias=None)
    assert (outcomes, place.champion) == ({"small@champion": "alias_stays"}, before)
    with pytest.raises(RunError, match="publishes small, and not large"):
        publish_again(place.workspace, record.run_id, Witness(), model="large", alias=None)


@pytest.mark.slow
def test_an_alias_that_waits_for_a_person(place: Place) -> None:
    before = place.champion
    record = place.run("seed=5", APPROVE)
    assert (record.status, exit_code(record)) == ("waiting_approval", ExitCode.WAITING_APPROVAL)
    assert record.stages["sft"].status == "completed"
    assert place.champion == before
    assert list(record.open_questions) == ["publish:small@champion"]
    assert any("champion stays where it is: it waits for approval" in line for line in place.said)
    version = max(int(each.version) for each in place.client.search_model_versions("name = 'small'"))
    with pytest.raises(RunError, match="must not get champion: nobody has approved of it"):
        place.back(to=str(version))

    shown = CliRunner().invoke(app, ["publish", record.run_id, "--workspace", str(place.workspace.root)])
    assert shown.exit_code == ExitCode.WAITING_APPROVAL, shown.output
    assert f"approve {record.run_id} publish:small@champion --reason WHY" in shown.output

    given, sent = answer(
        place.workspace, record.run_id, "publish:small", approved=True, by="ada", reason="reads well"
    )
    assert sent
    assert given.question.subject == "publish:small@champion"
    done = place.run("seed=5", APPROVE)
    assert (done.run_id, done.status, place.champion) == (record.run_id, "completed", str(version))
    [run] = place.client.search_runs(
        [each.experiment_id for each in place.client.search_experiments()],
        f"tags.`vantage.run_id` = '{record.run_id}' AND tags.`vantage.stage` = 'sft'",
    )
    assert run.data.tags["vantage.approval.publish.small.champion"] == str(given)

    arguments = ["publish", record.run_id, "--alias", "latest-try", "--workspace", str(place.workspace.root)]
    other = CliRunner().invoke(app, arguments)
    assert other.exit_code == ExitCode.WAITING_APPROVAL, "another alias is another question"
    assert read_run(place.workspace, record.run_id).status == "waiting_approval"
    answer(place.workspace, record.run_id, "publish:small@latest-try", approved=False, by=None, reason="no")
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == ExitCode.GATE_CLOSED
    assert "latest-try stays where it is: rejected by" in refused.output
    assert read_run(place.workspace, record.run_id).status == "completed"

    back = ["rollback", "small@champion", "--reason", "again", "--workspace", str(place.workspace.root)]
    done_back = CliRunner().invoke(app, back)
    assert done_back.exit_code == 0, done_back.output
    assert f"small@champion: version {version} → {before}" in done_back.output
    assert place.champion == before
    assert CliRunner().invoke(app, ["rollback", "small", "--reason", "x"]).exit_code == ExitCode.BAD_INPUT


def test_a_damaged_artifact_is_not_published(place: Place) -> None:
    [newest, *_] = read_runs(place.workspace)
    stage = newest.stages["sft"]
    weights = place.workspace.store / "objects" / str(stage.digest) / "weights.txt"
    kept, mode = weights.read_bytes(), weights.stat().st_mode
    weights.chmod(0o644)
    weights.write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
    try:
        with pytest.raises(RunError, match="the artifact of sft is not intact: .*weights.txt"):
            publish_again(place.workspace, newest.run_id, Witness(), model=None, alias=None)
    finally:
        weights.write_bytes(kept)
        weights.chmod(mode)


def test_where_an_alias_has_pointed() -> None:
    def at(time: int, digest: str, goes_back: bool = False) -> Pointed:
        return Pointed(time, f"run {time}", "sft", digest, goes_back)

    def left(*history: Pointed) -> str:
        return "".join(each.digest for each in pointed_to(list(history)))

    assert left() == ""
    assert left(at(1, "a"), at(2, "b"), at(3, "c")) == "abc"
    assert left(at(1, "a"), at(2, "a"), at(3, "b")) == "ab"
    assert left(at(1, "a"), at(2, "b"), at(3, "c"), at(4, "b", True)) == "ab"
    assert left(at(1, "a"), at(2, "b"), at(3, "c"), at(4, "b", True), at(5, "a", True)) == "a"
    assert left(at(1, "a"), at(2, "b"), at(3, "a", True), at(4, "c")) == "ac"
    assert left(at(1, "a"), at(2, "z", True)) == "az", "one that was never recorded here"
    assert left(at(1, "a"), at(2, "b"), at(3, "a")) == "aba", "published again, not rolled back"


def test_a_line_that_was_half_written_is_passed_over(tmp_path: Path, place: Place) -> None:
    copy = tmp_path / "workspace"
    shutil.copytree(place.workspace.root / "runs", copy / "runs")
    workspace = Workspace(copy)
    history = movements(workspace, "small", "champion")
    newest = read_runs(workspace)[-1].run_id
    with (workspace.folder(newest) / "ledger" / "outbox.jsonl").open("a") as file:
        file.write('{"operation": "publish", "registered_model": "small"')
    assert movements(workspace, "small", "champion") == history
    assert movements(workspace, "small", "other") == []
