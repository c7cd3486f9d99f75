"""Tampering with artifacts, refs, statements and signatures is found with the public key alone."""

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.signing.conftest import Ended, Keys
from vantage.schemas.canonical_json import canonical_json
from vantage.signing import keys as signing_keys
from vantage.signing.bundles import sign
from vantage.signing.keys import PASSWORD, PublicKey
from vantage.signing.lineage import refs_of
from vantage.signing.statements import Judged, judged_by, statement
from vantage.signing.verification import SignatureCheck, signature_checks
from vantage.storage.refs import Ref
from vantage.storage.signatures import KEY_FILE, SIGNATURE, STATEMENT, add_signature, read_signatures


@pytest.fixture(autouse=True)
def _no_password(_password: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD)


def ref_of(ended: Ended, step: str = "reward") -> Ref:
    """Return the step's ref as the store has it now."""
    ref = ended.workspace.storage.find(str(ended.record.stages[step].stage_key))
    assert ref is not None
    return ref


def checks(ended: Ended, *required: PublicKey, judged: Judged | None = None) -> list[SignatureCheck]:
    return signature_checks(ended.workspace.storage, ref_of(ended), required=required, judged=judged)


def folder_of(ended: Ended, step: str = "reward") -> Path:
    """Return the folder with the step's only statement."""
    root = ended.workspace.store / "signatures" / str(ended.record.stages[step].stage_key)
    [found] = root.rglob(STATEMENT)
    return found.parent


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.chmod(0o644)
    path.write_text(canonical_json(content))


def test_an_intact_one_is_ok_by_file_and_by_id(ended: Ended, keys: Keys) -> None:
    judged = judged_by(ended.record, "reward")
    for required in (keys.own.public, PublicKey(keys.own.public.key_id)):
        [check] = checks(ended, required, judged=judged)
        assert check == SignatureCheck("ok", f"signed by key {keys.own.public.short}", keys.own.public.key_id)
    [check] = checks(ended, judged=judged)
    assert check.outcome == "ok"
    assert "compared with no key of yours (--require-signature KEY)" in check.detail


def test_without_signatures_only_a_requirement_finds_fault(copied: Ended, keys: Keys) -> None:
    shutil.rmtree(copied.workspace.store / "signatures")
    assert checks(copied) == []
    [check] = checks(copied, keys.own.public)
    assert (check.outcome, "there is no signature by it" in check.detail) == ("wrong", True)


def test_a_valid_signature_by_another_key_is_none_by_the_required_one(copied: Ended, keys: Keys) -> None:
    first, second = checks(copied, keys.other.public)
    assert first.outcome == "wrong"
    assert f"is not signed by key {keys.other.public.short}, which is required" in first.detail
    assert (second.outcome, "which is not required" in second.detail) == ("ok", True)


def rewrite_the_object(ended: Ended) -> None:
    """Write other weights with a manifest and a ref that agree with them, which no digest can tell."""
    store, ref = ended.workspace.store, ref_of(ended)
    old = store / "objects" / ref.artifact.digest
    for path in (old, *old.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (old / "weights.txt").write_text("worse weights")
    sha = hashlib.sha256(b"worse weights").hexdigest()

    def change(manifest: Any) -> None:
        next(each for each in manifest["files"] if each["path"] == "weights.txt").update(sha256=sha, size=13)

    edit_json(old / "manifest.json", change)
    digest = hashlib.sha256((old / "manifest.json").read_bytes()).hexdigest()
    old.rename(store / "objects" / digest)
    edit_json(
        store / "refs" / f"{ref.artifact.stage_key}.json",
        lambda found: found["artifact"].update(digest=digest, uri=f"objects/{digest}"),
    )


def edit_ref(**changes: Any) -> Callable[[Ended], None]:
    """Change fields of the ref; ``artifact__metrics`` is the artifact's."""

    def edit(ended: Ended) -> None:
        def change(found: Any) -> None:
            for name, value in changes.items():
                owner, _, field = name.rpartition("__")
                target = found[owner] if owner else found
                target[field] = {**target[field], **value} if isinstance(value, dict) else value

        edit_json(ended.workspace.store / "refs" / f"{ref_of(ended).artifact.stage_key}.json", change)

    return edit


def edit_statement(ended: Ended) -> None:
    """Change metrics in the statement itself, and store it under the name that it then has."""
    folder = folder_of(ended)

    def change(said: Any) -> None:
        said["predicate"]["runDetails"]["byproducts"][0]["annotations"]["metrics"]["pair_accuracy"] = 0.99

    edit_json(folder / STATEMENT, change)
    folder.rename(folder.with_name(hashlib.sha256((folder / STATEMENT).read_bytes()).hexdigest()))


def rewrite_everything(ended: Ended) -> None:
    """Rewrite object, manifest, ref and statement so that they agree; the old signature does not hold for the new
    statement.
    """
    rewrite_the_object(ended)
    ref, folder = ref_of(ended), folder_of(ended)
    files = json.loads((ended.workspace.store / ref.artifact.uri / "manifest.json").read_bytes())["files"]
    said = statement(ref, {each["path"]: each["sha256"] for each in files}, judged_by(ended.record, "reward"))
    (folder / STATEMENT).write_bytes(said)


def swap_statements(ended: Ended) -> None:
    """Put the signed statement of another stage in the place of this one's."""
    other, ours = folder_of(ended, "sft"), folder_of(ended)
    for name in (STATEMENT, SIGNATURE):
        shutil.copyfile(other / name, ours / name)


def flip_in(name: str) -> Callable[[Ended], None]:
    def flip(ended: Ended) -> None:
        path = folder_of(ended) / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))

    return flip


def write(name: str, content: bytes) -> Callable[[Ended], None]:
    return lambda ended: (folder_of(ended) / name).write_bytes(content) and None  # type: ignore[func-returns-value]


def damage_manifest(ended: Ended) -> None:
    path = ended.workspace.store / ref_of(ended).artifact.uri / "manifest.json"
    edit_json(path, lambda manifest: manifest["files"].pop())


def build(said: Any) -> Any:
    return said["predicate"]["buildDefinition"]


def verdicts_in(said: Any) -> Any:
    return next(each for each in said["predicate"]["runDetails"]["byproducts"] if each["name"] == "verdicts")


NOT_HELD = "the signature does not hold"
DIFFERS = "what is stored differs from what was signed"


@pytest.mark.parametrize(
    "tamper, said",
    [
        (rewrite_the_object, DIFFERS),
        (edit_ref(artifact__metrics={"pair_accuracy": 0.99}), f"{DIFFERS}.*pair_accuracy was signed as 0.8, and is 0.99"),
        (edit_ref(artifact__metrics={"invented": 1.0}), f"{DIFFERS}.*invented was signed as null, and is 1.0"),
        (edit_ref(artifact__parents={"init": "0" * 64}), f"{DIFFERS}.*resolvedDependencies.init.digest.sha256"),
        (edit_ref(provenance={"code": "0" * 64}), f"{DIFFERS}.*provenance.code was signed as"),
        (edit_ref(run_id="0009-other-123456"), f"{DIFFERS}.*invocationId"),
        (edit_ref(artifact__kind="value_model"), f"{DIFFERS}.*makes was signed as \"reward_model\""),
        (edit_statement, NOT_HELD),
        (rewrite_everything, NOT_HELD),
        (swap_statements, "is about another stage key"),
        (flip_in(STATEMENT), NOT_HELD),
        (flip_in(SIGNATURE), NOT_HELD),
        (write(SIGNATURE, b""), NOT_HELD),
        (write(SIGNATURE, b"[" * 100_000), NOT_HELD),
        (write(SIGNATURE, b'{"verificationMaterial": {"publicKey": {"hint": null}}}'), NOT_HELD),
        (write(SIGNATURE, b'{"verificationMaterial": {"publicKey": {"hint": ""}}}'), "does not say which key made it"),
        (write(SIGNATURE, b"\xff\xfe"), NOT_HELD),
        (damage_manifest, "no signature can hold: manifest.json: sha256 is"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_what_was_changed_after_signing_is_found(
    copied: Ended, keys: Keys, tamper: Callable[[Ended], None], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tamper(copied)
    for required in ([keys.own.public], []):
        found = checks(copied, *required)
        assert [each.outcome for each in found] == ["wrong"]
        assert __import__("re").search(said, found[0].detail), found[0].detail
    assert capfd.readouterr().out == ""


def test_verdicts_and_recipe_of_a_record_are_compared_with_what_was_signed(copied: Ended, keys: Keys) -> None:
    judged = judged_by(copied.record, "reward")
    softer = Judged(judged.run_id, judged.recipe, ({**judged.verdicts[0], "threshold": 0.5},))
    other_recipe = Judged(judged.run_id, "0" * 64, judged.verdicts)
    other_run = Judged("0002-signed-123456", "0" * 64, judged.verdicts)
    other_gate = Judged("0002-signed-123456", "0" * 64, softer.verdicts)
    for changed, outcomes, said in (
        (softer, ["wrong"], "the verdicts in the record of run"),
        (other_recipe, ["wrong"], "the recipe in the record of run"),
        (other_run, ["ok"], "signed by key"),  # the same verdicts on the same artifact
        (other_gate, ["ok", "unchecked"], "but not the verdicts of run 0002-signed-123456"),
    ):
        found = checks(copied, keys.own.public, judged=changed)
        assert [each.outcome for each in found] == outcomes
        assert said in found[-1].detail


def test_an_attacker_with_a_key_of_his_own_is_found_where_a_key_is_required(
    copied: Ended, keys: Keys
) -> None:
    """All files are rewritten and signed anew, so only a requirement of our own key finds the attack."""
    rewrite_the_object(copied)
    shutil.rmtree(copied.workspace.store / "signatures")
    ref = ref_of(copied)
    files = json.loads((copied.workspace.store / ref.artifact.uri / "manifest.json").read_bytes())["files"]
    said = statement(
        ref, {each["path"]: each["sha256"] for each in files}, judged_by(copied.record, "reward")
    )
    pem = keys.other.public.pem
    assert pem is not None
    add_signature(
        copied.workspace.storage, ref.artifact.stage_key,
        key_id=keys.other.public.key_id, public_key=pem, statement=said, signature=sign(said, keys.other),
    )  # fmt: skip
    assert [each.outcome for each in checks(copied)] == ["ok"]
    assert [each.outcome for each in checks(copied, keys.own.public)] == ["wrong", "ok"]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda said: build(said)["externalParameters"].pop("stage_key"), "KeyError"),
        (lambda said: build(said).pop("internalParameters"), "KeyError"),
        (lambda said: build(said)["internalParameters"].pop("attempt"), "KeyError"),
        (lambda said: said["subject"].__setitem__(0, 1), "TypeError"),
        (lambda said: said.update(subject=[]), "IndexError"),
        (lambda said: verdicts_in(said).update(content=base64.b64encode(b'[{"x": NaN}]').decode()), "ValueError"),
        (lambda said: verdicts_in(said).update(content=base64.b64encode(b'["x"]').decode()), "TypeError"),
        (lambda said: verdicts_in(said).update(content="%"), "Error"),
    ],
)  # fmt: skip
def test_a_statement_of_a_key_of_his_own_that_is_none_of_ours(
    copied: Ended, keys: Keys, change: Callable[[Any], object], said: str
) -> None:
    """A statement that a stranger signs is reported, and no check of the others ends because of it."""
    statement_of = json.loads((folder_of(copied) / STATEMENT).read_bytes())
    change(statement_of)
    data = json.dumps(statement_of).encode()
    pem = keys.other.public.pem
    assert pem is not None
    add_signature(
        copied.workspace.storage, ref_of(copied).artifact.stage_key,
        key_id=keys.other.public.key_id, public_key=pem, statement=data, signature=sign(data, keys.other),
    )  # fmt: skip
    own, other = checks(copied, keys.own.public)
    assert (own.outcome, other.outcome) == ("ok", "wrong")
    assert f"what it signed is no statement that Vantage writes ({said})" in other.detail


def test_the_same_values_in_other_bytes_are_not_what_we_sign(copied: Ended, keys: Keys) -> None:
    folder = folder_of(copied)
    data = json.dumps(json.loads((folder / STATEMENT).read_bytes()), indent=1).encode()
    (folder / STATEMENT).write_bytes(data)
    other = keys.other.public
    assert other.pem is not None
    shutil.rmtree(folder.parent)
    add_signature(
        copied.workspace.storage, ref_of(copied).artifact.stage_key,
        key_id=other.key_id, public_key=other.pem, statement=data, signature=sign(data, keys.other),
    )  # fmt: skip
    [check] = checks(copied, other)
    assert check.outcome == "wrong"
    assert check.detail.endswith("differs from what was signed: the same values, written in another way")


@pytest.mark.parametrize("known_by", ["file", "id"])
def test_his_signature_under_the_required_keys_name(copied: Ended, keys: Keys, known_by: str) -> None:
    folder = folder_of(copied)
    said = (folder / STATEMENT).read_bytes()
    (folder / SIGNATURE).write_bytes(sign(said, keys.other))
    assert keys.other.public.pem is not None
    (folder.parent / KEY_FILE).write_bytes(keys.other.public.pem)
    required = keys.own.public if known_by == "file" else PublicKey(keys.own.public.key_id)
    [check] = checks(copied, required)
    assert check.outcome == "wrong"
    assert ("Key mismatch" if known_by == "file" else "another one") in check.detail


def test_what_was_made_again_since_is_not_what_was_signed(copied: Ended, keys: Keys) -> None:
    """A later attempt made the artifact again, for example after damage. Its only fault is that it is not signed."""
    edit_ref(attempt=2)(copied)
    [check] = checks(copied)
    assert (check.outcome, "of attempt 1, and attempt 2 has made" in check.detail) == ("unchecked", True)
    [check] = checks(copied, keys.own.public)
    assert check.outcome == "wrong"


def test_folders_links_and_strange_names_among_signatures_are_not_read(copied: Ended, keys: Keys) -> None:
    folder = folder_of(copied)
    (folder / "note.txt").write_text("x")
    (folder.parent / "x").mkdir()
    (folder.parent / "x" / STATEMENT).write_text("x")
    assert [each.outcome for each in checks(copied, keys.own.public)] == ["ok"]
    assert len(read_signatures(copied.workspace.storage, ref_of(copied).artifact.stage_key)) == 1


def test_without_the_library_nothing_is_checked_and_it_is_named(
    ended: Ended, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing_keys, "_PACKAGES", ("no_such_package",))
    [check] = checks(ended, keys.own.public)
    assert check.outcome == "unchecked"
    assert "pip install 'vantage-rlhf[sign]'" in check.detail


def test_each_step_has_its_own(ended: Ended, keys: Keys) -> None:
    storage = ended.workspace.storage
    for step, ref in refs_of(ended.workspace, ended.record, ended.record.stages).items():
        judged = judged_by(ended.record, step)
        assert [
            each.outcome for each in signature_checks(storage, ref, required=[keys.own.public], judged=judged)
        ] == ["ok"]
