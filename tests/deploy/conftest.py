"""Real servers for the tests of one module, and the variables that ``make servers`` prints."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from deploy.servers.postgres import data_folder
from deploy.servers.processes import processes_of
from deploy.servers.settings import PORTS, Settings, write_private

ROOT = Path(__file__).parents[2]

EXPORT = re.compile(r"^export ([A-Z_]+)=([A-Za-z0-9:/._-]+)$")


@dataclass(frozen=True)
class Servers:
    """The folder of three servers; every call is a process of its own, as from ``make``."""

    folder: Path

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Begin ``up``."""
        command = [sys.executable, "-m", "deploy.servers", "up", "--data", str(self.folder), *options]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def up(self, *options: str) -> tuple[dict[str, str], str]:
        """Variables and messages of a call that has to succeed."""
        process = self.start(*options)
        output, messages = process.communicate(timeout=240)
        assert process.returncode == 0, messages
        found = [EXPORT.match(line) for line in output.splitlines()]
        assert all(found), output
        return {each[1]: each[2] for each in found if each}, messages

    def down(self, *options: str) -> str:
        """Messages of a call that has to succeed."""
        command = [sys.executable, "-m", "deploy.servers", "down", "--data", str(self.folder), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def processes(self) -> dict[str, set[int]]:
        """Server → ids of its living processes, as the system lists them."""
        from deploy.servers.lifecycle import read_settings

        data = str(read_settings(self.folder).postgres_folder / "data")
        named = {
            name: {each.pid for each in processes_of(self.folder, name)} for name in ("prefect", "mlflow")
        }
        main = {
            each.pid
            for each in psutil.process_iter(["status", "cmdline"])
            if each.info["status"] != psutil.STATUS_ZOMBIE and data in (each.info["cmdline"] or [])
        }
        return {**named, "postgres": main}


def own_ports() -> dict[str, int]:
    """Ports of this test process, which the system gives to nobody by itself: other processes test servers at the same time."""
    first = 21000 + 10 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return {name: first + place for place, name in enumerate(PORTS)}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Not yet started; stopped and deleted in the end."""
    made = Servers(tmp_path_factory.mktemp("servers"))
    settings = Settings(postgres_folder=data_folder(made.folder), ports=own_ports())
    write_private(made.folder / "settings.json", settings.model_dump_json())
    yield made
    made.down("--delete")
