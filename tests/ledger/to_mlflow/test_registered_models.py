"""MLflow loads back the published model as it was stored, once, under the alias that was given."""

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import mlflow.transformers
import pytest
import torch
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.tracking import MlflowClient
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

from tests.ledger.cutting import Racing, cut_after_every_write
from tests.ledger.small_run import VERDICT, artifact, runs_of
from vantage.ledger.operations import Input
from vantage.ledger.published_copies import is_same_place, local_folder, problems_in
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.to_mlflow import registered_models
from vantage.ledger.to_mlflow.model_description import PublishingError
from vantage.ledger.to_mlflow.published_models import DamagedCopy, find_model
from vantage.schemas.records.artifacts import (
    Evaluation,
    PolicyCheckpoint,
    RewardModel,
    ValueModel,
)
from vantage.schemas.safe_text import markdown_text

RUN_ID, OTHER_RUN_ID = "0001-tiny-aaaaaa", "0002-tiny-bbbbbb"
PROMPT = "3 + 4 ="


def sealed(cls: type[Any], folder: Path, **fields: Any) -> Any:
    """Return the artifact whose files lie in the sealed folder."""
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    return artifact(cls, folder.name, {}, digest=digest, **fields)


def make(ledger: Ledger, stage: str, kind: str, made: Any) -> None:
    ledger.open_stage(stage, kind=kind, stage_key=made.stage_key, attempt=1, params={}, inputs={})
    ledger.finish_stage(stage, "completed", artifact=made)


def publish_once(workspace: Path, policy: Path) -> PolicyCheckpoint:
    """Publish the policy as version 1 of ``quickstart``, and return its artifact."""
    made: PolicyCheckpoint = sealed(PolicyCheckpoint, policy)
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(RUN_ID, "tiny", {})
        make(ledger, "policy", "policy_optimization", made)
        assert ledger.publish("policy", made, policy, "quickstart", alias="champion") == "1"
        assert ledger.copy_status("quickstart", made).repaired == ()
    return made


def load(workspace: Path, uri: str) -> Any:
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{workspace / 'mlflow.db'}")
    try:
        return mlflow.transformers.load_model(uri)
    finally:
        mlflow.set_tracking_uri(before)


@pytest.mark.slow
def test_a_published_policy_loads_as_a_pipeline_that_answers_as_the_stored_one_does(
    workspace: Path, policy: Path
) -> None:
    made = sealed(PolicyCheckpoint, policy)
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(RUN_ID, "tiny", {})
        make(ledger, "policy", "policy_optimization", made)
        assert ledger.publish("policy", made, policy, "quickstart", alias="champion") == "1"
        run_id = ledger.mlflow_run_id("policy")
        ledger.finish_run("completed")

    pipeline = load(workspace, "models:/quickstart@champion")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    stored = AutoModelForCausalLM.from_pretrained(policy)
    ids = tokenizer(PROMPT, return_tensors="pt")
    expected = tokenizer.decode(
        stored.generate(**ids, max_new_tokens=8, do_sample=False)[0], skip_special_tokens=True
    )
    (answer,) = pipeline(PROMPT, max_new_tokens=8, do_sample=False)
    assert answer["generated_text"] == expected
    assert len(expected) > len(PROMPT)

    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    version = client.get_model_version_by_alias("quickstart", "champion")
    assert version.tags == {
        "vantage.digest": made.digest,
        "vantage.stage_key": made.stage_key,
        "vantage.stage": "policy",
        "vantage.run_id": RUN_ID,
    }
    assert version.run_id == run_id
    assert version.description.startswith("**tiny: policy** · policy made by stage [policy](#/experiments/")
    run = client.get_run(run_id)
    assert run.data.tags["vantage.published"] == "quickstart@champion version 1"
    model = client.get_logged_model(run.data.tags["vantage.model"])
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "quickstart", "version": 1}]


def test_a_published_reward_model_loads_as_a_classifier_with_the_stored_score(
    workspace: Path, reward: Path
) -> None:
    made = sealed(RewardModel, reward)
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(RUN_ID, "tiny", {})
        make(ledger, "reward", "reward_model", made)
        assert ledger.publish("reward", made, reward, "judge", alias=None) == "1"
    pipeline = load(workspace, "models:/judge/1")
    stored = LlamaForSequenceClassification.from_pretrained(reward)
    with torch.no_grad():
        expected = stored(**AutoTokenizer.from_pretrained(reward)(PROMPT, return_tensors="pt")).logits.item()
    (answer,) = pipeline(PROMPT, function_to_apply="none")
    assert answer["score"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_the_same_artifact_is_one_version_and_an_alias_moves_only_when_told(
    workspace: Path, policy: Path, other_policy: Path
) -> None:
    first, second = sealed(PolicyCheckpoint, policy), sealed(PolicyCheckpoint, other_policy)
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")

    def champion() -> str:
        return str(client.get_model_version_by_alias("quickstart", "champion").version)

    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(RUN_ID, "tiny", {})
        make(ledger, "policy", "policy_optimization", first)
        assert ledger.publish("policy", first, policy, "quickstart", alias="champion") == "1"
    with Ledger(None, workspace, "tiny") as ledger:  # the next run reuses the first and makes the second
        ledger.open_run("0002-tiny-bbbbbb", "tiny", {})
        ledger.record_reuse(
            "policy",
            kind="policy_optimization",
            stage_key=first.stage_key,
            params={},
            inputs={},
            artifact=first,
        )
        assert ledger.publish("policy", first, policy, "quickstart", alias=None) == "1"
        make(ledger, "other", "policy_optimization", second)
        assert ledger.publish("other", second, other_policy, "quickstart", alias=None) == "2"
        assert champion() == "1"
        assert ledger.publish("other", second, other_policy, "quickstart", alias="champion") == "2"
        assert champion() == "2"
    assert len(client.search_model_versions("name = 'quickstart'")) == 2


def test_what_could_not_be_published_is_published_by_the_next_run(workspace: Path, policy: Path) -> None:
    made = sealed(PolicyCheckpoint, policy)
    with Ledger("http://127.0.0.1:9", workspace, "tiny") as ledger:  # nobody listens there
        ledger.open_run(RUN_ID, "tiny", {})
        make(ledger, "policy", "policy_optimization", made)
        assert ledger.publish("policy", made, policy, "quickstart", alias="champion") is None
    assert Ledger(None, workspace, "tiny").flush()
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    assert str(client.get_model_version_by_alias("quickstart", "champion").version) == "1"


def test_only_a_policy_or_a_reward_model_can_be_published(workspace: Path, policy: Path) -> None:
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(RUN_ID, "tiny", {})
        with pytest.raises(
            PublishingError, match="stage 'value' makes a value_model; only a policy or a reward"
        ):
            ledger.publish("value", artifact(ValueModel, "value", {}), policy, "critic", alias=None)


@pytest.mark.slow
def test_a_kill_while_publishing_leaves_one_whole_version(workspace: Path, policy: Path) -> None:
    made = sealed(PolicyCheckpoint, policy)
    with Ledger("http://127.0.0.1:9", workspace, "tiny") as ledger:  # nobody listens there
        ledger.open_run(RUN_ID, "tiny", {})
        make(ledger, "policy", "policy_optimization", made)
        assert ledger.publish("policy", made, policy, "quickstart", alias="champion") is None

    def found(client: MlflowClient) -> Any:
        (version,) = client.search_model_versions("name = 'quickstart'")
        run = runs_of(client, RUN_ID)["policy"]
        model = client.get_logged_model(run.data.tags["vantage.model"])
        folder = Path(model.artifact_location.removeprefix("file://"))
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        tags = {name: value for name, value in model.tags.items() if name != "mlflow.note.content"}
        champion = client.get_model_version_by_alias("quickstart", "champion").version
        return version.version, champion, version.tags, run.data.tags["vantage.published"], tags, files

    expected, written = cut_after_every_write(workspace, RUN_ID, found, since="create_registered_model")
    assert {"log_model_artifacts", "create_model_version", "set_registered_model_alias"} <= set(written)
    tags, files = expected[4:]
    assert json.loads(tags["mlflow.modelVersions"]) == [{"name": "quickstart", "version": 1}]
    assert {"MLmodel", "model/model.safetensors"} <= set(files)


@pytest.mark.slow
def test_a_kill_between_a_second_version_and_its_deletion_leaves_one(workspace: Path, policy: Path) -> None:
    """The second process looks for a version just before the first process creates it, and so creates another."""
    made = publish_once(workspace, policy)
    with Ledger("http://127.0.0.1:9", workspace, "tiny") as ledger:  # nobody listens there
        ledger.open_run(OTHER_RUN_ID, "tiny", {})
        ledger.record_reuse(
            "policy",
            kind="policy_optimization",
            stage_key=made.stage_key,
            params={},
            inputs={},
            artifact=made,
        )
        assert ledger.publish("policy", made, policy, "quickstart", alias="newest") is None

    def found(client: MlflowClient) -> Any:
        versions = [each.version for each in client.search_model_versions("name = 'quickstart'")]
        model = client.get_logged_model(runs_of(client, RUN_ID)["policy"].data.tags["vantage.model"])
        return versions, client.get_registered_model("quickstart").aliases, model.tags["mlflow.modelVersions"]

    expected, written = cut_after_every_write(
        workspace, OTHER_RUN_ID, found, since="create_model_version", client_of=Racing
    )
    assert "delete_model_version" in written
    versions, aliases, linked = expected
    assert (versions, aliases) == ([1], {"champion": 1, "newest": 1})
    assert [int(each["version"]) for each in json.loads(linked)] == [1]


@pytest.mark.parametrize("used", ["no", "alias", "description", "tag", "tag of a person"])
def test_a_second_version_is_kept_if_somebody_uses_it(workspace: Path, policy: Path, used: str) -> None:
    """A version that an earlier Vantage or a person made is kept, and an audit names it. One that looks as a kill
    leaves it is removed.
    """
    made = publish_once(workspace, policy)
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    first = client.get_model_version("quickstart", "1")
    tags = first.tags | ({"reviewed_by": "ada"} if used == "tag of a person" else {})
    second = client.create_model_version("quickstart", first.source, first.run_id, tags=tags).version
    if used == "alias":
        client.set_registered_model_alias("quickstart", "ours", second)
    elif used == "description":
        client.update_model_version("quickstart", second, description="ask Ada")
    elif used == "tag":
        client.delete_model_version_tag("quickstart", second, "vantage.run_id")
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(OTHER_RUN_ID, "tiny", {})
        assert ledger.publish("policy", made, policy, "quickstart", alias="champion") == "1"
    left = {each.version for each in client.search_model_versions("name = 'quickstart'")}
    assert left == ({1} if used == "no" else {1, second})


def copy_of(workspace: Path, made: Any) -> Path:
    """Return where MLflow keeps the copy."""
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    (version,) = client.search_model_versions(f"tags.`vantage.digest` = '{made.digest}'")
    return Path(version.source.removeprefix("file://"))


def flip(file: Path) -> None:
    """Flip one bit of a file, which keeps its size."""
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("model/model.safetensors", flip, "model: model.safetensors: sha256 is "),
        ("components/tokenizer/tokenizer.json", flip, "components/tokenizer: tokenizer.json: sha256 is "),
        ("model/config.json", Path.unlink, "model: config.json: is missing"),
    ],
)
def test_a_copy_that_was_damaged_is_told_and_made_again_by_the_next_publication(
    workspace: Path, policy: Path, name: str, damage: Any, complaint: str
) -> None:
    made = publish_once(workspace, policy)
    copy = copy_of(workspace, made)
    damage(copy / name)
    assert problems_in(copy, made.digest)
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run("0002-tiny-bbbbbb", "tiny", {})
        assert ledger.publish("policy", made, policy, "quickstart", alias="champion") == "1"
        said = ledger.copy_status("quickstart", made)
    assert len(said.repaired) == 1
    assert said.repaired[0].startswith(complaint)
    assert said.refused is None
    assert problems_in(copy, made.digest) == []


@pytest.mark.parametrize(
    ("table", "field", "said"),
    [
        ("model_versions", "storage_location", "MLflow loads it from {other}, and its source is in "),
        ("model_versions", "source", "its source is in {other}"),
        ("logged_models", "artifact_location", "its logged model is in {other}"),
    ],
)
def test_a_version_whose_rows_name_several_places_is_not_published_again(
    workspace: Path, policy: Path, table: str, field: str, said: str
) -> None:
    """MLflow would load other files than those that are compared."""
    made = publish_once(workspace, policy)
    own = copy_of(workspace, made)
    other = workspace / own.parent.name / "artifacts"
    shutil.copytree(own, other)
    flip(other / "model/model.safetensors")
    with closing(sqlite3.connect(workspace / "mlflow.db")) as database, database:
        database.execute(
            f"UPDATE {table} SET {field} = ? WHERE {field} LIKE ?",
            (other.as_uri(), f"%/{own.parent.name}/artifacts"),
        )
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run("0002-tiny-bbbbbb", "tiny", {})
        assert ledger.publish("policy", made, policy, "quickstart", alias="newest") is None
        refused = ledger.copy_status("quickstart", made).refused
    assert refused is not None
    assert said.format(other=other.as_uri()) in refused
    assert "set them back" in refused
    assert (
        "newest"
        not in MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}").get_registered_model("quickstart").aliases
    )


@pytest.mark.parametrize(
    "address",
    [
        "/a/b?x",
        "/a/b#x",
        "/a/b;x",
        "/a/b%20c",
        "/a\n",
        " /a",
        "file:///a?x",
        "file:///a%3Fx;y",
        "FILE:///a",
        "fi\tle:///a",
        "file:a",
        "file://host/a",
        "//localhost/a",
        "a/b",
    ],
)
def test_a_local_address_is_the_folder_from_which_mlflow_loads_it(address: str) -> None:
    repository = get_artifact_repository(address)
    assert isinstance(repository, LocalArtifactRepository)
    assert local_folder(address) == Path(repository.artifact_dir)


@pytest.mark.parametrize("address", ["s3://bucket/a", "mlflow-artifacts:/a", "file://[a/b"])
def test_what_mlflow_does_not_load_from_a_folder_has_none(address: str) -> None:
    assert local_folder(address) is None


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("/a/b", "file:///a/b", True),
        ("/a/b", "/a/b/", True),
        ("s3://bucket/a", "s3://bucket/a/", True),
        ("/a/b", "/a/c", False),
        ("s3://bucket/a", "mlflow-artifacts:/a", False),
    ],
)
def test_a_place_may_be_written_in_several_ways(one: str, other: str, is_same: bool) -> None:
    assert is_same_place(one, other) is is_same_place(other, one) is is_same


def test_a_changed_description_of_a_copy_is_damage_and_says_nothing_of_its_kind(
    workspace: Path, policy: Path
) -> None:
    made = publish_once(workspace, policy)
    config = copy_of(workspace, made) / "model/config.json"
    described = json.loads(config.read_text())
    config.chmod(0o644)
    config.write_text(json.dumps({**described, "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(
        DamagedCopy, match=r"config\.json: its bytes are not those that were published; run the recipe"
    ):
        find_model(f"sqlite:///{workspace / 'mlflow.db'}", "quickstart", alias="champion")


def test_what_mlflow_does_not_hold_as_it_is_stored_gets_neither_version_nor_alias(
    workspace: Path, policy: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(policy, broken)
    flip(broken / "model.safetensors")  # after it was sealed
    made = sealed(PolicyCheckpoint, broken)
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(RUN_ID, "tiny", {})
        make(ledger, "policy", "policy_optimization", made)
        assert ledger.publish("policy", made, broken, "quickstart", alias="champion") is None
        refused = ledger.copy_status("quickstart", made).refused
    assert refused is not None
    assert "is not what is in the store: model: model.safetensors: sha256 is" in refused
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    assert client.search_model_versions("name = 'quickstart'") == []


def test_a_published_models_page_names_its_gates_and_its_evaluation(workspace: Path, policy: Path) -> None:
    made = sealed(PolicyCheckpoint, policy)
    inputs = {"candidate": Input(stage="policy", artifact=made)}
    evaluation = artifact(Evaluation, "evaluation", inputs, metrics={"accuracy_gain": 0.25, "none": None})
    verdict = VERDICT.model_copy(update={"metric": "accuracy_gain", "measured": 0.25, "relation": ">="})
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(RUN_ID, "tiny", {})
        make(ledger, "policy", "policy_optimization", made)
        ledger.open_stage(
            "judged", kind="evaluation", stage_key=evaluation.stage_key, attempt=1, params={}, inputs=inputs
        )
        ledger.record_verdicts("judged", [verdict])
        ledger.finish_stage("judged", "completed", artifact=evaluation)
        assert ledger.publish("policy", made, policy, "quickstart", alias=None) == "1"
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    version = client.get_model_version("quickstart", "1")
    assert version.tags["vantage.gate.judged.accuracy_gain"] == str(verdict)
    assert version.tags["vantage.measured.judged.accuracy_gain"] == "0.25"
    assert f"- judged: {markdown_text(str(verdict))}" in version.description
    assert "- judged: accuracy_gain 0.25" in version.description
    model = client.get_logged_model(client.get_run(version.run_id).data.tags["vantage.model"])
    assert [(metric.key, metric.value) for metric in model.metrics] == [("accuracy_gain", 0.25)]


def test_published_again_only_the_tags_that_changed_are_written(
    workspace: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sealed(PolicyCheckpoint, policy)
    inputs = {"candidate": Input(stage="policy", artifact=made)}
    measured = {"accuracy_gain": 0.25, "accuracy": 0.75}
    evaluation = artifact(Evaluation, "evaluation", inputs, metrics=measured)
    set_tag, written = MlflowClient.set_model_version_tag, list[tuple[str, str]]()

    def noted(client: MlflowClient, name: str, version: str, key: str, value: str) -> None:
        written.append((key, value))
        set_tag(client, name, version, key, value)

    monkeypatch.setattr(MlflowClient, "set_model_version_tag", noted)
    tags = []
    for run_id, threshold in ((RUN_ID, 0.1), ("0002-tiny-aaaaaa", 0.1), ("0003-tiny-aaaaaa", 0.2)):
        verdict = VERDICT.model_copy(
            update={"metric": "accuracy_gain", "measured": 0.25, "relation": ">=", "threshold": threshold}
        )
        written.clear()
        with Ledger(None, workspace, "tiny") as ledger:
            ledger.open_run(run_id, "tiny", {})
            make(ledger, "policy", "policy_optimization", made)
            ledger.open_stage(
                "judged",
                kind="evaluation",
                stage_key=evaluation.stage_key,
                attempt=1,
                params={},
                inputs=inputs,
            )
            ledger.record_verdicts("judged", [verdict])
            ledger.finish_stage("judged", "completed", artifact=evaluation)
            assert ledger.publish("policy", made, policy, "quickstart", alias=None) == "1"
        version = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}").get_model_version("quickstart", "1")
        assert version.tags["vantage.gate.judged.accuracy_gain"] == str(verdict)
        assert version.tags["vantage.measured.judged.accuracy"] == "0.75"
        tags.append(list(written))
    assert tags == [[], [], [("vantage.gate.judged.accuracy_gain", str(verdict))]]


def test_a_version_that_another_run_has_made_meanwhile_stays_the_only_one(
    workspace: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs look before either has made a version. The second version, which is the later one, is removed."""
    made = sealed(PolicyCheckpoint, policy)
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run(RUN_ID, "tiny", {})
        make(ledger, "policy", "policy_optimization", made)
        assert ledger.publish("policy", made, policy, "quickstart", alias="champion") == "1"
    look, seen = registered_models._versions_of, []

    def too_early(*of: Any) -> Any:
        seen.append(of)
        return [] if len(seen) == 1 else look(*of)

    monkeypatch.setattr(registered_models, "_versions_of", too_early)
    with Ledger(None, workspace, "tiny") as ledger:
        ledger.open_run("0002-tiny-bbbbbb", "tiny", {})
        ledger.record_reuse(
            "policy",
            kind="policy_optimization",
            stage_key=made.stage_key,
            params={},
            inputs={},
            artifact=made,
        )
        assert ledger.publish("policy", made, policy, "quickstart", alias="champion") == "1"
    client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
    assert len(seen) == 2
    assert [each.version for each in client.search_model_versions("name = 'quickstart'")] == [1]
    assert client.get_model_version_by_alias("quickstart", "champion").version == 1
