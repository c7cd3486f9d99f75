"""The messages that a run sends to people."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import MAX_NAMED, Switch, is_off

NotifyEvent = Literal["gate_closed", "failed", "waiting_approval", "ended"]
"""``gate_closed``: a stage's gate closed, or a guard of it fired. ``failed``: a stage failed for good. ``waiting_approval``: a gate or an alias
waits for a person. ``ended``: the run ended, however."""

_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,126}$"


class Notify(Frozen):
    """Messages by webhook, e-mail, Slack and others (Apprise)."""

    urls: Annotated[
        tuple[Annotated[str, StringConstraints(pattern=_VARIABLE)], ...],
        Field(min_length=1, max_length=MAX_NAMED),
    ]
    """Names of environment variables. Each holds an address of Apprise (``slack://…``, ``mailtos://…``, ``json://…``), or
    several with spaces between them. An address contains secrets, so a recipe never holds one."""
    on: Annotated[tuple[NotifyEvent, ...], Field(min_length=1, max_length=4)] = (
        "gate_closed",
        "failed",
        "waiting_approval",
        "ended",
    )
    """Events for which a message is sent."""
    reused: Switch = Field(False, exclude_if=is_off)
    """Send messages also for runs that computed nothing, because all of their artifacts were in the store."""

    @field_validator("urls", mode="before")
    @classmethod
    def _are_names_of_variables(cls, value: Any) -> Any:
        # The value is not repeated in the message: it may be an address with its secret.
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(each, str) or not re.match(_VARIABLE, each) or value is each:
                raise ValueError(
                    "is no list of names of environment variables; put each address into a variable, "
                    "because it contains secrets, and give the variable's name: urls: [SLACK_URL]"
                )
        return value
