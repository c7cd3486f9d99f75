"""The drawing of the lineage: nothing lies on anything else, and every edge is there."""

import re
import xml.etree.ElementTree as ET

import pytest

from flows.reports.gathered import Step
from flows.reports.graph import HEIGHT, WIDTH, _depths, _rows, lineage


def step(name: str, *reads: str, status: str = "completed") -> Step:
    return Step(name, "sft", status, None, 0.0, tuple(("role", read) for read in reads), "")


QUICKSTART = [
    *map(step, ("model", "data.a", "data.b")),
    step("sft", "model", "data.a"),
    step("reward", "sft", "data.b"),
    step("value", "sft", "reward", "data.a"),
    step("policy", "sft", "value", "reward", "data.a"),
    step("evaluation", "policy", "sft", "data.a"),
]


def boxes(drawing: str) -> list[tuple[float, float]]:
    root = ET.fromstring(drawing)
    return [(float(each.get("x", 0)), float(each.get("y", 0))) for each in root.iter("rect")]


def test_each_step_is_below_all_that_it_reads() -> None:
    depth = _depths({each.name: each for each in QUICKSTART})
    assert [depth[each.name] for each in QUICKSTART] == [0, 0, 0, 1, 2, 3, 4, 5]


def test_a_line_that_passes_rows_has_a_place_of_its_own_in_each() -> None:
    rows, lines = _rows({each.name: each for each in QUICKSTART})
    passed = [place for row in rows for place in row if place.step is None]
    # spans less 1: data.b→reward 1; sft→value 1, data.a→value 2; policy: sft 2, reward 1, data.a 3; evaluation: sft 3, data.a 4
    assert len(passed) == 1 + 1 + 2 + 2 + 1 + 3 + 3 + 4
    assert len(lines) == 2 + 2 + 3 + 4 + 3


@pytest.mark.parametrize(
    "steps", [QUICKSTART, [step(f"s{i}", *(f"s{j}" for j in range(i))) for i in range(12)]]
)
def test_no_box_lies_on_another_and_all_are_within(steps: list[Step]) -> None:
    drawing = lineage(steps)
    places = boxes(drawing)
    assert len(places) == len(steps)
    for number, (x, y) in enumerate(places):
        for other_x, other_y in places[:number]:
            assert abs(x - other_x) >= WIDTH or abs(y - other_y) >= HEIGHT
    left, top, width, height = map(float, re.findall(r'viewBox="(\S+) (\S+) (\S+) (\S+)"', drawing)[0])
    assert all(left <= x and x + WIDTH <= left + width for x, _ in places)
    assert all(top <= y and y + HEIGHT <= top + height for _, y in places)


def test_its_label_says_what_is_drawn_and_names_are_text() -> None:
    drawing = lineage([step("a"), step("b", "a", "a", status="gate_closed"), step("c", "gone")])
    assert 'aria-label="Lineage: a (completed); b (gate closed) reads a; c (completed) reads gone"' in drawing
    assert drawing.count("<path") == 1
    odd = lineage([step('<script>"&')])
    assert "<script" not in odd
    ET.fromstring(odd)


def test_steps_that_read_each_other_are_drawn_all_the_same() -> None:
    """A record that someone edited."""
    assert len(boxes(lineage([step("a", "b"), step("b", "a")]))) == 2


def test_a_run_without_steps_has_an_empty_drawing() -> None:
    ET.fromstring(lineage([]))
