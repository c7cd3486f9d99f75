"""Make the three measurements of one seed, as rows ``{part, seed, critic, x, quantity, value}``."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient
from torch import Tensor

from docs.value_bias.study.setting import Responses, Setting, predict, value_stage
from vantage.algorithms.advantages import gae
from vantage.algorithms.diagnostics import explained_variance
from vantage.algorithms.value_loss import value_loss
from vantage.models.folders import load_tokenizer
from vantage.models.heads import ScalarModel, load_critic, values
from vantage.schemas.loading.recipe_file import load_recipe
from vantage.tasks.data.examples import Codec
from vantage.tasks.data.splits import TEST, TRAIN
from vantage.tasks.rollout.minibatches import minibatches
from vantage.tasks.training.data_order import DataOrder
from vantage.tasks.training.optimization import make_optimizer, update_weights
from vantage.tasks.training.seeds import derive_seed

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "study_value_bias.yaml"
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

Row = dict[str, Any]


def measure(workspace: Path, seed: int, overrides: list[str]) -> list[Row]:
    """Measure one seed, and return rows ``{part, seed, critic, x, quantity, value}``."""
    report = run(workspace, seed, overrides)
    stages = report["stages"]
    folders = {name: workspace / "store" / "objects" / stage["digest"] for name, stage in stages.items()}
    recipe = load_recipe(RECIPE, overrides)
    codec = Codec(load_tokenizer(folders["sft"]), recipe.generation, recipe.model.chat)
    setting = Setting(recipe, seed, folders, codec)
    test = setting.prompts(TEST)
    indices = [index % len(test) for index in range(NUM_HELD_OUT)]
    sampled = setting.respond(test, indices, seed=derive_seed(seed, "study held out"))
    held_out = setting.rewarded_by_rule(sampled)
    rows = [
        *by_position(setting, held_out, critic="reward", name="reward model"),
        *by_position(setting, held_out, critic="value", name="pretrained"),
        *by_position(
            setting,
            setting.rewarded_by_reward_model(sampled),
            critic="reward",
            name="reward model, of its own score",
        ),
        *by_iteration(workspace, stages),
        *by_target_lambda(setting, held_out),
    ]
    return [{"seed": seed, **row} for row in rows]


def run(workspace: Path, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Return the report of the recipe's run with this seed; what the workspace has is reused."""
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
    """Measure part 1: mean value, return and advantage in each tenth of the response, token by token.

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
    """Measure part 2: the curves of the two policy stages, as the ledger has them."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(workspace / 'mlflow.db').resolve()}"
    ledger = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in ledger.search_experiments()]
    for stage in POLICIES:
        key = stages[stage]["stage_key"]
        runs = ledger.search_runs(experiments, filter_string=f"tags.`vantage.stage_key` = '{key}'")
        for quantity in CURVES:
            histories = [ledger.get_metric_history(each.info.run_id, quantity) for each in runs]
            longest = max(histories, key=len, default=[])  # a run that reused the stage has no curve
            if not longest:
                sys.exit(f"the ledger of {workspace} has no {quantity} of {stage}; run it in a new workspace")
            for point in longest:
                yield row("iteration", stage, point.step, quantity, point.value)
        for quantity, final in stages[stage]["metrics"].items():
            if final is not None:
                yield row("iteration", stage, None, quantity, final)


def by_target_lambda(setting: Setting, held_out: Responses) -> Iterator[Row]:
    """Measure part 3: two critics from the reward model, the same responses in the same order, targets of two λ."""
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
    """Yield what a critic knows of the return at the tokens ``here`` (B,T).

    ``slope`` is that of its values on the returns: by how much V differs between two responses whose scores differ
    by 1. An ideal critic's slope is its explained variance; a critic that does not learn from the reward has 0.
    """
    value, outcome = predicted[here].double(), returns[here].double()
    deviation = outcome - outcome.mean()
    slope = (deviation * (value - value.mean())).sum() / deviation.square().sum()
    yield row(part, critic, x, "explained_variance", explained_variance(predicted, returns, here))
    yield row(part, critic, x, "slope", slope)
    yield row(part, critic, x, "bias", (value - outcome).mean())


def training_rollouts(setting: Setting) -> Iterator[Responses]:
    """Yield responses of the SFT policy to training prompts."""
    prompts, work = setting.prompts(TRAIN), value_stage(setting)
    order = DataOrder(num_examples=len(prompts), batch_size=work.batch_size, seed=setting.seed)
    for number in range(NUM_ROLLOUTS):
        seed = derive_seed(setting.seed, "study rollouts", number)
        yield setting.rewarded_by_rule(setting.respond(prompts, order.batch(number), seed=seed))


def train_critic(setting: Setting, rollouts: list[Responses], *, lam: float) -> ScalarModel:
    """Return a critic that starts from the reward model and learns GAE targets, A(λ) + V, as PPO's critic does.

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


def row(part: str, critic: str, x: float | None, quantity: str, value: Tensor | float) -> Row:
    """Return one measured number; ``x`` is None for one of the whole response or run."""
    return {"part": part, "critic": critic, "x": x, "quantity": quantity, "value": float(value)}
