"""From which state of the code a run is made, in a repository, without one, and inside another project's."""

import getpass
import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.runs import origin as of


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


FILES = sorted(
    "flows/runs/origin.py" if package == "flows" else f"{package}/origin.py" for package in of.PACKAGES
)
"""One file a package, by their paths in order."""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with packages of ours."""
    for file in FILES:
        (tmp_path / "ours" / file).parent.mkdir(parents=True)
        (tmp_path / "ours" / file).write_text("x = 1\n")
    monkeypatch.setattr(of, "SOURCE_ROOT", tmp_path / "ours")
    of.origin.cache_clear()
    yield tmp_path / "ours"
    of.origin.cache_clear()


def test_without_git_the_version_and_a_digest_of_the_code_are_told(installed: Path) -> None:
    tags = of.origin()
    assert tags["mlflow.user"] == getpass.getuser()
    assert tags["vantage.version"] == "0.1.0"
    one = hashlib.sha256(b"x = 1\n").hexdigest()
    lines = [f"{file} {one}" for file in FILES]
    assert tags["vantage.code_sha256"] == hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert "mlflow.source.git.commit" not in tags


def test_in_a_repository_the_revision_is_told_and_whether_it_was_changed(installed: Path) -> None:
    git(installed, "init", "-q")
    git(installed, "add", ".")
    git(installed, "commit", "-qm", "first")
    revision = git(installed, "rev-parse", "HEAD")
    clean = of.origin()
    assert (clean["mlflow.source.git.commit"], clean["vantage.git.dirty"]) == (revision, "false")
    (installed / "tasks" / "origin.py").write_text("x = 2\n")
    of.origin.cache_clear()
    changed = of.origin()
    assert (changed["mlflow.source.git.commit"], changed["vantage.git.dirty"]) == (revision, "true")
    assert changed["vantage.code_sha256"] != clean["vantage.code_sha256"]


def test_another_projects_revision_is_not_ours(installed: Path) -> None:
    git(installed.parent, "init", "-q")
    (installed.parent / "theirs.py").write_text("")
    git(installed.parent, "add", "theirs.py")
    git(installed.parent, "commit", "-qm", "theirs")
    assert "mlflow.source.git.commit" not in of.origin()
