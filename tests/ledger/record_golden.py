"""Record the golden files: what MLflow contains after the outboxes of some small runs were sent to an empty database.

Run ``python -m tests.ledger.record_golden`` from the root of the repository, and read the difference before it is committed:
the files are what the audit is tested against, so that they are never written by a test.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from tests.ledger.recorded_contents import FOLDER, contents_of
from tests.ledger.small_run import (
    JOURNAL,
    MODEL,
    ORIGIN,
    RECIPE,
    STAGES,
    VERDICT,
    artifact,
    tell_reuse,
    tell_run,
    tell_stage,
)
from vantage.ledger.journal import Entry
from vantage.ledger.operations import Input
from vantage.ledger.outbox import Outbox, operation_in
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.to_mlflow.delivery import Delivery
from vantage.ledger.to_mlflow.server import Server
from vantage.schemas.records.approvals import Approval, Question
from vantage.schemas.records.artifacts import PolicyCheckpoint
from vantage.storage.sealed_folders import seal

FIRST, SECOND = "0001-tiny-aaaaaa", "0002-tiny-bbbbbb"
START = 1_700_000_100_000
"""Milliseconds since 1970 at which the first operation happened; each later one is a second later."""
PLACE = "/workspace"
"""Stands in the outboxes for the folder in which a file was recorded."""

Tell = Callable[[Path], Iterator[Ledger]]


def record_trained(workspace: Path) -> None:
    """Record a run whose stages are all computed, with gates, energy, samples, a report and a bill of materials."""
    report, bill = workspace / "report.html", workspace / "bill.json"
    report.write_text("a report")
    bill.write_text("{}")
    with unsent_ledger(workspace) as ledger:
        tell_run(ledger, FIRST)
        ledger.log_report(report)
        ledger.log_bill("sft", bill)


def record_taken_over(workspace: Path) -> None:
    """Record a run whose process dies, and that another version of the code resumes; a person answers about its gate."""
    closed = VERDICT.model_copy(update={"passed": False, "threshold": 0.1, "on_fail": "approve"})
    kind, inputs, made = STAGES["sft"]
    attempt: dict[str, Any] = {"kind": kind, "stage_key": made.stage_key, "params": {"epochs": 2.0}}
    with unsent_ledger(workspace) as ledger:
        ledger.open_run(FIRST, "tiny", RECIPE, origin=ORIGIN)
        tell_stage(ledger, "model")
        tell_stage(ledger, "data.demos")
        ledger.open_stage("sft", attempt=1, inputs=inputs, **attempt)
        ledger.send_metrics("sft", JOURNAL[:3])
        # the process of the run dies here
        ledger.open_run(FIRST, "tiny", RECIPE, origin={**ORIGIN, "mlflow.source.git.commit": "decade"})
        tell_reuse(ledger, "model")
        tell_reuse(ledger, "data.demos")
        ledger.open_stage("sft", attempt=2, inputs=inputs, **attempt)
        undefined = Entry(step=5, time=1700000006.0, metrics={"loss": float("nan"), "kl": float("inf")})
        ledger.send_metrics("sft", [*JOURNAL, undefined])
        ledger.finish_stage("sft", "failed", reason="out of memory", provenance={"device": "cpu"})
        ledger.open_stage("sft", attempt=3, inputs=inputs, **attempt)
        ledger.record_verdicts("sft", [closed])
        ledger.finish_stage("sft", "waiting_approval", artifact=made, provenance={"device": "cuda"})
        question = Question(
            subject="sft", stage="sft", stage_key=made.stage_key, digest=made.digest, verdicts=(closed,)
        )
        ledger.record_approval(
            Approval(question=question, approved=True, by="ada", reason="seen", time=START, login="ada")
        )
        ledger.finish_run("completed")


def record_reused(workspace: Path) -> None:
    """Record a run that publishes a policy, and one that reuses all of it and publishes it once more."""
    policy, inputs = publishable(workspace / "policy"), {"init": Input(stage="model", artifact=MODEL)}
    stage: dict[str, Any] = {
        "kind": "policy_optimization",
        "stage_key": policy.stage_key,
        "params": {},
        "inputs": inputs,
    }
    folder = workspace / "policy"
    with unsent_ledger(workspace) as ledger:
        ledger.open_run(FIRST, "tiny", RECIPE, origin=ORIGIN)
        tell_stage(ledger, "model")
        ledger.open_stage("policy", attempt=1, **stage)
        ledger.record_verdicts("policy", [VERDICT])
        ledger.finish_stage("policy", "completed", artifact=policy)
        ledger.publish("policy", policy, folder, "tiny", alias="champion")
        ledger.finish_run("completed")
    with unsent_ledger(workspace) as ledger:
        ledger.open_run(SECOND, "tiny", RECIPE, origin=ORIGIN)
        tell_reuse(ledger, "model")
        ledger.record_reuse("policy", artifact=policy, **stage)
        ledger.record_verdicts("policy", [VERDICT.model_copy(update={"passed": False, "threshold": 0.1})])
        ledger.publish("policy", policy, folder, "tiny", alias="best")
        ledger.finish_run("gate_closed")
        ledger.move_alias(
            "policy",
            policy.digest,
            "tiny",
            "champion",
            from_version="1",
            to_version="1",
            by="ada",
            login="ada",
            reason="it stays",
        )


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "trained": record_trained,
    "taken_over": record_taken_over,
    "reused": record_reused,
}
"""Golden file → what is recorded before MLflow is read."""


def publishable(folder: Path) -> PolicyCheckpoint:
    """Return the smallest folder that can be published."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    inputs = {"init": Input(stage="model", artifact=MODEL)}
    return artifact(PolicyCheckpoint, "policy", inputs, digest=seal(folder), metrics={"test_nll": 0.4})


def unsent_ledger(workspace: Path) -> Ledger:
    """Return a ledger that writes its outbox and sends nothing."""
    ledger = Ledger("http://127.0.0.1:9", workspace, "tiny")
    ledger._sender = MagicMock()
    return ledger


def outboxes_of(workspace: Path) -> dict[str, list[dict[str, Any]]]:
    """Return run → its operations, with ``PLACE`` for the workspace's own folder."""
    return {
        path.parents[1].name: [
            operation_in(line.replace(str(workspace).encode(), PLACE.encode()))
            for line in path.read_bytes().splitlines()
        ]
        for path in sorted(workspace.glob("runs/*/ledger/outbox.jsonl"))
    }


def record(name: str, workspace: Path) -> dict[str, Any]:
    """Return the golden file's content, made in an empty workspace or one with an empty database."""
    seconds = count()
    with patch("vantage.ledger.run_ledger.SteadyClock.now", lambda self: START + 1000 * next(seconds)):
        SCENARIOS[name](workspace)
    server = Server(f"sqlite:///{workspace / 'mlflow.db'}", artifacts=workspace / "mlartifacts")
    outboxes = outboxes_of(workspace)
    for run_id in outboxes:
        Delivery(server, Outbox(workspace / "runs" / run_id / "ledger")).send()
    assert not list(workspace.glob("runs/*/ledger/refused.jsonl"))
    return {"outboxes": outboxes, "mlflow": contents_of(server.client)}


def main() -> None:
    """Write every golden file."""
    for name in SCENARIOS:
        with tempfile.TemporaryDirectory() as folder:
            content = record(name, Path(folder))
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=True)
        (FOLDER / f"{name}.json").write_text(text + "\n")
        print(f"{name}: {len(content['mlflow']['runs'])} runs of MLflow")


if __name__ == "__main__":
    main()
