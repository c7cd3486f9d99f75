"""Every stage of the pipeline on a model in 4 bits writes what it writes with the same weights in float32."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tasks.conftest import Pipeline
from vantage.models.quantisation import SIDECAR
from vantage.schemas.recipe.inputs import Model
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.recipe.work import ImportModel
from vantage.schemas.records.job import StageJob

Contents = Callable[[Path], dict[str, bytes]]
LORA = Lora(rank=4, alpha=8.0)
SHORT: dict[str, dict[str, object]] = {
    "sft": {"epochs": 0.1},
    "reward": {"epochs": 0.05},
    "value": {"iterations": 1, "batch_size": 8, "minibatch_size": 8},
    "policy": {"iterations": 1, "batch_size": 8, "minibatch_size": 8, "epochs": 1, "validate_every": 1},
}


class Rounded(Pipeline):
    """The small pipeline with adapters on a rounded model, whose stages take a step or two."""

    def job(self, name: str, *, folder: Path | None = None, **changes: object) -> StageJob:
        job = super().job(name, folder=folder, **{**SHORT.get(name, {}), **changes})
        if name != "model":
            return job
        return job.model_copy(
            update={"work": ImportModel(model=Model(source="builtin:tiny", quantization="nf4"))}
        )


@pytest.mark.slow
def test_every_stage_writes_what_it_writes_with_the_same_weights_in_float32(
    tmp_path: Path, contents: Contents
) -> None:
    torch.set_num_threads(1)
    in_4_bits, in_float = (Rounded(tmp_path / each, lora=LORA) for each in ("in_4_bits", "in_float"))
    (in_float.folder("model") / SIDECAR).unlink()
    assert (in_4_bits.folder("model") / SIDECAR).is_file()
    for name in SHORT:
        mine, theirs = contents(in_4_bits.folder(name)), contents(in_float.folder(name))
        # in this test these digests are made from the folders' paths
        mine.pop("base.json"), theirs.pop("base.json")
        assert mine == theirs, name
        assert in_4_bits.metrics(name) == in_float.metrics(name)
