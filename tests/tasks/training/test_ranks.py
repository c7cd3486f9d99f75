"""Three processes that share a minibatch give the gradients and metrics of one, and agree on where to continue."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.fork_server import WITH_TORCH
from tests.tasks.small_model import write_small_model
from tests.tasks.training import rank_losses
from tests.tasks.training.rank_losses import LENGTHS, LOSSES, ROWS, gradient_of
from vantage.ledger.journal import read
from vantage.tasks.training import ranks
from vantage.tasks.training.checkpoint_folders import committed
from vantage.tasks.training.scratch import CHECKPOINTS, JOURNAL
from vantage.tasks.training.writer import writes_files

RANKS = 3

SECONDS = 240
"""The most that the processes may take; on an idle machine they take 20."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "model"
    write_small_model(folder, width=32, seed=3)
    return folder


@pytest.fixture(scope="module")
def three_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder into which three gloo processes on this machine wrote what they found."""
    output = tmp_path_factory.mktemp("three")
    arguments = (str(model), str(RANKS), str(output))
    ended = WITH_TORCH.run_main(
        rank_losses.__name__, *arguments, environment={"GLOO_SOCKET_IFNAME": "lo"}, seconds=SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    return output


def said(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found


def test_the_ranks_are_unequal() -> None:
    assert [sum(LENGTHS[rank::RANKS]) for rank in range(RANKS)] == [11, 4, 16]


@pytest.mark.parametrize("name", list(LOSSES))
def test_three_ranks_give_the_gradient_and_the_metrics_of_one_process(
    name: str, three_ranks: Path, model: Path
) -> None:
    """A denominator of a rank's own rows would be off by a factor of about two."""
    network, metrics = LOSSES[name](model, ROWS)
    expected = gradient_of(network)
    found = load_file(three_ranks / "gradients.safetensors")[name]
    scale = expected.abs().max()
    assert scale > 0
    torch.testing.assert_close(found / scale, expected / scale, atol=5e-5, rtol=0)
    for rank in range(RANKS):
        of_rank = said(three_ranks, rank)["metrics"][name]
        assert of_rank.keys() == metrics.keys()
        assert of_rank == pytest.approx(metrics, rel=2e-4, abs=1e-5)


def test_the_ranks_agree_on_where_to_stop_and_what_is_best(three_ranks: Path) -> None:
    all_agreed = [said(three_ranks, rank)["agreements"] for rank in range(RANKS)]
    for agreed in all_agreed:
        assert agreed["steps"] == [0, 1, 2], "the second asked to stop in step 2"
        kept = {name: agreed["state"][name] for name in ("best", "best_iteration")}
        assert kept == {"best": 2.0, "best_iteration": 2}, "as the first measured"
        assert agreed["any"] == [True, False]
        assert agreed["text"] == ["µ of rank 0", ""], "the first rank's, of another length than the others'"
        assert agreed["total"] == [6, 4.5, [3, 3]]
    assert [agreed["rows"] for agreed in all_agreed] == [[0, 3, 6], [1, 4], [2, 5]], "each row is of one rank"
    assert [agreed["writes"] for agreed in all_agreed] == [True, False, False]


def test_the_first_rank_alone_writes(three_ranks: Path) -> None:
    scratch = three_ranks / "scratch"
    entries = list(read(scratch / JOURNAL))
    assert [entry.step for entry in entries] == [1, 2, 3]
    assert [(each.step, each.revision) for each in committed(scratch / CHECKPOINTS)] == [(2, 0), (3, 0)]


def test_without_a_process_group_everything_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([1.0, 2.0])
    assert ranks.total(values) is values
    assert ranks.agreed_text("a µ") == "a µ"
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
