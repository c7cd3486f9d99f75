"""Networks sharded over two ranks by FSDP2 compute what whole ones do, and gather what their passes need."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.on_ranks import Collectives, on_ranks
from tests.tasks.small_model import write_small_model
from vantage.models import gathered_weights
from vantage.models.folders import load_policy
from vantage.models.heads import ScalarModel, value_from_policy, values
from vantage.models.policy import PolicyModel
from vantage.models.sampling import InStep, Samples, sample
from vantage.models.sequences import collate
from vantage.models.sharding import local, whole
from vantage.models.stored_models import load_stored_policy
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.records.model_files import ModelFiles
from vantage.tasks.training import ranks
from vantage.tasks.training.likelihood import accumulate_nll
from vantage.tasks.training.networks import placed
from vantage.tasks.training.optimization import Precision, autocast, make_optimizer, take_step

pytestmark = pytest.mark.slow

WIDTH, CPU = 64, torch.device("cpu")
LENGTHS = [5, 1, 7, 2, 3, 9, 4, 6]
IDS = [[7 + (row * 5 + place) % 80 for place in range(length)] for row, length in enumerate(LENGTHS)]
PROMPTS = [[1, 20 + row, *range(30, 30 + row % 3)] for row in range(len(IDS))]
SEQUENCES = collate(PROMPTS, IDS, pad_token_id=0)
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


def in_one(parameters: Any) -> Tensor:
    return torch.cat([whole(each.detach()).flatten() for each in parameters])


def policy_of(folder: Path, precision: Precision) -> PolicyModel:
    files = ModelFiles(folder / "model")
    return placed(lambda: PolicyModel(load_stored_policy(files)), files.folder, CPU, precision=precision)


def critic_of(folder: Path, precision: Precision) -> ScalarModel:
    model = folder / "model"
    return placed(lambda: value_from_policy(model, seed=2), model, CPU, precision=precision)


def step_of(folder: Path, precision: Precision) -> dict[str, Any]:
    """Return loss, gradient, and the weights after one step of a policy."""
    policy = policy_of(folder, precision)
    optimizer = make_optimizer(policy, weight_decay=0.0)
    with Collectives() as counted:
        nll = accumulate_nll(
            policy, SEQUENCES, temperature=0.8, limits=PassLimits(2), precision=precision
        ).nll
    gradient = in_one(each.grad for each in policy.parameters() if each.grad is not None)
    types = {str(each.dtype) for each in policy.parameters()}
    take_step(optimizer, policy, learning_rate=1e-3, max_grad_norm=1.0)
    return {
        "nll": nll,
        "gradient": gradient,
        "weights": in_one(policy.parameters()),
        "types": " ".join(sorted(types)),
        "gathered": counted.bytes["gathered"],
        "scattered": counted.bytes["scattered"],
        "measured": measured(policy),
    }


@torch.no_grad()
def measured(policy: PolicyModel) -> Tensor:
    """Return log-probabilities of a pass without autocast around it, as stages measure them."""
    return policy.logprobs(SEQUENCES, temperature=1.0).logprobs


def values_of(folder: Path, precision: Precision) -> dict[str, Any]:
    """Return the values of a critic, and the gradient of their squares."""
    critic = critic_of(folder, precision)
    with autocast(precision, CPU):
        found = values(critic, SEQUENCES)
    (found.square().sum() / len(IDS) / ranks.world_size()).backward()
    gradients = {name: whole(each.grad) for name, each in critic.named_parameters() if each.grad is not None}
    return {"values": found.detach(), "head": gradients["head.weight"], "type": str(found.dtype)}


def responses_of(folder: Path, *, precision: Precision, tokens: int) -> tuple[Samples, Collectives]:
    policy = policy_of(folder, precision)
    in_step = InStep(policy.next_logits, 2, lambda ended: not ranks.any_rank(not ended))
    with Collectives() as counted, autocast(precision, CPU):
        found = sample(
            policy.causal_lm,
            PROMPTS,
            max_new_tokens=tokens,
            temperature=1.0,
            eos_token_ids=(),
            pad_token_id=0,
            seed=5,
            limits=PassLimits(2),
            rows=ranks.own(len(PROMPTS)),
            in_step=in_step if ranks.are_sharded() else None,
        )
    return found, counted


def bytes_after_sampling(folder: Path, precision: Precision) -> int:
    """Return the bytes that a pass gathers after a rollout, during which the weights stayed gathered."""
    policy = policy_of(folder, precision)
    in_step = InStep(policy.next_logits, 1, lambda ended: ended)
    sample(
        policy.causal_lm,
        PROMPTS[:1],
        max_new_tokens=2,
        temperature=1.0,
        eos_token_ids=(),
        pad_token_id=0,
        seed=5,
        in_step=in_step,
    )
    with Collectives() as counted:
        measured(policy)
    return counted.bytes["gathered"]


def frozen(folder: Path) -> dict[str, Any]:
    """Return the bytes of a frozen policy, and whether it computes the same as one that is trained."""
    files = ModelFiles(folder / "model")
    held = placed(
        lambda: PolicyModel(load_stored_policy(files, training="nothing")),
        files.folder,
        CPU,
        precision="bfloat16",
    )
    trained = policy_of(folder, "bfloat16")
    return {
        "bytes": sum(local(each).numel() * each.element_size() for each in held.parameters()),
        "is equal": torch.equal(measured(held), measured(trained)),
    }


def two_ranks(folder: Path) -> dict[str, Any]:
    """Return the results of this rank."""
    found: dict[str, Any] = {"frozen": frozen(folder)}
    for precision in PRECISIONS:
        found[precision] = {
            "step": step_of(folder, precision),
            "critic": values_of(folder, precision),
            "after": bytes_after_sampling(folder, precision),
        }
        for tokens in (4, 16):
            samples, counted = responses_of(folder, precision=precision, tokens=tokens)
            kept = {
                "ids": samples.responses,
                "logprobs": samples.logprobs,
                "bytes": counted.bytes["gathered"],
            }
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gathered_weights, "_has_room", lambda *_: False)
                samples, counted = responses_of(folder, precision=precision, tokens=tokens)
            each = {
                "ids": samples.responses,
                "logprobs": samples.logprobs,
                "bytes": counted.bytes["gathered"],
            }
            found[precision][f"sampled {tokens}"] = {"kept": kept, "each": each}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    write_small_model(folder / "model", width=WIDTH)
    return folder


@pytest.fixture(scope="module")
def sharded(folder: Path) -> list[dict[str, Any]]:
    return on_ranks(two_ranks, folder, strategy="fsdp2")


def num_weights(folder: Path) -> int:
    return sum(each.numel() for each in load_policy(folder / "model").parameters())


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_a_float32_step_is_that_of_one_process(sharded: list[dict[str, Any]], folder: Path) -> None:
    alone, found = step_of(folder, "float32"), sharded[0]["float32"]["step"]
    assert found["nll"] == pytest.approx(alone["nll"], rel=1e-6)
    assert distance(found["gradient"], alone["gradient"]) < 1e-5
    assert distance(found["weights"], alone["weights"]) < 1e-5
    assert distance(found["measured"], alone["measured"]) < 1e-4


def test_a_bfloat16_step_is_that_of_one_process_within_its_rounding(
    sharded: list[dict[str, Any]], folder: Path
) -> None:
    """Weights of norms and embeddings are rounded too, which autocast leaves in float32. Gradients differ by 0.018."""
    exact, alone = step_of(folder, "float32"), step_of(folder, "bfloat16")
    found = sharded[0]["bfloat16"]["step"]
    assert found["nll"] == pytest.approx(alone["nll"], rel=1e-3)
    for name, most in (("gradient", 0.04), ("weights", 0.002), ("measured", 0.006)):
        assert distance(found[name], alone[name]) < most, name
    for name in ("gradient", "weights"):
        assert distance(found[name], exact[name]) < 1.5 * distance(alone[name], exact[name]), name
    assert found["types"] == "torch.float32", "weights and optimiser stay as they are"
    assert all(torch.equal(each["bfloat16"]["step"]["weights"], found["weights"]) for each in sharded)


def test_bfloat16_halves_what_is_gathered_and_adds_gradients_in_float32(
    sharded: list[dict[str, Any]],
) -> None:
    exact, found = (sharded[0][precision]["step"] for precision in PRECISIONS)
    assert exact["gathered"] > 0
    assert found["gathered"] * 2 == exact["gathered"]
    assert found["scattered"] == exact["scattered"] > 0


def test_frozen_weights_are_held_as_they_are_gathered(sharded: list[dict[str, Any]], folder: Path) -> None:
    assert sum(each["frozen"]["bytes"] for each in sharded) == 2 * num_weights(folder)
    assert all(each["frozen"]["is equal"] for each in sharded), (
        "bit by bit, so that KL to the policy begins at 0"
    )


def test_a_scalar_head_stays_float32(sharded: list[dict[str, Any]], folder: Path) -> None:
    exact, alone, found = (
        values_of(folder, "float32"),
        values_of(folder, "bfloat16"),
        sharded[0]["bfloat16"]["critic"],
    )
    assert found["type"] == "torch.float32"
    for name in ("values", "head"):
        assert distance(found[name], alone[name]) < 0.03, name
        assert distance(found[name], exact[name]) < 1.5 * distance(alone[name], exact[name]), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_gathered_once_for_all_tokens_of_a_rollout(
    precision: Precision, sharded: list[dict[str, Any]], folder: Path
) -> None:
    """A rollout has two batches of two responses. If weights are not kept, each pass of a batch gathers all of them."""
    once = num_weights(folder) * (2 if precision == "bfloat16" else 4)
    for of_rank in sharded:
        for tokens in (4, 16):
            sampled = of_rank[precision][f"sampled {tokens}"]
            assert sampled["kept"].pop("bytes") == once
            assert sampled["each"].pop("bytes") == 2 * tokens * once
            assert sampled["kept"] == sampled["each"], (
                "the same ids, and log-probabilities with the same bits"
            )
            assert of_rank[precision]["after"] == once, "what is kept is free again after sampling"


def test_sharded_ranks_sample_the_responses_of_one_process(
    sharded: list[dict[str, Any]], folder: Path
) -> None:
    alone, _ = responses_of(folder, precision="float32", tokens=16)
    found = [of_rank["float32"]["sampled 16"]["kept"]["ids"] for of_rank in sharded]
    assert len(alone.responses) == len(PROMPTS)
    assert found == [alone.responses[rank::2] for rank in range(2)]
