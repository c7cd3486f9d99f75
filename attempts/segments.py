"""Record how many ranks computed each part of a stage: a resumed stage may have more ranks or fewer.

The last bits of the weights depend on the number of ranks, so the parts belong to the artifact's provenance. They are
stored beside the stage's checkpoints and are copied with them to another machine.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from vantage.schemas.frozen import Frozen
from vantage.storage.durable_files import replace_file
from vantage.tasks.training.scratch import read_committed

SEGMENTS = "segments.json"
"""File in a stage's scratch folder."""

_Count = Annotated[int, Field(ge=0, le=2**62, strict=True)]


class Segment(Frozen):
    """The steps that one attempt computes."""

    attempt: _Count
    from_step: _Count
    """Step of the checkpoint from which the attempt went on; 0: it had none."""
    ranks: Annotated[int, Field(ge=1, le=2**31, strict=True)]


_SEGMENTS: TypeAdapter[tuple[Segment, ...]] = TypeAdapter(tuple[Segment, ...])


def begin_segment(scratch: Path, *, attempt: int, ranks: int) -> None:
    """Record that an attempt goes on from the newest checkpoint. Later steps are computed again."""
    step, _ = read_committed(scratch)
    kept = [each for each in read_segments(scratch) if each.from_step < step and each.attempt < attempt]
    segments = (*kept, Segment(attempt=attempt, from_step=step, ranks=ranks))
    replace_file(scratch / SEGMENTS, _SEGMENTS.dump_json(segments))


def read_segments(scratch: Path) -> tuple[Segment, ...]:
    """Return the parts so far, in order; empty for a stage that an earlier version began."""
    try:
        return _SEGMENTS.validate_json((scratch / SEGMENTS).read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return ()


def ranks_of(segments: Sequence[Segment]) -> dict[str, str]:
    """Return the entries of the parts in a stage's provenance: the newest number of ranks, and all of them if they
    differ."""
    if not segments:
        return {}
    changes = [segments[0]]
    for segment in segments[1:]:
        if segment.ranks != changes[-1].ranks:
            changes.append(segment)
    last = changes[-1].ranks
    if len(changes) == 1:
        return {"world_size": str(last)}
    until = [f"{each.ranks} until step {after.from_step}" for each, after in pairwise(changes)]
    return {
        "world_size": str(last),
        "ranks": f"{', '.join(until)}, then {last}",
        "not_bitwise": f"begun on {changes[0].ranks} processes, continued on {changes[1].ranks}",
    }
