"""Set the order of the test files, and start an S3 server on loopback with buckets on it."""

import gc
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.folder_in_memory import use_folder_in_memory
from tests.support.mlflow_databases import forget_databases
from tests.support.needs import missing, reason
from tests.support.one_certificate import trust_one_certificate
from tests.support.progress import Progress
from tests.support.stand_in import ADDRESS

pytest_plugins = ("tests.support.fixtures",)

LONGEST = (
    "tests/attempts/launchers/test_ray_train.py",
    "tests/test_instruct.py",
    "tests/flows/pools/test_workers.py",
    "tests/deploy/test_live_servers.py",
    "tests/flows/sweeps/test_sweep.py",
    "tests/test_quickstart.py",
    "tests/flows/test_pipeline.py",
    "tests/tasks/test_compile.py",
    "tests/flows/pools/test_outages.py",
    "tests/deploy/test_postgresql_outage.py",
    "tests/deploy/test_backup.py",
    "tests/tasks/test_found_limits.py",
    "tests/review/audit/test_mlflow_columns.py",
    "tests/tasks/test_stages_on_ranks.py",
    "tests/flows/prefect_server/test_flow_runs.py",
    "tests/tasks/rollout/test_remote_stages.py",
    "tests/tasks/test_presets_run.py",
    "tests/tasks/test_model_families.py",
    "tests/tasks/test_servers_over_nodes.py",
    "tests/tasks/test_killed_engines.py",
    "tests/tasks/training/test_ranks.py",
    "tests/tasks/test_lora_stages.py",
    "tests/tasks/test_extended_stages.py",
    "tests/test_extending.py",
    "tests/review/audit/test_tampering.py",
    "tests/attempts/test_golden_digests.py",
    "tests/flows/test_orchestrator.py",
    "tests/cli/test_export.py",
    "tests/schemas/loading/test_json_schema.py",
    "tests/cli/test_sample.py",
    "tests/cli/test_main.py",
    "tests/cli/test_secrets.py",
    "tests/runs/test_registered_models.py",
    "tests/test_imports.py",
    "tests/flows/test_started_by_prefect.py",
    "tests/flows/test_approval_form.py",
    "tests/models/test_compiled_layers.py",
    "tests/flows/test_random_kills.py",
    "tests/tasks/test_stages_by_oracle.py",
    "tests/tasks/test_policy_runs_by_oracle.py",
    "tests/tasks/test_ahead.py",
    "tests/test_recipes.py",
)
"""The longest files of both tiers, which come first, the longest before the others: a process that began with one of them
when all others were done would work alone for minutes (Makefile)."""


_CACHE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process for tests.

    Runs end without a report, which takes seconds each; tests of the report ask for one. All processes of the tests
    share one cache folder, and none reads the user's own. Files are not synced to the disk, which took a third of the
    time of a small run, and are in memory where there is room: no test outlives a loss of power, and tests that
    simulate one watch the calls. Examples of hypothesis have no deadline, because a busy machine may be slow.

    A shell starts background commands with SIGINT ignored, and children inherit this. Tests interrupt commands, so the
    default handler is set again.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile(
        "untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("untimed")
    os.fsync = lambda fd: None
    gc.disable()  # until the tests are collected
    os.environ["VANTAGE_REPORT"] = "0"
    if not hasattr(config, "workerinput"):
        if config.option.basetemp is None:
            use_folder_in_memory()
        config.stash[_CACHE] = tempfile.TemporaryDirectory(prefix="vantage-cache-")
        os.environ["VANTAGE_CACHE"] = config.stash[_CACHE].name
        trust_one_certificate(Path(config.stash[_CACHE].name))
        config.pluginmanager.register(Progress(config))
    os.environ[ADDRESS] = f"{os.environ['VANTAGE_CACHE']}/forks-{os.getpid()}"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache folder of this test session."""
    if _CACHE in config.stash:
        config.stash[_CACHE].cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front; within a file, and among all others, the order stays.

    Tests that need what the machine lacks are skipped, with the remedy as their reason.
    """
    lacks = missing()
    for item in items:
        for mark in item.iter_markers("needs"):
            if mark.args[0] in lacks:
                item.add_marker(pytest.mark.skip(reason=reason(mark.args[0])))
    place = {file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST)))


def pytest_collection_finish() -> None:
    """Exclude what is loaded by now from garbage collection, and collect the rest seldom. Otherwise it takes a quarter
    of the tests' time."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude what a file of tests has loaded from garbage collections, and reset at the end of the file what a
    pipeline has set for its process.
    """
    if nextitem is None or nextitem.path != item.path:
        logging.raiseExceptions = True  # see errors_of_logging_are_quiet
        forget_databases()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Yield the address of an S3 server."""
    from moto.moto_server.werkzeug_app import create_backend_app
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(
        logging.WARNING
    )  # a line for each request, in the logs of other tests too
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server is not None
    # the server's own application lists a folder to find the service of each request
    server._server.app = _one_write_at_a_time(create_backend_app("s3"))
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def _one_write_at_a_time(app: Any) -> Any:
    """Let moto write one object at a time: it looks at an etag and then writes in many threads, where a real server
    does both in one step.
    """
    writing = threading.Lock()

    def answer(environ: Any, start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] == "GET":
            return app(environ, start_response)
        with writing:
            return list(app(environ, start_response))

    return answer


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return ``s3://…`` of an empty bucket; the environment has what a client needs."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    name = f"vantage-{secrets.token_hex(6)}"
    boto3.client("s3", endpoint_url=s3_server, region_name="us-east-1").create_bucket(Bucket=name)
    return f"s3://{name}/workspace"
