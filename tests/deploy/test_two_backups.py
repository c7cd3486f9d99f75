"""Of two calls that save or restore the same at once, one is complete and the other is refused."""

import shutil
from pathlib import Path

import pytest

from deploy.backup import saving
from deploy.backup.restoring import restore
from deploy.backup.saving import save
from deploy.backup.stores import Stores
from deploy.servers.failure import ServersFailure


def test_two_calls_at_once_never_mix_what_they_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call begins and ends while the first has saved half of the workspace."""
    stores = Stores(workspace=tmp_path / "ws", servers=None)
    (tmp_path / "ws" / "runs" / "a").mkdir(parents=True)
    (tmp_path / "ws" / "notes.txt").write_text("notes")
    to, copy_folder = tmp_path / "backups" / "1", saving.copy_folder

    def interrupted(source: Path, target: Path) -> None:
        monkeypatch.setattr(saving, "copy_folder", copy_folder)
        save(stores, to)
        copy_folder(source, target)

    monkeypatch.setattr(saving, "copy_folder", interrupted)
    with pytest.raises(ServersFailure, match=f"{to} was made by another call meanwhile; name a new folder"):
        save(stores, to)
    assert sorted(path.relative_to(to).as_posix() for path in to.rglob("*")) == [
        *("backup.json", "workspace", "workspace/notes.txt", "workspace/runs", "workspace/runs/a"),
    ]
    assert [*to.parent.iterdir()] == [to]


def test_two_calls_at_once_never_mix_what_they_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ws" / "runs" / "a").mkdir(parents=True)
    (tmp_path / "ws" / "notes.txt").write_text("notes")
    backup = tmp_path / "backups" / "1"
    save(Stores(workspace=tmp_path / "ws", servers=None), backup)
    new, copytree = Stores(workspace=tmp_path / "new", servers=None), shutil.copytree
    (tmp_path / "new").mkdir()

    def interrupted(source: Path, target: Path, **options: bool) -> None:
        monkeypatch.setattr(shutil, "copytree", copytree)
        (target / "runs").mkdir(parents=True)
        restore(backup, new)
        copytree(source, target, dirs_exist_ok=True, **options)

    monkeypatch.setattr(shutil, "copytree", interrupted)
    with pytest.raises(ServersFailure, match="was made by another call meanwhile"):
        restore(backup, new)
    assert sorted(path.name for path in (tmp_path / "new").rglob("*")) == ["a", "notes.txt", "runs"]
    assert not [*tmp_path.glob("*restoring*")]
