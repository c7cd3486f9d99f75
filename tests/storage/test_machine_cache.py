"""A derived file is read if it is intact, and otherwise counts as missing."""

from pathlib import Path

import pytest

from vantage.storage.machine_cache import cache_root, keep_derived, read_derived


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_is_read_and_replaced(root: Path) -> None:
    assert read_derived("a") is None
    assert not root.exists(), "a look makes nothing"
    keep_derived("a", b"one\n\x00two")
    keep_derived("b", b"")
    assert (read_derived("a"), read_derived("b")) == (b"one\n\x00two", b"")
    keep_derived("a", b"three")
    assert read_derived("a") == b"three"
    assert {path.name for path in (root / "derived").iterdir()} == {"a", "b"}


def test_its_user_alone_can_read_it(root: Path) -> None:
    """Only its user can read the cache of derived files."""
    keep_derived("a", b"one")
    assert (root / "derived" / "a").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "no seal", "a folder", "a link to nothing"])
def test_what_is_damaged_counts_as_none_and_is_made_again(root: Path, damage: str) -> None:
    keep_derived("a", b"one two three")
    path = root / "derived" / "a"
    whole = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage == "a link to nothing":
        path.symlink_to(root / "gone")
    else:
        path.write_bytes(
            {"cut": whole[:-1], "changed": whole.replace(b"two", b"2wo"), "empty": b"", "no seal": b"one"}[
                damage
            ]
        )
    assert read_derived("a") is None
    keep_derived("a", b"again")
    assert read_derived("a") == (None if damage == "a folder" else b"again")
    assert [each.name for each in path.parent.iterdir()] == ["a"]


def test_where_nothing_can_be_written_nothing_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.write_text("a file where the folder belongs")
    keep_derived("a", b"one")
    assert read_derived("a") is None

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("VANTAGE_CACHE")
    monkeypatch.setattr(Path, "home", no_home)
    keep_derived("a", b"one")
    assert read_derived("a") is None
    with pytest.raises(RuntimeError):
        cache_root()
