"""A run signs the right artifacts while it goes on and afterwards, and copes where it cannot sign."""

import json
import subprocess
import sys
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from model_signing import verifying

from tests.signing.conftest import CANARY, RECIPE, STEPS, Ended, Here, Keys, run_recipe
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.flows.execution import exit_code
from vantage.ledger import tracking
from vantage.ledger.to_mlflow import published_models
from vantage.review.audit.exported_signatures import exported_signature_checks, signature_files
from vantage.review.exports import exporting
from vantage.review.exports.exporting import export
from vantage.runs.named_models import DamagedModel, NamedModel, Origin
from vantage.runs.record import REMOVED
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.recipe import Publication
from vantage.signing.keys import PASSWORD, new_key
from vantage.signing.lineage import NotStored, lineage, refs_of
from vantage.signing.signing import sign_all
from vantage.signing.statements import is_about
from vantage.signing.targets import find_target
from vantage.signing.verification import signature_checks
from vantage.storage import signatures as stored_signatures
from vantage.storage.durable_files import locked
from vantage.storage.removed import Cause
from vantage.storage.signatures import SIGNATURE, STATEMENT, add_signature, read_signatures
from vantage.storage.store import Store
from vantage.storage.store_garbage import StoreGarbage


def signatures(workspace: Workspace) -> dict[str, bytes]:
    """Return path → content of everything that is stored of signatures."""
    root = workspace.store / "signatures"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def pairs(workspace: Workspace) -> list[tuple[Path, Path]]:
    """Return statement and signature, as files."""
    found = sorted((workspace.store / "signatures").rglob(STATEMENT))
    return [(path, path.with_name(SIGNATURE)) for path in found]


def outcomes(ended: Ended, keys: Keys, *required: str) -> dict[str, set[str]]:
    """Return step → outcomes of its checks, with these keys required."""
    named = {"own": keys.own.public, "other": keys.other.public}
    storage, record = ended.workspace.storage, ended.record
    refs = refs_of(ended.workspace, record, STEPS)
    return {
        step: {
            each.outcome
            for each in signature_checks(storage, ref, required=[named[name] for name in required])
        }
        for step, ref in refs.items()
    }


@pytest.mark.slow
def test_a_run_signs_all_that_it_makes_and_openssf_agrees(ended: Ended, keys: Keys) -> None:
    assert ended.record.unsigned == {}
    found = pairs(ended.workspace)
    assert len(found) == len(STEPS)
    for statement, signature in found:
        verifying.Config().use_elliptic_key_verifier(public_key=keys.folder / "key.pem.pub").verify(
            statement, signature
        )
    statement, signature = found[0]
    command = [str(Path(sys.executable).with_name("model_signing")), "verify", "key", str(statement)]
    options = ["--signature", str(signature), "--public_key"]
    done = subprocess.run(
        [*command, *options, str(keys.folder / "key.pem.pub")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Verification succeeded" in done.stdout + done.stderr) == (0, True)
    done = subprocess.run(
        [*command, *options, str(keys.folder / "other.pem.pub")], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0


def test_the_password_and_the_key_are_nowhere_in_the_workspace(ended: Ended, keys: Keys) -> None:
    secret = (keys.folder / "key.pem").read_bytes().splitlines()[2]
    assert len(secret) == 64
    files = [path for path in ended.workspace.root.rglob("*") if path.is_file()]
    assert len(files) > 50
    for path in files:
        content = path.read_bytes()
        assert CANARY.encode() not in content, path
        assert secret not in content, path
    assert not any(CANARY in line for line in ended.lines)


def test_a_lost_key_costs_no_stage_and_is_told_with_the_remedy(
    keys: Keys, tmp_path: Path, ledger_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    recipe = tmp_path / "signed.yaml"
    recipe.write_text(RECIPE.replace("keys/", ""))
    new_key(tmp_path / "key.pem")
    workspace = Workspace(tmp_path / "workspace")
    with orchestrated(workspace, recipe) as orchestrator:
        orchestrator._launcher = Here()
        attempt_all(orchestrator, until="sft")
        (tmp_path / "key.pem").unlink()
        stages = attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
        lines = getattr(orchestrator.watcher, "lines")  # noqa: B009
        record = orchestrator.run.record
    assert {stages[step].status for step in STEPS} <= {"completed", "reused"}
    assert set(record.unsigned) >= {"sft", "reward"}
    assert exit_code(record) == ExitCode.BAD_INPUT
    [said] = [line for line in lines if line.startswith("  reward is made, and NOT SIGNED: sign.key: ")]
    assert "is not there" in said
    assert f"sign {record.run_id} --key FILE" in said
    signed = sign_all(workspace, record, STEPS, keys.own)
    assert [each.step for each in signed if each.is_new] == STEPS
    assert outcomes(Ended(workspace), keys, "own") == {step: {"ok"} for step in STEPS}


def test_signing_twice_changes_nothing_and_another_key_adds_its_own(copied: Ended, keys: Keys) -> None:
    before = signatures(copied.workspace)
    assert not any(each.is_new for each in sign_all(copied.workspace, copied.record, STEPS, keys.own))
    assert signatures(copied.workspace) == before
    assert outcomes(copied, keys, "other") == {step: {"wrong", "ok"} for step in STEPS}
    signed = sign_all(copied.workspace, copied.record, lineage(copied.record, "sft"), keys.other)
    assert [each.step for each in signed] == ["model", "data.demonstrations", "sft"]
    assert all(each.is_new for each in signed)
    after = signatures(copied.workspace)
    assert before.items() <= after.items()
    assert len(after) == len(before) + 3 * 3
    assert outcomes(copied, keys, "own", "other") | {"reward": set(), "data.preferences": set()} == {
        **{step: {"ok"} for step in ("model", "data.demonstrations", "sft")},
        "reward": set(),
        "data.preferences": set(),
    }


def test_one_flipped_bit_anywhere_and_nothing_is_signed(copied: Ended, keys: Keys) -> None:
    file = copied.workspace.store / "objects" / str(copied.record.stages["sft"].digest) / "weights.txt"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.chmod(0o644)
    file.write_bytes(bytes(content))
    before = signatures(copied.workspace)
    with pytest.raises(
        DamagedModel, match="sft of run .* is damaged, and nothing is signed: weights.txt: sha256 is"
    ):
        sign_all(copied.workspace, copied.record, STEPS, keys.other)
    assert signatures(copied.workspace) == before


@pytest.mark.parametrize(
    "edit, said",
    [
        (lambda stage: stage["metrics"].update(pair_accuracy=0.99), "metrics.pair_accuracy is 0.99"),
        (lambda stage: stage["verdicts"][0].update(threshold=0.5), "the verdict is recorded as"),
        (lambda stage: stage.update(digest="0" * 64), "is 000000000000 in the run's record"),
    ],
)
def test_a_record_that_was_edited_is_not_signed(copied: Ended, keys: Keys, edit: object, said: str) -> None:
    path = copied.workspace.folder(copied.record.run_id) / "run.json"
    record = json.loads(path.read_bytes())
    edit(record["stages"]["reward"])  # type: ignore[operator]
    path.write_text(json.dumps(record))
    with pytest.raises((DamagedModel, NotStored), match=said):
        sign_all(copied.workspace, copied.record, STEPS, keys.other)


@pytest.mark.parametrize("left", [STATEMENT, SIGNATURE, "key.pub", "damaged statement", "damaged signature"])
def test_what_was_cut_off_or_damaged_is_signed_again(copied: Ended, keys: Keys, left: str) -> None:
    """A kill between two files leaves only one of them."""
    key = str(copied.record.stages["sft"].stage_key)
    folder = next(path.parent for path, _ in pairs(copied.workspace) if key in str(path))
    if left.startswith("damaged"):
        (folder / (STATEMENT if "statement" in left else SIGNATURE)).write_bytes(b"{}")
    elif left == "key.pub":
        for name in (STATEMENT, SIGNATURE):
            (folder / name).unlink()
    else:
        (folder / (SIGNATURE if left == STATEMENT else STATEMENT)).unlink()
    assert outcomes(copied, keys, "own")["sft"] == {"wrong"}
    signed = sign_all(copied.workspace, copied.record, STEPS, keys.own)
    assert [each.step for each in signed if each.is_new] == ["sft"]
    assert outcomes(copied, keys, "own")["sft"] == {"ok"}


def test_a_removed_artifact_leaves_its_signed_statement(copied: Ended, keys: Keys) -> None:
    stage, storage = copied.record.stages["reward"], copied.workspace.storage
    ref = refs_of(copied.workspace, copied.record, ["reward"])["reward"]
    garbage = StoreGarbage(storage, Cause(when="now", why="a test", by="a test"))  # type: ignore[arg-type]
    assert garbage.remove_object(str(stage.digest), needed=lambda: ())
    [check] = signature_checks(storage, ref, required=[keys.own.public])
    assert (check.outcome, "what it was is signed" in check.detail) == ("ok", True)
    assert garbage.remove_refs([str(stage.stage_key)], needed=lambda: ()) == [stage.stage_key]
    assert garbage.leftovers() == [] or all("signatures" not in each.name for each in garbage.leftovers())
    [kept] = read_signatures(storage, str(stage.stage_key))
    assert is_about(kept.statement, str(stage.digest))


def test_a_recipe_with_another_key_trains_nothing_and_signs_what_it_reuses(copied: Ended, keys: Keys) -> None:
    again = run_recipe(copied.workspace, keys.recipe, f"sign.key={keys.folder / 'other.pem'}")
    assert {again.record.stages[step].status for step in STEPS} == {"reused"}
    assert outcomes(again, keys, "own", "other") == {step: {"ok"} for step in STEPS}


@pytest.mark.slow
def test_in_a_bucket_and_checked_from_another_machine(
    bucket: str, keys: Keys, tmp_path: Path, ledger_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "here"))
    here = run_recipe(Workspace.at(bucket), keys.recipe)
    assert here.record.unsigned == {}
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "there"))
    monkeypatch.delenv(PASSWORD)  # the public key is enough
    there = Ended(Workspace.at(bucket))
    assert outcomes(there, keys, "own") == {step: {"ok"} for step in STEPS}
    assert outcomes(there, keys) == {step: {"ok"} for step in STEPS}
    signed = sign_all(there.workspace, there.record, STEPS, keys.other)
    assert all(each.is_new and each.place.startswith("s3://") for each in signed)
    assert not any(each.is_new for each in sign_all(there.workspace, there.record, STEPS, keys.other))


def test_an_export_carries_statement_signature_and_key(
    ended: Ended, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        exporting, "_describe_for_mlflow", lambda model, staging: None
    )  # of a real model's files
    record, storage = ended.record, ended.workspace.storage
    stage = record.stages["reward"]
    origin = Origin("signed", record.run_id, "reward", str(stage.stage_key), str(stage.digest), None, {})
    folder = storage.local_folder(str(stage.digest))
    model = NamedModel("reward", "reward_model", folder, Generation(max_response_tokens=8), origin=origin)
    stored = read_signatures(storage, str(stage.stage_key))
    told = export(model, None, tmp_path / "out", signatures=stored)
    [place] = told["signatures"][keys.own.public.key_id]
    said = tmp_path / "out" / place
    verifying.Config().use_elliptic_key_verifier(public_key=said.parent / "key.pub").verify(
        said / STATEMENT, said / SIGNATURE
    )
    subjects = json.loads((said / STATEMENT).read_bytes())["subject"]
    listed = "".join(f"{each['digest']['sha256']}  {each['name']}\n" for each in subjects)
    sums = subprocess.run(
        ["sha256sum", "--check", "--ignore-missing", "--strict"],
        cwd=tmp_path / "out", input=listed, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (sums.returncode, sums.stdout) == (0, "weights.txt: OK\n")

    def checked(digest: str = str(stage.digest)) -> list[tuple[str, str]]:
        checks = exported_signature_checks(tmp_path / "out", told, digest)
        return [(each.outcome, each.detail) for each in checks]

    assert signature_files(told) == {f"{place}/{name}" for name in (STATEMENT, SIGNATURE)} | {
        f"{Path(place).parent}/key.pub"
    }
    assert [outcome for outcome, _ in checked()] == ["ok"]
    assert "is not about the artifact 000000000000" in checked("0" * 64)[0][1]
    whole, key = (said / STATEMENT).read_bytes(), said.parent / "key.pub"
    (said / STATEMENT).write_bytes(whole.replace(b"0", b"1", 1))
    assert checked()[0][0] == "wrong" and "does not hold" in checked()[0][1]
    (said / STATEMENT).write_bytes(whole)
    key.write_bytes(keys.other.public.pem or b"")
    assert checked()[0][0] == "wrong" and "the key beside it is" in checked()[0][1]
    (said / SIGNATURE).unlink()
    assert checked()[0][0] == "wrong" and "cannot be read" in checked()[0][1]
    outside = {"signatures": {"k": ["../elsewhere", "/etc", 7]}}
    assert signature_files(outside) == set()
    unsigned = export(model, None, tmp_path / "plain")
    assert "signatures" not in unsigned and not (tmp_path / "plain" / "signatures").exists()


def test_targets_are_runs_stages_and_registered_models(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, record = ended.workspace, ended.record
    assert find_target(workspace, "latest").steps == STEPS
    assert find_target(workspace, f"{record.run_id}/sft").steps == ["model", "data.demonstrations", "sft"]
    stage = record.stages["sft"]
    found = SimpleNamespace(version="3", run_id=record.run_id, digest=stage.digest, stage_key=stage.stage_key)
    asked: list[dict[str, str | None]] = []

    def find_version(address: str, name: str, **which: str | None) -> SimpleNamespace:
        asked.append({"name": name, **which})
        return found

    monkeypatch.setattr(published_models, "find_version", find_version)
    monkeypatch.setattr(tracking, "is_missing_database", lambda address: False)
    for named in ("tiny@champion", "models:/tiny/3", "tiny"):
        assert find_target(workspace, named).steps == ["model", "data.demonstrations", "sft"]
    assert asked == [
        {"name": "tiny", "version": None, "alias": "champion"},
        {"name": "tiny", "version": "3", "alias": None},
        {"name": "tiny", "version": None, "alias": None},
    ]
    waits = Publication(stage="sft", registered_model="tiny", alias="champion", after="reward")
    published = record.model_copy(update={"recipe": record.recipe.model_copy(update={"publish": (waits,)})})
    with monkeypatch.context() as patched:
        patched.setattr("vantage.signing.targets.read_run", lambda workspace, run_id: published)
        assert find_target(workspace, "tiny@champion").steps == STEPS, (
            "with the gate that holds the alias back"
        )
    found.digest = "0" * 64
    with pytest.raises(RunError, match="tiny version 3 is 000000000000, which no step of run .* has made"):
        find_target(workspace, "tiny@champion")
    with pytest.raises(RunError, match="has no artifact of policy; it has made model, data.demonstrations"):
        find_target(workspace, "latest/policy")
    removed = record.model_copy(update={"status": REMOVED})
    with monkeypatch.context() as patched:
        patched.setattr("vantage.signing.targets.read_run", lambda workspace, run_id: removed)
        with pytest.raises(RunError, match="was removed by `vantage gc`; run its recipe again"):
            find_target(workspace, "latest/sft")
    nothing = record.model_copy(update={"stages": {}})
    with monkeypatch.context() as patched:
        patched.setattr("vantage.signing.targets.read_run", lambda workspace, run_id: nothing)
        with pytest.raises(RunError, match="has no artifact of sft; it has made nothing yet"):
            find_target(workspace, "latest/sft")
        with pytest.raises(RunError, match="has made nothing yet; `vantage status .*` shows it"):
            find_target(workspace, "latest")
    monkeypatch.setattr(tracking, "is_missing_database", lambda address: True)
    with pytest.raises(RunError, match="there is no run nothing"):
        find_target(workspace, "nothing")


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_statements_about_decisions_are_kept_apart(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """An earlier version refuses a statement of a kind that it does not know, among those about artifacts."""
    at = str(tmp_path / "workspace") if place == "folder" else request.getfixturevalue("bucket")
    storage, stage_key, key_id = Workspace.at(at).storage, "a" * 64, "b" * 64
    given = {"key_id": key_id, "public_key": b"key", "signature": b"signature"}
    add_signature(storage, stage_key, statement=b"artifact", **given)  # type: ignore[arg-type]
    add_signature(storage, stage_key, statement=b"decision", about="decisions", **given)  # type: ignore[arg-type]
    assert [each.statement for each in read_signatures(storage, stage_key)] == [b"artifact"]
    [found] = read_signatures(storage, stage_key, "decisions")
    assert (found.statement, found.signature, found.public_key) == (b"decision", b"signature", b"key")
    assert read_signatures(storage, "c" * 64, "decisions") == []


def test_what_is_too_long_is_no_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone who may write there could fill the memory of whoever checks signatures."""
    storage, stage_key, key_id = Workspace.at(str(tmp_path)).storage, "a" * 64, "b" * 64
    given = {"key_id": key_id, "public_key": b"key", "signature": b"signature"}
    for statement in (b"x" * 20, b"x" * 21):
        add_signature(storage, stage_key, statement=statement, **given)  # type: ignore[arg-type]
    monkeypatch.setattr(stored_signatures, "MAX_BYTES", 20)
    assert [each.statement for each in read_signatures(storage, stage_key)] == [b"x" * 20]


def test_a_signature_waits_for_whoever_changes_the_stages_ref(tmp_path: Path) -> None:
    storage, stage_key, key_id = Workspace.at(str(tmp_path)).storage, "a" * 64, "b" * 64
    assert isinstance(storage, Store)
    given = {"key_id": key_id, "public_key": b"key", "statement": b"said", "signature": b"signature"}
    writing = Thread(target=add_signature, args=(storage, stage_key), kwargs=given)
    with locked(storage.swap_lock(stage_key)):
        writing.start()
        writing.join(0.2)
        assert writing.is_alive() and not read_signatures(storage, stage_key)
    writing.join(10)
    assert [each.statement for each in read_signatures(storage, stage_key)] == [b"said"]
