"""Every row of an embedding learns, also that of a token by which short rows are filled up."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.slow import slow
from tests.tasks.golden_results import Results
from tests.tasks.unequal_inputs import EOS
from vantage.models.folders import read_tensor
from vantage.tasks.data.rows import read_rows, write_rows
from vantage.tasks.data.splits import SPLITS

MODELS = ("init", "reference", "fresh", "critic", "reward")


def _edit(path: Path, **changes: object) -> None:
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


def _results(folder: Path, *, pad_token_id: int | None) -> Results:
    """Return models whose tokenizer pads with EOS, and prompts that contain EOS, as between turns of a chat."""
    results = Results(folder)
    for name in MODELS:
        _edit(results.folder(name) / "tokenizer_config.json", pad_token=None, unk_token=None)
        path = results.folder(name) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": pad_token_id}))
    for name in ("prompts", "demonstrations", "pairs"):
        for split in SPLITS:
            rows = list(read_rows(results.folder(name), split))
            write_rows(
                results.folder(name), split, [{**row, "prompt": f"2+</s>{row['prompt']}"} for row in rows]
            )
    return results


def _row_of_eos(folder: Path) -> torch.Tensor:
    names = ("model.embed_tokens.weight", "embed_tokens.weight")
    [table] = [found for name in names if (found := read_tensor(folder, name)) is not None]
    return table[EOS]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return runs whose models name EOS for padding; what several of them read is made once."""
    return _results(tmp_path_factory.mktemp("named"), pad_token_id=EOS)


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return runs whose models name no token for padding."""
    return _results(tmp_path_factory.mktemp("unnamed"), pad_token_id=None)


@pytest.mark.parametrize(
    "run",
    [
        "sft",
        *slow(
            "sft: packing, length groups off",
            "dpo",
            "reward_model",
            "value_pretraining",
            "policy_optimization: ppo",
        ),
    ],
)
def test_a_stage_trains_eos_alike_whether_the_configuration_names_it_for_padding_or_not(
    named: Results, unnamed: Results, run: str
) -> None:
    job = named.of(run).job
    row, begun = _row_of_eos(job.output), _row_of_eos(job.inputs["init"])
    assert torch.equal(row, _row_of_eos(unnamed.of(run).job.output))
    assert (row - begun).abs().max() > 1e-4, "it learns"
