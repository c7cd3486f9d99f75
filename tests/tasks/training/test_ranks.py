"""Two processes that share a minibatch give the gradients and metrics of one, and agree on where they go."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ledger.journal import read
from models.builtin import build_tiny
from tasks.training import ranks
from tasks.training.checkpoint_folders import committed
from tasks.training.scratch import CHECKPOINTS, JOURNAL
from tasks.training.writer import writes_files
from tests.tasks.training.rank_losses import LENGTHS, LOSSES, OF_RANK, gradient_of

SECONDS = 240
"""The most that both processes may take; on an idle machine they take 20."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "model"
    build_tiny(folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def two_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which two gloo processes on this machine wrote what they found."""
    output = tmp_path_factory.mktemp("two")
    script = Path(__file__).with_name("rank_losses.py")
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root}
    processes = [
        subprocess.Popen(
            [sys.executable, script, model, str(rank), "2", output / "rendezvous", output], env=environment
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(SECONDS) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return output


def said(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found


def test_the_ranks_are_unequal() -> None:
    assert [sum(LENGTHS[row] for row in rows) for rows in OF_RANK] == [13, 18]


@pytest.mark.parametrize("name", list(LOSSES))
def test_two_ranks_give_the_gradient_and_the_metrics_of_one_process(
    name: str, two_ranks: Path, model: Path
) -> None:
    """A denominator of a rank's own rows would be off by a factor of about two."""
    network, metrics = LOSSES[name](model, [row for rows in OF_RANK for row in rows])
    expected = gradient_of(network)
    found = load_file(two_ranks / "gradients.safetensors")[name]
    scale = expected.abs().max()
    assert scale > 0
    torch.testing.assert_close(found / scale, expected / scale, atol=5e-5, rtol=0)
    for rank in range(2):
        of_rank = said(two_ranks, rank)["metrics"][name]
        assert of_rank.keys() == metrics.keys()
        assert of_rank == pytest.approx(metrics, rel=2e-4, abs=1e-5)


def test_the_ranks_agree_on_where_to_stop_what_is_best_and_when_there_is_enough(two_ranks: Path) -> None:
    first, second = (said(two_ranks, rank)["agreements"] for rank in range(2))
    for agreed in (first, second):
        assert agreed["steps"] == [0, 1, 2], "the second asked to stop in step 2"
        assert agreed["state"] == {"best": 2.0, "best_iteration": 2}, "as the first measured"
        assert agreed["any"] == [True, False]
        assert agreed["gathered"] == [0.0, 0.0, 1.0, 2.0]
        assert agreed["total"] == [3, 2.0, [2, 1]]
        assert agreed["rounds"] == 2, "the first had enough after one"
    assert [first["writes"], second["writes"]] == [True, False]


def test_the_first_rank_alone_writes(two_ranks: Path) -> None:
    scratch = two_ranks / "scratch"
    entries = list(read(scratch / JOURNAL))
    assert [entry.step for entry in entries] == [1, 2, 3]
    assert [(each.step, each.revision) for each in committed(scratch / CHECKPOINTS)] == [(2, 0), (3, 0)]


def test_without_a_process_group_everything_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([1.0, 2.0])
    assert ranks.gathered(values) is values
    assert ranks.total(values) is values
    assert (ranks.total(3), ranks.agreed(0.5), ranks.any_rank(True), ranks.any_rank(False)) == (
        3,
        0.5,
        True,
        False,
    )
    monkeypatch.delenv("RANK", raising=False)
    assert writes_files()
    monkeypatch.setenv("RANK", "3")
    assert not writes_files()
