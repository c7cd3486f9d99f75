"""The table of growth has exponents, and numbers of positions, that equal hand-worked ones."""

from benchmarks.growth import AXES, Measured, Size, exponents, measure, table


def test_the_exponent_of_a_square_is_two() -> None:
    assert exponents([1, 2, 8], [3.0, 12.0, 192.0]) == ["", "2.00", "2.00"]


def test_each_axis_changes_its_own_field_alone() -> None:
    for axis, sizes in AXES.items():
        others = {
            tuple(value for name, value in vars(size).items() if name not in (axis, "rows")) for size in sizes
        }
        assert len(others) == 1
        assert len({getattr(size, axis) for size in sizes}) == len(sizes)


def test_rows_of_one_length_have_no_padding() -> None:
    assert measure(Size(rows=2, length=8), repeats=1).positions == 16


def test_a_prompt_of_a_group_is_computed_once() -> None:
    """Eight rows of 64 + 64 tokens that share a prompt take 64 + 8 × 64 positions, in place of 8 × 128."""
    assert measure(Size(rows=8, group=8, length=128), repeats=1).positions == 64 + 8 * 64


def test_a_row_of_the_table() -> None:
    found = [Measured(1.0, 2.0, 64, 10.0, 20.0), Measured(4.0, 2.0, 128, 11.0, 21.0)]
    assert table("length", [Size(length=32), Size(length=64)], found).splitlines()[-1] == (
        "| 64 | 4.000 | 2.00 | 128 | 11 | 2.000 | 0.00 | 21 |"
    )
