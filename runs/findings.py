"""Checks of ``vantage doctor``: requirements of a machine to run recipes."""

import os
import platform
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import obstore
from obstore.exceptions import BaseError

from vantage.attempts.identity.child_python import python_environment
from vantage.attempts.identity.package import package_folder
from vantage.attempts.machine import available_cpus, available_gpus
from vantage.ledger.destination_settings import OPENLINEAGE, TENSORBOARD, check_destinations, openlineage_url
from vantage.ledger.tracking import check_address, without_password
from vantage.runs.run import damaged_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.safe_text import safe_text, without_secrets
from vantage.storage.durable_files import make_folder
from vantage.storage.records import BucketNotFound, Conflict, replace_record
from vantage.tasks.rewards import sandbox

LIBRARIES = ("torch", "transformers", "prefect", "mlflow", "pandera", "pyarrow", "safetensors")
FREE_BYTES = 5 * 2**30
"""Free bytes below which there is a warning: about the size of a small model's checkpoints and artifacts."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    subject: str
    verdict: Literal["fine", "warning", "broken"]
    message: str
    """The finding and, if it is not fine, the remedy."""


def run_checks(workspace: Workspace) -> Iterator[Finding]:
    """Run all checks, in order."""
    yield from _versions()
    yield Finding("packages", "fine", str(package_folder()))
    yield from _storage(workspace)
    yield from _runs(workspace)
    yield _sqlite(workspace)
    yield from _servers()
    yield _processes()
    yield _isolation()
    yield _accelerators()


def machine_faults() -> Iterator[str]:
    """Yield findings that keep this machine from computing stages, whatever the workspace."""
    checks = [*_versions(), _processes(), _accelerators()]
    yield from (f"{each.subject}: {each.message}" for each in checks if each.verdict == "broken")


def _versions() -> Iterator[Finding]:
    yield Finding("python", "fine", platform.python_version())
    for name in LIBRARIES:
        try:
            yield Finding(name, "fine", version(name))
        except PackageNotFoundError:
            yield Finding(name, "broken", "is not installed; run `pip install -c constraints.txt -e .`")


def _storage(workspace: Workspace) -> Iterator[Finding]:
    root = workspace.root
    try:
        make_folder(root)
        with tempfile.NamedTemporaryFile(dir=root) as probe:
            probe.write(b"probe")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        yield Finding(
            "workspace", "broken", f"{root} cannot be written ({error.strerror}); use --workspace DIR"
        )
        return
    if workspace.uri:
        yield _bucket(workspace)
    free = shutil.disk_usage(root).free
    described = f"{root}, {free / 2**30:.1f} GiB free"
    verdict: Literal["fine", "warning"] = "fine" if free >= FREE_BYTES else "warning"
    yield Finding(
        "workspace", verdict, described if verdict == "fine" else f"{described}; make room before a long run"
    )


def _bucket(workspace: Workspace) -> Finding:
    """Return whether the bucket supports conditional writes, on which locks and commits depend."""
    path = f"probes/{secrets.token_hex(8)}"
    try:
        remote = workspace.storage.remote
        version = replace_record(remote, path, b"1", None)
        replace_record(remote, path, b"2", version)
        try:
            replace_record(remote, path, b"3", version)
        except Conflict:
            return Finding("bucket", "fine", workspace.address)
        finally:
            obstore.delete(remote, path)
    except (BaseError, BucketNotFound, Conflict, ValueError) as error:
        return Finding("bucket", "broken", f"{workspace.address}: {str(error).splitlines()[0]}")
    return Finding(
        "bucket", "broken", f"{workspace.address} takes stale writes; use a storage with conditional ones"
    )


def _runs(workspace: Workspace) -> Iterator[Finding]:
    for damaged in damaged_runs(workspace):
        yield Finding("run", "warning", damaged)


def _sqlite(workspace: Workspace) -> Finding:
    """Check that the workspace has the WAL locks that Prefect's and MLflow's databases need; some network file systems
    lack them."""
    try:
        with tempfile.TemporaryDirectory(dir=workspace.root) as folder:
            with sqlite3.connect(Path(folder) / "probe.db") as database:
                database.execute("PRAGMA journal_mode=WAL")
                database.execute("CREATE TABLE probe (value INTEGER)")
            database.close()
    except (OSError, sqlite3.Error) as error:
        return Finding(
            "sqlite", "broken", f"no database can be made in {workspace.root} ({error}); use a local disk"
        )
    return Finding("sqlite", "fine", sqlite3.sqlite_version)


def _servers() -> Iterator[Finding]:
    yield _prefect(os.environ.get("PREFECT_API_URL"))
    yield _mlflow(os.environ.get("MLFLOW_TRACKING_URI"))
    yield from _destinations()


def _prefect(address: str | None) -> Finding:
    if not address:
        return Finding("Prefect", "fine", "no PREFECT_API_URL: each run starts a server of its own")
    if not address.startswith(("http://", "https://")):
        shown = f"PREFECT_API_URL={safe_text(address)!r}"
        return Finding(
            "Prefect",
            "broken",
            f"{shown} is not an http:// address; name HOST:PORT/api with http://, or unset it",
        )
    return _answers("Prefect", "PREFECT_API_URL", address)


def _mlflow(address: str | None) -> Finding:
    if not address:
        return Finding(
            "MLflow", "fine", "no MLFLOW_TRACKING_URI: the records go to mlflow.db in the workspace"
        )
    try:
        check_address(address)
    except ValueError as error:
        return Finding("MLflow", "broken", str(error))
    if address.startswith("http"):
        return _answers("MLflow", "MLFLOW_TRACKING_URI", address)
    return Finding("MLflow", "fine", f"MLFLOW_TRACKING_URI={without_password(address)}")


def _destinations() -> Iterator[Finding]:
    """Yield a line about the places beside MLflow that get a run's records; nothing if none is set."""
    try:
        check_destinations()
    except ValueError as error:
        yield Finding("destinations", "broken", str(error))
        return
    named = {TENSORBOARD: os.environ.get(TENSORBOARD), OPENLINEAGE: openlineage_url()}
    shown = [f"{name}={without_password(value)}" for name, value in named.items() if value]
    if shown:
        yield Finding("destinations", "fine", ", ".join(shown))


def _answers(name: str, variable: str, address: str) -> Finding:
    try:
        with urllib.request.urlopen(address.rstrip("/") + "/health", timeout=5) as answer:
            return Finding(name, "fine", f"{variable} answers ({answer.status})")
    except (OSError, ValueError, HTTPException) as error:
        said = without_secrets(str(error))
        return Finding(name, "broken", f"{variable} does not answer ({said}); start that server, or unset it")


def _processes() -> Finding:
    """Check that a server process, from which stages are forked, finds our packages on its path."""
    code = "import multiprocessing as m; m.get_context('forkserver'); import vantage.attempts.launchers.stage_process; print('ok')"
    environment = {**os.environ, **python_environment()}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("processes", "broken", f"no child process can be started ({error})")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("processes", "broken", f"a child process cannot load our packages: {last}")
    return Finding("processes", "fine", "the fork server and its children can be started")


def _isolation() -> Finding:
    """Return whether programs in responses run isolated, which only recipes with ``builtin:code`` need."""
    reason = sandbox.why_not_isolated()
    if reason is None:
        return Finding("isolation", "fine", f"programs in responses run in {sandbox.NAMESPACES}")
    return Finding("isolation", "warning", f"builtin:code is refused here ({reason}); see docs/verifiers.md")


def _accelerators() -> Finding:
    gpus = available_gpus()
    described = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''} ({', '.join(gpus)})" if gpus else "no GPU"
    return Finding("machine", "fine", f"{available_cpus()} CPUs, {described}")
