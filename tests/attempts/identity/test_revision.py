"""The commit of the code, and what was changed in it, are those that git reports."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from vantage.attempts.identity import package
from vantage.attempts.identity import revision as subject
from vantage.attempts.identity.revision import Revision, by_files, by_git, checkout_of_package, revision


def git(folder: Path, *arguments: str) -> str:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{
            f"GIT_{who}_{what}": "somebody@host"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        },
    }
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with packages behind links, and one commit; it counts as ours."""
    root = tmp_path / "checkout"
    for name in ("vantage/__init__.py", "flows/__init__.py", "flows/a.py", "docs/a.md", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n")
    (root / "vantage/flows").symlink_to("../flows")
    for module in (subject, package):
        monkeypatch.setattr(module, "package_folder", lambda: root / "vantage")
    git(tmp_path, "init", "-q", "-b", "main", str(root))
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


def head(folder: Path) -> str:
    return git(folder, "rev-parse", "HEAD")


def test_a_clean_checkout(checkout: Path) -> None:
    """A checkout without changes has its commit, by git and by git's files."""
    assert by_git(checkout) == Revision(head(checkout), "no")


@pytest.mark.parametrize(
    "name, dirty",
    [("flows/a.py", "yes"), ("flows/new.py", "yes"), ("vantage/__init__.py", "yes"), ("docs/a.md", "no")],
)
def test_changes_and_new_files_of_our_packages_are_told(checkout: Path, name: str, dirty: str) -> None:
    (checkout / name).write_text("changed\n")
    found = by_git(checkout)
    assert found is not None
    assert found.dirty == dirty


def test_what_is_staged_is_a_change(checkout: Path) -> None:
    (checkout / "flows/a.py").write_text("changed\n")
    git(checkout, "add", "-A")
    assert by_git(checkout) == Revision(head(checkout), "yes")


@pytest.mark.parametrize("state", ["a branch", "packed", "detached", "a branch with a slash"])
def test_without_git_its_files_are_read(checkout: Path, state: str) -> None:
    if state == "packed":
        git(checkout, "pack-refs", "--all")
    if state == "detached":
        git(checkout, "checkout", "-q", "--detach")
    if state == "a branch with a slash":
        git(checkout, "checkout", "-q", "-b", "some/branch")
    assert by_files(checkout / ".git") == head(checkout)


def test_a_worktree(checkout: Path, tmp_path: Path) -> None:
    """A worktree has the commit of its own branch."""
    git(checkout, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    tree = tmp_path / "tree"
    (tree / "flows/a.py").write_text("changed\n")
    git(tree, "commit", "-qam", "second")
    assert head(tree) != head(checkout)
    assert by_files(tree / ".git") == head(tree)
    assert by_git(tree) == Revision(head(tree), "no")


def test_a_broken_repository_is_unknown(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/../../../etc/passwd\n")
    assert by_files(tmp_path / ".git") is None
    assert by_git(tmp_path) is None
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git/refs/heads/main").write_text("only a beginning\n")
    assert by_files(tmp_path / ".git") is None
    (tmp_path / ".git/HEAD").write_bytes(b"\xff")
    assert by_files(tmp_path / ".git") is None


def test_no_program_of_the_repository_is_run_and_nothing_is_written(checkout: Path, tmp_path: Path) -> None:
    monitor = tmp_path / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    monitor.chmod(0o755)
    git(checkout, "config", "core.fsmonitor", str(monitor))
    os.utime(checkout / "flows/a.py", (1, 1))  # so that git would refresh its index
    before = (checkout / ".git/index").read_bytes()
    assert by_git(checkout) is not None
    assert not (tmp_path / "was-run").exists()
    assert (checkout / ".git/index").read_bytes() == before


def test_variables_of_a_hook_name_no_other_repository(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert by_git(checkout) == Revision(head(checkout), "no")


def test_on_a_machine_without_git_the_commit_is_known_and_changes_are_not(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = head(checkout)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(subject, "package_folder", lambda: checkout / "vantage")
    revision.cache_clear()
    assert revision() == Revision(commit, "unknown")
    revision.cache_clear()


def test_what_pip_installed_from_a_repository_has_its_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subject, "package_folder", lambda: tmp_path / "vantage")
    site = tmp_path / "vantage_rlhf-0.1.0.dist-info"
    site.mkdir()
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: vantage-rlhf\nVersion: 0.1.0\n")
    noted = {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "b" * 40}}
    (site / "direct_url.json").write_text(json.dumps(noted))
    monkeypatch.syspath_prepend(str(tmp_path))
    revision.cache_clear()
    assert checkout_of_package() is None
    assert revision() == Revision("b" * 40, "unknown")
    revision.cache_clear()
