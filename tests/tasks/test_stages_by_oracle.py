"""Whole runs of the stages beside policy optimisation equal the oracle: journals, weights and headline metrics.

As in ``test_policy_runs_by_oracle``: inputs differ in everything, and what a case is there for is asserted first.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks import oracle_distillation, oracle_preferences, oracle_stages
from tests.tasks.oracle_networks import assert_moved_alike
from tests.tasks.oracle_rollouts import collected, rows_of
from tests.tasks.oracle_stages import Outcome
from tests.tasks.unequal_inputs import collect, job_of, write_inputs
from vantage.ledger.journal import read
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.stages import BestOfN, ValuePretraining
from vantage.schemas.recipe.stages_on_data import (
    DirectPreferenceOptimization,
    RewardModelling,
    SupervisedFineTuning,
)
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection
from vantage.schemas.recipe.unpaired import KahnemanTverskyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.stages import run_stage
from vantage.tasks.training import checkpoints
from vantage.tasks.training.scratch import CHECKPOINTS, JOURNAL

TRAINING = {"learning_rate": 0.01, "max_grad_norm": 0.3, "weight_decay": 0.1, "microbatch_size": 2}
ROWS = {**TRAINING, "batch_size": 6, "epochs": 1.5, "group_by_length": False, "warmup_steps": 2}
ROLLOUTS = {
    **TRAINING,
    "reward": "main",
    "prompts": "prompts",
    "batch_size": 12,
    "epochs": 2,
    "iterations": 4,
    "validate_every": 1,
    "validation_samples": 18,
    "test_samples": 13,
    "schedule": "linear",
    "checkpoint_every": 4,
}
SCORED = {"reward.main.0": "reward", "reward.main.1": "last_digit", "prompts": "prompts"}
RETURNS = {
    "gamma": 0.9,
    "kl_coef": 0.1,
    "kl_kind": "k2",
    "reward_scaling": "normalise",
    "reward_clip": 0.8,
    "overlong_buffer": 0.5,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("inputs")
    folders = write_inputs(root)
    return folders | {"collected": collect(root / "collecting", folders, policy="init")}


def run_both(job: StageJob, oracle: Callable[[Any], Outcome], happens: Callable[[Outcome], bool]) -> Outcome:
    """Run the stage and its oracle; their journals and headline metrics must agree."""
    outcome = oracle(job)
    assert happens(outcome), [outcome.metrics, *outcome.journal]
    result = run_stage(job)
    journal = [entry.metrics for entry in read(job.scratch / JOURNAL)]
    assert len(journal) == len(outcome.journal)
    for number, (told, expected) in enumerate(zip(journal, outcome.journal, strict=True)):
        for metric, value in expected.items():
            assert told[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), (number, metric)
    for metric, value in outcome.metrics.items():
        assert result.metrics[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric
    return outcome


def last_weights(job: StageJob, part: str) -> dict[str, torch.Tensor]:
    """Return the weights of the network in the last checkpoint."""
    found = checkpoints.latest(job.scratch / CHECKPOINTS)
    assert found is not None
    required = {f"{part}.weights", f"{part}.optimizer", "stage", "stopped", "journal_offset", "best"}
    tensors = checkpoints.load(found, required=required).tensors
    prefix = f"{part}.weights/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def inputs_of(folders: dict[str, Path], **roles: str) -> dict[str, Path]:
    return {role: folders[name] for role, name in roles.items()}


@pytest.mark.parametrize("patience", [2, 9])
def test_value_pretraining(patience: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """The stage has γ 0.9, moments of its own, another reference than the policy, two epochs of two minibatches, and a
    falling rate.
    """
    work = ValuePretraining.model_validate(
        {
            **ROLLOUTS,
            "kind": "value_pretraining",
            "policy": "init",
            "init": "reward",
            "reference": "reference",
            "returns": RETURNS,
            "minibatch_size": 6,
            "samples_per_prompt": 2,
            "patience": patience,
            "learning_rate": 0.02,
            "iterations": 6,
        }
    )
    inputs = inputs_of(folders, policy="init", init="reward", reference="reference", **SCORED)
    job = job_of(work, tmp_path, inputs, seed=8)
    stops = patience == 2
    outcome = run_both(
        job,
        oracle_stages.pretrain_value,
        lambda o: 0 < o.metrics["best_iteration"] < len(o.journal) and (len(o.journal) < 6) == stops,
    )
    assert_moved_alike(last_weights(job, "critic"), outcome.last, outcome.before)
    head = load_file(job.output / "head.safetensors")
    saved = {
        f"backbone.{name}": tensor for name, tensor in load_file(job.output / "model.safetensors").items()
    }
    assert_moved_alike(
        saved | {f"head.{name}": tensor for name, tensor in head.items()}, outcome.weights, outcome.before
    )
    moments = json.loads((job.output / "reward_moments.json").read_text())
    assert moments["count"] == outcome.moments.count
    assert moments["mean"] == pytest.approx(outcome.moments.mean, abs=1e-5)
    assert (moments["m2"] / moments["count"]) ** 0.5 == pytest.approx(outcome.moments.std, abs=1e-5)


@pytest.mark.parametrize("fresh_share", [0.0, 0.5])
def test_value_pretraining_on_collected_responses(
    fresh_share: float, folders: dict[str, Path], tmp_path: Path
) -> None:
    """All of a rollout is collected, or half of it; the held-out responses always are. Every switch is as above."""
    work = ValuePretraining.model_validate(
        {
            **ROLLOUTS,
            "kind": "value_pretraining",
            "policy": "init",
            "init": "reward",
            "reference": "reference",
            "returns": RETURNS,
            "minibatch_size": 6,
            "samples_per_prompt": 2 if fresh_share else 1,
            "learning_rate": 0.02,
            "iterations": 7,
            "rollouts": "collected",
            "fresh_share": fresh_share,
        }
    )
    inputs = inputs_of(
        folders, policy="init", init="reward", reference="reference", rollouts="collected", **SCORED
    )
    job = job_of(work, tmp_path, inputs, seed=5)
    outcome = run_both(job, oracle_stages.pretrain_value, lambda o: o.metrics["best_iteration"] > 0)
    assert_moved_alike(last_weights(job, "critic"), outcome.last, outcome.before)
    gaps = [entry.metrics.get("sampler_gap") for entry in read(job.scratch / JOURNAL)]
    assert all((gap is None) == (fresh_share == 0) for gap in gaps)


@pytest.mark.slow
def test_value_pretraining_of_a_fresh_critic(folders: dict[str, Path], tmp_path: Path) -> None:
    """The critic starts from a policy and learns plain discounted scores. It has no KL, no reference and no moments."""
    work = ValuePretraining.model_validate(
        {
            **ROLLOUTS,
            "kind": "value_pretraining",
            "policy": "reference",
            "init": "fresh",
            "reference": "reference",
            "returns": {"gamma": 0.8},
            "minibatch_size": 4,
            "epochs": 1,
            "iterations": 3,
            "validate_every": 2,
            "schedule": "cosine",
        }
    )
    inputs = inputs_of(folders, policy="reference", init="fresh", reference="reference", **SCORED)
    job = job_of(work, tmp_path, inputs, seed=3)
    outcome = run_both(
        job, oracle_stages.pretrain_value, lambda o: all(m["value_bias"] > -1 for m in o.journal)
    )
    assert_moved_alike(last_weights(job, "critic"), outcome.last, outcome.before)
    assert not (job.output / "reward_moments.json").exists()


@pytest.mark.parametrize("head", [{"quantiles": 4}, {"quantiles": 3, "huber": 0.0}, {"ensemble": 2}])
def test_value_pretraining_of_several_outputs(
    head: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """The critic starts from the reward model, on its returns. Each row of the head and the form in the artifact are
    compared.
    """
    work = ValuePretraining.model_validate(
        {
            **ROLLOUTS,
            "kind": "value_pretraining",
            "policy": "init",
            "init": "reward",
            "reference": "reference",
            "returns": RETURNS,
            "head": head,
            "minibatch_size": 6,
            "iterations": 3,
        }
    )
    inputs = inputs_of(folders, policy="init", init="reward", reference="reference", **SCORED)
    job = job_of(work, tmp_path, inputs, seed=4)
    outcome = run_both(job, oracle_stages.pretrain_value, lambda o: len(o.journal) == 3)
    assert_moved_alike(last_weights(job, "critic"), outcome.last, outcome.before)
    form = {name: count for name, count in head.items() if name != "huber"}
    assert json.loads((job.output / "scalar.json").read_text()) == {
        "role": "value",
        "score_shift": 0.0,
        **form,
    }


def test_best_of_n(folders: dict[str, Path], tmp_path: Path) -> None:
    """Journal, weights and headline metrics of best of n equal the oracle's."""
    work = BestOfN.model_validate(
        {**ROLLOUTS, "kind": "best_of_n", "init": "init", "samples_per_prompt": 3, "minibatch_size": 2}
    )
    job = job_of(work, tmp_path, inputs_of(folders, init="init", **SCORED), seed=3)
    outcome = run_both(
        job, oracle_stages.best_of_n, lambda o: 0 < o.metrics["best_iteration"] < len(o.journal)
    )
    assert_moved_alike(last_weights(job, "policy"), outcome.last, outcome.before)
    assert_moved_alike(load_file(job.output / "model.safetensors"), outcome.weights, outcome.before)


def test_best_of_n_collected_beforehand(folders: dict[str, Path], tmp_path: Path) -> None:
    """Two of the three collected responses compete. The policy that learns is not the one that sampled them."""
    work = BestOfN.model_validate(
        {
            **ROLLOUTS,
            "kind": "best_of_n",
            "init": "reference",
            "samples_per_prompt": 2,
            "minibatch_size": 3,
            "rollouts": "collected",
        }
    )
    inputs = inputs_of(folders, init="reference", rollouts="collected", **SCORED)
    job = job_of(work, tmp_path, inputs, seed=3)
    outcome = run_both(job, oracle_stages.best_of_n, lambda o: o.journal[0]["nll"] != o.journal[1]["nll"])
    assert_moved_alike(last_weights(job, "policy"), outcome.last, outcome.before)


@pytest.mark.parametrize("kl", ["full", "sampled"])
def test_distillation(kl: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """The stage has two responses a prompt, two epochs of three minibatches, a teacher that scores higher, and a best
    student before the last.
    """
    work = Distillation.model_validate(
        {
            **ROLLOUTS,
            "kind": "distillation",
            "init": "reference",
            "teacher": "init",
            "kl": kl,
            "samples_per_prompt": 2,
            "minibatch_size": 4,
        }
    )
    job = job_of(work, tmp_path, inputs_of(folders, init="reference", teacher="init", **SCORED), seed=1)
    outcome = run_both(
        job,
        oracle_distillation.distillation,
        lambda o: (
            0 < o.metrics["best_iteration"] < len(o.journal)
            and o.metrics["teacher_score"] > o.metrics["initial_score"]
            and abs(o.metrics["teacher_lead_share"]) > 0.01
        ),
    )
    assert_moved_alike(last_weights(job, "policy"), outcome.last, outcome.before)
    assert_moved_alike(load_file(job.output / "model.safetensors"), outcome.weights, outcome.before)


@pytest.mark.parametrize("packing", [False, True])
def test_fine_tuning(packing: bool, folders: dict[str, Path], tmp_path: Path) -> None:
    """The gradient has a bound that some steps keep and others do not, since Adam ignores a factor that all steps have."""
    bound = 3.5
    work = SupervisedFineTuning.model_validate(
        {
            **ROWS,
            "kind": "sft",
            "data": "demonstrations",
            "schedule": "cosine",
            "max_grad_norm": bound,
            "packing": packing,
        }
    )
    job = job_of(work, tmp_path, inputs_of(folders, init="init", data="demonstrations"), seed=3, rewards={})

    def happens(outcome: Outcome) -> bool:
        norms = [metrics["grad_norm"] for metrics in outcome.journal]
        differ = outcome.metrics["test_nll"] != outcome.metrics["validation_nll"]
        return min(norms) < bound < max(norms) and differ

    outcome = run_both(job, oracle_stages.fine_tune, happens)
    assert_moved_alike(load_file(job.output / "model.safetensors"), outcome.weights, outcome.before)


def test_dpo(folders: dict[str, Path], tmp_path: Path) -> None:
    """The reference is another model than the stage starts from, and the temperature is 0.7."""
    work = DirectPreferenceOptimization.model_validate(
        {
            **ROWS,
            "kind": "dpo",
            "init": "init",
            "reference": "reference",
            "data": "pairs",
            "beta": 0.4,
            "schedule": "linear",
        }
    )
    inputs = inputs_of(folders, init="init", reference="reference", data="pairs")
    job = job_of(work, tmp_path, inputs, seed=3, rewards={})
    outcome = run_both(job, oracle_preferences.direct_preference, headline_says_which_split)
    assert_moved_alike(load_file(job.output / "model.safetensors"), outcome.weights, outcome.before)


@pytest.mark.parametrize(
    "switches",
    [
        {"label_smoothing": 0.2},
        {"length_normalised": True, "beta": 5.0},
        {"loss": "ipo"},
        {"loss": "ipo", "length_normalised": True},
        {"loss": "simpo", "beta": 2.5, "target_margin": 1.0},
        {"loss": "simpo", "beta": 2.5, "target_margin": 0.5, "label_smoothing": 0.1},
        {"loss": "orpo", "beta": 0.5},
    ],
    ids=lambda switches: " ".join(f"{name}={value}" for name, value in switches.items()),
)
def test_other_losses_on_pairs(switches: dict[str, Any], folders: dict[str, Path], tmp_path: Path) -> None:
    """The temperature is 0.7; SimPO and ORPO are given no reference."""
    work = DirectPreferenceOptimization.model_validate(
        {**ROWS, "kind": "dpo", "init": "init", "data": "pairs", "beta": 0.4, **switches}
    )
    roles = {"init": "init", "data": "pairs"}
    if work.reads_reference:
        work = work.model_copy(update={"reference": "reference"})
        roles["reference"] = "reference"
    job = job_of(work, tmp_path, inputs_of(folders, **roles), seed=3, rewards={})
    outcome = run_both(job, oracle_preferences.direct_preference, headline_says_which_split)
    assert_moved_alike(load_file(job.output / "model.safetensors"), outcome.weights, outcome.before)


def test_kto(folders: dict[str, Path], tmp_path: Path) -> None:
    """Two responses to each prompt lie side by side, so that not every row before another is a mismatch; 9 of 12 are desirable."""
    work = KahnemanTverskyOptimization.model_validate(
        {
            **ROWS,
            "kind": "kto",
            "init": "reference",
            "reference": "init",
            "data": "labelled",
            "beta": 0.4,
            "desirable_weight": 0.6,
            "undesirable_weight": 1.7,
            "epochs": 0.5,
            "schedule": "linear",
        }
    )
    inputs = inputs_of(folders, init="reference", reference="init", data="labelled")
    job = job_of(work, tmp_path, inputs, seed=3, rewards={})

    def happens(outcome: Outcome) -> bool:
        points = [metrics["reference_point"] for metrics in outcome.journal]
        differ = outcome.metrics["kto_loss"] != outcome.metrics["validation_kto_loss"]
        return max(points) > 0 and differ

    outcome = run_both(job, oracle_preferences.labelled_responses, happens)
    assert_moved_alike(load_file(job.output / "model.safetensors"), outcome.weights, outcome.before)


def test_dpo_on_collected_responses(folders: dict[str, Path], tmp_path: Path) -> None:
    """A pair is the best and the worst of a prompt's responses, as the ids that were sampled."""
    work = DirectPreferenceOptimization.model_validate(
        {
            **ROWS,
            "kind": "dpo",
            "init": "init",
            "reference": "reference",
            "rollouts": "collected",
            "beta": 0.4,
        }
    )
    inputs = inputs_of(folders, init="init", reference="reference", rollouts="collected")
    job = job_of(work, tmp_path, inputs, seed=3, rewards={})
    outcome = run_both(job, oracle_preferences.direct_preference, headline_says_which_split)
    assert_moved_alike(load_file(job.output / "model.safetensors"), outcome.weights, outcome.before)


def headline_says_which_split(outcome: Outcome) -> bool:
    measured = outcome.metrics
    return measured["pair_accuracy"] != measured["validation_pair_accuracy"]


@pytest.mark.parametrize("learns", ["data", "rankings"])
def test_reward_modelling(learns: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """The stage learns pairs with margins, centring and a likelihood of the chosen, or rankings with ties. Scores are
    shifted at the end.
    """
    from_pairs = {"lm_coef": 0.3, "centre_coef": 0.05} if learns == "data" else {}
    name = "pairs" if learns == "data" else "rankings"
    work = RewardModelling.model_validate(
        {
            **ROWS,
            **from_pairs,
            "kind": "reward_model",
            "init": "init",
            learns: name,
            "centre_on": "demonstrations",
            "schedule": "linear",
        }
    )
    inputs = inputs_of(folders, init="init", centre_on="demonstrations") | {learns: folders[name]}
    job = job_of(work, tmp_path, inputs, seed=3, rewards={})
    outcome = run_both(job, oracle_stages.reward_modelling, headline_says_which_split)
    saved = load_file(job.output / "model.safetensors")
    names = {"score.weight": "head.weight"}
    renamed = {names.get(n, n.replace("model.", "backbone.", 1)): tensor for n, tensor in saved.items()}
    assert_moved_alike(renamed, outcome.weights, outcome.before)
    shift = json.loads((job.output / "scalar.json").read_text())["score_shift"]
    assert shift == pytest.approx(outcome.metrics["score_shift"], rel=1e-3, abs=1e-5)


JUDGES = {"by a verifier": {"verifier": "last_digit"}, "by a reward": {"reward": "main"}}


@pytest.mark.parametrize("judge", JUDGES)
def test_evaluation(judge: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """An evaluation equals the oracle in every metric."""
    work = PolicyEvaluation.model_validate(
        {
            "kind": "evaluation",
            "candidate": "init",
            "baseline": "reference",
            "judge": JUDGES[judge],
            "also": next(other for name, other in JUDGES.items() if name != judge),
            "prompts": "prompts",
            "demonstrations": "demonstrations",
            "samples_per_prompt": 6,
            "microbatch_size": 5,
        }
    )
    roles = {"candidate": "init", "baseline": "reference", "demonstrations": "demonstrations"}
    verifier = "judge" if judge == "by a verifier" else "also"
    inputs = inputs_of(folders, **roles, **{verifier: "last_digit"}, **SCORED)
    job = job_of(work, tmp_path, inputs, seed=3)
    expected = oracle_stages.evaluation(job)
    [error] = [value for name, value in expected.items() if name.endswith("_standard_error")]
    assert error > 0
    assert len(set(expected.values())) == len(expected)
    metrics = run_stage(job).metrics
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_rollout_collection(folders: dict[str, Path]) -> None:
    """The stage collects three responses to a training prompt and four to another, in batches of four and three prompts
    and micro-batches of five.
    """
    work = RolloutCollection(
        kind="rollout_collection",
        policy="init",
        prompts="prompts",
        reward="main",
        samples_per_prompt=3,
        held_out_samples_per_prompt=4,
        batch_size=12,
    )
    job = job_of(work, folders["collected"].parent, inputs_of(folders, policy="init", **SCORED), seed=4)
    for split, prompts in oracle_stages.rollouts(job).items():
        found = collected(folders["collected"], split)
        assert len(found) == len(prompts) > 5
        for told, expected in zip(found, prompts, strict=True):
            assert (told.prompts, told.responses) == (expected.prompts, expected.responses)
            assert (told.answers, told.ended) == (expected.answers, expected.ended)
            assert told.scores == pytest.approx(expected.scores, rel=1e-4, abs=1e-5)
            assert told.weighted_sums == pytest.approx(expected.weighted_sums, rel=1e-4, abs=1e-5)
            for term, values in expected.by_term.items():
                assert told.by_term[term] == pytest.approx(values, rel=1e-4, abs=1e-5)


def test_preference_collection(folders: dict[str, Path], tmp_path: Path) -> None:
    """A reward of a model and a verifier chooses the best and the worst for pairs, in batches of two prompts."""
    work = PreferenceCollection.model_validate(
        {
            "kind": "preference_collection",
            "policy": "init",
            "prompts": "prompts",
            "judge": {"reward": "main"},
            "samples_per_prompt": 3,
            "batch_size": 6,
            "microbatch_size": 4,
        }
    )
    job = job_of(work, tmp_path, inputs_of(folders, policy="init", **SCORED), seed=3)
    expected = oracle_stages.preferences(job)
    run_stage(job)
    for split, pairs in expected.items():
        assert pairs
        rows = rows_of(job.output, split)
        assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == pairs
