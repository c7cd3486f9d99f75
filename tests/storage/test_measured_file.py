"""What was measured is stored under the artifact's manifest, and a ref that contradicts it is not believed."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from vantage.schemas.records.artifacts import Artifact, is_same
from vantage.schemas.records.stage_key import stage_key
from vantage.storage.sealed_folders import MANIFEST
from vantage.storage.store import Store

PARTS = {"kind": "evaluation", "seed": 1}
KEY = stage_key(PARTS)
METRICS = {"win_rate": 0.5, "accuracy_gain": 0.03, "undefined": None}
SURE = {"accuracy_gain": {"n": 16, "rows": 64, "standard_error": 0.05}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def produce(
    store: Store,
    *,
    seed: int = 1,
    files: dict[str, str] | None = None,
    metrics: dict[str, float | None] | None = None,
) -> Artifact:
    parts = {**PARTS, "seed": seed}
    key = stage_key(parts)
    attempt = store.next_attempt(key)
    folder = store.staging_folder(key, attempt)
    for name, text in (files if files is not None else {"rows.txt": "rows"}).items():
        (folder / name).write_text(text)
    return store.commit(
        folder,
        stage_key=key,
        attempt=attempt,
        run_id="0001-run",
        description={
            "kind": "evaluation",
            "parents": {},
            "metrics": METRICS if metrics is None else metrics,
            "uncertainty": SURE,
        },
        key_parts=parts,
        provenance={},
    )


def edit(store: Store, *path: str, value: Any) -> None:
    """Put another value into the ref, as a person with an editor could."""
    file = store.root / "refs" / f"{KEY}.json"
    ref = json.loads(file.read_bytes())
    place = ref["artifact"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    file.write_text(json.dumps(ref))


def test_metrics_and_uncertainty_lie_among_the_files_that_the_digest_names(store: Store) -> None:
    artifact = produce(store)
    folder = store.folder(artifact)
    held = json.loads((folder / "metrics.json").read_bytes())
    assert held == {"metrics": METRICS, "uncertainty": SURE}
    assert list(held["metrics"]) == list(METRICS), "in the stage's order"
    listed = {record["path"]: record for record in json.loads((folder / MANIFEST).read_bytes())["files"]}
    assert listed.keys() == {"metrics.json", "rows.txt"}
    assert (
        listed["metrics.json"]["sha256"] == hashlib.sha256((folder / "metrics.json").read_bytes()).hexdigest()
    )
    assert produce(store, seed=2, metrics={**METRICS, "accuracy_gain": 0.9}).digest != artifact.digest


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("metrics", "accuracy_gain"), 0.9, "metrics.accuracy_gain is 0.9, metrics.json of the artifact says 0.03"),
        (("metrics", "undefined"), 1.0, "metrics.undefined is 1.0, metrics.json of the artifact says None"),
        (("metrics", "made_up"), 1.0, "metrics.made_up is 1.0, metrics.json of the artifact says absent"),
        (("metrics",), {}, "metrics.win_rate is absent, metrics.json of the artifact says 0.5"),
        (("uncertainty", "accuracy_gain", "n"), 4096, "uncertainty.accuracy_gain is n=4096"),
        (("uncertainty",), {}, "uncertainty.accuracy_gain is absent"),
        (("files_digest",), "a" * 64, f"files_digest is {'a' * 64}, the manifest says "),
        (("files_digest",), None, "files_digest is None, the manifest says "),
    ],
)  # fmt: skip
def test_an_edited_ref_is_told_and_not_believed(
    store: Store, path: tuple[str, ...], value: Any, told: str
) -> None:
    artifact = produce(store)
    edit(store, *path, value=value)

    found = store.inspect(KEY)
    assert found.ref is None
    assert any(damage.startswith(f"refs/{KEY}.json: {told}") for damage in found.damage), found.damage
    assert store.lookup(KEY) == found
    assert store.lookup(KEY).damage == (), "what was found is set aside"
    assert os.listdir(store.root / "quarantine") == [f"ref-{KEY}.1"]
    assert store.verify(artifact) == [], "its files were never in doubt"
    again = produce(store)
    assert again.digest == artifact.digest
    assert store.lookup(KEY).ref is not None


def test_edited_metrics_in_the_object_are_damage_as_in_any_file(store: Store) -> None:
    artifact = produce(store)
    file = store.folder(artifact) / "metrics.json"
    file.chmod(0o644)
    file.write_text(file.read_text().replace("0.03", "0.99"))
    found = store.inspect(KEY)
    assert found.ref is None
    assert "metrics.json: sha256 is" in found.damage[0]
    with pytest.raises(ValueError, match="metrics.json: sha256 is"):
        store.sealed(artifact.digest)


def test_edited_in_ref_and_object_alike_the_digest_still_tells(store: Store) -> None:
    artifact = produce(store)
    folder = store.folder(artifact)
    (folder / "metrics.json").chmod(0o644)
    edited = (folder / "metrics.json").read_text().replace("0.03", "0.99")
    (folder / "metrics.json").write_text(edited)
    (folder / MANIFEST).chmod(0o644)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for record in manifest["files"]:
        if record["path"] == "metrics.json":
            record |= {"size": len(edited), "sha256": hashlib.sha256(edited.encode()).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    edit(store, "metrics", "accuracy_gain", value=0.99)
    assert any("manifest.json: sha256 is" in damage for damage in store.inspect(KEY).damage)


def test_the_same_files_are_known_whatever_was_measured_of_them(store: Store) -> None:
    one = produce(store, seed=1)
    measured_otherwise = produce(store, seed=2, metrics={"win_rate": 0.7})
    another = produce(store, seed=3, files={"rows.txt": "other rows"})
    renamed = produce(store, seed=4, files={"lines.txt": "rows"})
    assert one.digest != measured_otherwise.digest
    assert is_same(one, measured_otherwise)
    assert not is_same(one, another)
    assert not is_same(one, renamed)
    unknown = one.model_copy(update={"files_digest": None})
    assert not is_same(unknown, unknown)


def test_a_stage_cannot_write_its_own_metrics(store: Store) -> None:
    with pytest.raises(ValueError, match="metrics.json: this name is kept for what was measured"):
        produce(store, files={"metrics.json": "{}", "rows.txt": "rows"})


def test_metrics_alone_are_no_artifact(store: Store) -> None:
    with pytest.raises(ValueError, match="holds no file"):
        produce(store, files={})
