"""Measure the same ratios of the gradient of all parameters, in fewer rollouts and for fewer baselines.

    python -m docs.critic_boundary.study.all_parameters --workspace DIR --output docs/critic_boundary --seeds 1 2 3 4 5

Two backward passes for each basic baseline and rollout: of Σ c_t·log π_t, and of Σ ±c_t·log π_t with a random sign for each token,
whose squared norm has the mean Σ c_t²·‖∇ log π_t‖². So the gradient-weighted measure needs no token's own gradient. The rollouts are
the first of those that the package's own command measures. It writes `all-parameters-SEED.json`, which that command's report reads.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from docs.critic_boundary.study.__main__ import rounded
from docs.critic_boundary.study.arms import MEAN
from docs.critic_boundary.study.critics import (
    NUM_ROLLOUTS,
    ORACLE,
    PRETRAINED,
    REWARD_MODEL,
    along_greedy,
    fit_oracle,
    predict,
    pretrain,
    training_rollouts,
)
from docs.critic_boundary.study.gradients import LAST_BLOCK, all_gradients
from docs.critic_boundary.study.measure import NUM_PROMPTS, SAMPLES
from docs.critic_boundary.study.setting import Setting, prepare
from docs.critic_boundary.study.variance import gradient_moments
from vantage.algorithms.advantages import mean_return
from vantage.tasks.training.seeds import generator

NUM_MEASURED = 24
"""Rollouts."""
BASIC = ("return", "one", REWARD_MODEL, PRETRAINED, ORACLE)
ARMS: dict[tuple[str, str, float | None], dict[str, float]] = {
    ("baseline", "none", None): {},
    ("constant", "none", -0.75): {"one": -0.75},
    ("constant", "none", -0.25): {"one": -0.25},
    ("constant", "none", 0.5): {"one": 0.5},
    ("critic", REWARD_MODEL, None): {REWARD_MODEL: 1.0},
    ("critic", PRETRAINED, None): {PRETRAINED: 1.0},
    ("critic", ORACLE, None): {ORACLE: 1.0},
    ("shifted", PRETRAINED, -0.75): {PRETRAINED: 1.0, "one": -0.75},
    ("shifted", PRETRAINED, 0.5): {PRETRAINED: 1.0, "one": 0.5},
    ("shifted", ORACLE, -0.75): {ORACLE: 1.0, "one": -0.75},
    ("scaled", PRETRAINED, 0.5): {PRETRAINED: 0.5},
    ("scaled", PRETRAINED, 2.0): {PRETRAINED: 2.0},
    ("scaled", ORACLE, 0.5): {ORACLE: 0.5},
    ("scaled", ORACLE, 2.0): {ORACLE: 2.0},
}
"""Family, critic and x of an arm → its weights of the basic baselines."""


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True, help="of the runs; one for all seeds")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the numbers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--threads", type=int, default=1, help="of the measurements")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for seed in arguments.seeds:
        kept = arguments.output / f"all-parameters-{seed}.json"
        if not kept.is_file():
            setting = prepare(arguments.workspace, seed)
            start = time.process_time()
            found = measure(setting)
            print(f"seed {seed}: {time.process_time() - start:.0f} CPU seconds", flush=True)
            kept.write_text(json.dumps(rounded(found), ensure_ascii=False) + "\n")


def measure(setting: Setting) -> dict[str, Any]:
    """Return the moments of one seed's gradients, the batch mean's first: of all parameters, and of the last block among them."""
    gradients, signed, means = basic_gradients(setting)
    places = places_of_last_block(setting)
    weights = {key: row_of(weights).repeat(len(means), 1) for key, weights in ARMS.items()}
    of_mean = torch.stack([row_of({"one": mean}) for mean in means.tolist()])
    arms = []
    for (family, critic, x), each in {("baseline", MEAN, None): of_mean, **weights}.items():
        plain, with_signs = (torch.einsum("rj,rjp->rp", each, basic) for basic in (gradients, signed))
        arms.append(
            {
                "family": family,
                "critic": critic,
                "x": x,
                "whole": asdict(gradient_moments(plain)),
                "part_of_whole": asdict(gradient_moments(plain[:, places])),
                "weighted_squares": with_signs.double().square().sum(dim=1).tolist(),
                "weighted_squares_of_part": with_signs[:, places].double().square().sum(dim=1).tolist(),
            }
        )
    return {"seed": setting.seed, "arms": arms}


def row_of(weights: dict[str, float]) -> Tensor:
    """Return the coefficients (J,) of return less baseline."""
    return torch.tensor([1.0, *(-weights.get(name, 0.0) for name in BASIC[1:])])


def basic_gradients(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (R,J,P) of `BASIC`, the same with random signs, and the mean return of each rollout (R,)."""
    rollouts = training_rollouts(setting)
    oracle, critics = fit_oracle(setting, rollouts), dict(pretrain(setting, rollouts))
    first = NUM_ROLLOUTS * setting.pretraining.batch_size
    gradients, signed, means = [], [], []
    for number in range(NUM_MEASURED):
        start = first + number * NUM_PROMPTS
        indices = setting.order[start : start + NUM_PROMPTS]
        responses = setting.respond(indices, stream="study measured", number=number, count=SAMPLES)
        mask = responses.mask
        agrees, left = along_greedy(setting, responses, indices, count=SAMPLES)
        basic = (
            responses.returns,
            mask.to(torch.float32),
            *(predict(critics[name], responses.sequences) for name in (REWARD_MODEL, PRETRAINED)),
            oracle.values(agrees, left, mask),
        )
        coefficients = torch.stack([each[mask] for each in basic]) / mask.sum()
        source = generator(setting.seed, "study signs", number)
        signs = 2.0 * torch.randint(2, (coefficients.shape[1],), generator=source) - 1.0
        both = all_gradients(
            setting.policy,
            responses.sequences,
            torch.cat([coefficients, signs * coefficients]),
            temperature=setting.recipe.generation.temperature,
        )
        gradients.append(both[: len(BASIC)])
        signed.append(both[len(BASIC) :])
        means.append(mean_return(responses.returns, mask))
    return torch.stack(gradients), torch.stack(signed), torch.stack(means)


def places_of_last_block(setting: Setting) -> Tensor:
    """Return where the matrices of ``LAST_BLOCK`` stand in the gradient of all parameters: True (P,)."""
    last = f"layers.{len(setting.policy.causal_lm.get_decoder().layers) - 1}.mlp."
    return torch.cat(
        [
            torch.full((parameter.numel(),), last in name and name.split(".")[-2] in LAST_BLOCK)
            for name, parameter in setting.policy.named_parameters()
        ]
    )


if __name__ == "__main__":
    main()
