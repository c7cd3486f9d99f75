"""``vantage export --push`` gives a bucket and a hub on loopback the audited bytes, all or nothing."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from typer.testing import CliRunner

from tests.support.fake_model_hub import ModelHub, fake_model_hub
from vantage.attempts.exit_codes import ExitCode
from vantage.cli.main import app
from vantage.review.exports import push_to_bucket
from vantage.review.exports.push_to_bucket import BucketPrefix
from vantage.review.exports.push_to_hub import HubRepository
from vantage.review.exports.pushing import Place, PushRefused, hashed, place_named, push
from vantage.runs.workspace import Workspace
from vantage.storage.bucket import open_bucket

REPOSITORY = "org/small-chat"


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def in_bucket(address: str) -> dict[str, bytes]:
    remote = open_bucket(address)
    paths = [str(each["path"]) for batch in obstore.list(remote) for each in batch]
    return {path: bytes(obstore.get(remote, path).bytes()) for path in paths}


def in_hub(hub: ModelHub, commit: int = -1) -> dict[str, bytes]:
    files = dict(hub.commits[REPOSITORY][commit][1])
    files.pop(".gitattributes")
    return files


def to_bucket(folder: Path, address: str) -> str:
    """Push without an audit, which takes most of the time."""
    return BucketPrefix(address).send(folder, hashed(folder))


def to_hub(folder: Path) -> str:
    """Push the folder without an audit, and return the commit that holds it."""
    return HubRepository(REPOSITORY).send(folder, hashed(folder))


@pytest.fixture(scope="module")
def exported(small_chat_run: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the exported folder of the trained reward model. Tests may only read it."""
    folder = tmp_path_factory.mktemp("exported") / "policy"
    arguments = ["export", "latest/reward", str(folder), "--workspace", small_chat_run.address]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    """Return a copy of the exported folder, which a test may change."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """Yield an empty hub, with a login in the environment."""
    with fake_model_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield hub


@pytest.mark.usefixtures("model_threads")
def test_the_command_publishes_a_model_whose_card_names_the_place(
    small_chat_run: Workspace, bucket: str
) -> None:
    address = f"{bucket}/models/chat"
    arguments = ["export", "small-chat@champion", "--push", address, "--workspace", small_chat_run.address]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith(f"audited (ok), published and read back: {address}\n")
    sent = in_bucket(address)
    assert "transformers serve chat" in sent["README.md"].decode()
    assert {"model.safetensors", "vantage.json", "config.json", "generation_config.json"} < set(sent)


def test_a_bucket_gets_the_audited_bytes_the_card_last_and_twice_changes_nothing(
    small_chat_run: Workspace, exported: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, order = f"{bucket}/models/reward", []
    put = obstore.put

    def recorded(remote: Any, path: str, file: Any, **more: Any) -> Any:
        order.append(path)
        return put(remote, path, file, **more)

    monkeypatch.setattr(push_to_bucket.obstore, "put", recorded)
    published, report = push(exported, Place(address), small_chat_run)  # returns the report of its audit, too
    assert (published, report.outcome) == (address, "ok")
    assert in_bucket(address) == content(exported)
    assert order[-1] == "README.md"
    assert len(order) == len(content(exported))
    to_bucket(exported, address)
    assert len(order) == len(content(exported)), "it is there already"


def test_a_push_that_was_cut_off_shows_no_card_and_is_completed(
    exported: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, put = f"{bucket}/models/cut", obstore.put

    def dies(remote: Any, path: str, file: Any, **more: Any) -> Any:
        if path == "vantage.json":
            raise KeyboardInterrupt
        return put(remote, path, file, **more)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(push_to_bucket.obstore, "put", dies)
        to_bucket(exported, address)
    left = in_bucket(address)
    assert left and "README.md" not in left
    to_bucket(exported, address)
    assert in_bucket(address) == content(exported)


def test_what_a_bucket_gives_back_otherwise_gets_no_card(
    exported: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, put = f"{bucket}/models/other", obstore.put

    def changes(remote: Any, path: str, file: Any, **more: Any) -> Any:
        return put(remote, path, b"{}" if path == "config.json" else file, **more)

    with monkeypatch.context() as patched:
        patched.setattr(push_to_bucket.obstore, "put", changes)
        with pytest.raises(PushRefused, match=r"config.json is 44136fa355b3, and the audited file"):
            to_bucket(exported, address)
    assert "README.md" not in in_bucket(address)


def test_a_prefix_with_other_files_or_another_model_is_not_touched(
    exported: Path, model: Path, bucket: str
) -> None:
    address = f"{bucket}/models/taken"
    obstore.put(open_bucket(address), "notes.txt", b"mine")
    with pytest.raises(PushRefused, match=r"has notes.txt, which is no file of this model; name a prefix"):
        to_bucket(exported, address)
    assert in_bucket(address) == {"notes.txt": b"mine"}
    other = f"{bucket}/models/published"
    to_bucket(exported, other)
    (model / "README.md").write_text((model / "README.md").read_text() + "\nA line of a person.\n")
    with pytest.raises(PushRefused, match=r"README.md is .*a published model is never changed"):
        to_bucket(model, other)
    assert in_bucket(other) == content(exported)


def test_a_model_that_fails_its_audit_goes_nowhere(
    small_chat_run: Workspace, model: Path, bucket: str, hub: ModelHub
) -> None:
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    for place in (Place(f"{bucket}/models/damaged"), place_named(f"hub:{REPOSITORY}")):
        with pytest.raises(PushRefused, match=r"nothing was sent to .*: the audit found .*model.safetensors"):
            push(model, place, small_chat_run)
    assert in_bucket(f"{bucket}/models/damaged") == {}
    assert hub.commits == {}


def test_a_hub_gets_one_commit_in_a_private_repository(exported: Path, hub: ModelHub) -> None:
    published = to_hub(exported)
    [(_, before), (commit, _)] = hub.commits[REPOSITORY]
    assert published == f"hub:{REPOSITORY}@{commit}"
    assert set(before) == {".gitattributes"}
    assert in_hub(hub) == content(exported)
    assert hub.private == {REPOSITORY: True}
    assert hub.tokens == {"Bearer hf_secret"}


def test_the_next_push_removes_what_the_model_has_no_longer(exported: Path, hub: ModelHub) -> None:
    to_hub(exported)
    hub.commits[REPOSITORY][-1][1]["old.safetensors"] = b"of an earlier model"
    to_hub(exported)
    assert len(hub.commits[REPOSITORY]) == 3
    assert in_hub(hub) == content(exported)


def test_a_repository_of_somebody_else_is_not_touched(exported: Path, hub: ModelHub) -> None:
    hub.commits[REPOSITORY] = [("1" * 40, {"pytorch_model.bin": b"mine", ".gitattributes": b""})]
    with pytest.raises(PushRefused, match=r"has pytorch_model.bin, which no push of Vantage has made"):
        to_hub(exported)
    assert len(hub.commits[REPOSITORY]) == 1


def test_what_a_hub_changes_or_loses_is_found(exported: Path, hub: ModelHub) -> None:
    hub.changes["config.json"] = b"{}"
    with pytest.raises(PushRefused, match=r"config.json of hub:org/small-chat@\w+ is 44136fa355b3, and the"):
        to_hub(exported)
    hub.changes.clear()
    hub.loses.add("tokenizer.json")
    with pytest.raises(PushRefused, match=r"tokenizer.json of hub:org/small-chat@\w+ is missing"):
        to_hub(exported)


def test_a_hub_that_refuses_shows_nothing_and_no_login_is_printed(exported: Path, hub: ModelHub) -> None:
    hub.refuses = 403
    with pytest.raises(
        PushRefused, match=r"did not take the model \(.*check its name and the login"
    ) as refused:
        to_hub(exported)
    assert "hf_secret" not in str(refused.value)
    assert len(hub.commits[REPOSITORY]) == 1


def test_a_hub_that_does_not_answer_is_an_error_in_words(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(PushRefused, match=r"did not take the model \(.*refused"):
        HubRepository(REPOSITORY).send(exported, {})


@pytest.mark.parametrize(
    "text", ["hub:name", "s3://bucket", "s3://", "https://host/x/y", "folder", "hub:a/b/c"]
)
def test_what_is_no_place_is_refused_before_anything_is_exported(
    small_chat_run: Workspace, text: str
) -> None:
    done = CliRunner().invoke(
        app, ["export", "latest", "--push", text, "--workspace", small_chat_run.address]
    )
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "is no place for a model; write one of hub:ORG/NAME, s3://BUCKET/PREFIX" in done.output


def test_a_command_without_any_place_is_refused(small_chat_run: Workspace) -> None:
    done = CliRunner().invoke(app, ["export", "latest", "--workspace", small_chat_run.address])
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "FOLDER is missing; name a new folder, or a place with --push" in done.output


def test_the_forms_of_a_place() -> None:
    assert place_named("hub:org/name").repository == "org/name"
    assert place_named("gs://team/models/chat/") == Place("gs://team/models/chat")
    assert place_named("az://team/models/chat").name_in_card == Path("chat")
