"""In the drawing of the lineage nothing overlaps, and every edge is there."""

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from vantage.review.reports.column import column, down
from vantage.review.reports.gathered import Step
from vantage.review.reports.graph import HEIGHT, WIDTH, lineage
from vantage.review.reports.layers import depths
from vantage.review.reports.reduced import is_junction, reduced
from vantage.schemas.loading.recipe_file import load_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.steps import dependencies, ordered_steps
from vantage.schemas.sweep import load_sweep

RECIPES = Path(__file__).parents[3] / "recipes"


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


def test_each_step_is_below_all_that_it_reads_and_a_source_just_above_its_reader() -> None:
    depth = depths(reduced(QUICKSTART))
    assert [depth[each.name] for each in QUICKSTART] == [0, 0, 1, 1, 2, 3, 4, 5]


def test_a_line_that_repeats_a_longer_way_is_left_out() -> None:
    """The policy reads sft, value, reward and data.a. All but value are above value already, so one line is left."""
    assert dict(reduced(QUICKSTART).above) == {
        "model": (),
        "data.a": (),
        "data.b": (),
        "sft": ("model", "data.a"),
        "reward": ("sft", "data.b"),
        "value": ("reward",),
        "policy": ("value",),
        "evaluation": ("policy",),
    }


def test_steps_that_read_the_same_share_a_junction() -> None:
    steps = [*map(step, "abc"), step("d", "a", "b"), step("e", "a", "b", "c"), step("f", "b", "a")]
    graph = reduced(steps)
    [joint] = [name for name in graph.above if is_junction(name)]
    assert graph.above[joint] == ("a", "b")
    assert [graph.above[name] for name in "def"] == [(joint,), (joint, "c"), (joint,)]


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
    """Someone edited the record, so that two steps read each other."""
    assert len(boxes(drawn([step("a", "b"), step("b", "a")]))) == 2


def test_a_run_without_steps_has_an_empty_drawing() -> None:
    assert boxes(drawn([])) == boxes(column([])) == []


def test_what_is_too_wide_for_a_screen_is_not_drawn_in_rows() -> None:
    assert lineage([step(f"s{i}") for i in range(30)]) is None
    assert lineage([step(f"s{i}", *([f"s{i - 1}"] if i else [])) for i in range(30)])


SHARED = [
    *map(step, ("model", "data.a", "data.b")),
    *(step(f"value{i}", "model", "data.a", "data.b") for i in range(4)),
    *(step(f"policy{i}", f"value{i}", "model", "data.b") for i in range(4)),
    *(step(f"evaluation{i}", f"policy{i}", "model", "data.b") for i in range(4)),
]


def _loaded(file: Path, overrides: list[str]) -> dict[str, Recipe]:
    if "\narms:" in file.read_text():
        return load_sweep(str(file), overrides).recipes
    return {"": load_recipe(str(file), overrides, needs_files=False)}


def recipes() -> Iterator[tuple[str, list[Step]]]:
    """Yield every built-in recipe and arm of a sweep; sources that a recipe leaves open are filled, which changes no
    lineage.
    """
    for file in sorted(RECIPES.glob("*.yaml")):
        for name, recipe in _filled(file, []).items():
            reads = dependencies(recipe)
            yield f"{file.stem} {name}", [step(each, *reads[each].values()) for each in ordered_steps(recipe)]


def _filled(file: Path, overrides: list[str]) -> dict[str, Recipe]:
    try:
        return _loaded(file, overrides)
    except RecipeError as error:
        left_open = dict.fromkeys(re.findall(r"--set ([\w.]+)=…", str(error)))
        if not left_open:
            raise
    sources = [
        f"{name}={'builtin:tiny' if name.startswith('model') else 'nowhere.jsonl'}" for name in left_open
    ]
    return _filled(file, [*overrides, *sources])


def segments(drawing: str) -> list[list[tuple[float, float]]]:
    """Read each line back as points, a curve as seventeen of them."""
    found = []
    for path in ET.fromstring(drawing).iter("path"):
        points: list[tuple[float, float]] = []
        for letter, numbers in re.findall("([MCHV])([^MCHV]*)", path.get("d", "")):
            values = [float(each) for each in numbers.split()]
            if letter == "M":
                points.append((values[0], values[1]))
            elif letter == "H":
                points.append((values[0], points[-1][1]))
            elif letter == "V":
                points.append((points[-1][0], values[0]))
            else:
                points += bezier(points[-1], *zip(values[::2], values[1::2], strict=True))
        found.append(points)
    return found


def bezier(*corners: tuple[float, float]) -> list[tuple[float, float]]:
    weights = [
        ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3) for t in (i / 17 for i in range(1, 18))
    ]
    return [
        tuple(sum(w * corner[axis] for w, corner in zip(of, corners, strict=True)) for axis in (0, 1))  # type: ignore[misc]
        for of in weights
    ]


def crossings(drawing: str) -> int:
    """Return the number of pairs of lines of which one goes from one side of the other to its other side.

    Of two pieces, each has its ends on both sides of the other. Pieces that touch or share a way do not cross.
    """

    def side(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
        area = (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
        return 0.0 if abs(area) < 1e-6 else area

    def cross(
        a: tuple[float, float], b: tuple[float, float], c: tuple[float, float], d: tuple[float, float]
    ) -> bool:
        return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0

    lines = [list(itertools.pairwise(points)) for points in segments(drawing)]
    return sum(
        any(cross(*one, *other) for one, other in itertools.product(first, second))
        for first, second in itertools.combinations(lines, 2)
    )


def test_lines_that_cross_are_counted() -> None:
    """The function that counts crossings for these tests counts two diagonals, and not two lines that only meet."""

    def drawn_lines(*paths: str) -> str:
        return f"<svg>{''.join(f'<path d={chr(34)}{each}{chr(34)}/>' for each in paths)}</svg>"

    assert crossings(drawn_lines("M0 0C0 50 100 50 100 100", "M100 0C100 50 0 50 0 100")) == 1
    assert crossings(drawn_lines("M0 0C0 50 100 50 100 100", "M0 0C0 50 50 50 50 100")) == 0
    assert crossings(drawn_lines("M0 5H10V20", "M5 0V10")) == 1


def test_no_lines_cross_and_none_is_missing() -> None:
    """Followed upwards, the lines of each step lead to exactly the steps that it is made of by the recipe."""
    named = [("by hand", QUICKSTART), ("shared", SHARED), *recipes()]
    assert len(named) > 20
    for name, steps in named:
        for drawing in (drawn(steps), column(steps)):
            assert crossings(drawing) == 0, name
            assert len(boxes(drawing)) == len(steps), name
        graph = reduced(steps)
        for each in steps:
            reads = {one.name: [read for _, read in one.reads] for one in steps}
            above = {one for one in made_of(each.name, graph.above) if not is_junction(one)}
            assert made_of(each.name, reads) == above, (name, each.name)


def made_of(name: str, above: Mapping[str, Sequence[str]]) -> set[str]:
    return {found for each in above[name] for found in ({each} | made_of(each, above))}


def test_in_a_column_lines_begin_and_end_at_their_boxes() -> None:
    drawing = column(QUICKSTART)
    tops = [y for _, y in boxes(drawing)]
    names = [name for name in down(reduced(QUICKSTART)) if not is_junction(name)]
    found = set()
    for points in segments(drawing):
        upper, lower = (
            next(name for name, top in zip(names, tops, strict=True) if top <= y <= top + HEIGHT)
            for y in (points[0][1], points[-1][1])
        )
        found.add((upper, lower))
    assert found == {(read, name) for name, of in reduced(QUICKSTART).above.items() for read in of}


def test_a_column_fits_on_a_phone() -> None:
    for steps in (QUICKSTART, SHARED, [step(f"s{i}", *(f"s{j}" for j in range(i))) for i in range(30)]):
        left, _, width, _ = map(float, re.findall(r'viewBox="(\S+) (\S+) (\S+) (\S+)"', column(steps))[0])
        assert width <= 320, "a phone shows it without scrolling"
        assert all(left <= x <= left + width for points in segments(column(steps)) for x, _ in points)


def test_a_name_ends_within_its_box() -> None:
    """East Asian letters are twice as wide: of forty, ten are there and a sign that there are more."""
    assert "<text" in drawn([step("short")]) and "textLength" not in drawn([step("short")])
    assert f'textLength="{WIDTH - 20}"' in drawn([step("data.demonstrations")])
    assert f">{'名' * 10}…<" in drawn([step("名" * 40)])
