"""Count from the recipe what each baseline costs in samples, passes and memory. Nothing is run.

    python benchmarks/baseline_costs.py

prints the table of docs/baselines.md: the quickstart with another ``advantage`` in its policy stage, as ``vantage estimate``
counts it. No clock is read, so the numbers are the same on every machine.
"""

from dataclasses import dataclass

from vantage.estimates.recipe_estimate import RecipeEstimate, StageEstimate, estimate_recipe
from vantage.estimates.workload import Workload
from vantage.schemas.loading.recipe_file import load_recipe

COLLECTED = "stages.collected={kind: rollout_collection, policy: sft, prompts: prompts, reward: main, samples_per_prompt: 8, held_out_samples_per_prompt: 1}"
POLICY = "stages.policy.algorithm="
PLAIN = "preset: ppo, kl_coef: 0.0"
BEFORE = ("value", "collected")
"""Stages that the baseline needs before the policy's."""


@dataclass(frozen=True)
class Arm:
    """One baseline."""

    name: str
    overrides: tuple[str, ...]
    before: str | None = None
    """The stage that makes it beforehand."""


ARMS = (
    Arm("none (`returns_to_go`)", (POLICY + f"{{{PLAIN}, advantage: returns_to_go}}",)),
    Arm("a pretrained critic (`gae`)", (POLICY + f"{{{PLAIN}}}",), "value"),
    Arm(
        "a critic, two steps, first (`sao`)", (POLICY + "{preset: sao, length_adaptive_alpha: 1.0}",), "value"
    ),
    Arm(
        "the critic or the rollout's mean (`evpo`)",
        (POLICY + "{preset: evpo, kl_coef: 0.0}",),
        "value",
    ),
    Arm(
        "the others of a group of 4 (`leave_one_out`)",
        (POLICY + f"{{{PLAIN}, advantage: leave_one_out, samples_per_prompt: 4}}",),
    ),
    Arm("the greedy response (`greedy_baseline`)", (POLICY + f"{{{PLAIN}, advantage: greedy_baseline}}",)),
    *(
        Arm(
            f"8 responses of the reference (`{kind}`)",
            (POLICY + f"{{{PLAIN}, advantage: {kind}}}", COLLECTED, "stages.policy.rollouts=collected"),
            "collected",
        )
        for kind in ("reference_mean", "optimal_value")
    ),
    Arm(
        "8 responses, then a running mean (`tracked_mean`)",
        (POLICY + f"{{{PLAIN}, advantage: tracked_mean}}", COLLECTED, "stages.policy.rollouts=collected"),
        "collected",
    ),
)


def sampled(workload: Workload) -> float:
    """Return the number of responses that a stage samples, those to validate and to test included."""
    return sum(each.times * each.count for each in workload.samplings)


def through(workload: Workload, does: str) -> float:
    """Return the number of sequences that pass all networks together, with or without a backward pass."""
    return sum(each.times * each.sequences.count for each in workload.passes if each.does == does)


def memory(workload: Workload) -> float:
    """Return the memory of weights, gradients and AdamW's moments in float32, in copies of the model's weights.

    A trained network counts 4 copies, any other network 1.
    """
    whole = workload.network("policy").weights
    return sum((4 if each.is_trained else 1) * each.weights / whole for each in workload.networks)


def stage(found: RecipeEstimate, name: str) -> StageEstimate:
    """Return the estimate of one stage."""
    return next(each for each in found.stages if each.name == name)


def row(arm: Arm) -> list[str]:
    """Return the arm's cells."""
    found = estimate_recipe(load_recipe("quickstart", arm.overrides), gpu="h100")
    policy = stage(found, "policy").workload
    before = None if arm.before is None else stage(found, arm.before).workload
    cells = [sampled(before), through(before, "score"), through(before, "train")] if before else [0.0] * 3
    cells += [sampled(policy), through(policy, "score"), through(policy, "train")]
    return [arm.name, *(f"{cell:,.0f}" for cell in cells), f"{memory(policy):.1f}"]


HEAD = (
    "baseline", "sampled beforehand", "scored", "trained on", "sampled in training", "scored", "trained on",
    "memory, copies of the weights",
)  # fmt: skip


def table() -> str:
    """Return the table as Markdown."""
    lines = [HEAD, ["---", *["---:"] * (len(HEAD) - 1)], *map(row, ARMS)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
