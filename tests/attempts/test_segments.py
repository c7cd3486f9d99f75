"""Each change of the number of ranks within a stage is named with its step."""

from pathlib import Path

import pytest

from vantage.attempts.segments import SEGMENTS, Segment, begin_segment, ranks_of, read_segments
from vantage.tasks.training.scratch import write_committed


def attempts(scratch: Path, *begun: tuple[int, int]) -> dict[str, str]:
    """Return what provenance records after attempts that go on from a step with so many ranks."""
    for number, (step, ranks) in enumerate(begun, 1):
        if step:
            write_committed(scratch, step=step, journal_offset=0)
        begin_segment(scratch, attempt=number, ranks=ranks)
    return ranks_of(read_segments(scratch))


@pytest.mark.parametrize(
    ("begun", "world_size", "ranks", "first_change"),
    [
        ([(0, 2)], "2", None, None),
        ([(0, 2), (5, 2)], "2", None, None),
        ([(0, 2), (5, 1)], "1", "2 until step 5, then 1", "1"),
        # earlier, the third attempt forgot this segment
        ([(0, 2), (5, 1), (9, 1)], "1", "2 until step 5, then 1", "1"),
        ([(0, 2), (5, 1), (9, 2)], "2", "2 until step 5, 1 until step 9, then 2", "1"),
        ([(0, 2), (0, 1), (5, 1)], "1", None, None),  # the first attempt left nothing
        ([(0, 2), (5, 4), (5, 1)], "1", "2 until step 5, then 1", "1"),  # nor did the second
        ([(0, 2), (5, 1), (5, 2)], "2", None, None),
    ],
)
def test_every_change_is_named_with_its_step(
    tmp_path: Path,
    begun: list[tuple[int, int]],
    world_size: str,
    ranks: str | None,
    first_change: str | None,
) -> None:
    found = attempts(tmp_path, *begun)
    assert found["world_size"] == world_size
    assert found.get("ranks") == ranks
    assert found.get("not_bitwise") == (
        None if first_change is None else f"begun on 2 processes, continued on {first_change}"
    )


def test_a_stage_of_an_earlier_version_has_none(tmp_path: Path) -> None:
    assert ranks_of(read_segments(tmp_path)) == {}
    (tmp_path / SEGMENTS).write_text('[{"attempt": 1, "from_step": -3, "ranks": "2"}]')
    assert read_segments(tmp_path) == ()
    write_committed(tmp_path, step=7, journal_offset=0)
    begin_segment(tmp_path, attempt=2, ranks=1)
    assert read_segments(tmp_path) == (Segment(attempt=2, from_step=7, ranks=1),)
