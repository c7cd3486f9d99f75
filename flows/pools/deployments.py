"""The deployment that makes attempts runnable on a work pool."""

from contextlib import suppress

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.utilities.callables import parameter_schema

from flows.prefect_server.server import configured_url
from schemas.recipe.recipe import Recipe
from schemas.steps import pool_of

ATTEMPT = "vantage-attempt"
ENTRYPOINT = "flows.pools.attempt_flow.attempt"
"""Imported by name on the worker, which has Vantage installed."""


class UnknownPool(ValueError):
    """Prefect has no such work pool; the message says how to make one."""


def attempt_deployment(pool: str) -> str:
    """Name of the deployment of attempts on a pool."""
    return f"{ATTEMPT}/{pool}"


def require_pool(client: SyncPrefectClient, pool: str) -> None:
    """Raise UnknownPool if Prefect has no such work pool."""
    try:
        client.read_work_pool(pool)
    except ObjectNotFound:
        known = ", ".join(sorted(each.name for each in client.read_work_pools())) or "none"
        raise UnknownPool(
            f"resources.pool={pool} is no work pool of Prefect (known: {known}); start a worker with "
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


def deploy_attempts(client: SyncPrefectClient, pool: str) -> None:
    """Register the flow of attempts on the pool; what is registered there already stays as it is.

    A pool that was deleted leaves its deployment without one, also when a pool of the same name is made again.
    """
    from flows.pools.attempt_flow import attempt

    registered = None
    with suppress(ObjectNotFound):
        registered = client.read_deployment_by_name(attempt_deployment(pool))
    if registered is None or registered.work_pool_name != pool:
        require_pool(client, pool)
        client.create_deployment(
            client.create_flow(attempt),
            pool,
            entrypoint=ENTRYPOINT,
            work_pool_name=pool,
            parameter_openapi_schema=parameter_schema(attempt).model_dump(),
            description="One attempt at a stage of a Vantage run, started by the run.",
            tags=["vantage"],
        )
