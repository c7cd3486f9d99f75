"""Secrets of the environment (canaries) are found nowhere in what a run prints and keeps."""

import os
import re
import sys
from base64 import b64encode
from pathlib import Path
from uuid import UUID

import pytest

from tests.ledger.test_sender import mlflow_server
from tests.support.fork_server import WITH_PREFECT
from tests.support.ports import own_port
from vantage.attempts.exit_codes import ExitCode
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.safe_text import MASK
from vantage.storage.bucket import open_bucket

ROOT = Path(__file__).parents[2]
CANARY = "canary"


@pytest.mark.slow
def test_a_run_writes_no_secret_down_and_steers_no_terminal(
    workspace: Workspace, recipe_file: Path, prefect_url: str
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterId,
        LogFilter,
        LogFilterFlowRunId,
    )

    workspace.root.mkdir()
    (workspace.root / "leak.txt").write_text("sft")
    done = WITH_PREFECT.run(
        [
            sys.executable,
            "-m",
            "tests.support.fake_vantage",
            "run",
            str(recipe_file),
            "--workspace",
            str(workspace.root),
            "-v",
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PREFECT_API_URL": prefect_url.replace("://", "://ann:canary-of-prefect@"),
            "MLFLOW_TRACKING_URI": "http://ann:canary-of-mlflow@127.0.0.1:1",
            "MLFLOW_TRACKING_PASSWORD": "canary-for-mlflow",
            "HF_TOKEN": "canary-of-the-hub",
            "CANARY_TOKEN": "canary-of-the-stage",
        },
        timeout=500,
    )
    assert done.returncode == ExitCode.INTERNAL, done.stdout + done.stderr
    printed = done.stdout + done.stderr
    [record] = read_runs(workspace)
    reason = record.stages["sft"].reason
    assert reason is not None and "cannot reach http://***@host/x?token=***" in reason
    assert reason in done.stdout
    assert not {"\x1b", "\u202e"} & set(printed)
    log = (workspace.folder(record.run_id) / "logs" / "sft.log").read_text()
    assert f"'HF_TOKEN': '{MASK}'" in log and "MLFLOW_TRACKING_PASSWORD" not in log

    kept = {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()}
    assert len(kept) > 10
    assert [path for path, content in kept.items() if CANARY.encode() in content] == []
    assert CANARY not in printed.lower()
    with get_client(sync_client=True) as client:
        [flow_run_id] = map(UUID, record.prefect_flow_run_ids)
        its_own = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        shown = [
            client.read_flow_run(flow_run_id),
            *client.read_task_runs(flow_run_filter=its_own),
            *client.read_artifacts(flow_run_filter=its_own),
            *client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id]))),
        ]
    assert CANARY not in " ".join(each.model_dump_json() for each in shown)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["PREFECT_API_URL", "MLFLOW_TRACKING_URI"])
def test_an_address_that_is_wrong_is_told_without_its_login(
    workspace: Workspace, recipe_file: Path, variable: str
) -> None:
    done = WITH_PREFECT.run(
        [sys.executable, "-c", "from vantage.flows.prefect_server import server; server.ANSWER_SECONDS = 0.5; from vantage.cli.main import main; main()",
         "run", str(recipe_file), "--workspace", str(workspace.root)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": "http://127.0.0.1:1/api",
             variable: "http://ann:canary-of-it@127.0.0.1:1/api"},
        timeout=300,
    )  # fmt: skip
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "127.0.0.1:1/api does not answer" in done.stderr
    assert CANARY not in done.stdout + done.stderr


SECRETS = {
    "AWS_ACCESS_KEY_ID": "CANARY-of-the-bucket",
    "AWS_SECRET_ACCESS_KEY": "canary/of+the-buckets-secret",
    "AWS_SESSION_TOKEN": "canary-of-the-session",
    "HF_TOKEN": "hf_canary0of0the0hub0000",
    "WANDB_API_KEY": "canary-of-wandb",
    "OPENAI_API_KEY": "sk-canary-of-openai",
    "DATABASE_URL": "postgresql://ann:canary-of-the-database@127.0.0.1/x",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=canary-of-azure==;EndpointSuffix=b",
    "SLACK_WEBHOOK_URL": "https://hooks.example/services/canary-of-slack",
    "CANARY_TOKEN": "canary-of-the-stage",
    "MLFLOW_TRACKING_USERNAME": "ann",
    "MLFLOW_TRACKING_PASSWORD": "canary-of-mlflow",
    "MLFLOW_FLASK_SERVER_SECRET_KEY": "canary-of-flask",
}


@pytest.mark.slow
@pytest.mark.timeout(900)  # two runs and a server of MLflow
def test_with_a_bucket_and_servers_a_failure_and_its_resume_leave_no_secret_anywhere(
    bucket: str,
    tmp_path: Path,
    recipe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No byte of bucket, cache, logs, Prefect's database, MLflow's database and artifacts, or output has a secret."""
    import obstore

    cache, server = tmp_path / "cache", tmp_path / "mlflow"
    monkeypatch.setenv("VANTAGE_CACHE", str(cache))
    root = Workspace.at(bucket).root
    server.mkdir()
    cache.mkdir()
    (cache / "leak.txt").write_text("sft")
    port = own_port()
    environment = {
        **os.environ,
        **SECRETS,
        "PYTHONPATH": str(ROOT),
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}",
    }
    environment.pop("PREFECT_API_URL", None)
    command = [
        sys.executable,
        "-m",
        "tests.support.fake_vantage",
        "run",
        str(recipe_file),
        "--workspace",
        bucket,
        "-v",
    ]
    printed = []
    with mlflow_server(server, port, seconds=300):
        for expected in (ExitCode.INTERNAL, ExitCode.OK):
            done = WITH_PREFECT.run(command, env=environment, timeout=400)
            assert done.returncode == expected, done.stdout + done.stderr
            printed.append(done.stdout + done.stderr)
            (cache / "leak.txt").unlink(missing_ok=True)
        log = next(root.glob("runs/*/logs/sft.log"))
        assert f"'OPENAI_API_KEY': '{MASK}'" in log.read_text(), "it was printed there, masked"
        assert "MLFLOW_TRACKING_PASSWORD" not in log.read_text(), "a stage is not told it at all"
    remote = open_bucket(bucket)
    kept = {
        str(path): path.read_bytes()
        for folder in (cache, server)
        for path in folder.rglob("*")
        if path.is_file()
    }
    kept |= {
        f"{bucket}/{each['path']}": bytes(obstore.get(remote, each["path"]).bytes())
        for batch in obstore.list(remote)
        for each in batch
    }
    kept |= {f"printed {number}": text.encode() for number, text in enumerate(printed)}
    assert any(name.endswith("mlflow.db") for name in kept) and any(
        name.endswith("prefect.db") for name in kept
    )
    assert len([name for name in kept if name.startswith(bucket)]) > 20
    basic = b64encode(b"ann:canary-of-mlflow").rstrip(b"=")
    secret = re.compile(rb"canary[-/0]of|canary-in-a-query|" + re.escape(basic), re.IGNORECASE)
    assert all(secret.search(value.encode()) for name, value in SECRETS.items() if name[-8:] != "USERNAME")
    found = [name for name, content in kept.items() if secret.search(content)]
    assert found == []
