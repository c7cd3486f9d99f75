"""The git revision of our own packages, if they run from a checkout; no network is used."""

import json
import os
import re
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from vantage.attempts.identity.package import DISTRIBUTION, package_folder, packages

UNKNOWN = "unknown"
_SECONDS = 5.0
"""Seconds after which a call of git is abandoned."""
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Revision(NamedTuple):
    """Commit of the code."""

    commit: str
    """40 or 64 hexadecimal digits, or ``unknown``."""
    dirty: str
    """``yes``: files of our packages differ from the commit, or are not committed. ``no``, or ``unknown``."""


@cache
def revision() -> Revision:
    """Return the commit of the checkout that holds our packages, or of the repository that pip installed them from.

    A repository around an installed package (a virtual environment in another project) does not count.
    """
    checkout = checkout_of_package()
    if checkout is None:
        return Revision(_installed_commit() or UNKNOWN, UNKNOWN)
    return by_git(checkout) or Revision(by_files(checkout / ".git") or UNKNOWN, UNKNOWN)


def checkout_of_package() -> Path | None:
    """Return the folder of our checkout, if the packages are imported from one."""
    root = package_folder().parent
    return root if (root / ".git").exists() and (root / "pyproject.toml").is_file() else None


def by_git(checkout: Path) -> Revision | None:
    """Ask git; None: there is no git, or it refuses (for example a checkout of another user)."""
    git = shutil.which("git")
    if git is None:
        return None
    # git must not read the variables of a hook that may have started this process, write anything, or run a program that the repository names.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    # git reports nothing behind links: the folders to which ours lead are named
    folders = [folder.name for folder in (package_folder(), *packages())]
    command = [git, "-c", "core.fsmonitor=false", "-C", str(checkout), "status", "--porcelain=v2", "--branch"]
    try:
        answer = subprocess.run(
            [*command, "--untracked-files=all", "--ignore-submodules", "--", *folders],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    lines = answer.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if answer.returncode or not _COMMIT.fullmatch(commit):
        return None
    return Revision(commit, "yes" if any(not line.startswith("#") for line in lines) else "no")


def by_files(git: Path) -> str | None:
    """Return the commit of ``HEAD``, read from the repository's own files; None: it is not in the usual places."""
    try:
        if git.is_file():  # a worktree, whose files are elsewhere
            git = git.parent / git.read_text().strip().removeprefix("gitdir: ")
        common = git / "commondir"
        shared = git / common.read_text().strip() if common.is_file() else git
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else None
        name = head.removeprefix("ref: ")
        for folder in (git, shared):
            if (folder / name).is_file():
                commit = (folder / name).read_text().strip()
                return commit if _COMMIT.fullmatch(commit) else None
        packed = (shared / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except (OSError, UnicodeDecodeError):
        return None


def _installed_commit() -> str | None:
    """Return the commit that pip noted when it installed from a repository (PEP 610)."""
    try:
        noted = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return None
    commit = noted.get("vcs_info", {}).get("commit_id")
    return commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else None
