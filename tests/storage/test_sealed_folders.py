"""A sealed folder has a digest, and every way to damage it is found."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vantage.storage.sealed_folders import (
    MANIFEST,
    UnsafePath,
    check_path,
    find_problems,
    read_manifest,
    seal,
)


def sealed(folder: Path) -> str:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"w" * 100_000)
    (folder / "inner" / "config.json").write_bytes(b"{}")
    return seal(folder)


def test_the_digest_is_the_sha256_of_a_manifest_written_out_by_hand(tmp_path: Path) -> None:
    digest = sealed(tmp_path)
    manifest = (
        '{"files":['
        f'{{"path":"inner/config.json","sha256":"{hashlib.sha256(b"{}").hexdigest()}","size":2}},'
        f'{{"path":"weights.bin","sha256":"{hashlib.sha256(b"w" * 100_000).hexdigest()}","size":100000}}'
        "]}"
    ).encode()
    assert (tmp_path / MANIFEST).read_bytes() == manifest
    assert digest == hashlib.sha256(manifest).hexdigest()


def test_the_digest_depends_on_content_alone(tmp_path: Path) -> None:
    one = sealed(tmp_path / "one")
    other = tmp_path / "other"
    (other / "inner").mkdir(parents=True)
    (other / "empty" / "empty").mkdir(parents=True)
    (other / "inner" / "config.json").write_bytes(b"{}")
    os.utime(other / "inner" / "config.json", (0, 0))
    (other / "weights.bin").write_bytes(b"w" * 100_000)
    (other / "weights.bin").chmod(0o600)
    assert seal(other) == one
    assert not (other / "empty").exists()


def test_an_intact_folder_has_no_problems(tmp_path: Path) -> None:
    assert find_problems(tmp_path, digest=sealed(tmp_path)) == []
    assert read_manifest(tmp_path).keys() == {"weights.bin", "inner/config.json"}


def _flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "weights.bin").read_bytes())
    data[77_777] ^= 1
    _overwrite(folder / "weights.bin", bytes(data))


def _overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


def _swap_for_a_link(folder: Path) -> None:
    (folder / "weights.bin").rename(folder.parent / "outside.bin")
    (folder / "weights.bin").symlink_to(folder.parent / "outside.bin")


def _swap_folder_for_a_link(folder: Path) -> None:
    (folder / "inner").rename(folder.parent / "outside")
    (folder / "inner").symlink_to(folder.parent / "outside")


def _share(folder: Path) -> None:
    os.link(folder / "weights.bin", folder.parent / "shared.bin")


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (_flip_a_bit, "weights.bin: sha256 is"),
    (
        lambda folder: os.truncate(folder / "weights.bin", 99_999),
        "weights.bin: has 99999 bytes, must have 100000",
    ),
    (lambda folder: (folder / "weights.bin").unlink(), "weights.bin: is missing"),
    (lambda folder: (folder / "extra.bin").write_bytes(b""), "extra.bin: is not in the manifest"),
    (
        lambda folder: (folder / "inner" / MANIFEST).write_bytes(b"{}"),
        "inner/manifest.json: is not in the manifest",
    ),
    (lambda folder: (folder / "empty").mkdir(), "empty: is an unexpected empty folder"),
    (_swap_for_a_link, "weights.bin: is a symbolic link"),
    (_swap_folder_for_a_link, "inner: is a symbolic link"),
    (_share, "weights.bin: is shared with another name"),
    (lambda folder: os.mkfifo(folder / "pipe"), "pipe: is not a plain file"),
    (lambda folder: (folder / "a%2eb").write_bytes(b""), "'a%2eb' is not a safe relative path"),
    (lambda folder: (folder / MANIFEST).unlink(), "manifest.json"),
    (lambda folder: _overwrite(folder / MANIFEST, b'{"files":[]}'), "manifest.json: sha256 is"),
]


@pytest.mark.parametrize("damage, message", DAMAGE)
def test_damage_is_found(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    """Each kind of damage to a sealed folder is found."""
    folder = tmp_path / "folder"
    digest = sealed(folder)
    damage(folder)
    assert any(message in problem for problem in find_problems(folder, digest=digest))


def test_a_missing_folder_and_a_link_to_one_are_problems(tmp_path: Path) -> None:
    digest = sealed(tmp_path / "folder")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("absent", "link"):
        assert find_problems(tmp_path / name, digest=digest) == ["the folder is missing, or is a link"]


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        '{"files":3}',
        '{"files":[{"path":"a"}]}',
        '{"files":[{"path":["a"],"size":1,"sha256":"x"}]}',
        '{"files":[{"path":"a","size":"1","sha256":"x"}]}',
        '{"files":[{"path":"a","size":1,"sha256":"x"},{"path":"a","size":1,"sha256":"x"}]}',
        '{"files":[{"path":"../a","size":1,"sha256":"x"}]}',
        '{"files":' + "[" * 100_000,
    ],
)
def test_a_manifest_that_is_none_is_refused_whatever_its_own_digest(tmp_path: Path, manifest: str) -> None:
    (tmp_path / MANIFEST).write_text(manifest)
    digest = hashlib.sha256(manifest.encode()).hexdigest()
    with pytest.raises(ValueError, match=r"manifest\.json|'\.\./a' is not a safe relative path"):
        read_manifest(tmp_path, digest=digest)
    assert find_problems(tmp_path, digest=digest)


def test_a_huge_manifest_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).touch()
    os.truncate(tmp_path / MANIFEST, 10**12)  # a sparse file uses no disk
    with pytest.raises(ValueError, match="longer than"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/../b",
        "./a",
        "a\\b",
        "..\\a",
        "%2e%2e/a",
        "a%2Fb",
        "a\0b",
        "a\nb",
        "ä",
        "C:a",
        3,
    ],
)
def test_unsafe_paths_are_refused(path: object) -> None:
    with pytest.raises(UnsafePath, match="is not a safe relative path; use letters"):
        check_path(path)


@pytest.mark.parametrize(
    "path",
    ["a", ".gitattributes", "model-00001-of-00002.safetensors", "chat templates/tool_use (1).jinja", "..."],
)
def test_usual_names_are_allowed(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda folder: (folder / "link").symlink_to("/etc/passwd"), "link: is a symbolic link; copy"),
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe: is not a plain file"),
        (lambda folder: os.link(folder / "a", folder / "b"), "a: is shared with another name"),
        (lambda folder: (folder / "a\\b").touch(), "is not a safe relative path"),
        (lambda folder: (folder / MANIFEST).touch(), "this name is kept for the folder's own manifest"),
        (lambda folder: (folder / "a").unlink(), "holds no file; nothing can be sealed"),
    ],
)
def test_what_may_not_be_sealed_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    (tmp_path / "a").touch()
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        seal(tmp_path)


def test_a_seal_that_failed_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"a")
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:  # the manifest's own record
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        seal(tmp_path)
    assert find_problems(tmp_path, digest=seal(tmp_path)) == []


def test_files_are_read_only_once_sealed(tmp_path: Path) -> None:
    sealed(tmp_path)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {0o444}


def test_every_file_and_folder_is_synced_before_the_digest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, []

    def watch(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    sealed(tmp_path)
    assert {os.path.relpath(path, tmp_path) for path in synced} == {
        "weights.bin",
        "inner/config.json",
        MANIFEST,
        "inner",
        ".",
    }
    # the folder that holds the manifest's name comes after the manifest's content
    assert synced.index(str(tmp_path)) > synced.index(str(tmp_path / MANIFEST))


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    sealed(tmp_path)
    assert [record["path"] for record in json.loads((tmp_path / MANIFEST).read_text())["files"]] == [
        "inner/config.json",
        "weights.bin",
    ]
