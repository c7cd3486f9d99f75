"""Start real servers for the tests of one module, with the variables that ``make servers`` prints, and make workspaces that use them."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from deploy.servers.postgres import data_folder
from deploy.servers.processes import processes_of
from deploy.servers.settings import PORTS, Settings, write_private
from tests.support.fixtures import RECIPE
from tests.support.fork_server import WITH_PREFECT
from tests.support.ports import own_port
from tests.support.processes import with_word

ROOT = Path(__file__).parents[2]

EXPORT = re.compile(r"^export ([A-Z_]+)=([A-Za-z0-9:/._-]+)$")


@dataclass(frozen=True)
class Servers:
    """The folder of three servers. Every call starts a process of its own, as ``make`` does."""

    folder: Path

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Begin ``up``."""
        command = [sys.executable, "-m", "deploy.servers", "up", "--data", str(self.folder), *options]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def up(self, *options: str) -> tuple[dict[str, str], str]:
        """Return variables and messages of a call that has to succeed."""
        process = self.start(*options)
        output, messages = process.communicate(timeout=240)
        assert process.returncode == 0, messages
        found = [EXPORT.match(line) for line in output.splitlines()]
        assert all(found), output
        return {each[1]: each[2] for each in found if each}, messages

    def down(self, *options: str) -> str:
        """Return the messages of a call that has to succeed."""
        command = [sys.executable, "-m", "deploy.servers", "down", "--data", str(self.folder), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def processes(self) -> dict[str, set[int]]:
        """Return server → ids of its living processes, as the system lists them."""
        from deploy.servers.lifecycle import read_settings

        data = str(read_settings(self.folder).postgres_folder / "data")
        named = {
            name: {each.pid for each in processes_of(self.folder, name)} for name in ("prefect", "mlflow")
        }
        main = {each.pid for each in with_word(psutil.process_iter(), data)}
        return {**named, "postgres": main}


CLIENTS = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_URI", "PREFECT_HOME")


class Place:
    """A workspace, the servers that its runs use, and where it is saved."""

    def __init__(self, folder: Path, variables: Mapping[str, str], servers: Path | None) -> None:
        self.workspace = folder / "workspace"
        self.backup = folder / "backups" / "first"
        self.recipe = folder / "fake.yaml"
        self.recipe.parent.mkdir(parents=True, exist_ok=True)
        self.recipe.write_text(RECIPE)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in CLIENTS},
            **variables,
            "PYTHONPATH": str(ROOT),
        }
        self.stores = ["--workspace", str(self.workspace), *(["--servers", str(servers)] if servers else [])]

    def begin(self, *command: str) -> subprocess.Popen[str]:
        return WITH_PREFECT.popen(
            [
                *(sys.executable, "-m", "tests.support.fake_vantage"),
                *command,
                *("--workspace", str(self.workspace)),
            ],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def vantage(self, *command: str) -> str:
        process = self.begin(*command)
        printed, _ = process.communicate(timeout=400)
        assert process.returncode == 0, printed
        return printed

    def backs_up(self, action: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deploy.backup", action, *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)

    def record(self) -> dict[str, object]:
        [file] = self.workspace.glob("runs/*/run.json")
        read: dict[str, object] = json.loads(file.read_bytes())
        return read

    def digests(self) -> dict[str, str]:
        return {name: stage["digest"] for name, stage in self.record()["stages"].items()}  # type: ignore[attr-defined]

    def events(self) -> list[str]:
        file = self.workspace / "events.txt"
        return file.read_text().splitlines() if file.exists() else []

    def has_checkpoint(self, step: str) -> bool:
        keys = [stage["stage_key"] for name, stage in self.record()["stages"].items() if name == step]  # type: ignore[attr-defined]
        return any(
            (self.workspace / "store" / "scratch" / str(key) / "committed.json").exists() for key in keys
        )


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Yield servers that are not yet started; they are stopped and deleted in the end."""
    made = Servers(tmp_path_factory.mktemp("servers"))
    settings = Settings(postgres_folder=data_folder(made.folder), ports={name: own_port() for name in PORTS})
    write_private(made.folder / "settings.json", settings.model_dump_json())
    yield made
    made.down("--delete")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return a run that was never interrupted, without servers."""
    made = Place(tmp_path_factory.mktemp("whole"), {}, None)
    made.vantage("run", str(made.recipe))
    return made


@pytest.fixture(scope="module")
def expected(whole: Place) -> dict[str, str]:
    """Return stage → digest of that run."""
    return whole.digests()


def rows_of(place: Place) -> list[tuple[str, str, int, float]]:
    """Return stage, metric, step and value of every row of MLflow that does not measure time or the machine."""
    with closing(sqlite3.connect(place.workspace / "mlflow.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = database.execute(
            "SELECT name, key, step, value FROM metrics JOIN runs USING (run_uuid) "
            "WHERE key NOT LIKE 'system/%' AND key NOT LIKE '%seconds%' ORDER BY 1, 2, 3, 4"
        ).fetchall()
    return [(re.sub("-[0-9a-f]{6}$", "", name), key, step, value) for name, key, step, value in found]
