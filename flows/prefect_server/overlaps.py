"""Cancel earlier runs of a deployment when a new one starts; Prefect itself lets the new one wait, or cancels it."""

from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType

CANCELS_EARLIER = "on-overlap:cancel"
"""Tag of a deployment whose new runs cancel earlier ones; its flow runs also have it."""
_WITHOUT_END = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
"""States of runs that are under way or late; after an outage, a worker may begin late runs after newer ones."""


async def cancel_earlier(flow_run_id: str) -> list[str]:
    """Ask the earlier flow runs of this one's deployment to save and end, and cancel late ones; returns their names.

    Flow runs are ordered by their scheduled start, and by their ids if these are equal.
    """
    async with get_client() as client:
        this = await client.read_flow_run(UUID(flow_run_id))
        if this.deployment_id is None:
            return []
        others = await client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[this.deployment_id])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_WITHOUT_END))
            ),
        )
        earlier = [
            each
            for each in others
            if (each.expected_start_time, each.id) < (this.expected_start_time, this.id)
        ]
        for each in earlier:
            why = f"flow run {this.name} of the same deployment begins"
            has_begun = each.state_type != StateType.SCHEDULED
            cancelled = State(type=StateType.CANCELLED, message=why)
            asked = State(type=StateType.CANCELLING, name="Cancelling", message=why)
            await client.set_flow_run_state(each.id, asked if has_begun else cancelled)
        return [each.name for each in earlier]
