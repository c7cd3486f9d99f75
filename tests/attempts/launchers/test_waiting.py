"""A stage that waits for the nodes of a Ray cluster shows what it waits for, and how many nodes it takes; Ray is not needed."""

import time
from pathlib import Path
from typing import Any

import pytest

from vantage.attempts.launchers import waiting
from vantage.attempts.launchers.waiting import NodesAsked, Waiting, what_it_waits_for
from vantage.runs.console import facts_of
from vantage.schemas.recipe.stage import Resources
from vantage.tasks.training.progress import StageProgress, read_progress
from vantage.tasks.training.scratch import PROGRESS, write_committed


def test_a_waiting_stage_shows_what_for_since_when_and_from_which_step_it_will_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = StageProgress(
        phase="running",
        step=9,
        total=40,
        metrics={"loss": 1.0},
        tokens_per_second=9.0,
        started=1.0,
        updated=2.0,
    )
    (tmp_path / PROGRESS).write_text(old.model_dump_json())
    write_committed(tmp_path, step=5, journal_offset=0)
    before = time.strftime("%H:%M", time.localtime())
    reported = Waiting(tmp_path, NodesAsked(least=2, most=2, cpus=1, gpus=1))
    for alive in (1, 1, 0):
        reported.report(alive)
    progress = read_progress(tmp_path / PROGRESS)
    assert progress is not None
    said = what_it_waits_for(progress)
    assert said is not None
    assert said.startswith(f"waiting for 2 Ray nodes with 1 GPU each since {before}")
    assert said.endswith(", 0 are alive")
    shown = facts_of(progress)
    assert shown == f"5/40  {said}", "none of the old metrics, nor the pace"
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["1 is alive", "0 are alive"]
    reported.is_over(2, 2)
    started = read_progress(tmp_path / PROGRESS)
    assert started is not None
    assert facts_of(started) == "5/40  starting 2 ranks on 2 Ray nodes"
    assert what_it_waits_for(started) is what_it_waits_for(old) is None
    assert what_it_waits_for(None) is None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (NodesAsked(2, 2, cpus=1, gpus=0), "2 Ray nodes with 1 CPU each"),
        (NodesAsked(1, 4, cpus=8, gpus=8), "1 to 4 Ray nodes with 8 GPUs each"),
    ],
)
def test_what_is_asked_is_named(asked: NodesAsked, expected: str) -> None:
    assert str(asked) == expected
    assert asked.bundle == {"CPU": float(asked.cpus), **({"GPU": float(asked.gpus)} if asked.gpus else {})}


def test_nodes_that_are_alive_but_not_free_or_not_yet_enough_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.mktime((2026, 11, 27, 3, 12, 5, 0, 0, -1))
    monkeypatch.setattr(time, "time", lambda: began)
    reported = Waiting(tmp_path, NodesAsked(1, 2, cpus=1, gpus=0))

    def ends(alive: int) -> str:
        reported.report(alive)
        said = what_it_waits_for(read_progress(tmp_path / PROGRESS)) or ""
        beginning, _, end = said.partition(" since 03:12:05, ")
        assert beginning == "waiting for 1 to 2 Ray nodes with 1 CPU each"
        return end

    assert ends(0) == "0 are alive"
    assert ends(1) == "1 is alive, enough from 03:13:05 on"
    assert ends(2) == "2 are alive, in use by others"
    monkeypatch.setattr(waiting, "SECONDS_FOR_MORE", 0.0)
    assert ends(1) == "1 is alive, in use by others"


@pytest.mark.parametrize(
    ("nodes", "least", "most"),
    [(None, 1, 1), (4, 4, 4), ({"least": 1, "most": 2}, 1, 2), ({"least": 3, "most": 4096}, 3, 4096)],
)
def test_a_recipe_names_a_number_of_nodes_or_a_range(nodes: Any, least: int, most: int) -> None:
    resources = Resources.model_validate({} if nodes is None else {"nodes": nodes})
    assert (resources.least_nodes, resources.most_nodes) == (least, most)
    assert Resources.model_validate_json(resources.model_dump_json()) == resources
    assert ("nodes" in resources.model_dump()) == (nodes is not None)
    assert resources.model_dump().get("nodes") == nodes


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            {"least": 2, "most": 2},
            "least=2 is not below most=2; give a smaller least, or one number: nodes: 2",
        ),
        ({"least": 0, "most": 2}, "greater than or equal to 1"),
        ({"least": 1}, "Field required"),
        (1, "greater than or equal to 2"),
        (4097, "less than or equal to 4096"),
    ],
)
def test_numbers_of_nodes_that_make_no_sense_are_refused(nodes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Resources.model_validate({"nodes": nodes})
