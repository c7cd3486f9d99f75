"""What a reward model does as a critic, and what value pretraining cures: measured, with plots.

    python benchmarks/study_value_bias.py --workspace DIR --output docs/value_bias --seeds 1 2 3 4 5

For every seed it runs `recipes/study_value_bias.yaml` (SFT and reward model are trained once and shared) and measures

1. mean value and mean advantage against the relative position in the response, of the reward model as a critic and
   of the pretrained one, on the same responses to test prompts,
2. response length, score and explained variance over the iterations of two policy stages that differ in nothing but
   the critic they start from,
3. two critics that start from the reward model and learn from the same responses, one with targets of λ = 1 and one
   of λ = 0.95: how much of the return they know, against the number of tokens that are left before the reward.

It writes one JSON a seed (a seed that has one is not measured again), a CSV and a PNG for each of the three, and
`summary.md`. Intervals are 95 % ones of the mean over seeds (Student's t).
"""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

from vantage.schemas.recipe.pass_limits import PassLimits

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from mlflow.tracking import MlflowClient
from torch import Tensor

from vantage.algorithms.advantages import gae, monte_carlo_returns
from vantage.algorithms.diagnostics import explained_variance
from vantage.algorithms.rewards import shape_rewards
from vantage.algorithms.value_loss import value_loss
from vantage.flows.sweeps.report import interval
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.heads import (
    ScalarModel,
    load_critic,
    load_scalar,
    values,
)
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences
from vantage.schemas.kinds import resolve_work
from vantage.schemas.loading.recipe_file import load_recipe
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.resolved import ResolvedValuePretraining
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.tasks.data.examples import Codec, Prompts, read_prompts
from vantage.tasks.data.splits import TEST, TRAIN
from vantage.tasks.rewards import model_scores, verifier_scores
from vantage.tasks.rewards.scoring import Scorer, Term, score
from vantage.tasks.rewards.verifiers import BUILTIN_FUNCTIONS
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.minibatches import minibatches
from vantage.tasks.rollout.rollouts import Sampled, per_token, sample_responses
from vantage.tasks.training.data_order import DataOrder
from vantage.tasks.training.optimization import make_optimizer, update_weights
from vantage.tasks.training.seeds import derive_seed

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "study_value_bias.yaml"
RESEEDED = ("value", "from_reward_model", "from_value_model")
POLICIES = RESEEDED[1:]
CURVES = ("response_length_mean", "score_mean", "explained_variance")
"""What is read of every iteration of the two policy stages."""

NUM_POSITIONS = 10
"""Equal parts of a response."""
ADVANTAGES = {"advantage": 0.95, "td_error": 0.0, "advantage_lambda_1": 1.0}
"""Name → λ of the advantages that are looked at by position."""
TARGET_LAMBDAS = (1.0, 0.95)
NUM_HELD_OUT = 512
"""Responses to test prompts on which critics are measured."""
NUM_ROLLOUTS = 4
"""Rollouts that the two critics of part 3 learn from."""
TOKENS_LEFT = (0, 10, 20, 40, 60, 80, 200)
"""Edges of the parts by tokens left before the reward (the last token has 0 left)."""
LENGTHS = (0, 65, 90, 200)
"""Edges of the parts by the length of the whole response."""
FIRST_TOKENS = 10
MICROBATCH = 64

Row = dict[str, Any]


@dataclass(frozen=True)
class Responses:
    """Responses with the reward's score at their last token: rewards and returns (B,T), γ = 1 and no KL."""

    sequences: Sequences
    rewards: Tensor

    @property
    def mask(self) -> Tensor:
        """(B,T)."""
        return self.sequences.response_mask

    @property
    def returns(self) -> Tensor:
        """Monte-Carlo returns (B,T)."""
        return monte_carlo_returns(self.rewards, self.mask, gamma=1.0)


@dataclass(frozen=True)
class Setting:
    """What one seed's measurements need, read from the artifacts of its run."""

    recipe: Recipe
    seed: int
    folders: dict[str, Path]
    codec: Codec

    def prompts(self, split: str) -> Prompts:
        """The recipe's prompts of one split."""
        return read_prompts(self.folders["data.prompts"], split, self.codec)

    def respond(self, prompts: Prompts, indices: Sequence[int], *, seed: int) -> Sampled:
        """Responses of the SFT policy."""
        policy = PolicyModel(load_policy(self.folders["sft"]))
        engine = load_engine(policy, self.codec, limits=PassLimits())
        return sample_responses(engine, self.codec, prompts, indices, device=policy.device, seed=seed)

    def paid_by_rule(self, sampled: Sampled) -> Responses:
        """Responses with the recipe's reward, a rule; the reward model is only a critic in it."""
        terms = self.recipe.rewards["main"].terms
        assert all(isinstance(term, VerifierTerm) for term in terms)
        return paid(
            sampled,
            [
                Term(
                    term.name,
                    term.weight,
                    verifier_scores.scored_by(BUILTIN_FUNCTIONS[term.verifier], wrong=term.wrong),
                )
                for term in terms
                if isinstance(term, VerifierTerm)
            ],
        )

    def paid_by_reward_model(self, sampled: Sampled) -> Responses:
        """The same responses with the reward model's score as reward: then it is a critic of itself."""
        return paid(
            sampled,
            [Term("reward", 1.0, model_scores.scored_by(load_scalar(self.folders["reward"], role="reward")))],
        )


def paid(sampled: Sampled, terms: Sequence[Term]) -> Responses:
    """Responses with the sum of the terms as the reward of their last token."""
    scores = score(
        Scorer(tuple(terms), missing_eos=None),
        sampled.sequences,
        prompts=sampled.prompts,
        responses=sampled.responses,
        answers=sampled.answers,
        ended=sampled.ended,
        limits=PassLimits(MICROBATCH),
    )
    mask = sampled.sequences.response_mask
    no_kl = torch.zeros(mask.shape)
    return Responses(sampled.sequences, shape_rewards(scores.total, no_kl, mask, kl_coef=0.0))


def main() -> None:
    """Measure what is missing, then write tables and plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True, help="of the runs; one for all seeds")
    parser.add_argument("--output", type=Path, required=True, help="a folder for tables and plots")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--threads", type=int, default=1, help="of the measurements; the stages have their own"
    )
    parser.add_argument("--set", action="append", default=[], help="passed on to every run")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.output.mkdir(parents=True, exist_ok=True)
    measured: list[Row] = []
    for seed in arguments.seeds:
        kept = arguments.output / f"seed-{seed}.json"
        if not kept.is_file():
            rows = measure(arguments.workspace, seed, arguments.set)
            kept.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        measured += json.loads(kept.read_text())
    measured += list(paired(measured))
    tables = {part: over_seeds(measured, part) for part in (*PANELS, *PAIRS.values())}
    for part, table in tables.items():
        write_csv(arguments.output / f"{part}.csv", table)
        if part in PANELS:
            plot(arguments.output / f"{part}.png", table, part)
    (arguments.output / "summary.md").write_text(summary(tables, num_seeds=len(arguments.seeds)))
    print((arguments.output / "summary.md").read_text())


# -- one seed


def measure(workspace: Path, seed: int, overrides: list[str]) -> list[Row]:
    """All measurements of one seed: rows ``{part, seed, critic, x, quantity, value}``."""
    report = run(workspace, seed, overrides)
    stages = report["stages"]
    folders = {name: workspace / "store" / "objects" / stage["digest"] for name, stage in stages.items()}
    recipe = load_recipe(RECIPE, overrides)
    codec = Codec(load_tokenizer(folders["sft"]), recipe.generation, recipe.model.chat)
    setting = Setting(recipe, seed, folders, codec)
    test = setting.prompts(TEST)
    indices = [index % len(test) for index in range(NUM_HELD_OUT)]
    sampled = setting.respond(test, indices, seed=derive_seed(seed, "study held out"))
    held_out = setting.paid_by_rule(sampled)
    rows = [
        *by_position(setting, held_out, critic="reward", name="reward model"),
        *by_position(setting, held_out, critic="value", name="pretrained"),
        *by_position(
            setting,
            setting.paid_by_reward_model(sampled),
            critic="reward",
            name="reward model, of its own score",
        ),
        *by_iteration(workspace, stages),
        *by_target_lambda(setting, held_out),
    ]
    return [{"seed": seed, **row} for row in rows]


def run(workspace: Path, seed: int, overrides: list[str]) -> dict[str, Any]:
    """The report of the recipe's run with this seed; what the workspace has is reused."""
    seeds = [f"stages.{stage}.seed={seed}" for stage in RESEEDED]
    sets = [part for override in (*seeds, *overrides) for part in ("--set", override)]
    vantage = Path(sys.executable).with_name("vantage")
    done = subprocess.run(
        [vantage, "run", RECIPE, "--workspace", workspace, "--json", *sets], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"seed {seed} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def by_position(setting: Setting, held_out: Responses, *, critic: str, name: str) -> Iterator[Row]:
    """Part 1: mean value, return and advantage in each tenth of the response, token by token.

    The advantage with PPO's λ = 0.95 is between two others: with λ = 0 it is the TD error, how much the critic rises from
    one token to the next, and with λ = 1 it is the return less the value.
    """
    mask = held_out.mask
    rank, lengths = mask.cumsum(dim=1) - 1, mask.sum(dim=1, keepdim=True)
    tenth = rank * NUM_POSITIONS // lengths
    predicted = predict(load_critic(setting.folders[critic], seed=0), held_out.sequences)
    advantages = {
        quantity: gae(held_out.rewards, predicted, mask, gamma=1.0, lam=lam)
        for quantity, lam in ADVANTAGES.items()
    }
    quantities = {"value": predicted, "return": held_out.returns, **advantages}
    for position in range(NUM_POSITIONS):
        here = mask & (tenth == position)
        for quantity, tensor in quantities.items():
            yield row("position", name, (position + 0.5) / NUM_POSITIONS, quantity, tensor[here].mean())
    known_share = explained_variance(predicted, held_out.returns, mask)
    yield row("position", name, None, "explained_variance", known_share)
    # VC-PPO's claim in one number: how much more the first half of a response is favoured than the second
    first, second = mask & (2 * rank < lengths), mask & (2 * rank >= lengths)
    for quantity, tensor in advantages.items():
        gap = tensor[first].mean() - tensor[second].mean()
        yield row("position", name, None, f"{quantity}_first_half_minus_second", gap)


def by_iteration(workspace: Path, stages: dict[str, Any]) -> Iterator[Row]:
    """Part 2: the curves of the two policy stages, as the ledger has them."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(workspace / 'mlflow.db').resolve()}"
    ledger = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in ledger.search_experiments()]
    for stage in POLICIES:
        key = stages[stage]["stage_key"]
        runs = ledger.search_runs(experiments, filter_string=f"tags.`vantage.stage_key` = '{key}'")
        for quantity in CURVES:
            histories = [ledger.get_metric_history(each.info.run_id, quantity) for each in runs]
            longest = max(histories, key=len, default=[])  # a run that reused the stage has none
            if not longest:
                sys.exit(f"the ledger of {workspace} has no {quantity} of {stage}; run it in a new workspace")
            for point in longest:
                yield row("iteration", stage, point.step, quantity, point.value)
        for quantity, final in stages[stage]["metrics"].items():
            if final is not None:
                yield row("iteration", stage, None, quantity, final)


def by_target_lambda(setting: Setting, held_out: Responses) -> Iterator[Row]:
    """Part 3: two critics from the reward model, the same responses in the same order, targets of two λ."""
    rollouts = list(training_rollouts(setting))
    left = held_out.mask.flip(1).cumsum(dim=1).flip(1) - 1
    first = held_out.mask & (held_out.mask.cumsum(dim=1) <= FIRST_TOKENS)
    lengths = held_out.mask.sum(dim=1, keepdim=True).expand_as(held_out.mask)
    for lam in TARGET_LAMBDAS:
        name = f"λ = {lam:g}"
        critic = train_critic(setting, rollouts, lam=lam)
        predicted = predict(critic, held_out.sequences)
        for low, high in pairwise(TOKENS_LEFT):
            here = held_out.mask & (left >= low) & (left < high)
            yield from known(predicted, held_out.returns, here, part="tokens_left", critic=name, x=low)
        for low, high in pairwise(LENGTHS):
            here = first & (lengths >= low) & (lengths < high)
            mean_length = lengths[here].float().mean().item()
            yield from known(predicted, held_out.returns, here, part="length", critic=name, x=low)
            yield row("length", name, low, "mean_length", mean_length)
        yield from known(predicted, held_out.returns, held_out.mask, part="tokens_left", critic=name, x=None)


def known(
    predicted: Tensor, returns: Tensor, here: Tensor, *, part: str, critic: str, x: float | None
) -> Iterator[Row]:
    """What a critic knows of the return at the tokens ``here`` (B,T).

    ``slope`` is that of its values on the returns: by how much V differs between two responses whose scores differ
    by 1. An ideal critic's slope is its explained variance; a critic that does not hear of the reward has 0.
    """
    value, outcome = predicted[here].double(), returns[here].double()
    deviation = outcome - outcome.mean()
    slope = (deviation * (value - value.mean())).sum() / deviation.square().sum()
    yield row(part, critic, x, "explained_variance", explained_variance(predicted, returns, here))
    yield row(part, critic, x, "slope", slope)
    yield row(part, critic, x, "bias", (value - outcome).mean())


def training_rollouts(setting: Setting) -> Iterator[Responses]:
    """Responses of the SFT policy to training prompts."""
    prompts, work = setting.prompts(TRAIN), value_stage(setting)
    order = DataOrder(num_examples=len(prompts), batch_size=work.batch_size, seed=setting.seed)
    for number in range(NUM_ROLLOUTS):
        seed = derive_seed(setting.seed, "study rollouts", number)
        yield setting.paid_by_rule(setting.respond(prompts, order.batch(number), seed=seed))


def train_critic(setting: Setting, rollouts: list[Responses], *, lam: float) -> ScalarModel:
    """A critic that starts from the reward model and learns GAE targets, A(λ) + V, as PPO's critic does.

    Optimiser and schedule are the value stage's. With λ = 1 the targets are Monte-Carlo returns.
    """
    work = value_stage(setting)
    critic = load_critic(setting.folders["reward"], seed=0)
    optimizer = make_optimizer(critic, weight_decay=work.weight_decay)
    for iteration, responses in enumerate(rollouts):
        old_values = predict(critic, responses.sequences)
        targets = old_values + gae(responses.rewards, old_values, responses.mask, gamma=1.0, lam=lam)
        epochs = minibatches(responses.sequences, work, seed=setting.seed, iteration=iteration)
        cut = [rows for epoch in epochs for rows in epoch]
        for number, rows in enumerate(cut):
            micro = responses.sequences.select(rows)
            width = micro.response_ids.shape[1]
            value_loss(
                values(critic, micro), None, targets[rows, :width], micro.response_mask
            ).loss.backward()
            step, total = iteration * len(cut) + number, len(rollouts) * len(cut)
            update_weights(optimizer, critic, work, step=step, total_steps=total)
    return critic


def value_stage(setting: Setting) -> ResolvedValuePretraining:
    """The recipe's value stage, for its optimiser's settings."""
    work = resolve_work(setting.recipe.stages["value"])
    assert isinstance(work, ResolvedValuePretraining)
    return work


def predict(critic: ScalarModel, sequences: Sequences) -> Tensor:
    """Values (B,T), 0 outside the mask."""
    said = per_token(
        lambda part: {"values": values(critic, part)},
        sequences,
        limits=PassLimits(MICROBATCH),
        computes="values",
    )
    return said["values"]


def row(part: str, critic: str, x: float | None, quantity: str, value: Tensor | float) -> Row:
    """One measured number; ``x`` is None for one of the whole response or run."""
    return {"part": part, "critic": critic, "x": x, "quantity": quantity, "value": float(value)}


# -- all seeds


def over_seeds(measured: list[Row], part: str) -> list[Row]:
    """Mean and 95 % interval over seeds of every number of a part, in the order measured."""
    samples: dict[tuple[str, float | None, str], list[float]] = {}
    for each in measured:
        if each["part"] == part:
            samples.setdefault((each["critic"], each["x"], each["quantity"]), []).append(each["value"])
    table = []
    for (critic, x, quantity), numbers in samples.items():
        table.append({"critic": critic, "x": x, "quantity": quantity, **over(numbers)})
    return table


def paired(measured: list[Row]) -> Iterator[Row]:
    """Differences within each seed, in which both saw the same responses: what the intervals of each alone hide."""
    found = {
        (each["part"], each["seed"], each["critic"], each["x"], each["quantity"]): each["value"]
        for each in measured
    }
    for (part, seed, critic, x, quantity), value in found.items():
        first, second = COMPARED.get(part, ("", ""))
        if critic == first and (other := found.get((part, seed, second, x, quantity))) is not None:
            difference = row(PAIRS[part], f"{first} less {second}", x, quantity, value - other)
            yield {"seed": seed, **difference}


def over(numbers: list[float]) -> dict[str, float]:
    """Mean, half width of its 95 % interval, and of how many seeds; what is undefined in a seed is left out."""
    numbers = [number for number in numbers if math.isfinite(number)]
    centre, _, high = interval(numbers)
    nan = float("nan")
    if centre is None:
        return {"mean": nan, "half_width": nan, "seeds": 0}
    return {"mean": centre, "half_width": nan if high is None else high - centre, "seeds": len(numbers)}


def write_csv(path: Path, table: list[Row]) -> None:
    """One row for each number of the table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["critic", "x", "quantity", "mean", "half_width", "seeds"])
        writer.writeheader()
        writer.writerows(table)


COMPARED = {
    "iteration": ("from_value_model", "from_reward_model"),
    "tokens_left": ("λ = 1", "λ = 0.95"),
    "length": ("λ = 1", "λ = 0.95"),
}
"""Part → the two of which differences are taken."""
PAIRS = {part: f"{part}_paired" for part in COMPARED}
PANELS = {
    "position": ("value", "advantage", "td_error", "advantage_lambda_1"),
    "iteration": ("response_length_mean", "score_mean", "explained_variance"),
    "tokens_left": ("explained_variance", "slope", "bias"),
    "length": ("explained_variance", "slope"),
}
"""Part → what each of its panels shows."""
AXES = {
    "position": "relative position in the response",
    "iteration": "iteration",
    "tokens_left": "tokens left before the reward (from)",
    "length": "length of the response, tokens (from)",
}
TITLES = {
    "value": "mean value (dotted: mean return)",
    "advantage": "mean advantage, λ = 0.95",
    "td_error": "mean TD error (λ = 0)",
    "advantage_lambda_1": "mean advantage, λ = 1",
    "response_length_mean": "response length, tokens",
    "score_mean": "score of the rollout",
    "explained_variance": "explained variance",
    "slope": "slope of values on returns",
    "bias": "mean value − mean return",
}


def plot(path: Path, table: list[Row], part: str) -> None:
    """A panel for each entry of ``PANELS``: a line with its interval for each critic."""
    panels = PANELS[part]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, quantity in zip(axes[0], panels, strict=True):
        for number, critic in enumerate(dict.fromkeys(each["critic"] for each in table)):
            for shown, style in ((quantity, "-"), *([("return", ":")] if quantity == "value" else [])):
                points = [
                    each
                    for each in table
                    if each["critic"] == critic and each["quantity"] == shown and each["x"] is not None
                ]
                axis.errorbar(
                    [each["x"] for each in points],
                    [each["mean"] for each in points],
                    yerr=[each["half_width"] for each in points],
                    capsize=2,
                    linestyle=style,
                    color=f"C{number}",
                    label=critic if style == "-" else None,
                )
        axis.set_title(TITLES[quantity], fontsize=10)
        axis.set_xlabel(AXES[part])
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def summary(tables: dict[str, list[Row]], *, num_seeds: int) -> str:
    """Markdown: every number, means with the half width of their 95 % interval over seeds."""
    lines = [f"Means over {num_seeds} seeds ± half of the 95 % interval.", ""]
    for part, table in tables.items():
        quantities = list(dict.fromkeys(each["quantity"] for each in table if each["x"] is not None))
        lines += [f"## By {part.replace('_', ' ')}", ""]
        lines += [f"| critic | {part} | {' | '.join(quantities)} |", "|" + "---|" * (len(quantities) + 2)]
        found = {(each["critic"], each["x"], each["quantity"]): each for each in table}
        for critic, x in dict.fromkeys(
            (each["critic"], each["x"]) for each in table if each["x"] is not None
        ):
            cells = [shown(found.get((critic, x, quantity))) for quantity in quantities]
            lines.append(f"| {critic} | {x:g} | {' | '.join(cells)} |")
        lines.append("")
        lines += [
            f"- {each['critic']}, {each['quantity']}: {shown(each)}" for each in table if each["x"] is None
        ]
        lines.append("")
    return "\n".join(lines)


def shown(cell: Row | None) -> str:
    """A mean with its interval."""
    return "" if cell is None else f"{cell['mean']:.3f} ± {cell['half_width']:.3f}"


if __name__ == "__main__":
    main()
