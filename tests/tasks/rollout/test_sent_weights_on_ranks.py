"""A server gets whole weights that are spread over two ranks, and both ranks read its responses in step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.on_ranks import Collectives, on_ranks
from tests.tasks.small_model import write_small_model
from vantage.models.builtin import write_tokenizer
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.models.sampling import Samples
from vantage.models.stored_models import load_stored_policy
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.records.model_files import ModelFiles
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout import weight_files as module
from vantage.tasks.rollout.sampled_policy import SampledPolicy
from vantage.tasks.training import ranks
from vantage.tasks.training.networks import placed

CPU = torch.device("cpu")
PROMPTS = [[1, 20, 21], [1, 30], [1, 40, 41, 42]]
RESPONSES = [[50, 51], [60], [70, 71, 72]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_small_model(tmp_path / "model", width=64)
    write_tokenizer(tmp_path / "model")
    return tmp_path


def policy_of(folder: Path) -> PolicyModel:
    files = ModelFiles(folder / "model")
    return placed(lambda: PolicyModel(load_stored_policy(files)), files.folder, CPU, precision="float32")


def sent(folder: Path) -> dict[str, Any]:
    """Write the weights in several files, keep a copy, and write again on a disk that is full after the first file."""
    weights = dict(policy_of(folder).causal_lm.named_parameters())
    module.BYTES_IN_FILE = 50_000
    with Collectives() as counted, module.weight_files(weights, folder / "sent", precision="bfloat16") as at:
        ranks.wait()
        files = sorted(at.glob("*.safetensors"))
        if ranks.rank() == 0:
            found = {name: each for file in files for name, each in load_file(file).items()}
            save_file(found, folder / "found.safetensors")
        ranks.wait()
    saved = []

    def full(part: dict[str, Tensor], file: Path) -> None:
        saved.append(file)
        if len(saved) == 2:
            raise OSError(28, "No space left on device")

    module.save_file = full
    failed = 0
    try:
        with module.weight_files(weights, folder / "sent", precision="bfloat16"):
            pass
    except OSError:
        failed = 1
    ranks.wait()
    is_left = (folder / "sent").exists()
    return {
        "gathered": counted.bytes["gathered"],
        "files": len(files),
        "failed": failed,
        "left": int(is_left),
    }


def test_the_first_rank_writes_whole_weights_in_the_servers_type(folder: Path) -> None:
    """A disk that is full ends the first rank's writing, and no rank waits for another's share of a weight."""
    first, second = on_ranks(sent, folder, strategy="fsdp2")
    expected = dict(load_policy(folder / "model").named_parameters())
    found = load_file(folder / "found.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], weight.detach().bfloat16())
    rows_of_two = sum(2 * -(-len(each) // 2) * each[0].numel() for each in expected.values())
    assert first["gathered"] == second["gathered"] == 2 * rows_of_two  # bytes of bfloat16, an odd row padded
    assert first["files"] == second["files"] > 1
    assert (first["failed"], second["failed"]) == (1, 0)
    assert first["left"] == second["left"] == 0


def read(folder: Path) -> dict[str, Any]:
    """Read one rank's responses, one at a time. The first rank has two responses, and the second has one."""
    settings = Generation(max_prompt_tokens=8, max_response_tokens=4, temperature=0.6)
    codec = Codec(load_tokenizer(folder / "model"), settings, None)
    sampled = SampledPolicy(policy_of(folder), codec, limits=PassLimits(rows=1), precision="float32")
    mine = ranks.own(len(PROMPTS))
    responses = RESPONSES[mine]
    given = Samples(responses, [True] * len(responses), [[0.0] * len(each) for each in responses])
    found = sampled.at_temperature(PROMPTS[mine], given)
    return {"found": json.dumps(found.logprobs)}


def test_ranks_with_more_responses_than_others_read_them_in_step(folder: Path) -> None:
    policy = load_policy(folder / "model").double()
    results = [json.loads(each["found"]) for each in on_ranks(read, folder, strategy="fsdp2")]
    assert [len(each) for each in results] == [2, 1]
    for number, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.6
        exact = logits.log_softmax(dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        own = torch.tensor(results[number % 2][number // 2], dtype=torch.float64)
        torch.testing.assert_close(own, exact, atol=1e-5, rtol=0)
