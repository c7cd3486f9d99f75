"""The drawing of the lineage: nothing lies on anything else, and every edge is there."""

import re
import xml.etree.ElementTree as ET

import pytest

from vantage.review.reports.column import column
from vantage.review.reports.gathered import Step
from vantage.review.reports.graph import HEIGHT, WIDTH, _depths, _rows, lineage


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


def drawn(steps: list[Step]) -> str:
    drawing = lineage(steps)
    assert drawing is not None
    return drawing


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
    "steps", [QUICKSTART, [step(f"s{i}", *(f"s{j}" for j in range(i))) for i in range(9)]]
)
def test_no_box_lies_on_another_and_all_are_within(steps: list[Step]) -> None:
    drawing = drawn(steps)
    places = boxes(drawing)
    assert len(places) == len(steps)
    for number, (x, y) in enumerate(places):
        for other_x, other_y in places[:number]:
            assert abs(x - other_x) >= WIDTH or abs(y - other_y) >= HEIGHT
    left, top, width, height = map(float, re.findall(r'viewBox="(\S+) (\S+) (\S+) (\S+)"', drawing)[0])
    assert all(left <= x and x + WIDTH <= left + width for x, _ in places)
    assert all(top <= y and y + HEIGHT <= top + height for _, y in places)


def test_its_label_says_what_is_drawn_and_names_are_text() -> None:
    drawing = drawn([step("a"), step("b", "a", "a", status="gate_closed"), step("c", "gone")])
    assert 'aria-label="Lineage: a (completed); b (gate closed) reads a; c (completed) reads gone"' in drawing
    assert drawing.count("<path") == 1
    odd = drawn([step('<script>"&')])
    assert "<script" not in odd
    ET.fromstring(odd)


def test_steps_that_read_each_other_are_drawn_all_the_same() -> None:
    """A record that someone edited."""
    assert len(boxes(drawn([step("a", "b"), step("b", "a")]))) == 2


def test_a_run_without_steps_has_an_empty_drawing() -> None:
    assert boxes(drawn([])) == boxes(column([])) == []


def test_what_is_too_wide_for_a_screen_is_not_drawn_in_rows() -> None:
    assert lineage([step(f"s{i}", *(f"s{j}" for j in range(i))) for i in range(30)]) is None
    assert lineage([step(f"s{i}", *([f"s{i - 1}"] if i else [])) for i in range(30)])


def edges_of(drawing: str, names: list[str]) -> set[tuple[str, str]]:
    """Read back from the lines: each goes out of one box, and comes in at the height of its dots, to others."""
    root, found = ET.fromstring(drawing), set()
    tops = [y for _, y in boxes(drawing)]

    def at(height: float) -> str:
        [name] = [name for name, top in zip(names, tops, strict=True) if top < height < top + HEIGHT]
        return name

    for path in root.iter("path"):
        out, *into = re.findall(r"M\S+ (\d+)", path.get("d", ""))
        found |= {(at(float(out)), at(float(each))) for each in into}
    return found


@pytest.mark.parametrize("count", [0, 30])
def test_in_a_column_every_edge_is_a_line_and_none_lies_on_another(count: int) -> None:
    steps = QUICKSTART if not count else [step(f"s{i}", *(f"s{j}" for j in range(i))) for i in range(count)]
    drawing = column(steps)
    assert edges_of(drawing, [each.name for each in steps]) == {
        (read, each.name) for each in steps for _, read in each.reads
    }
    spans = [
        (float(x), float(out), float(end))
        for out, x, end in re.findall(r"M\d+ (\d+)H([\d.]+)V(\d+)", drawing)
    ]
    for number, (x, first, last) in enumerate(spans):
        for other_x, other_first, other_last in spans[:number]:
            assert x != other_x or last < other_first or other_last < first
    _, _, width, _ = map(float, re.findall(r'viewBox="(\S+) (\S+) (\S+) (\S+)"', drawing)[0])
    assert width <= 320, "a phone shows it without scrolling"
    assert max(x for x, _, _ in spans) < width


def test_a_name_ends_within_its_box() -> None:
    """East Asian letters are twice as wide: of forty, ten are there and a sign that there are more."""
    assert "<text" in drawn([step("short")]) and "textLength" not in drawn([step("short")])
    assert f'textLength="{WIDTH - 20}"' in drawn([step("data.demonstrations")])
    assert f">{'名' * 10}…<" in drawn([step("名" * 40)])
