"""Times in records: milliseconds since 1970, within the years that Python's dates have."""

from typing import Annotated

from pydantic import Field

LATEST = 253_402_300_799_999
"""The end of the year 9999; Python's dates end there."""
_EARLIEST = -62_135_596_800_000
"""The beginning of the year 1, since a machine's clock may be wrong."""

Milliseconds = Annotated[int, Field(ge=_EARLIEST, le=LATEST)]
"""Milliseconds since 1970. A damaged record with another number is refused when it is read, not when it is shown."""
