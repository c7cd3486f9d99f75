"""Measure how often a wrong reward or a wrong judge is seen before training, by the interval of their pair accuracy.

    python -m docs.guard_trials.agreement SFT PROMPTS    # folders of the two artifacts in a workspace of trials.py

Samples 1024 responses of the SFT model to its training prompts, and draws 500 sets of them for each row of the table.
"""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from docs.guard_trials import gameable
from vantage.models.folders import load_tokenizer
from vantage.models.policy import PolicyModel
from vantage.models.stored_models import load_stored_policy
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import UNLIMITED
from vantage.schemas.records.model_files import ModelFiles
from vantage.tasks.data.examples import Codec, read_prompts
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.judge_agreement import CHANCE, agreement_with_interval
from vantage.tasks.rollout.rollouts import sample_responses

RESPONSES, SETS, SIZES = 1024, 500, (64, 128, 256)
Rows = Sequence[tuple[str, str, str | None]]
Scores = Callable[[str, str, str | None], float]


def right(prompt: str, response: str, answer: str | None) -> float:
    """Return whether the answer is right."""
    return float(not gameable.wrong(prompt, response, answer))


def flipped(share: float) -> Scores:
    """Return a judge that errs in a share of its verdicts."""

    def judge(prompt: str, response: str, answer: str | None) -> float:
        is_right = right(prompt, response, answer)
        return 1 - is_right if random.Random(prompt + response).random() < share else is_right

    return judge


def blurred(deviation: float) -> Scores:
    """Return a reward that knows what is right, less well the larger the deviation of its noise."""

    def reward(prompt: str, response: str, answer: str | None) -> float:
        return right(prompt, response, answer) + random.Random(response + prompt).gauss(0, deviation)

    return reward


PAIRS: dict[str, tuple[Scores, Scores]] = {
    **{
        f"reward for {name}, right judge": (getattr(gameable, name), right)
        for name in ("length", "one_token", "repetition", "copied_prompt", "noise", "wrong")
    },
    "right reward, judge of noise": (right, gameable.noise),
    "right reward, judge errs in all verdicts": (right, flipped(1.0)),
    "right reward, judge errs in half": (right, flipped(0.5)),
    "right reward, judge errs in 30 %": (right, flipped(0.3)),
    "right reward, judge errs in 10 %": (right, flipped(0.1)),
    "reward with noise of 1, right judge": (blurred(1.0), right),
    "reward with noise of 2, right judge": (blurred(2.0), right),
    "reward with noise of 4, right judge": (blurred(4.0), right),
}


def sampled_rows(model: Path, prompts: Path) -> Rows:
    """Return prompts, responses and answers of the SFT model."""
    torch.manual_seed(0)
    codec = Codec(load_tokenizer(model), Generation(max_prompt_tokens=48, max_response_tokens=72), None)
    policy = PolicyModel(load_stored_policy(ModelFiles(model, None), training="nothing"))
    read = read_prompts(prompts, "train", codec)
    engine = load_engine(policy, codec, limits=UNLIMITED)
    found = sample_responses(engine, codec, read, range(RESPONSES), device=torch.device("cpu"), seed=7)
    return list(zip(found.prompts, found.responses, found.answers, strict=True))


def table(rows: Rows) -> None:
    """Print a row for each reward and judge."""
    print("| reward and judge | pair accuracy | warned with " + " | with ".join(map(str, SIZES)) + " |")
    print("|---|---|" + "---|" * len(SIZES))
    everything = torch.arange(len(rows))
    for name, pair in PAIRS.items():
        rewards, judged = (torch.tensor([float(score(*row)) for row in rows]).double() for score in pair)
        value, *_ = agreement_with_interval(rewards, judged, everything)
        shares = []
        for size in SIZES:
            generator = torch.Generator().manual_seed(size)
            sets = [torch.randperm(len(rows), generator=generator)[:size] for _ in range(SETS)]
            found = [agreement_with_interval(rewards[each], judged[each], each) for each in sets]
            warned = sum(bool(each) and each[1] < CHANCE for each in found)
            shares.append(f"{warned / SETS:.1%}")
        print(f"| {name} | {value:.2f} | " + " | ".join(shares) + " |")


if __name__ == "__main__":
    table(sampled_rows(*map(Path, sys.argv[1:])))
