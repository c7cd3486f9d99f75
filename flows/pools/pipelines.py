"""A recipe as a Prefect deployment, which schedules, people and automations start."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterTags,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import (
    TERMINAL_STATES,
    ConcurrencyLimitStrategy,
    ConcurrencyOptions,
    StateType,
)
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import SCHEDULE_TYPES
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema

from vantage.flows.pools.alias_triggers import (
    ON_TAG,
    alias_automation,
    alias_trigger,
    checked_alias,
    starts_on_a_movement,
)
from vantage.flows.pools.deployments import check_name, require_pool
from vantage.flows.pools.job_variables import ENVIRONMENT
from vantage.flows.pools.schedules import schedule_of
from vantage.flows.prefect_server.flow_runs import STATES
from vantage.flows.prefect_server.overlaps import CANCELS_EARLIER
from vantage.runs.resolving import load_resolved, load_resolved_text
from vantage.runs.run import recipe_digest
from vantage.runs.workspace import Workspace
from vantage.schemas.loading.overrides import parse_override
from vantage.schemas.loading.recipe_file import builtin_recipes, load_recipe
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.steps import pool_of

FLOW = "vantage"
ENTRYPOINT = "vantage.flows.pipeline.pipeline"
TAG = "vantage-pipeline"
OnOverlap = Literal["wait", "skip", "cancel"]
"""``wait``: until an earlier run has ended. ``skip``: the new run is cancelled at once. ``cancel``: the earlier ones save and end."""
HEARTBEAT_SECONDS = 30
"""Seconds between the heartbeats of a pipeline's process; Prefect's smallest value."""
LOST_SECONDS = 90.0
"""Seconds without a heartbeat after which a pipeline counts as lost, and is started again."""
NOT_BEGUN_SECONDS = 900.0
"""Seconds after which a pipeline that a worker has taken but that has not begun counts as crashed."""


@dataclass(frozen=True)
class Pipeline:
    """Settings of the deployment that is registered for a recipe."""

    name: str
    recipe: str
    """The name of a built-in recipe, or a recipe's text."""
    overrides: tuple[str, ...]
    workspace: str
    pool: str
    version: str
    """The first 12 digits of the resolved recipe's digest."""
    tags: tuple[str, ...]
    schedule: SCHEDULE_TYPES | None
    stage_pools: frozenset[str] = frozenset()
    """Pools of the recipe's stages."""
    concurrency: int = 1
    """Most runs that may be under way at the same time."""
    on_overlap: OnOverlap = "skip"
    """Treatment of a run that should begin while that many are under way."""
    paused: bool | None = None
    """Whether its schedule is paused; None: unchanged in Prefect if it exists, else active."""
    on_alias: str | None = None
    """Alias (``NAME@ALIAS``) whose movements start it; None: no alias does."""

    @property
    def strategy(self) -> ConcurrencyOptions | None:
        """Return Prefect's rule for a run beyond the limit; None: Prefect starts it, and the flow cancels earlier ones."""
        if self.on_overlap == "cancel":
            return None
        waits = self.on_overlap == "wait"
        chosen = ConcurrencyLimitStrategy.ENQUEUE if waits else ConcurrencyLimitStrategy.CANCEL_NEW
        return ConcurrencyOptions(collision_strategy=chosen)

    @property
    def parameters(self) -> dict[str, Any]:
        """Defaults of the flow's parameters, which Prefect's run form shows and can change."""
        return {"recipe": self.recipe, "overrides": list(self.overrides), "workspace": self.workspace}

    @property
    def warnings(self) -> list[str]:
        """Return warnings about problems when workers run the pipeline."""
        found = []
        if self.pool in self.stage_pools:
            found.append(
                f"pool {self.pool} also computes stages: the pipeline holds one of its slots while it waits for them; "
                "give it a pool of its own, or the pool more slots"
            )
        if "://" not in self.workspace:
            found.append(
                f"workspace {self.workspace} is a folder: each worker of pool {self.pool} needs it at this path, on a disk "
                "that all of them share; name a bucket (s3://…) if they are on other machines"
            )
        return found

    @property
    def job_variables(self) -> dict[str, Any]:
        """Environment of the pipeline's process."""
        return {"env": {**ENVIRONMENT, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}}


def pipeline_of(
    source: str,
    overrides: Sequence[str],
    *,
    workspace: str,
    pool: str,
    name: str | None = None,
    cron: str | None = None,
    interval: float | None = None,
    rrule: str | None = None,
    timezone: str | None = None,
    concurrency: int = 1,
    on_overlap: OnOverlap = "skip",
    paused: bool | None = None,
    on: str | None = None,
) -> Pipeline:
    """Return the pipeline of a recipe. Workers do not need the recipe's file: its text is included, with full paths of
    its sources.

    Args:
        source: a recipe's file, or the name of a built-in one.
        overrides: ``KEY=VALUE``.
        workspace: a folder that all workers reach, or a bucket.
        pool: work pool of the process that executes the run.
        name: name of the deployment; None: the recipe's.
        cron, interval, rrule: schedule of the pipeline, at most one of these; ``interval`` in seconds.
        timezone: time zone of the schedule; None: UTC.
        concurrency, on_overlap, paused: see ``Pipeline``.
        on: ``models:/NAME@ALIAS``, whose movements start the pipeline.

    Raises:
        ValueError: the recipe, the schedule or the alias is invalid.
    """
    if name is not None:
        check_name("--name", name, "deployment")
    check_name("--pool", pool, "work pool")
    place = Workspace.at(workspace)
    resolved, _ = load_resolved(source, overrides, workspace=place)
    overrides = _with_full_paths(overrides, resolved)
    text = (
        source if source in builtin_recipes() and not Path(source).exists() else _text_of(source, overrides)
    )
    if text != source and load_resolved_text(text, overrides, workspace=place)[0] != resolved:
        raise ValueError(f"{source}: its text alone is another recipe; name its sources by full paths")
    schedule = schedule_of(cron=cron, interval=interval, rrule=rrule, timezone=timezone)
    if schedule is None and paused is not None:
        option = "--paused" if paused else "--active"
        raise ValueError(
            f"{option} is about a schedule, and there is none; add --cron, --interval or --rrule"
        )
    on_alias = None if on is None else checked_alias(on, resolved)
    tags = [TAG, f"recipe:{resolved.recipe}"]
    tags += [CANCELS_EARLIER] if on_overlap == "cancel" else []
    tags += [] if on_alias is None else [f"{ON_TAG}{on_alias}"]
    return Pipeline(
        name=name or resolved.recipe,
        recipe=text,
        overrides=tuple(overrides),
        workspace=workspace,
        pool=pool,
        version=recipe_digest(resolved)[:12],
        tags=tuple(tags),
        schedule=schedule,
        concurrency=concurrency,
        on_overlap=on_overlap,
        paused=paused,
        on_alias=on_alias,
        stage_pools=frozenset(named for step in resolved.stages if (named := pool_of(resolved, step))),
    )


def _text_of(source: str, overrides: Sequence[str]) -> str:
    """Return a recipe's file as text that means the same in every folder."""
    try:
        recipe = load_recipe(source)
    except ValueError:  # the recipe is valid only with its overrides
        recipe = load_recipe(source, overrides)
    values = recipe.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)


def _with_full_paths(overrides: Sequence[str], resolved: ResolvedRecipe) -> tuple[str, ...]:
    """Return the overrides; each source in them is replaced by the full path that it was resolved to."""
    sources = {
        "model.source": resolved.model.source,
        **({} if resolved.model.base is None else {"model.base": resolved.model.base}),
        **{f"models.{name}.source": each.source for name, each in resolved.models.items()},
        **{f"models.{name}.base": each.base for name, each in resolved.models.items() if each.base},
        **{f"data.{name}.source": each.source for name, each in resolved.data.items()},
        **{f"verifiers.{name}.source": each.source for name, each in resolved.verifiers.items()},
        **{f"benchmarks.{name}.source": each.source for name, each in resolved.benchmarks.items()},
    }
    keys = [".".join(map(str, parse_override(override).path)) for override in overrides]
    kept = [override for key, override in zip(keys, overrides, strict=True) if key not in sources]
    full = [
        f"{source}={json.dumps(str(value), ensure_ascii=False)}"
        for source, value in sources.items()
        if any(f"{source}.".startswith(f"{key}.") for key in keys)
    ]
    return (*kept, *full)


def register(client: SyncPrefectClient, pipeline: Pipeline) -> UUID:
    """Create the deployment, or update the one of this name, with the automations that restart a lost pipeline and
    start it when an alias moves.

    Raises:
        UnknownPool: Prefect has no such work pool.
    """
    from vantage.flows.pipeline import pipeline as flow

    require_pool(client, pipeline.pool, field="--pool")
    for pool in sorted(pipeline.stage_pools):
        require_pool(client, pool)
    paused = is_paused(client, pipeline) if pipeline.paused is None else pipeline.paused
    schedules = []
    if pipeline.schedule is not None:
        schedules.append(DeploymentScheduleCreate(schedule=pipeline.schedule, active=not paused))
    _remove_schedules(client, pipeline.name)
    deployment = client.create_deployment(
        client.create_flow(flow),
        pipeline.name,
        version=pipeline.version,
        schedules=schedules,
        concurrency_limit=None if pipeline.strategy is None else pipeline.concurrency,
        concurrency_options=pipeline.strategy,
        paused=paused
        # the pause is remembered until there is a schedule again; until then, the deployment can be started by hand
        and not schedules,
        parameters=pipeline.parameters,
        description=f"Recipe {pipeline.version} in {pipeline.workspace}.",
        work_pool_name=pipeline.pool,
        tags=list(pipeline.tags),
        entrypoint=ENTRYPOINT,
        parameter_openapi_schema=parameter_schema(flow).model_dump(),
        enforce_parameter_schema=True,
        job_variables=pipeline.job_variables,
    )
    _remove_automations(client, deployment)
    for automation in automations_of(pipeline.name, deployment):
        client.create_automation(automation)
    if pipeline.on_alias is not None:
        client.create_automation(alias_automation(FLOW, pipeline.name, deployment, pipeline.on_alias))
    return deployment


def is_paused(client: SyncPrefectClient, pipeline: Pipeline) -> bool:
    """Return whether somebody has paused the deployment of this name, all its schedules, or its future schedule.

    Returns False if there is no such deployment.
    """
    try:
        known = client.read_deployment_by_name(f"{FLOW}/{pipeline.name}")
    except ObjectNotFound:
        return False
    same = [each for each in known.schedules if _times(each.schedule) == _times(pipeline.schedule)]
    schedules = same or known.schedules
    return bool(known.paused) or bool(schedules and not any(each.active for each in schedules))


def _times(schedule: SCHEDULE_TYPES | None) -> dict[str, Any] | None:
    """Return the fields that decide when a schedule is due, without the moment from which an interval is counted."""
    return None if schedule is None else schedule.model_dump(exclude={"anchor_date"})


def registered(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Return all deployments of pipelines, by name."""
    tagged = DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG]))
    return sorted(client.read_deployments(deployment_filter=tagged), key=lambda each: each.name)


def remove(client: SyncPrefectClient, name: str) -> list[str]:
    """Remove a deployment and its automations; its runs stay.

    While its runs are under way, remove only the schedules and automations that start new ones, and return the names
    and states of these runs. Without their deployment, Prefect (3.x) would show running ones as running for ever, if
    the deployment has a limit of runs, and would never start runs that wait for a worker, an earlier run or a person.

    Raises:
        ValueError: there is no deployment of this name.
    """
    try:
        deployment = client.read_deployment_by_name(f"{FLOW}/{name}")
    except ObjectNotFound:
        known = ", ".join(each.name for each in registered(client)) or "none"
        raise ValueError(
            f"there is no deployment {name} (known: {known}); name one that `vantage deployments` lists"
        ) from None
    _remove_schedules(client, name)
    for automation in client.read_resource_related_automations(_resource(deployment.id)):
        if starts_on_a_movement(automation):
            client.delete_automation(automation.id)
    if under_way := _under_way(client, deployment.id):
        return under_way
    _remove_automations(client, deployment.id)
    client.delete_deployment(deployment.id)
    return []


def _under_way(client: SyncPrefectClient, deployment: UUID) -> list[str]:
    """Return the names and states of a deployment's runs that have not ended, except those that Prefect removes with it.

    Prefect removes runs that were scheduled and never taken by a worker. ``AwaitingConcurrencySlot``, ``AwaitingRetry``
    and ``Resuming`` are of the type SCHEDULED too, but these runs would stay, and never go on.
    """
    states = [each for each in StateType if each not in TERMINAL_STATES]
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[deployment]),
            state=FlowRunFilterState(
                type=FlowRunFilterStateType(any_=states),
                name=FlowRunFilterStateName(not_any_=["Scheduled", "Late"]),
            ),
        )
    )
    return sorted(f"{run.name} ({run.state_name})" for run in found)


def automations_of(name: str, deployment: UUID) -> list[AutomationCore]:
    """Return three automations: a pipeline that is lost, or never begins, becomes crashed; a crashed pipeline is
    started again.

    A worker may be lost after it has taken a flow run and before the run begins, and a process before its first
    heartbeat.
    A restarted pipeline goes on with its unfinished run, and joins attempts that still run on their workers. Prefect
    refuses a number of ``restarts`` above the flow's limit, which ends a pipeline that crashes each time.
    """
    heartbeat = f"{_EVENT}heartbeat"
    ends = {f"{_EVENT}{state}" for state in ("Crashed", "Suspended", *(name for _, name in STATES.values()))}
    of_deployment = ResourceSpecification(
        {"prefect.resource.role": "deployment", "prefect.resource.id": _resource(deployment)}
    )
    running = f"{_EVENT}Running"
    taken = {f"{_EVENT}{state}" for state in ("Pending", "Submitting")}
    put_back = {
        f"{_EVENT}{state}" for state in ("Scheduled", "Late", "AwaitingConcurrencySlot", "Cancelling")
    }

    def silent(after: set[str], expect: set[str], seconds: float) -> EventTrigger:
        return EventTrigger(
            after=after,
            expect=expect,
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=of_deployment,
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=seconds),
        )

    def becomes_crashed(name: str, description: str, trigger: EventTrigger, message: str) -> AutomationCore:
        return AutomationCore(
            name=f"{FLOW}/{name}",
            description=description,
            trigger=trigger,
            actions=[ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=message)],
            owner_resource=_resource(deployment),
        )

    crashed = EventTrigger(
        expect={f"{_EVENT}Crashed"},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=of_deployment,
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )
    again = RunDeployment(
        source="selected",
        deployment_id=deployment,
        parameters={
            **{field: _parameter(field, default) for field, default in _DEFAULTS.items()},
            "restarts": _parameter("restarts", "0", plus=1),
        },
    )
    return [
        becomes_crashed(
            f"{name}: lost",
            "A pipeline whose process no longer reports counts as crashed.",
            silent({running, heartbeat}, {heartbeat, *ends}, LOST_SECONDS),
            f"no heartbeat for {LOST_SECONDS:g} s",
        ),
        becomes_crashed(
            f"{name}: not begun",
            "A pipeline that a worker has taken, and that never begins, counts as crashed.",
            silent(taken, {running, heartbeat, *put_back, *ends}, NOT_BEGUN_SECONDS),
            f"a worker has taken it, and it has not begun for {NOT_BEGUN_SECONDS:g} s",
        ),
        AutomationCore(
            name=f"{FLOW}/{name}: again",
            description="A crashed pipeline is started again, and goes on with its run.",
            trigger=crashed,
            actions=[again],
            owner_resource=_resource(deployment),
        ),
    ]


_EVENT = "prefect.flow-run."


_DEFAULTS = {
    "recipe": "''",
    "overrides": "[]",
    "workspace": "'.vantage'",
    "run_id": "none",
    "seed": "none",
    "strict": "false",
}
"""Parameter that is passed on → its default, in Jinja, since Prefect does not store omitted parameters."""


def _parameter(field: str, default: str, *, plus: int = 0) -> dict[str, Any]:
    """Return a parameter of the crashed flow run as a Prefect template; a number may be raised."""
    raised = f" + {plus}" if plus else ""
    value = f"{{{{ (flow_run.parameters.get('{field}', {default}){raised}) | tojson }}}}"
    return {"__prefect_kind": "json", "value": {"__prefect_kind": "jinja", "template": value}}


def _remove_schedules(client: SyncPrefectClient, name: str) -> None:
    """Remove the schedules of a deployment, since Prefect would add new schedules to them."""
    try:
        deployment = client.read_deployment_by_name(f"{FLOW}/{name}")
    except ObjectNotFound:
        return
    for schedule in deployment.schedules:
        client.delete_deployment_schedule(deployment.id, schedule.id)


def _remove_automations(client: SyncPrefectClient, deployment: UUID) -> None:
    client.delete_resource_owned_automations(_resource(deployment))


def _resource(deployment: UUID) -> str:
    """Return the name by which Prefect's events and automations refer to a deployment."""
    return f"prefect.deployment.{deployment}"


def as_prefect_yaml(pipeline: Pipeline) -> str:
    """Return the deployment for ``prefect deploy``, as ``prefect.yaml``."""
    schedule = None
    if pipeline.schedule is not None:
        schedule = pipeline.schedule.model_dump(mode="json", exclude_none=True)
    limit = pipeline.strategy and {
        "limit": pipeline.concurrency,
        "collision_strategy": pipeline.strategy.collision_strategy.value,
    }
    deployment = {
        "name": pipeline.name,
        "version": pipeline.version,
        "tags": list(pipeline.tags),
        "entrypoint": ENTRYPOINT,
        "parameters": pipeline.parameters,
        "schedules": [{**schedule, "active": not pipeline.paused}] if schedule else [],
        **({} if limit is None else {"concurrency_limit": limit}),
        "work_pool": {"name": pipeline.pool, "job_variables": pipeline.job_variables},
        "pull": [],
    }
    if pipeline.on_alias is not None:
        trigger = alias_trigger(pipeline.on_alias).model_dump(
            mode="json", exclude={"type", "id"}, exclude_unset=True
        )
        deployment["triggers"] = [{"type": "event", "enabled": True, **trigger}]
    return yaml.safe_dump({"name": FLOW, "deployments": [deployment]}, sort_keys=False, allow_unicode=True)
