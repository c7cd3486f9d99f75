"""Names that an attacker chooses are safe where they become a path, a query, a cell or a lock."""

import csv
import io
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.every import every
from vantage.flows.pools import share
from vantage.flows.sweeps.report import _csv
from vantage.ledger.to_mlflow.published_models import NoSuchModel, find_version
from vantage.runs.workspace import RunError, Workspace
from vantage.storage.bucket import open_bucket
from vantage.storage.digests import checked_digest
from vantage.storage.durable_files import open_lock
from vantage.storage.removed import find_removed
from vantage.storage.sealed_folders import UnsafePath, check_path
from vantage.storage.store import Store

TRAVERSALS = [
    "../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a/.", "..", "", "a\\..\\b", "C:\\x", "%2e%2e/x", "a%2fb", "a\x00b",
    "a\nb", "\u202ex", "a:b", "~/x", "$HOME/x", "a/\x1b[2J", "..\u2215x", "\uff0e\uff0e/x",
]  # fmt: skip


@every("name", TRAVERSALS)
def test_no_path_of_a_manifest_leaves_its_folder(name: str) -> None:
    with pytest.raises(UnsafePath):
        check_path(name)


@every("name", [*TRAVERSALS, "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_nothing_but_a_sha256_names_an_object_or_what_is_left_of_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a sha256"):
        checked_digest(name)
    with pytest.raises(ValueError, match="is not a sha256"):
        find_removed(Store(tmp_path), name)


@every("name", [*TRAVERSALS, "0001-x-abcdef/..", "0001-x-abcdef\n", "0001-../x-abcdef"])
def test_no_run_id_leads_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError):
        Workspace(tmp_path).folder(name)


@every("place", ["a?mode=memory", "a%2e%2e", "a#b", "a\nb", "a\x00b"])
def test_no_workspace_is_at_an_address_that_a_database_reads_otherwise(tmp_path: Path, place: str) -> None:
    with pytest.raises((RunError, ValueError)):
        Workspace.at(tmp_path / place)


@every(
    "address",
    ["s3://ann:canary@bucket/x", "file:///etc", "http://host/x", "s3:///x", "s3://b/x?y", "memory://x"],
)
def test_a_bucket_is_one_and_has_no_login_in_its_address(address: str) -> None:
    with pytest.raises(ValueError, match="is no bucket's address"):
        open_bucket(address)


@pytest.mark.parametrize("name", ["x' OR name LIKE '%", 'x" --', "x`y", "x\\'"])
def test_a_registered_models_name_cannot_add_a_condition_to_a_search(tmp_path: Path, name: str) -> None:
    with pytest.raises(NoSuchModel, match="is no name of a registered model"):
        find_version(f"sqlite:///{tmp_path / 'never-made.db'}", name)
    assert not (tmp_path / "never-made.db").exists()


@every("text", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1"])
def test_no_cell_of_a_csv_file_is_a_formula(text: str) -> None:
    [[cell, number]] = list(csv.reader(io.StringIO(_csv([], [[text, -1.5]]).removeprefix("\n"), newline="")))
    assert cell == f"'{text}"
    assert number == "-1.5", "a negative number is one"


def test_no_text_begins_another_row_of_a_csv_file() -> None:
    text = _csv([], [["a\r=1\x0b", "b\n=2"]]).removeprefix("\n")
    [[cell, more]] = list(csv.reader(io.StringIO(text, newline="")))
    assert cell == "a\\u000d=1\\u000b"
    assert more == "b\n=2", "a line feed in quotes is no row"


def test_a_lock_is_no_link_to_somebody_elses_file(tmp_path: Path) -> None:
    target = tmp_path / "victim"
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        open_lock(tmp_path / "lock")
    assert not target.exists()


@pytest.mark.parametrize("what", ["link", "of another user"])
def test_the_folder_of_gpu_locks_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The folder has a name in /tmp that everybody knows."""
    monkeypatch.setattr(share, "LOCKS", tmp_path)
    folder = tmp_path / f"vantage-gpus-{os.getuid()}"
    if what == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        user = os.getuid()
        folder.mkdir()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        (tmp_path / f"vantage-gpus-{user + 1}").mkdir()
    asked: Any = SimpleNamespace(is_set=lambda: False, wait=lambda seconds: True)
    with ExitStack() as held, pytest.raises(ValueError, match="belongs to another user or is a link"):
        share._take(1, ("GPU-0",), asked, held)
