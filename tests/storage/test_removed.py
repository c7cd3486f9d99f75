"""A removed artifact leaves its manifest, metrics and refs, and a record of when, why and by whom; in both storages."""

import hashlib
import json
from pathlib import Path

import obstore
import pytest

from tests.storage.places import Place
from tests.storage.stored import KEY, NEW, OLD, OTHER_PARTS, content_of, produce, stage
from vantage.schemas.records.stage_key import stage_key
from vantage.storage.removed import Cause, Removal, find_removed
from vantage.storage.storage import garbage_of
from vantage.storage.store import Store

pytestmark = pytest.mark.usefixtures("no_fsync")

OTHER = stage_key(OTHER_PARTS)
CAUSE = Cause(when="2026-01-02T03:04:05+00:00", why="nobody needs it", by="somebody on a machine")


def remove(place: Place, digest: str, *keys: str, cause: Cause = CAUSE) -> None:
    garbage = garbage_of(place.open(), cause)
    assert sorted(garbage.remove_refs(keys, needed=tuple)) == sorted(keys)
    assert garbage.remove_object(digest, needed=tuple)
    assert place.paths(f"objects/{digest}") == set()


def recorded(place: Place, digest: str) -> Removal:
    removal = find_removed(place.open(), digest)
    assert removal is not None
    return removal


def test_it_says_when_why_by_whom_and_what_it_was(place: Place) -> None:
    """The record of a removed artifact names when, why and by whom it was removed, and what it was."""
    artifact = produce(place.open(), OLD)
    manifest = place.read(f"{artifact.uri}/manifest.json")
    remove(place, artifact.digest, KEY)
    removal = recorded(place, artifact.digest)
    assert (removal.when, removal.why, removal.by) == (CAUSE.when, CAUSE.why, CAUSE.by)
    assert removal.files is not None
    assert removal.files["weights.bin"].sha256 == hashlib.sha256(OLD).hexdigest()
    assert removal.files["weights.bin"].size == len(OLD)
    assert set(removal.files) == {"weights.bin", "tokenizer/tokenizer.json", "metrics.json"}
    assert removal.measured is not None
    assert removal.measured.metrics == {"loss": 0.1, "accuracy": None}
    (ref,) = removal.refs
    assert ref.artifact == artifact
    assert (ref.run_id, ref.provenance, ref.key_parts["seed"]) == ("run-1", {"torch": "2.13.0"}, 1)
    kept = place.read(f"removed/{artifact.digest}/manifest.json")
    assert kept == manifest
    assert hashlib.sha256(kept).hexdigest() == artifact.digest, "it can still be checked against the digest"


def test_every_ref_of_equal_content_is_kept(place: Place) -> None:
    artifact = produce(place.open(), OLD)
    produce(place.open(), OLD, parts=OTHER_PARTS)
    remove(place, artifact.digest, KEY, OTHER)
    assert {ref.artifact.stage_key for ref in recorded(place, artifact.digest).refs} == {KEY, OTHER}


def test_what_is_there_was_not_removed(place: Place) -> None:
    artifact = produce(place.open(), OLD)
    assert find_removed(place.open(), artifact.digest) is None
    garbage = garbage_of(place.open(), CAUSE)
    garbage.remove_refs([KEY], needed=tuple)
    assert find_removed(place.open(), artifact.digest) is None, "only its ref is gone"
    assert find_removed(place.open(), "c" * 64) is None
    with pytest.raises(ValueError, match="not a sha256"):
        find_removed(place.open(), "../refs")


def test_made_again_it_is_there_and_removed_again_the_record_is_the_newest(place: Place) -> None:
    artifact = produce(place.open(), OLD)
    remove(place, artifact.digest, KEY)
    assert produce(place.open(), OLD).digest == artifact.digest
    assert content_of(place.open()) == OLD
    assert find_removed(place.open(), artifact.digest) is None
    later = CAUSE.model_copy(update={"when": "2026-05-01T00:00:00+00:00"})
    remove(place, artifact.digest, KEY, cause=later)
    removal = recorded(place, artifact.digest)
    assert removal.when == later.when
    assert [ref.attempt for ref in removal.refs] == [2]


def test_records_are_small_and_are_no_garbage(place: Place) -> None:
    digest = produce(place.open(), OLD * 100_000).digest
    remove(place, digest, KEY)
    garbage = garbage_of(place.open(), CAUSE)
    assert list(garbage.leftovers()) == []
    assert set(garbage.records()) == {digest}
    assert garbage.records()[digest] == sum(len(place.read(path)) for path in place.paths("removed"))
    assert garbage.records()[digest] < 4000


def test_half_an_upload_leaves_nothing(place: Place) -> None:
    place.open()
    path = f"objects/{'d' * 64}/weights.bin"
    if isinstance(place.open(), Store):
        (Path(place.machine().address) / path).parent.mkdir(parents=True)
    place.write(path, OLD)
    remove(place, "d" * 64)
    assert place.paths("removed") == set()


def test_to_ask_is_to_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An auditor's login may read and list alone."""
    digest = produce(place.open(), OLD).digest
    remove(place, digest, KEY)
    storage = place.open()

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("this login may only read")

    for name in ("put", "delete", "copy", "rename"):
        monkeypatch.setattr(obstore, name, refused)
    monkeypatch.setattr("vantage.storage.removed.replace_file", refused)
    monkeypatch.setattr("vantage.storage.removed.make_folder", refused)
    assert find_removed(storage, digest) is not None


def test_with_a_damaged_manifest_the_refs_stay_and_the_record_says_no_files(place: Place) -> None:
    artifact = produce(place.open(), OLD)
    place.write(f"{artifact.uri}/manifest.json", b'{"files": []}')
    remove(place, artifact.digest, KEY)
    removal = recorded(place, artifact.digest)
    assert removal.files is None
    assert removal.measured is None
    assert [ref.artifact.digest for ref in removal.refs] == [artifact.digest]


@pytest.mark.parametrize("edited", ["manifest", "metrics", "refs", "moved", "cause"])
def test_an_edited_record_is_told(place: Place, edited: str) -> None:
    artifact, other = produce(place.open(), OLD), produce(place.open(), NEW, parts=OTHER_PARTS)
    remove(place, artifact.digest, KEY)
    folder = f"removed/{artifact.digest}"
    path, data = {
        "manifest": (f"{folder}/manifest.json", lambda old: old.replace(b'"size":11', b'"size":12')),
        "metrics": (f"{folder}/metrics.json", lambda old: old.replace(b"0.1", b"0.2")),
        "refs": (f"{folder}/refs/{KEY}.json", lambda old: old.replace(b'"loss":0.1', b'"loss":0.2')),
        "moved": (
            f"{folder}/refs/{KEY}.json",
            lambda old: old.replace(artifact.digest.encode(), other.digest.encode()),
        ),
        "cause": (f"{folder}/removal.json", lambda old: b"{"),
    }[edited]
    before = place.read(path)
    assert data(before) != before
    place.write(path, data(before))
    with pytest.raises(ValueError, match=f"removed/{artifact.digest}"):
        find_removed(place.open(), artifact.digest)


def test_a_damaged_object_that_nobody_made_again_leaves_its_record_with_its_last_copy(store: Store) -> None:
    artifact = produce(store, OLD)
    weights = store.folder(artifact) / "weights.bin"
    weights.chmod(0o644)
    weights.write_bytes(NEW)
    assert store.lookup(KEY).damage
    garbage = garbage_of(store, CAUSE)
    (aside,) = garbage.leftovers()
    assert garbage.remove_leftover(aside, needed=tuple)
    removal = find_removed(store, artifact.digest)
    assert removal is not None
    assert removal.why == "was found damaged and set aside; nobody needs it"
    assert removal.files is not None


def test_a_record_has_no_name_that_leads_elsewhere(store: Store) -> None:
    artifact = produce(store, OLD)
    place_refs = store.root / "removed" / artifact.digest / "refs"
    garbage = garbage_of(store, CAUSE)
    garbage.remove_refs([KEY], needed=tuple)
    garbage.remove_object(artifact.digest, needed=tuple)
    (place_refs / "..%2fescape.json").write_text("{}")
    (place_refs.parent / "other.json").write_text(json.dumps({"a": 1}))
    removal = find_removed(store, artifact.digest)
    assert removal is not None
    assert len(removal.refs) == 1
    # A stage that began and never ended leaves no record.
    stage(store, NEW)
    assert len(list((store.root / "removed").iterdir())) == 1
