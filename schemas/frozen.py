"""The one base of every noun: immutable, and strict about names."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A value that never changes after it was made and refuses fields that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)
