"""Register the deployment that makes attempts runnable on a work pool."""

import re
from collections.abc import Iterator
from contextlib import suppress

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.utilities.callables import parameter_schema

from vantage.flows.prefect_server.server import configured_url, is_healthy
from vantage.runs.findings import Finding
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.steps import pool_of

_NAME = re.compile(r"[^/%&<>\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,200}")
"""Names that Prefect and its database take."""
ATTEMPT = "vantage-attempt"
ENTRYPOINT = "vantage.flows.pools.attempt_flow.attempt"
"""Entrypoint, imported by name on the worker, which has Vantage installed."""
FORMER_ENTRYPOINTS = {
    "flows.pools.attempt_flow.attempt": ENTRYPOINT,
    "flows.pipeline.pipeline": "vantage.flows.pipeline.pipeline",
}
"""Entrypoints from before our packages had a common name → the present ones."""


class UnknownPool(ValueError):
    """Prefect has no such work pool; the message explains how to make one."""


def attempt_deployment(pool: str) -> str:
    """Return the name of the deployment of attempts on a pool."""
    return f"{ATTEMPT}/{pool}"


def check_name(option: str, given: str, what: str) -> None:
    """Raise ValueError if Prefect or its database does not accept an option's name."""
    if not _NAME.fullmatch(given):
        raise ValueError(
            f"{option}={given[:100]!a} is no name of a {what}: 1 to 200 printable characters without / % & < >; name another"
        )


def require_pool(client: SyncPrefectClient, pool: str, *, field: str = "resources.pool") -> None:
    """Raise UnknownPool if Prefect has no such work pool; ``field``: the field in which the user has named it."""
    try:
        client.read_work_pool(pool)
    except ObjectNotFound:
        known = ", ".join(sorted(each.name for each in client.read_work_pools())) or "none"
        raise UnknownPool(
            f"{field}={pool} is no work pool of Prefect (known: {known}); start a worker with "
            f"`vantage worker --pool {pool}`, which creates it, or correct the name"
        ) from None


def require_pools(recipe: Recipe) -> None:
    """Refuse a recipe whose pools do not exist, before anything runs.

    Raises:
        ValueError: no Prefect server is configured, or it has no such pool (``UnknownPool``).
    """
    pools = sorted({pool for step in recipe.stages if (pool := pool_of(recipe, step))})
    if not pools:
        return
    if configured_url() is None:
        raise ValueError(
            f"resources.pool={pools[0]} needs a Prefect server that workers reach too; set PREFECT_API_URL "
            "(`make servers` starts one)"
        )
    with get_client(sync_client=True) as client:
        for pool in pools:
            require_pool(client, pool)


def create_pool(client: SyncPrefectClient, pool: str) -> bool:
    """Create a work pool of processes if there is none of this name; returns whether it is new."""
    try:
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    except ObjectAlreadyExists:
        return False
    return True


def with_former_entrypoints(client: SyncPrefectClient) -> list[DeploymentResponse]:
    """Return the deployments that no worker with this version of Vantage can import, sorted by name."""
    deployments = client.read_deployments()
    return sorted(
        (each for each in deployments if each.entrypoint in FORMER_ENTRYPOINTS), key=lambda each: each.name
    )


def deployment_findings() -> Iterator[Finding]:
    """Yield the lines of ``vantage doctor`` about the deployments of the configured Prefect server; nothing if it does
    not answer."""
    url = configured_url()
    if url is None or not is_healthy(url):
        return
    with get_client(sync_client=True) as client:
        former = with_former_entrypoints(client)
    if former:
        names = ", ".join(each.name for each in former)
        remedy = "start `vantage worker` on their pools, which renews them, or deploy them again with `vantage deploy`"
        yield Finding(
            "deployments", "warning", f"{names}: registered by an earlier version of Vantage; {remedy}"
        )
    else:
        yield Finding("deployments", "fine", "workers with this version can import all of them")


def renew_entrypoints(client: SyncPrefectClient, pool: str) -> list[str]:
    """Point the deployments of a pool to this version's entrypoints; returns their names.

    Flow runs that wait on the pool are then imported from the new entrypoint.
    """
    of_pool = [each for each in with_former_entrypoints(client) if each.work_pool_name == pool]
    for deployment in of_pool:
        renewed = DeploymentUpdate(entrypoint=FORMER_ENTRYPOINTS[str(deployment.entrypoint)])
        client.update_deployment(deployment.id, renewed)
    return [each.name for each in of_pool]


def deploy_attempts(client: SyncPrefectClient, pool: str) -> None:
    """Register the flow of attempts on the pool; an existing registration of this version stays unchanged.

    A deleted pool leaves its deployment without a pool, even if a pool of the same name is made again.
    """
    from vantage.flows.pools.attempt_flow import attempt

    registered, parameters = None, parameter_schema(attempt).model_dump()
    with suppress(ObjectNotFound):
        registered = client.read_deployment_by_name(attempt_deployment(pool))
    is_ours = registered is not None and (
        registered.work_pool_name,
        registered.entrypoint,
        # the flow of an earlier version accepts a request only as an object
        registered.parameter_openapi_schema,
    ) == (pool, ENTRYPOINT, parameters)
    if not is_ours:
        require_pool(client, pool)
        client.create_deployment(
            client.create_flow(attempt),
            pool,
            entrypoint=ENTRYPOINT,
            work_pool_name=pool,
            parameter_openapi_schema=parameters,
            description="One attempt at a stage of a Vantage run, started by the run.",
            tags=["vantage"],
        )
