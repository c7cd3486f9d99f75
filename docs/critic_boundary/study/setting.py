"""Load what one seed's measurements read: the policy and the reward model of its run, and rollouts of the policy."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from vantage.algorithms.advantages import monte_carlo_returns
from vantage.algorithms.rewards import shape_rewards
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences
from vantage.schemas.kinds import resolve_work
from vantage.schemas.loading.recipe_file import load_recipe
from vantage.schemas.recipe.pass_limits import UNLIMITED
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.resolved import ResolvedValuePretraining
from vantage.tasks.data.examples import Codec, Prompts, read_prompts
from vantage.tasks.data.splits import TRAIN
from vantage.tasks.rewards import verifier_scores
from vantage.tasks.rewards.scoring import Scorer, Term, score
from vantage.tasks.rewards.verifiers import BUILTIN_FUNCTIONS
from vantage.tasks.rollout.engine import RolloutEngine, load_engine
from vantage.tasks.rollout.rollouts import Sampled, sample_responses
from vantage.tasks.training.seeds import derive_seed, generator

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
RECIPE = RECIPES / "study_critic_boundary.yaml"
RESEEDED = ("sft", "reward")
VERIFIER, WRONG = "arithmetic_long", -1.0
"""The reward: +1 for a right answer, `WRONG` for another, as in the recipe."""


@dataclass(frozen=True)
class Responses:
    """Responses with the verifier's score at their last token; returns (B,T) with γ = 1 and no KL."""

    sampled: Sampled
    scores: Tensor
    """(B,)."""
    returns: Tensor

    @property
    def sequences(self) -> Sequences:
        """The ids that were sampled."""
        return self.sampled.sequences

    @property
    def mask(self) -> Tensor:
        """(B,T)."""
        return self.sampled.sequences.response_mask


@dataclass(frozen=True)
class Setting:
    """One seed's artifacts, by stage."""

    recipe: Recipe
    seed: int
    folders: dict[str, Path]

    @cached_property
    def codec(self) -> Codec:
        """The policy's tokenizer with the recipe's limits."""
        return Codec(load_tokenizer(self.folders["sft"]), self.recipe.generation, self.recipe.model.chat)

    @cached_property
    def policy(self) -> PolicyModel:
        """The fixed policy."""
        return PolicyModel(load_policy(self.folders["sft"]))

    @cached_property
    def engine(self) -> RolloutEngine:
        """Which samples from it."""
        return load_engine(self.policy, self.codec, limits=UNLIMITED)

    @cached_property
    def prompts(self) -> Prompts:
        """All training prompts; what is measured and what critics learn from are different ones of them."""
        return read_prompts(self.folders["data.prompts"], TRAIN, self.codec)

    @cached_property
    def order(self) -> list[int]:
        """The prompts in an order of this seed, each once."""
        order: list[int] = torch.randperm(
            len(self.prompts), generator=generator(self.seed, "study prompts")
        ).tolist()
        return order

    @cached_property
    def pretraining(self) -> ResolvedValuePretraining:
        """The long dial's value stage, for its optimiser's settings."""
        work = resolve_work(load_recipe(RECIPES / "long_dial.yaml").stages["value"])
        assert isinstance(work, ResolvedValuePretraining)
        return work

    def respond(self, indices: Sequence[int], *, stream: str, number: int, count: int) -> Responses:
        """Sample ``count`` responses to each of the prompts, with the verifier's returns."""
        sampled = sample_responses(
            self.engine,
            self.codec,
            self.prompts,
            indices,
            device=self.policy.device,
            seed=derive_seed(self.seed, stream, number),
            count=count,
        )
        by_rule = verifier_scores.scored_by(BUILTIN_FUNCTIONS[VERIFIER], wrong=WRONG)
        total = score(
            Scorer((Term("right", 1.0, by_rule),), missing_eos=None),
            sampled.sequences,
            prompts=sampled.prompts,
            responses=sampled.responses,
            answers=sampled.answers,
            ended=sampled.ended,
            limits=UNLIMITED,
        ).total
        mask = sampled.sequences.response_mask
        rewards = shape_rewards(total, torch.zeros(mask.shape), mask, kl_coef=0.0)
        return Responses(sampled, total, monte_carlo_returns(rewards, mask, gamma=1.0))

    def greedy(self, indices: Sequence[int]) -> Sampled:
        """Return the most likely response to each prompt, which is nearly always the right one here."""
        return sample_responses(
            self.engine,
            self.codec,
            self.prompts,
            indices,
            device=self.policy.device,
            seed=0,
            greedy=True,
        )


def prepare(workspace: Path, seed: int) -> Setting:
    """Run the recipe with this seed, or reuse what the workspace has of it."""
    sets = [part for stage in RESEEDED for part in ("--set", f"stages.{stage}.seed={seed}")]
    vantage = Path(sys.executable).with_name("vantage")
    done = subprocess.run(
        [vantage, "run", RECIPE, "--workspace", workspace, "--json", *sets], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"seed {seed} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    stages = json.loads(done.stdout.strip().splitlines()[-1])["stages"]
    objects = workspace / "store" / "objects"
    return Setting(
        load_recipe(RECIPE), seed, {name: objects / each["digest"] for name, each in stages.items()}
    )
