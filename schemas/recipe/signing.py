"""``sign:`` of a recipe: the key with which the artifacts of its runs are signed. It names the key, and never holds one."""

from typing import Annotated

from pydantic import Field, StringConstraints

from vantage.schemas.frozen import Frozen, rule


class Signing(Frozen):
    """The private key with which every artifact of a run is signed; its password is in ``VANTAGE_KEY_PASSWORD``."""

    key: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """File of the private key, as ``vantage keys new`` writes it. In no stage key."""
    key_variable: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] | None = None
    """Environment variable that holds the path of that file, where machines keep it in different places."""

    @rule
    def _one_place(self) -> None:
        if (self.key is None) == (self.key_variable is None):
            raise ValueError(
                "exactly one of key (a file) and key_variable (an environment variable) is needed"
            )
