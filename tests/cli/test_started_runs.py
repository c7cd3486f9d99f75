"""The options of ``vantage run``, ``logs``, ``publish``, ``deploy`` and ``estimate`` take effect; tested without any run."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from vantage.attempts.exit_codes import ExitCode
from vantage.cli import deploy, detached, estimate
from vantage.cli import run as run_command
from vantage.cli.main import app
from vantage.flows.pools import pipelines
from vantage.flows.publishing import moving_aliases
from vantage.runs import logs, run
from vantage.runs import names as run_names
from vantage.runs.workspace import Workspace
from vantage.schemas.loading.recipe_file import load_recipe


def vantage(*words: str) -> Result:
    return CliRunner().invoke(app, words)


# run --detach


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None], list[list[str]]]:
    """Have detached runs begin with this id, or not at all; returns the list of what was started."""

    def begin(run_id: str | None) -> list[list[str]]:
        started: list[list[str]] = []
        log = tmp_path / "console.log"
        log.write_text("vantage: it was refused\n")

        def start(arguments: list[str], place: Workspace) -> detached.Detached:
            started.append(arguments)
            return detached.Detached(run_id, 41, log, None if run_id else int(ExitCode.STORAGE))

        monkeypatch.setattr(detached, "start_detached", start)
        return started

    return begin


def test_a_detached_run_gets_all_options(begun: Any, recipe_file: Path, tmp_path: Path) -> None:
    started, place = begun("0001-fake-000001"), str(tmp_path / "w")
    options = ("--set", "seed=5", "--until", "sft", "--strict", "--verbose", "--json")
    done = vantage("run", str(recipe_file), "--workspace", place, "--detach", *options)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["run_id"] == "0001-fake-000001"
    expected = ["--workspace", place, "--set", "seed=5", "--until=sft", "--strict", "--verbose"]
    assert started == [[str(recipe_file), *expected]]
    plain = vantage("run", str(recipe_file), "--workspace", place, "--detach")
    assert "run 0001-fake-000001 has begun (process 41)" in plain.stdout
    assert started[1] == [str(recipe_file), "--workspace", place]


def test_a_detached_run_that_is_refused_leaves_nothing(begun: Any, recipe_file: Path, tmp_path: Path) -> None:
    begun(None)
    done = vantage("run", str(recipe_file), "--workspace", str(tmp_path / "w"), "--detach")
    assert (done.exit_code, done.stderr) == (ExitCode.STORAGE, "vantage: it was refused\n")
    assert not (tmp_path / "console.log").exists()


def test_a_part_that_cannot_be_run_alone_is_refused_before_it_begins(
    begun: Any, recipe_file: Path, tmp_path: Path
) -> None:
    started = begun("0001-fake-000001")
    done = vantage(
        "run", str(recipe_file), "--workspace", str(tmp_path / "w"), "--only", "reward", "--detach"
    )
    assert done.exit_code == ExitCode.BAD_INPUT
    assert not started


def test_a_detached_run_leads_a_session_and_its_output_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workspace, begins = Workspace(tmp_path), []

    class Process(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            begins.append(options)
            assert command[1:4] == ["-m", "vantage", "run"]
            said = "print('· run 0001-fake-000001', flush=True)"
            super().__init__([sys.executable, "-c", said], **options)

    monkeypatch.setattr(detached.subprocess, "Popen", Process)
    for name in ("console.log", "console.2.log"):
        found = detached.start_detached(["recipe.yaml"], workspace)
        assert (found.run_id, found.log.parent) == ("0001-fake-000001", workspace.folder("0001-fake-000001"))
        assert "0001-fake-000001" in found.log.read_text(), name
    assert len(list(workspace.folder("0001-fake-000001").iterdir())) == 2, "the first log stays"
    assert [options["start_new_session"] for options in begins] == [True, True]
    assert [options["stdin"] for options in begins] == [subprocess.DEVNULL] * 2


def test_json_leaves_standard_output_to_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json, expected in ((True, ("", "progress\n")), (False, ("progress\n", ""))):
        run_command.screen_of(as_json).say("progress")
        assert tuple(capsys.readouterr()) == expected


# logs


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bytes]]:
    """Replace the logs of a run: they grow at each look at them, and the run ends with the last."""
    looks: list[dict[str, bytes]] = []
    at = -1

    def read_run(place: object, run_id: str) -> object:
        return SimpleNamespace(stages=dict.fromkeys(looks[0]))

    def is_active(place: object, run_id: str) -> bool:
        nonlocal at
        at += 1
        return at + 1 < len(looks)

    def read_log(place: object, record: object, step: str) -> bytes:
        return looks[max(at, 0)][step]

    monkeypatch.setattr(run, "read_run", read_run)
    monkeypatch.setattr(run, "is_active", is_active)
    monkeypatch.setattr(logs, "read_log", read_log)
    monkeypatch.setattr(run_names, "named_run", lambda place, named, command: "0001-fake-000001")
    monkeypatch.setattr("vantage.cli.logs.SECONDS_BETWEEN_LOOKS", 0.0)
    return looks


def test_following_prints_each_line_once(growing: list[dict[str, bytes]]) -> None:
    growing += [
        {"sft": b"one\n", "reward": b""},
        {"sft": b"one\ntwo\n", "reward": b""},
        {"sft": b"one\ntwo\n", "reward": b"three\n"},
    ]
    assert vantage("logs", "latest", "--follow").stdout == "sft | one\nsft | two\nreward | three\n"


def test_a_log_that_begins_anew_is_printed_from_its_beginning(growing: list[dict[str, bytes]]) -> None:
    growing += [{"sft": b"first attempt\n"}, {"sft": b"second\n"}]
    assert vantage("logs", "latest", "sft", "--follow").stdout == "first attempt\nsecond\n"


def test_without_follow_the_logs_are_printed_once(growing: list[dict[str, bytes]]) -> None:
    growing += [{"sft": b"one\n", "reward": b"two\n"}, {"sft": b"never\n", "reward": b""}]
    assert vantage("logs", "latest", "reward").stdout == "two\n"
    done = vantage("logs", "latest", "polic")
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "polic is no step of run 0001-fake-000001; it has sft, reward" in done.stderr


# publish and rollback


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ({"a@champion": "published"}, ExitCode.OK),
        ({"a@champion": "published", "b@champion": "gate_closed"}, ExitCode.GATE_CLOSED),
        ({}, ExitCode.GATE_CLOSED),
        ({"a@champion": "published", "b@champion": "waiting_approval"}, ExitCode.WAITING_APPROVAL),
    ],
)
def test_publishing_ends_with_the_code_of_its_worst_outcome(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: dict[str, str], code: ExitCode
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(run_names, "named_run", lambda place, named, command: "0001-fake-000001")
    monkeypatch.setattr("vantage.runs.run.read_run", lambda place, run_id: None)
    monkeypatch.setattr("vantage.runs.next_steps.after_questions", lambda record, address: ["ask ada"])
    monkeypatch.setattr(
        moving_aliases, "publish_again", lambda *words, **options: asked.append(options) or outcomes
    )
    options = ("--model", "a", "--alias", "next", "--key", "k", "--json", "--workspace", str(tmp_path))
    done = vantage("publish", "latest", *options)
    assert done.exit_code == code
    assert json.loads(done.stdout) == {"run_id": "0001-fake-000001", "publications": outcomes}
    assert asked == [{"model": "a", "alias": "next", "key": Path("k")}]
    assert ("ask ada" in done.stderr) == (code == ExitCode.WAITING_APPROVAL)


def test_rolling_back_passes_on_who_why_and_where_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    moved = moving_aliases.roll_back.__annotations__["return"]
    fields = dict.fromkeys(moved._fields, "x") | {"sent": False}

    def roll_back(place: Workspace, name: str, alias: str, **options: Any) -> Any:
        asked.append({"name": name, "alias": alias, **options})
        return moved(**fields)

    monkeypatch.setattr(moving_aliases, "roll_back", roll_back)
    place = ("--workspace", str(tmp_path))
    done = vantage("rollback", "m@champion", "--to", "3", "--reason", "worse", "--by", "ada", *place)
    assert done.exit_code == 0, done.output
    del asked[0]["watcher"]
    expected = {"name": "m", "alias": "champion", "to": "3", "by": "ada", "reason": "worse", "key": None}
    assert asked == [expected]
    assert "MLflow does not answer, and the next run sends it" in done.stdout
    refused = vantage("rollback", "m@champion", "--reason", "worse", "--by", "a" * 201, *place)
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert len(asked) == 1


# deploy and undeploy


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Stand in for Prefect: what was registered, and the runs that keep a deployment from being removed."""
    seen: dict[str, list[Any]] = {"registered": [], "under_way": []}
    monkeypatch.setattr(deploy, "_client", lambda: nullcontext())
    monkeypatch.setattr(deploy, "_quiet", lambda verbose: None)
    monkeypatch.setattr(pipelines, "register", lambda client, pipeline: seen["registered"].append(pipeline))
    monkeypatch.setattr(pipelines, "remove", lambda client, name: seen["under_way"])
    return seen


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (("--cron", "0 2 * * *"), "skip"),
        (("--on", "models:/m@champion"), "wait"),
        (("--on", "models:/m@champion", "--on-overlap", "skip"), "skip"),
        (("--on-overlap", "cancel"), "cancel"),
    ],
)
def test_overlapping_runs_have_a_rule(
    prefect: dict[str, list[Any]], recipe_file: Path, options: tuple[str, ...], rule: str
) -> None:
    done = vantage("deploy", str(recipe_file), "--workspace", "s3://team/rlhf", *options)
    assert done.exit_code == 0, done.output
    [pipeline] = prefect["registered"]
    assert (pipeline.on_overlap, pipeline.concurrency) == (rule, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--on-overlap", "queue"), "--on-overlap=queue is no rule for overlapping runs; use one of: wait"),
        (("--on-overlap", "cancel", "--concurrency", "2"), "--concurrency=2 and --on-overlap=cancel exclude"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(
    prefect: dict[str, list[Any]], recipe_file: Path, options: tuple[str, ...], said: str
) -> None:
    done = vantage("deploy", str(recipe_file), "--workspace", "s3://team/rlhf", *options)
    assert done.exit_code == ExitCode.BAD_INPUT
    assert said in done.stderr
    assert not prefect["registered"]


def test_a_dry_run_and_a_file_register_nothing(
    prefect: dict[str, list[Any]], recipe_file: Path, tmp_path: Path
) -> None:
    words = (
        "deploy",
        str(recipe_file),
        "--workspace",
        "s3://team/rlhf",
        "--name",
        "nightly",
        "--pool",
        "orders",
    )
    shown = vantage(*words, "--dry-run")
    [deployment] = yaml.safe_load(shown.stdout)["deployments"]
    assert (deployment["name"], deployment["work_pool"]["name"]) == ("nightly", "orders")
    assert vantage(*words, "--write", str(tmp_path / "prefect.yaml")).exit_code == 0
    assert yaml.safe_load((tmp_path / "prefect.yaml").read_text())["deployments"] == [deployment]
    assert not prefect["registered"]


def test_a_deployment_with_runs_under_way_is_not_called_removed(prefect: dict[str, list[Any]]) -> None:
    assert vantage("undeploy", "nightly").stdout == "removed nightly\n"
    prefect["under_way"].append("0001-fake-000001")
    done = vantage("undeploy", "nightly")
    assert (done.exit_code, done.stdout) == (ExitCode.RESUME, "")
    assert "these runs of it have not ended" in done.stderr and "0001-fake-000001" in done.stderr


# estimate


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, ""), (999.6e6, "1,000 MB"), (1e9, "1.0 GB"), (12e6, "12 MB"), (80.04e9, "80.0 GB")],
)
def test_a_size_has_its_unit(value: float, shown: str) -> None:
    assert estimate._size(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(59.94, "59.9 s"), (60.0, "1.0 min"), (3599.0, "60.0 min"), (5400.0, "1.5 h")]
)
def test_a_duration_has_its_unit(seconds: float, shown: str) -> None:
    assert estimate._duration(seconds) == shown


@pytest.mark.parametrize(
    ("smallest", "shown"),
    [(None, "nothing"), (("1 × 1", 8), "1 × 1"), (("1 × 1", 9), "1 × 1"), (("1 × 1", 4), "1 × 1, 4 at once")],
)
def test_the_smallest_layout_names_smaller_passes(smallest: Any, shown: str) -> None:
    assert estimate._smallest(smallest, 8) == shown


def vllm(**changes: Any) -> Any:
    given = {"engines": 1, "place": "process", "tokens_per_second": 1234.0, "rows": 64.0, "sampling": 90.0}
    return SimpleNamespace(**{**given, "sending": 0.0, "gpus_of_each": 1, "tensor_parallel": 1, **changes})


@pytest.mark.parametrize(
    ("found", "nodes", "shown"),
    [
        (vllm(), 1, "1,234 tokens/s in the stage's process, 64 rows at once, 1.5 min"),
        (vllm(engines=4), 1, "1,234 tokens/s in each of 4 processes, 64 rows at once each, 1.5 min"),
        (vllm(), 2, "a recipe for 2 nodes is refused with it: use rollout.servers"),
        (
            vllm(place="servers", sending=30.0),
            2,
            "on one server, 64 rows at once, 1.5 min, and 30.0 s until new weights are there",
        ),
        (
            vllm(place="url", engines=2, gpus_of_each=4),
            1,
            "each server is counted with 4 GPUs (tensor parallel)",
        ),
        (
            vllm(place="servers", gpus_of_each=4),
            1,
            "its weights leave no room on one, and vLLM has one there; use rollout.servers with rollout.tensor_parallel: 4",
        ),
        (
            vllm(place="servers", gpus_of_each=8, tensor_parallel=4),
            1,
            "if it had 8 GPUs: its weights leave no room on 4, and vLLM has 4 there; use rollout.servers with rollout.tensor_parallel: 8",
        ),
        (
            vllm(place="servers", gpus_of_each=4, tensor_parallel=4),
            1,
            "1,234 tokens/s on one server, 64 rows at once, 1.5 min",
        ),
    ],
)
def test_what_vllm_does_is_one_line(found: Any, nodes: int, shown: str) -> None:
    assert shown in estimate._by_vllm(found, nodes)


@pytest.mark.parametrize(("share", "is_recommended"), [(0.95, False), (0.85, True)])
def test_bfloat16_is_recommended_where_it_saves_a_tenth(
    monkeypatch: pytest.MonkeyPatch, share: float, is_recommended: bool
) -> None:
    from dataclasses import replace

    from vantage.estimates import recipe_estimate

    real = recipe_estimate.estimate_recipe

    def estimated(*words: Any, **options: Any) -> Any:
        found = real(*words, **options)
        stages = [replace(each, seconds_in_bfloat16=share * each.seconds) for each in found.stages]
        return replace(found, stages=stages)

    monkeypatch.setattr(recipe_estimate, "estimate_recipe", estimated)
    done = vantage("estimate", "quickstart", "--gpu", "h100", "--gpus", "1", "--price", "3600")
    assert ("with precision: auto and resources.gpus, in bfloat16: " in done.stdout) == is_recommended
    found = real(load_recipe("quickstart"), gpu="h100", gpus=1, price=3600.0)
    costs = [f"{3600 * stage.gpu_hours:,.2f}" for stage in found.stages]
    assert all(cost in done.stdout for cost in costs)
    assert f", {3600 * sum(stage.gpu_hours for stage in found.stages):,.2f}; memory" in " ".join(
        done.stdout.split()
    )
