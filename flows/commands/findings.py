"""What has to be right on a machine before a recipe can run, looked at one thing after another."""

import importlib.util
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from flows.launchers.local_process import OURS
from flows.machine import available_cpus, available_gpus
from flows.runs.run import RunError, Workspace, read_run
from storage.store import Store

PACKAGES = ("schemas", "algorithms", "models", "storage", "ledger", "tasks", "flows", "recipes")
LIBRARIES = ("torch", "transformers", "prefect", "mlflow", "pandera", "pyarrow", "safetensors")
FREE_BYTES = 5 * 2**30
"""Below this much free space a warning is due: checkpoints and artifacts of a small model take so much."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    verdict: Literal["fine", "warning", "broken"]
    message: str
    """What was found, and what to do where it is not fine."""


def examine(workspace: Workspace) -> Iterator[Finding]:
    """Every finding, in the order of looking."""
    yield from _versions()
    yield from _name_clashes()
    yield from _storage(workspace)
    yield from _runs(workspace)
    yield _sqlite(workspace)
    yield from _servers()
    yield _processes()
    yield _accelerators()


def _versions() -> Iterator[Finding]:
    yield Finding("python", "fine", platform.python_version())
    for name in LIBRARIES:
        try:
            yield Finding(name, "fine", version(name))
        except PackageNotFoundError:
            yield Finding(name, "broken", "is not installed; run `pip install -c constraints.txt -e .`")


def _name_clashes() -> Iterator[Finding]:
    """Our packages have common names: somebody else's folder of the same name may be found first."""
    clashes = [
        f"{name} is {found}"
        for name in PACKAGES
        if (found := _location(name)) is not None and found.parent.resolve() != OURS.resolve()
    ]
    if clashes:
        remedy = "start vantage from another folder, or take that one off PYTHONPATH"
        yield Finding("packages", "broken", f"not ours: {'; '.join(clashes)}; {remedy}")
    else:
        yield Finding("packages", "fine", str(OURS))
    shadows = [
        name for name in PACKAGES if (Path.cwd() / name).is_dir() and Path.cwd().resolve() != OURS.resolve()
    ]
    if shadows:
        told = f"the current folder has {', '.join(f'{name}/' for name in shadows)}, like packages of ours"
        yield Finding("packages", "warning", f"{told}; start with `vantage`, not with `python -m`")


def _location(package: str) -> Path | None:
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or ()) if found else []
    return Path(places[0]) if places else None


def _storage(workspace: Workspace) -> Iterator[Finding]:
    root = workspace.root
    try:
        Store(workspace.store)
        with tempfile.NamedTemporaryFile(dir=workspace.store) as probe:
            probe.write(b"probe")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        yield Finding(
            "workspace", "broken", f"{root} cannot be written ({error.strerror}); use --workspace DIR"
        )
        return
    free = shutil.disk_usage(root).free
    told = f"{root}, {free / 2**30:.1f} GiB free"
    verdict: Literal["fine", "warning"] = "fine" if free >= FREE_BYTES else "warning"
    yield Finding("workspace", verdict, told if verdict == "fine" else f"{told}; make room before a long run")


def _runs(workspace: Workspace) -> Iterator[Finding]:
    for folder in sorted(workspace.runs.glob("[0-9]*")) if workspace.runs.is_dir() else ():
        try:
            read_run(workspace, folder.name)
        except RunError as error:
            yield Finding("run", "warning", str(error))


def _sqlite(workspace: Workspace) -> Finding:
    """Prefect's and MLflow's own databases need WAL locks, which some network file systems lack."""
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
    for name, variable, path in (
        ("Prefect", "PREFECT_API_URL", "/health"),
        ("MLflow", "MLFLOW_TRACKING_URI", "/health"),
    ):
        address = os.environ.get(variable)
        if not address or not address.startswith("http"):
            yield Finding(name, "fine", f"no {variable}: a server of our own (Prefect), or SQLite (MLflow)")
            continue
        try:
            with urllib.request.urlopen(address.rstrip("/") + path, timeout=5) as answer:
                yield Finding(name, "fine", f"{variable} answers ({answer.status})")
        except OSError as error:
            yield Finding(
                name, "broken", f"{variable} does not answer ({error}); start that server, or unset it"
            )


def _processes() -> Finding:
    """Children are forked from a server process that must start with our packages on its path."""
    code = "import multiprocessing as m; m.get_context('forkserver'); import flows.launchers.stage_process; print('ok')"
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(OURS)}
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


def _accelerators() -> Finding:
    gpus = available_gpus()
    told = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''} ({', '.join(gpus)})" if gpus else "no GPU"
    return Finding("machine", "fine", f"{available_cpus()} CPUs, {told}")
