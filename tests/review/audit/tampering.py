"""Tamper with a workspace in many ways, and read what an audit of it found."""

import hashlib
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs.record import RunRecord
from vantage.runs.workspace import Workspace
from vantage.schemas.records.audit import AuditReport

Lines = list[dict[str, Any]]
"""The operations of an outbox."""


@dataclass(frozen=True)
class Case:
    """A workspace with one run, and the folder of the original."""

    workspace: Workspace
    record: RunRecord
    original: Path

    def audit(self, target: str | None = None) -> AuditReport:
        """Return the audit of a target, or else of the run."""
        with Evidence(self.workspace) as evidence:
            return audit(evidence, target or self.record.run_id)

    def digest(self, step: str) -> str:
        return str(self.record.stages[step].digest)

    def object(self, step: str) -> Path:
        return self.workspace.store / "objects" / self.digest(step)

    def ref(self, step: str) -> Path:
        return self.workspace.store / "refs" / f"{self.record.stages[step].stage_key}.json"

    @property
    def run_json(self) -> Path:
        return self.workspace.folder(self.record.run_id) / "run.json"

    @property
    def outbox(self) -> Path:
        return self.workspace.folder(self.record.run_id) / "ledger" / "outbox.jsonl"

    def sql(self, statement: str, *values: str | float) -> None:
        """Change MLflow's database; at least one row must change."""
        with closing(sqlite3.connect(self.workspace.root / "mlflow.db")) as database:
            changed = database.execute(statement, values).rowcount
            database.commit()
        assert changed > 0, statement

    def select(self, statement: str, *values: str) -> str:
        """Return the first column of the first row that MLflow's database has."""
        with closing(sqlite3.connect(self.workspace.root / "mlflow.db")) as database:
            return str(database.execute(statement, values).fetchone()[0])

    def mlflow_run(self, step: str) -> str:
        """Return MLflow's id of a step's run."""
        with closing(sqlite3.connect(self.workspace.root / "mlflow.db")) as database:
            found = database.execute(
                "SELECT a.run_uuid FROM tags a JOIN tags b ON a.run_uuid = b.run_uuid "
                "WHERE a.key = 'vantage.stage' AND a.value = ? AND b.key = 'vantage.run_id' AND b.value = ?",
                (step, self.record.run_id),
            ).fetchall()
        return str(found[0][0])

    def copy_of(self, name: str) -> Path:
        """Return MLflow's copy of a registered model, in this workspace."""
        location = self.record.copies[name].location
        return self.workspace.root / "mlartifacts" / location.partition("/mlartifacts/")[2]


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    content = json.loads(path.read_bytes())
    change(content)
    write(path, json.dumps(content).encode())


def edit_lines(path: Path, change: Callable[[Lines], Lines]) -> None:
    """Change the lines of a JSONL file in place."""
    lines = change([json.loads(line) for line in path.read_bytes().splitlines()])
    write(path, b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def write(path: Path, data: bytes) -> None:
    """Write over a file that may be read-only."""
    path.chmod(0o644)
    path.write_bytes(data)


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    write(path, bytes(data))


def sealed_again(folder: Path) -> str:
    """Rewrite the manifest of a folder to what its files are now; returns the new digest."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for record in manifest["files"]:
        data = (folder / record["path"]).read_bytes()
        record |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    data = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    write(folder / "manifest.json", data)
    return hashlib.sha256(data).hexdigest()


def found(report: AuditReport, outcome: str = "wrong") -> list[str]:
    """Return ``where: subject: detail`` of each check with this outcome."""
    return [
        f"{where}: {check.subject}: {check.detail}"
        for where, check in report.every_check()
        if check.outcome == outcome
    ]


def assert_found(case: Case, tamper: Callable[[Case], None], where: str, said: str) -> None:
    """Assert that an audit finds what somebody did, and reports it at this place with this text."""
    tamper(case)
    report = case.audit()
    wrong = found(report)
    assert report.exit_code == 1, (report.outcome, found(report, "unchecked"))
    assert any(where in each and said in each for each in wrong), wrong
