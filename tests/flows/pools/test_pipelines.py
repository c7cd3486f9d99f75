"""A recipe becomes a deployment: what is registered, what a second time changes, and what is refused."""

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import yaml
from prefect.exceptions import ObjectNotFound
from typer.testing import CliRunner

from tests.support.ports import own_port
from vantage.attempts.exit_codes import ExitCode
from vantage.cli import deploy
from vantage.cli.deploy import _described
from vantage.cli.main import app
from vantage.flows.pools import pipelines
from vantage.flows.pools.alias_triggers import alias_automation
from vantage.flows.pools.pipelines import (
    as_prefect_yaml,
    automations_of,
    pipeline_of,
    register,
    registered,
    remove,
)
from vantage.flows.prefect_server.overlaps import cancel_earlier
from vantage.runs.resolving import load_resolved, load_resolved_text

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

CHANGES = ("stages.sft.epochs=2", "seed=5")


@pytest.fixture
def client(prefect_url: str) -> Iterator["SyncPrefectClient"]:
    """Yield a client of a server that has the work pools ``orders`` and ``gpu``."""
    from prefect.client.orchestration import get_client

    from vantage.flows.pools.deployments import create_pool

    with get_client(sync_client=True) as client:
        for pool in ("orders", "gpu"):
            create_pool(client, pool)
        yield client


def pipeline(source: str | Path, *overrides: str, **options: Any) -> Any:
    return pipeline_of(str(source), overrides, workspace="s3://team/rlhf", pool="orders", **options)


def test_a_file_goes_along_as_a_text_that_is_the_same_recipe_on_any_machine(
    tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1?", "response": "2"}\n')
    text = recipe_file.read_text().replace("builtin:arithmetic/demonstrations", "rows.jsonl")
    recipe_file.write_text(text)
    expected, _ = load_resolved(recipe_file, CHANGES)
    deployed = pipeline(recipe_file, *CHANGES)
    os.makedirs(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_resolved_text(deployed.recipe, deployed.overrides)[0] == expected
    assert str(rows) in deployed.recipe
    assert deployed.parameters["overrides"] == list(CHANGES)
    assert deployed.name == "fake"
    assert pipeline("quickstart").recipe == "quickstart"


@pytest.mark.parametrize("source", ["quickstart", "a file"])
@pytest.mark.parametrize("override", ["data.{0}.source=my rows.jsonl", "data.{0}={{source: my rows.jsonl}}"])
def test_a_relative_source_among_the_overrides_is_the_same_file_in_every_folder(
    tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, source: str, override: str
) -> None:
    rows = tmp_path / "my rows.jsonl"
    rows.write_text('{"prompt": "1+1?", "response": "2"}\n')
    recipe = "quickstart" if source == "quickstart" else recipe_file
    name = next(iter(load_resolved(recipe)[0].data))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    changes = [override.format(name), "seed=5"]
    expected, _ = load_resolved(recipe, changes)
    assert expected.data[name].source == str(rows)
    deployed = pipeline(recipe, *changes)
    monkeypatch.chdir(tmp_path / "elsewhere")
    if recipe == "quickstart":
        assert load_resolved(deployed.recipe, deployed.overrides)[0] == expected
    else:
        assert load_resolved_text(deployed.recipe, deployed.overrides)[0] == expected


def test_the_version_is_that_of_the_resolved_recipe(recipe_file: Path) -> None:
    assert pipeline(recipe_file).version == pipeline(recipe_file, "seed=17").version
    assert pipeline(recipe_file).version != pipeline(recipe_file, "seed=18").version


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cron": "every night"}, 'Invalid cron string: "every night"'),
        ({"cron": "0 2 * * *", "timezone": "Mars/Base"}, 'Invalid timezone: "Mars/Base"'),
        ({"cron": "0 2 * * *", "interval": 60.0}, "--cron, --interval exclude each other"),
        ({"timezone": "UTC"}, "add --cron, --interval or --rrule"),
        (
            {"paused": True},
            "--paused is about a schedule, and there is none; add --cron, --interval or --rrule",
        ),
        ({"paused": False}, "--active is about a schedule, and there is none; add --cron"),
    ],
)
def test_a_schedule_that_is_none_is_refused(recipe_file: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        pipeline(recipe_file, **options)


@pytest.mark.parametrize("name", ["a/b", "a\0b", "", "a" * 201, "50 %", "a\udcff"])
def test_a_name_that_prefect_does_not_take_is_refused(recipe_file: Path, name: str) -> None:
    with pytest.raises(
        ValueError, match="--name=.* is no name of a deployment: 1 to 200 printable characters"
    ):
        pipeline(recipe_file, name=name)
    with pytest.raises(
        ValueError, match="--pool=.* is no name of a work pool: 1 to 200 printable characters"
    ):
        pipeline_of(str(recipe_file), (), workspace="s3://team/rlhf", pool=name)


def test_a_pool_that_waits_for_itself_is_warned_of(recipe_file: Path) -> None:
    assert pipeline(recipe_file, "workers=gpu").warnings == []
    [warning] = pipeline(recipe_file, "stages.sft.resources.pool=orders").warnings
    assert "holds one of its slots" in warning


def test_a_workspace_in_a_folder_is_warned_of(recipe_file: Path) -> None:
    here = pipeline_of(str(recipe_file), (), workspace="/home/ada/work", pool="orders")
    [warning] = here.warnings
    assert "workspace /home/ada/work is a folder: each worker of pool orders needs it at this path" in warning


@pytest.mark.parametrize(
    ("on_overlap", "limit"),
    [
        ("wait", {"limit": 2, "collision_strategy": "ENQUEUE"}),
        ("skip", {"limit": 2, "collision_strategy": "CANCEL_NEW"}),
        ("cancel", None),
    ],
)
def test_what_happens_to_one_run_too_many(
    recipe_file: Path, on_overlap: str, limit: dict[str, Any] | None
) -> None:
    made = pipeline(recipe_file, cron="0 2 * * *", on_overlap=on_overlap, concurrency=2, paused=True)
    [deployment] = yaml.safe_load(as_prefect_yaml(made))["deployments"]
    assert deployment.get("concurrency_limit") == limit
    assert ("on-overlap:cancel" in deployment["tags"]) == (limit is None)
    assert deployment["schedules"][0]["active"] is False


@pytest.mark.slow
def test_the_limit_is_registered_and_what_somebody_paused_stays_paused(
    client: "SyncPrefectClient", recipe_file: Path
) -> None:
    register(client, pipeline(recipe_file, cron="0 2 * * *"))
    [found] = registered(client)
    assert found.global_concurrency_limit is not None
    assert found.global_concurrency_limit.limit == 1
    assert found.concurrency_options is not None
    assert found.concurrency_options.collision_strategy == "CANCEL_NEW"
    assert [each.active for each in found.schedules] == [True]
    client.update_deployment_schedule(found.id, found.schedules[0].id, active=False)  # in Prefect's page
    register(client, pipeline(recipe_file, cron="0 3 * * *"))
    [found] = registered(client)
    assert [(each.schedule.cron, each.active) for each in found.schedules] == [("0 3 * * *", False)]
    assert _described(found)["started by"] == "cron 0 3 * * * (paused)"
    assert _described(found)["at once"] == "1, skips others"
    register(client, pipeline(recipe_file, cron="0 3 * * *", paused=False, on_overlap="cancel"))
    [found] = registered(client)
    assert [each.active for each in found.schedules] == [True]
    assert _described(found)["at once"] == "1, cancels earlier ones"
    remove(client, "fake")


@pytest.mark.slow
def test_a_deployment_that_somebody_paused_stays_paused_without_a_schedule_and_with_two(
    client: "SyncPrefectClient", recipe_file: Path
) -> None:
    """The deployment is deployed without a schedule meanwhile, and with somebody else's schedule beside ours, which
    alone is paused.
    """
    from prefect.client.schemas.schedules import CronSchedule

    def schedules() -> list[tuple[str, bool]]:
        [found] = registered(client)
        return [(getattr(each.schedule, "cron", "interval"), each.active) for each in found.schedules]

    identity = register(client, pipeline(recipe_file, interval=3000.0))
    client.pause_deployment(identity)
    register(client, pipeline(recipe_file))
    assert schedules() == []
    register(client, pipeline(recipe_file, interval=3000.0))
    assert schedules() == [("interval", False)]
    client.create_deployment_schedules(identity, [(CronSchedule(cron="7 7 * * *"), True)])
    register(client, pipeline(recipe_file, interval=3000.0))
    assert schedules() == [("interval", False)]
    register(client, pipeline(recipe_file, interval=3000.0, paused=False))
    assert schedules() == [("interval", True)]
    register(client, pipeline(recipe_file))
    register(client, pipeline(recipe_file, interval=3000.0))
    assert schedules() == [("interval", True)], "nobody had paused it"
    remove(client, "fake")


@pytest.mark.slow
def test_stages_on_an_unknown_pool_are_refused(client: "SyncPrefectClient", recipe_file: Path) -> None:
    with pytest.raises(ValueError, match="resources.pool=nowhere is no work pool of Prefect"):
        register(client, pipeline(recipe_file, "workers=nowhere"))
    assert registered(client) == []


@pytest.mark.slow
def test_a_new_run_has_the_earlier_ones_save_and_end(
    client: "SyncPrefectClient", recipe_file: Path, prefect_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new run ends neither a later run, nor one of another deployment, nor one that has ended. A late run never
    begins.
    """
    from prefect.client.schemas.objects import State, StateType

    monkeypatch.setenv("PREFECT_API_URL", prefect_url)
    ours = register(client, pipeline(recipe_file, on_overlap="cancel"))
    other = register(client, pipeline(recipe_file, name="other"))
    start = datetime(2026, 1, 1, tzinfo=UTC)
    runs = {}
    for name, deployment, hour in [
        ("ended", ours, 0),
        ("first", ours, 1),
        ("elsewhere", other, 1),
        ("late", ours, 1),
        ("this", ours, 2),
        ("to come", ours, 4),
        ("later", ours, 3),
    ]:
        scheduled = State(
            type=StateType.SCHEDULED, state_details={"scheduled_time": start + timedelta(hours=hour)}
        )
        runs[name] = client.create_flow_run_from_deployment(deployment, name=name, state=scheduled)
        if name not in ("late", "to come"):
            client.set_flow_run_state(runs[name].id, State(type=StateType.RUNNING), force=True)
    client.set_flow_run_state(runs["ended"].id, State(type=StateType.COMPLETED), force=True)
    assert sorted(asyncio.run(cancel_earlier(str(runs["this"].id)))) == ["first", "late"]
    states = {name: client.read_flow_run(run.id).state_type for name, run in runs.items()}
    assert states == {
        "ended": StateType.COMPLETED,
        "first": StateType.CANCELLING,
        "late": StateType.CANCELLED,
        "to come": StateType.SCHEDULED,
        **dict.fromkeys(("elsewhere", "this", "later"), StateType.RUNNING),
    }
    for run in runs.values():
        client.set_flow_run_state(run.id, State(type=StateType.COMPLETED), force=True)
    for name in ("fake", "other"):
        assert remove(client, name) == []


@pytest.mark.parametrize(
    ("states", "done"),
    [
        (["Completed", "Failed"], ["schedule", "on alias", "automations", "deployment"]),
        (["Completed", "Pending"], ["schedule", "on alias"]),
        (["Running"], ["schedule", "on alias"]),
        (["Cancelling"], ["schedule", "on alias"]),
        (["Suspended"], ["schedule", "on alias"]),
        (["AwaitingConcurrencySlot"], ["schedule", "on alias"]),
        (["Late", "Scheduled"], ["schedule", "on alias", "automations", "deployment"]),
        ([], ["schedule", "on alias", "automations", "deployment"]),
    ],
)
def test_with_runs_under_way_only_what_starts_others_is_removed(states: list[str], done: list[str]) -> None:
    identity, calls = uuid4(), []
    types = {"Suspended": "PAUSED", **dict.fromkeys(("AwaitingConcurrencySlot", "Late"), "SCHEDULED")}

    def read_flow_runs(flow_run_filter: Any) -> list[Any]:
        assert flow_run_filter.deployment_id.any_ == [identity]
        asked, left_out = flow_run_filter.state.type.any_, flow_run_filter.state.name.not_any_
        return [
            SimpleNamespace(name="0007-fake", state_name=state)
            for state in states
            if types.get(state, state.upper()) in asked and state not in left_out
        ]

    deployment = SimpleNamespace(id=identity, schedules=[SimpleNamespace(id=uuid4())])
    automations = [
        alias_automation("vantage", "fake", identity, "judge@champion"),
        *automations_of("fake", identity),
    ]
    client: Any = SimpleNamespace(
        read_deployment_by_name=lambda name: deployment,
        read_flow_runs=read_flow_runs,
        read_resource_related_automations=lambda _: [
            SimpleNamespace(id=each.name, trigger=each.trigger) for each in automations
        ],
        delete_automation=lambda name: calls.append(
            name.removeprefix("vantage/fake: ").removesuffix(" judge@champion") + " alias"
        ),
        delete_deployment_schedule=lambda *_: calls.append("schedule"),
        delete_resource_owned_automations=lambda _: calls.append("automations"),
        delete_deployment=lambda _: calls.append("deployment"),
    )
    under_way = [
        f"0007-fake ({each})" for each in states if each not in ("Completed", "Failed", "Late", "Scheduled")
    ]
    assert (remove(client, "fake"), calls) == (under_way, done)


@pytest.mark.parametrize("fails_at", range(8))
def test_removed_by_a_server_that_fails_midway_it_is_removed_by_the_same_command_again(fails_at: int) -> None:
    identity, calls = uuid4(), itertools.count()
    prefect: dict[str, set[str]] = {
        "deployments": {"fake"},
        "schedules": {"nightly"},
        "automations": {"lost", "not begun", "again", "on judge@champion"},
    }

    def answers(answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **options: Any) -> Any:
            if next(calls) == fails_at:
                raise ConnectionError("the server is away")
            return answer(*values, **options)

        return call

    def deployment(name: str) -> Any:
        if not prefect["deployments"]:
            raise ObjectNotFound(Exception())
        schedules = [SimpleNamespace(id=each) for each in prefect["schedules"]]
        return SimpleNamespace(id=identity, schedules=schedules)

    moved = alias_automation("vantage", "fake", identity, "judge@champion").trigger
    client: Any = SimpleNamespace(
        read_deployment_by_name=answers(deployment),
        read_deployments=answers(lambda deployment_filter: []),
        read_flow_runs=answers(lambda flow_run_filter: []),
        read_resource_related_automations=answers(
            lambda _: [
                SimpleNamespace(id=each, trigger=moved if each.startswith("on ") else None)
                for each in sorted(prefect["automations"])
            ]
        ),
        delete_automation=answers(prefect["automations"].discard),
        delete_deployment_schedule=answers(lambda _, schedule: prefect["schedules"].discard(schedule)),
        delete_resource_owned_automations=answers(lambda _: prefect["automations"].clear()),
        delete_deployment=answers(lambda _: prefect["deployments"].clear()),
    )
    with pytest.raises(ConnectionError):
        remove(client, "fake")
    assert prefect["deployments"] == {"fake"}, "it goes last, since nothing else can be found without it"
    assert remove(client, "fake") == []
    assert not any(prefect.values())


def test_undeploy_names_the_runs_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "_client", nullcontext)
    monkeypatch.setattr(
        pipelines, "remove", lambda client, name: ["0007-fake (Running)", "0008-fake (Suspended)"]
    )
    done = CliRunner().invoke(app, ["undeploy", "fake"])
    assert (done.exit_code, done.stdout) == (ExitCode.RESUME, "")
    assert "fake is not removed" in done.stderr
    assert (
        "0007-fake (Running), 0008-fake (Suspended). No schedule or alias starts it any more" in done.stderr
    )
    monkeypatch.setattr(pipelines, "remove", lambda client, name: [])
    done = CliRunner().invoke(app, ["undeploy", "fake"])
    assert (done.exit_code, done.stdout) == (0, "removed fake\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("PENDING", "Pending"),
        ("RUNNING", "Running"),
        ("CANCELLING", "Cancelling"),
        ("PAUSED", "Suspended"),
        ("SCHEDULED", "Resuming"),
        ("SCHEDULED", "AwaitingConcurrencySlot"),
    ],
)
def test_it_stays_until_its_last_run_has_ended(
    client: "SyncPrefectClient", recipe_file: Path, kind: str, state: str
) -> None:
    """Without their deployment, Prefect refuses the end of a run that holds a place in its limit, and never starts one
    that waits.
    """
    from prefect.client.schemas.objects import State, StateType

    identity = register(
        client, pipeline(recipe_file, interval=3600.0, on_overlap="wait", on="models:/judge@champion")
    )
    run = client.create_flow_run_from_deployment(identity, name="0007-fake")
    client.set_flow_run_state(run.id, State(type=StateType.PENDING))
    if state != "Pending":
        details: dict[str, Any] = {"scheduled_time": datetime.now(UTC)} if kind == "SCHEDULED" else {}
        client.set_flow_run_state(
            run.id, State(type=StateType(kind), name=state, state_details=details), force=True
        )
    assert remove(client, "fake") == [f"0007-fake ({state})"]
    [found] = registered(client)
    assert found.schedules == []
    assert {each.name for each in client.read_automations()} == {
        f"vantage/fake: {each}" for each in ("lost", "not begun", "again")
    }
    ended = StateType.CANCELLED if state == "Cancelling" else StateType.COMPLETED
    client.set_flow_run_state(run.id, State(type=ended))
    assert client.read_flow_run(run.id).state_type == ended
    assert remove(client, "fake") == []
    assert (registered(client), client.read_automations()) == ([], [])


@pytest.mark.slow
def test_again_it_is_updated_and_then_removed(client: "SyncPrefectClient", recipe_file: Path) -> None:
    register(client, pipeline(recipe_file, cron="0 2 * * *", timezone="Europe/Berlin"))
    identity = register(client, pipeline(recipe_file, "seed=5", interval=3600.0))
    [found] = registered(client)
    assert found.id == identity
    assert found.version == pipeline(recipe_file, "seed=5").version
    assert found.parameters["overrides"] == ["seed=5"]
    assert (found.work_pool_name, found.enforce_parameter_schema) == ("orders", True)
    [schedule] = found.schedules
    assert schedule.schedule.interval.total_seconds() == 3600
    properties = found.parameter_openapi_schema["properties"]
    assert {"recipe", "overrides", "seed"} <= set(properties)
    assert all(field["description"] for field in properties.values())
    assert len(client.read_automations()) == 3
    remove(client, "fake")
    assert registered(client) == []
    assert client.read_automations() == []
    with pytest.raises(ValueError, match=r"there is no deployment fake \(known: none\)"):
        remove(client, "fake")


@pytest.mark.slow
def test_a_pool_that_prefect_does_not_know_is_refused(client: "SyncPrefectClient", recipe_file: Path) -> None:
    absent = pipeline_of(str(recipe_file), (), workspace="s3://team/rlhf", pool="absent")
    with pytest.raises(ValueError, match="^--pool=absent is no work pool of Prefect"):
        register(client, absent)
    assert registered(client) == []


@pytest.mark.parametrize("more", [{}, {"run_id": "0007-fake-abcdef", "strict": True, "restarts": 3}])
def test_a_crashed_pipeline_is_started_again_with_its_own_parameters(more: dict[str, Any]) -> None:
    """The automation's templates are filled in as Prefect's server does it."""
    from uuid import uuid4

    from jinja2 import Environment

    class Crashed:
        parameters: dict[str, Any] = {
            "recipe": "recipe: x\nseed: 1\n",
            "overrides": ["seed=5"],
            "workspace": "s3://team/rlhf",
            **more,
        }

    [again] = [each for each in automations_of("fake", uuid4()) if each.name.endswith("again")]
    [action] = again.actions
    parameters = action.parameters  # type: ignore[union-attr]
    assert parameters is not None
    filled = {
        name: yaml.safe_load(Environment().from_string(field["value"]["template"]).render(flow_run=Crashed()))
        for name, field in parameters.items()
    }
    assert filled == {
        "run_id": None,
        "seed": None,
        "strict": False,
        **Crashed.parameters,
        "restarts": more.get("restarts", 0) + 1,
    }


@pytest.mark.parametrize(
    ("events", "awaited"),
    [
        ("Scheduled Late Pending Submitting", {"not begun"}),
        ("Scheduled Pending Submitting Running", {"lost"}),
        ("Pending Submitting Running heartbeat heartbeat", {"lost"}),
        ("Scheduled Pending Submitting Running heartbeat Completed", set()),
        ("Pending Submitting Running heartbeat Crashed", set()),
        ("Pending Submitting Cancelling Cancelled", set()),
        ("Scheduled Pending AwaitingConcurrencySlot", set()),
    ],
)  # fmt: skip
def test_a_flow_run_is_awaited_from_when_a_worker_takes_it_until_it_ends(
    events: str, awaited: set[str]
) -> None:
    """The events are those that a server recorded of flow runs that were lost at that moment, and of others."""
    from uuid import uuid4

    armed: set[str] = set()
    triggers = {each.name.partition(": ")[2]: each.trigger for each in automations_of("fake", uuid4())}
    del triggers["again"]
    for event in events.split():
        for name, trigger in triggers.items():
            if f"prefect.flow-run.{event}" in trigger.expect:  # type: ignore[union-attr]
                armed.discard(name)
            if f"prefect.flow-run.{event}" in trigger.after:  # type: ignore[union-attr]
                armed.add(name)
    assert armed == awaited


def test_a_pipeline_that_crashes_each_time_is_not_started_for_ever(
    client: "SyncPrefectClient", recipe_file: Path
) -> None:
    from prefect.exceptions import PrefectHTTPStatusError

    from vantage.flows.pipeline import MAX_RESTARTS

    identity = register(client, pipeline(recipe_file))
    client.create_flow_run_from_deployment(identity, parameters={"restarts": MAX_RESTARTS})
    with pytest.raises(PrefectHTTPStatusError, match="409"):
        client.create_flow_run_from_deployment(identity, parameters={"restarts": MAX_RESTARTS + 1})
    remove(client, "fake")


def test_prefect_deploy_reads_what_is_written(recipe_file: Path) -> None:
    written = yaml.safe_load(
        as_prefect_yaml(pipeline(recipe_file, cron="0 2 * * *", timezone="Europe/Berlin"))
    )
    [deployment] = written["deployments"]
    assert deployment["schedules"][0]["cron"] == "0 2 * * *"
    assert deployment["work_pool"]["name"] == "orders"
    assert deployment["entrypoint"] == "vantage.flows.pipeline.pipeline"


def test_what_an_earlier_version_registered_is_named_and_renewed(
    client: "SyncPrefectClient", prefect_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entrypoints of that version are modules without the prefix, which no worker of this version can import."""
    from prefect.client.schemas.actions import DeploymentUpdate

    from vantage.flows.pools.deployments import (
        attempt_deployment,
        deploy_attempts,
        deployment_findings,
        renew_entrypoints,
    )

    deploy_attempts(client, "gpu")
    attempts = client.read_deployment_by_name(attempt_deployment("gpu"))
    assert attempts.entrypoint == "vantage.flows.pools.attempt_flow.attempt"
    client.update_deployment(attempts.id, DeploymentUpdate(entrypoint="flows.pools.attempt_flow.attempt"))
    deploy_attempts(client, "gpu")
    assert client.read_deployment(attempts.id).entrypoint == attempts.entrypoint

    takes_objects = {**attempts.parameter_openapi_schema, "properties": {"request": {"type": "object"}}}
    client.update_deployment(attempts.id, DeploymentUpdate(parameter_openapi_schema=takes_objects))
    deploy_attempts(client, "gpu")
    renewed = client.read_deployment(attempts.id)
    assert renewed.parameter_openapi_schema == attempts.parameter_openapi_schema
    deploy_attempts(client, "gpu")
    assert client.read_deployment(attempts.id).updated == renewed.updated, "ours is left alone"

    made = register(client, pipeline("quickstart", name="nightly"))
    client.update_deployment(made, DeploymentUpdate(entrypoint="flows.pipeline.pipeline"))
    monkeypatch.setenv("PREFECT_API_URL", prefect_url)
    [before] = deployment_findings()
    assert (before.verdict, before.message.startswith("nightly: registered by an earlier")) == (
        "warning",
        True,
    )
    assert renew_entrypoints(client, "gpu") == []
    assert renew_entrypoints(client, "orders") == ["nightly"]
    renewed = client.read_deployment(made)
    assert renewed.entrypoint == "vantage.flows.pipeline.pipeline"
    assert (renewed.parameters["recipe"], renewed.work_pool_name) == ("quickstart", "orders")
    [after] = deployment_findings()
    assert after.verdict == "fine"
    remove(client, "nightly")


def test_a_server_that_does_not_answer_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """``vantage doctor`` has a line of its own about such a server. Prefect's client would start another one."""
    from vantage.flows.pools import deployments

    def asked(**_: object) -> None:
        raise AssertionError("it is asked")

    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{own_port()}/api")
    monkeypatch.setattr(deployments, "get_client", asked)
    assert list(deployments.deployment_findings()) == []
