"""DPO and best-of-n with adapters write adapters, go on from those given, and a kill changes nothing."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks import test_best_of_n, test_dpo
from tests.tasks.kills import same_bytes_after_a_kill
from tests.tasks.test_dpo import response_logprob
from vantage.models.adapter_check import WEIGHTS
from vantage.models.adapters import base_of
from vantage.models.folders import load_policy
from vantage.models.merging import merge
from vantage.schemas.recipe.lora import Lora
from vantage.schemas.records.model_files import ModelFiles
from vantage.tasks import best_of_n, dpo
from vantage.tasks.data.examples import codec_of, read_completions

pytestmark = pytest.mark.slow

STAGES = {"dpo": (dpo, test_dpo), "best_of_n": (best_of_n, test_best_of_n)}
LORA = Lora(rank=4, alpha=8.0)


def job_of(name: str, pipeline: Any) -> Callable[..., Any]:
    return partial(STAGES[name][1].job_in, pipeline, lora=LORA)


@pytest.mark.parametrize("name", STAGES)
def test_it_writes_adapters_alone_that_began_at_those_given(
    name: str, lora_pipeline: Any, tmp_path: Path
) -> None:
    model, sft = lora_pipeline.folder("model"), lora_pipeline.folder("sft")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    job = job_of(name, lora_pipeline)(tmp_path)
    result = STAGES[name][0].run(job)
    names = {path.name for path in job.output.iterdir()}
    assert {"adapter_config.json", WEIGHTS, "base.json", "tokenizer.json"} <= names
    assert not names & {"model.safetensors", "config.json"}
    assert result.base == base_of(job.output) == job.digests["init.base"] is not None
    assert before == {path.name: path.read_bytes() for path in model.iterdir()}
    old, new = load_file(sft / WEIGHTS), load_file(job.output / WEIGHTS)
    moved = [(old[key] - new[key]).abs().max() for key in old]
    assert old.keys() == new.keys() and 0 < max(moved) < 0.1


@pytest.mark.parametrize("name", STAGES)
def test_killed_and_run_again_with_adapters_it_gives_the_same_bytes(
    name: str,
    lora_pipeline: Any,
    contents: Callable[[Path], dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same_bytes_after_a_kill(
        STAGES[name][0].run,
        job_of(name, lora_pipeline),
        tmp_path,
        step=3,
        contents=contents,
        monkeypatch=monkeypatch,
    )


def test_the_gap_that_dpo_reports_is_that_of_the_merged_model(lora_pipeline: Any, tmp_path: Path) -> None:
    """The gap is β·(log π/π_ref of the chosen − of the rejected) over the test pairs, from full logits of models
    without adapters.
    """
    job = job_of("dpo", lora_pipeline)(tmp_path)
    result = dpo.run(job)
    merge(ModelFiles(job.output, job.inputs["init.base"]), tmp_path / "merged")
    policy, reference = (
        load_policy(folder).eval() for folder in (tmp_path / "merged", job.inputs["reference"])
    )
    pairs = read_completions(job.inputs["data"], "test", dpo.SIDES, codec_of(job, "init"))
    gaps = []
    for row, prompt in enumerate(pairs.prompt_ids):
        chosen, rejected = (
            response_logprob(policy, prompt, pairs.response_ids[side][row], 1.0)
            - response_logprob(reference, prompt, pairs.response_ids[side][row], 1.0)
            for side in dpo.SIDES
        )
        gaps.append(0.3 * (chosen - rejected))
    found = torch.tensor(gaps)
    assert result.metrics["reward_gap"] == pytest.approx(found.mean().item(), rel=1e-3, abs=1e-4)
    assert result.metrics["pair_accuracy"] == pytest.approx((found > 0).double().mean().item())
