"""The automation that starts a deployment when an alias of a registered model moves."""

import re
from datetime import timedelta
from uuid import UUID

from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from vantage.flows.publishing.announcing import MOVE_ID, MOVED, alias_resource
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.sources import Registered, model_source

ON_TAG = "on:"
"""Prefix of a deployment's tag that names the alias which starts it."""
_REPEATED = timedelta(days=1)
"""Time in which a repeated event starts nothing; Prefect keeps a row for each movement twice as long."""


def checked_alias(text: str, recipe: ResolvedRecipe) -> str:
    """Return the ``NAME@ALIAS`` of ``--on models:/NAME@ALIAS``.

    Raises:
        ValueError: the text names no alias, or the recipe itself moves the alias, so that each run would start the next
            one.
    """
    source = model_source(text)
    if not isinstance(source, Registered) or source.alias is None or not re.fullmatch(source.PATTERN, text):
        raise ValueError(
            f"--on={text[:200]!r} is no alias of a registered model; write --on 'models:/NAME@ALIAS', for example models:/judge@champion"
        )
    target = f"{source.name}@{source.alias}"
    if any(each.target == target for each in recipe.publish):
        raise ValueError(
            f"--on={text}: recipe {recipe.recipe} publishes {target} itself, so each of its runs would start the next one; "
            "name an alias that another recipe moves"
        )
    return target


def alias_trigger(target: str) -> EventTrigger:
    """Return the trigger that fires once for each movement of the alias, even if its event arrives twice."""
    return EventTrigger(
        expect={MOVED},
        match=ResourceSpecification({"prefect.resource.id": alias_resource(target)}),
        for_each={MOVE_ID},
        posture=Posture.Reactive,
        threshold=1,
        within=_REPEATED,
    )


def alias_automation(flow: str, name: str, deployment: UUID, target: str) -> AutomationCore:
    """Return the automation that starts the deployment, with its own parameters, when the alias moves."""
    return AutomationCore(
        name=f"{flow}/{name}: on {target}",
        description=f"The pipeline starts when the alias {target} moves.",
        trigger=alias_trigger(target),
        actions=[RunDeployment(source="selected", deployment_id=deployment)],
        owner_resource=f"prefect.deployment.{deployment}",
    )


def starts_on_a_movement(automation: AutomationCore) -> bool:
    """Return whether an automation starts something when an alias moves."""
    return MOVED in getattr(automation.trigger, "expect", ())


def alias_of(tags: list[str] | None) -> str | None:
    """Return the alias that starts the deployment with these tags; None: no alias does."""
    return next((tag.removeprefix(ON_TAG) for tag in tags or [] if tag.startswith(f"{ON_TAG}")), None)
