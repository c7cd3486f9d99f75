"""A run is found by the names that people give it."""

from pathlib import Path

import pytest

from tests.support.every import every
from vantage.runs.run_ids import find_run, run_ids
from vantage.runs.workspace import RunError, Workspace

RUNS = ("0001-quickstart-59aaf7", "0002-instruct-0a1b2c", "0010-quickstart-59aaf8", "1000-quickstart-000000")


@pytest.fixture
def place(tmp_path: Path) -> Workspace:
    """Return a workspace with four runs, of which nothing but the names is read, and something else beside them."""
    place = Workspace(tmp_path)
    for name in (*RUNS, ".creating-0011-x-000000", "notes"):
        (place.runs / name).mkdir(parents=True)
    return place


@every(
    "named, run_id",
    [
        ("0001-quickstart-59aaf7", "0001-quickstart-59aaf7"),
        ("0001", "0001-quickstart-59aaf7"),
        ("1", "0001-quickstart-59aaf7"),
        ("0002-i", "0002-instruct-0a1b2c"),
        ("10", "0010-quickstart-59aaf8"),
        ("001", "0001-quickstart-59aaf7"),
        ("0010-quick", "0010-quickstart-59aaf8"),
        ("1000", "1000-quickstart-000000"),
        ("latest", "1000-quickstart-000000"),
    ],
)
def test_one_run_is_found(named: str, run_id: str, place: Workspace) -> None:
    assert find_run(place, named) == run_id


@every(
    "named, said",
    [
        ("00", "00 fits 0001-quickstart-59aaf7, 0002-instruct-0a1b2c, 0010-quickstart-59aaf8; give more"),
        ("7", "there is no run 7 in"),
        ("quickstart", "there is no run quickstart in"),
        ("../../etc", "is not one of Vantage's"),
        ("", "is not one of Vantage's"),
        ("0001*", "is not one of Vantage's"),
        ("LATEST", "is not one of Vantage's"),
    ],
)
def test_none_or_several_are_refused(named: str, said: str, place: Workspace) -> None:
    with pytest.raises(RunError) as refused:
        find_run(place, named)
    assert said in str(refused.value)


def test_an_empty_workspace_has_no_latest_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run in .* yet"):
        find_run(Workspace(tmp_path / "nothing"), "latest")


def test_the_latest_run_has_the_largest_number_however_many_digits(place: Workspace) -> None:
    for name in ("9999-quickstart-000000", "10000-quickstart-000000"):
        (place.runs / name).mkdir()
    assert find_run(place, "latest") == "10000-quickstart-000000"
    assert run_ids(place) == [*RUNS, "9999-quickstart-000000", "10000-quickstart-000000"]
