"""MLflow tags for the user and the version of the code."""

import getpass
import hashlib
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from flows.launchers.local_process import SOURCE_ROOT

PACKAGES = ("schemas", "algorithms", "models", "storage", "ledger", "tasks", "flows", "recipes")
GIT_SECONDS = 10.0


@cache
def origin() -> dict[str, str]:
    """Tag → value: the user, the version and digest of our packages, and their git revision if there is one."""
    tags = {"mlflow.user": user(), "vantage.version": _version(), "vantage.code_sha256": code_sha256()}
    revision = _git("rev-parse", "HEAD")
    # Installed packages may be inside the working tree of another project, whose revision does not apply to them.
    if revision and _git("ls-files", "--", "flows/runs/origin.py"):
        changed = _git("status", "--porcelain", "--", *PACKAGES)
        tags |= {"mlflow.source.git.commit": revision, "vantage.git.dirty": "true" if changed else "false"}
    return tags


def code_sha256() -> str:
    """sha256 over the paths and sha256 of every Python and recipe file of our packages."""
    files = sorted(
        path
        for package in PACKAGES
        for path in (SOURCE_ROOT / package).rglob("*")
        if path.suffix in (".py", ".yaml") and path.is_file()
    )
    lines = (
        f"{path.relative_to(SOURCE_ROOT).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in files
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _git(*arguments: str) -> str:
    """Output of git in the folder of our packages; empty without git or a repository."""
    command = ["git", "-C", str(SOURCE_ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def user() -> str:
    """The login name of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user without a name
        return "unknown"


def _version() -> str:
    try:
        return version("vantage-rlhf")
    except PackageNotFoundError:
        return "unknown"
