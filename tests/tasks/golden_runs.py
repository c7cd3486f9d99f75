"""List small runs of every kind of stage, whose results ``tests/attempts/golden_digests.json`` keeps.

Their inputs differ in everything (``unequal_inputs``), and one prompt of each dataset has several rows with other answers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

from tests.tasks import test_policy_runs_by_oracle as by_oracle
from tests.tasks.test_presets_run import preset
from tests.tasks.unequal_inputs import REWARDS, job_of
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.presets import PresetName
from vantage.schemas.recipe.rewards import MissingEos, Reward
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm
from vantage.schemas.records.job import StageJob

VERIFIED = Reward(
    terms=(VerifierTerm(verifier="last_digit", wrong=-0.5),), missing_eos=MissingEos(replace=-0.9)
)
SCORED_BY_MODEL = Reward(terms=(ModelTerm(model="reward", weight=0.7),), missing_eos=MissingEos(subtract=0.4))


@dataclass(frozen=True)
class Run:
    """One small stage."""

    kind: str
    work: Mapping[str, Any]
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Role → one of the inputs, or the name of another run, whose artifact it is."""
    seed: int = 5
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    name: str | None = None
    """The stage's name, where it is not that of its kind."""

    def job(self, folder: Path, find: Callable[[str], Path]) -> StageJob:
        """Return an attempt at it in ``folder``; ``find`` gives the folder of an input. Names of inputs stand for their digests."""
        inputs = {role: find(name) for role, name in self.inputs.items()}
        work = _in_place(self.work, find)
        job = job_of(
            KINDS[self.kind].work.model_validate({"kind": self.kind, **work}),
            folder,
            inputs,
            seed=self.seed,
            rewards=self.rewards,
        )
        digests = {role: sha256(name.encode()).hexdigest() for role, name in self.inputs.items()}
        return job.model_copy(update={"digests": digests, **({"name": self.name} if self.name else {})})


def _in_place(value: Any, find: Callable[[str], Path]) -> Any:
    """Return the value, in which ``input:NAME/FILE`` is the path of that file."""
    if isinstance(value, Mapping):
        return {name: _in_place(each, find) for name, each in value.items()}
    if isinstance(value, str) and value.startswith("input:"):
        name, _, file = value.removeprefix("input:").partition("/")
        return str(find(name) / file)
    return value


TRAINING = {"learning_rate": 0.01, "max_grad_norm": 0.3, "weight_decay": 0.1, "microbatch_size": 2}
ROWS = {**TRAINING, "batch_size": 6, "epochs": 0.7, "warmup_steps": 2}
ROLLOUTS = {
    **TRAINING,
    "microbatch_size": 5,
    "reward": "main",
    "prompts": "prompts",
    "batch_size": 12,
    "iterations": 2,
    "validate_every": 1,
    "validation_samples": 9,
    "test_samples": 7,
    "schedule": "linear",
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
LORA = {"rank": 2, "alpha": 3.0}
COLLECTED = "rollout_collection"

IMPORTS = {
    "import_model": Run("import_model", {"model": {"source": "input:init/", "chat": False}}, name="model"),
    "import_model in 4 bits": Run(
        "import_model",
        {"model": {"source": "input:init/", "chat": False, "quantization": "nf4"}},
        name="model",
    ),
    "import_reward_model": Run(
        "import_reward_model", {"model": {"source": "input:reward/", "chat": False}}, name="models.reward"
    ),
    "prepare_data": Run(
        "prepare_data",
        {
            "content": "demonstrations",
            "data": {
                "source": "input:sources/rows.jsonl",
                "columns": {"prompt": "question", "response": "{reply}!"},
                "split": {"validation": 0.2, "test": 3},
            },
            "shares": {"validation": 0.2, "test": 0.25},
        },
        name="data.mine",
    ),
    "prepare_data: built-in preferences": Run(
        "prepare_data",
        {
            "content": "preferences",
            "data": {"source": "builtin:arithmetic/preferences", "rows": 30},
            "shares": {"validation": 0.2, "test": 0.25},
        },
        name="data.pairs",
    ),
    "mix_data": Run(
        "mix_data",
        {
            "content": "demonstrations",
            "parts": ("a", "b"),
            "weights": (0.7, 0.3),
            "split": {"validation": 5, "test": 4},
        },
        {"part.0": "demonstrations", "part.1": "prepare_data"},
        name="mixtures.both",
    ),
    "import_verifier": Run(
        "import_verifier",
        {"verifier": {"source": "input:sources/mine.py"}},
        {"prompts.0": "prompts"},
        name="verifiers.mine",
    ),
    "check_rows": Run(
        "check_rows",
        {
            "datasets": ["demonstrations", "preferences"],
            "contents": ["demonstrations", "preferences"],
            "max_dropped": [0.5, 0.5],
        },
        {"model": "init", "data.0": "demonstrations", "data.1": "pairs"},
        name="checks.rows",
    ),
    "import_benchmark": Run(
        "import_benchmark", {"benchmark": {"source": "input:benchmark/"}}, name="benchmarks.local"
    ),
    "merge_policy": Run(
        "merge_policy", {"adapters": "sft"}, {"adapters": "sft: LoRA", "adapters.base": "init"}
    ),
    "merge_reward_model": Run(
        "merge_reward_model",
        {"adapters": "reward"},
        {"adapters": "reward_model: LoRA", "adapters.base": "init"},
    ),
}


def _sft(**work: Any) -> Run:
    fixed = {**ROWS, "data": "demonstrations", "schedule": "cosine"}
    return Run("sft", {**fixed, **work}, {"init": "init", "data": "demonstrations"}, seed=3)


def _reward_model(learns: str, name: str, **work: Any) -> Run:
    fixed = {**ROWS, "init": "init", "centre_on": "demonstrations", learns: name}
    return Run(
        "reward_model",
        {**fixed, **work},
        {"init": "init", "centre_on": "demonstrations", learns: name},
        seed=4,
    )


def _free_of_reference(loss: str, **work: Any) -> Run:
    fixed = {**ROWS, "init": "init", "data": "pairs", "beta": 0.4, "loss": loss}
    return Run("dpo", {**fixed, **work}, {"init": "init", "data": "pairs"}, seed=6)


def _dpo(learns: str, name: str, **work: Any) -> Run:
    fixed = {**ROWS, "init": "init", "reference": "reference", "beta": 0.4, learns: name}
    return Run("dpo", {**fixed, **work}, {"init": "init", "reference": "reference", learns: name}, seed=6)


def _best_of_n(inputs: Mapping[str, str], **work: Any) -> Run:
    fixed = {**ROLLOUTS, "init": "init", "samples_per_prompt": 3, "minibatch_size": 2}
    return Run("best_of_n", {**fixed, **work}, {"init": "init", **SCORED, **inputs}, 7, REWARDS)


def _distillation(**work: Any) -> Run:
    fixed = {**ROLLOUTS, "init": "reference", "teacher": "init", "samples_per_prompt": 2, "minibatch_size": 4}
    inputs = {"init": "reference", "teacher": "init", **SCORED}
    return Run("distillation", {**fixed, **work}, inputs, 1, REWARDS)


LEARNING_FROM_DATA = {
    "sft": _sft(),
    "sft: packing, length groups off": _sft(packing=True, group_by_length=False, microbatch_size=3),
    "sft: LoRA": _sft(lora=LORA),
    "sft: bfloat16, recomputed activations": _sft(precision="bfloat16", gradient_checkpointing=True),
    "reward_model": _reward_model("data", "pairs", lm_coef=0.3, centre_coef=0.05),
    "reward_model: rankings": _reward_model("rankings", "rankings"),
    "reward_model: LoRA": _reward_model("data", "pairs", lora=LORA),
    "dpo": _dpo("data", "pairs", schedule="linear"),
    "dpo: collected responses": _dpo("rollouts", COLLECTED),
    "dpo: LoRA": _dpo("data", "pairs", lora=LORA),
    "dpo: IPO of means": _dpo("data", "pairs", loss="ipo", length_normalised=True),
    "dpo: SimPO": _free_of_reference("simpo", beta=2.0, target_margin=1.0, label_smoothing=0.1),
    "dpo: ORPO": _free_of_reference("orpo"),
    "kto": Run(
        "kto",
        {
            **ROWS,
            "init": "init",
            "reference": "reference",
            "data": "labelled",
            "beta": 0.4,
            "desirable_weight": 1.5,
        },
        {"init": "reference", "reference": "init", "data": "labelled"},
        seed=6,
    ),
    "best_of_n": _best_of_n({}, epochs=2),
    "distillation": _distillation(epochs=2),
    "best_of_n: collected responses": _best_of_n(
        {"rollouts": COLLECTED}, rollouts=COLLECTED, samples_per_prompt=2, minibatch_size=3
    ),
}


def _value(inputs: Mapping[str, str], **work: Any) -> Run:
    fixed = {
        **ROLLOUTS,
        "policy": "init",
        "init": "reward",
        "reference": "reference",
        "returns": RETURNS,
        "minibatch_size": 6,
        "samples_per_prompt": 2,
        "learning_rate": 0.02,
        "iterations": 3,
    }
    roles = {"policy": "init", "init": "reward", "reference": "reference", **SCORED, **inputs}
    return Run("value_pretraining", {**fixed, **work}, roles, 8, REWARDS)


PRETRAINING = {
    "value_pretraining": _value({}, epochs=2, keep_optimizer=True),
    "value_pretraining: ends without gain": _value({}, patience=1, learning_rate=0.5),
    "value_pretraining: sampled ahead": _value({}, rollout={"ahead": 1}, validate_every=2),
    "value_pretraining: collected responses": _value(
        {"rollouts": COLLECTED}, rollouts="collected", samples_per_prompt=1
    ),
    "value_pretraining: half collected": _value(
        {"rollouts": COLLECTED}, rollouts="collected", fresh_share=0.5
    ),
    "value_pretraining: quantiles": _value({}, head={"quantiles": 4}),
    "value_pretraining: an ensemble": _value({}, head={"ensemble": 2}),
    "value_pretraining: a fresh head, LoRA": _value(
        {"init": "fresh"}, init="fresh", returns={"gamma": 0.8}, lora=LORA
    ),
}


def _policy(algorithm: Mapping[str, Any], *, seed: int = 9, reward: Reward | None = None, **work: Any) -> Run:
    """Return two iterations of policy optimisation of what the oracle's tests train, with the inputs that the switches read."""
    switches = Algorithm.model_validate(algorithm)
    fixed = {
        **by_oracle.WORK,
        "iterations": 2,
        "validate_every": 2,
        "microbatch_size": 7,
        "checkpoint_every": 2,
        "validation_samples": 9,
        "test_samples": 7,
    }
    if not switches.importance_ratio:
        fixed |= {"epochs": 1, "minibatch_size": fixed["batch_size"]}
    given = {**fixed, "algorithm": dict(algorithm), **work}
    if switches.reads_rollouts:
        given["rollouts"] = COLLECTED
    if switches.ptx_coef:
        given["ptx"] = "demonstrations"
    optional = {"critic": "critic", "fresh_critic": "fresh", "rollouts": COLLECTED, "ptx": "demonstrations"}
    roles = {"init": "init", "reference": "reference", "prompts": "prompts"}
    roles |= {role: name for role, name in optional.items() if given.get(role)}
    if switches.positive_verifier:
        roles["positive_verifier"] = "last_digit"
    roles |= SCORED if reward is None else {"reward.main.0": _judge_of(reward)}
    return Run("policy_optimization", given, roles, seed, REWARDS if reward is None else {"main": reward})


def _judge_of(reward: Reward) -> str:
    """Return the input that scores the only term of a reward."""
    [term] = reward.terms
    return "reward" if isinstance(term, ModelTerm) else "last_digit"


def _of_preset(name: str) -> Run:
    """Return a preset as it is, but for groups that fit the batch, and a discount."""
    if name in ("dapo", "cispo"):  # a reward model's scores never leave a group uniform
        return _policy(preset(name, gamma=0.9, max_sampling_rounds=2), reward=VERIFIED)
    return _policy(preset(name, gamma=0.9), reward=SCORED_BY_MODEL)


def _of_oracle(case: by_oracle.Case) -> Run:
    """Return a case of the oracle's tests, in two iterations."""
    work = {
        name: value for name, value in case.work.items() if name not in ("iterations", "checkpoint_every")
    }
    return _policy(case.algorithm, seed=case.seed, reward=case.reward, **work)


POLICIES = {
    **{f"policy_optimization: {name}": _of_preset(name) for name in get_args(PresetName)},
    **{f"policy_optimization: {name}": _of_oracle(case) for name, case in by_oracle.CASES.items()},
    "policy_optimization: sampled ahead": _policy(
        preset("ppo", gamma=0.9, kl_coef=0.1), rollout={"ahead": 1, "importance_cap": 1.1}, iterations=3
    ),
    "policy_optimization: sampled ahead, ratio to the sampler": _policy(
        preset("grpo", old_logprobs="sampler"), rollout={"ahead": 1}, iterations=3
    ),
    "policy_optimization: LoRA": _policy(preset("ppo", gamma=0.9), lora=LORA),
    "policy_optimization: LoRA, no critic": _policy(preset("rloo", kl_coef=0.1), lora=LORA, critic=None),
    "policy_optimization: the critic's optimiser goes on": Run(
        "policy_optimization",
        {**(carried := _policy(preset("ppo", gamma=0.9))).work, "critic_optimizer": "carry"},
        {**carried.inputs, "critic": "value_pretraining"},
        10,
        REWARDS,
    ),
}

JUDGED = {
    "prompt_selection": Run(
        "prompt_selection",
        {"rollouts": "collected", "prompts": "prompts", "pass_rate": [0.0, 1.0], "passes_above": 0.5},
        {"rollouts": COLLECTED, "prompts": "prompts"},
    ),
    COLLECTED: Run(
        COLLECTED,
        {
            "policy": "init",
            "prompts": "prompts",
            "reward": "main",
            "samples_per_prompt": 3,
            "held_out_samples_per_prompt": 4,
            "batch_size": 12,
            "microbatch_size": 5,
        },
        {"policy": "init", **SCORED},
        4,
        REWARDS,
    ),
    "preference_collection": Run(
        "preference_collection",
        {
            "policy": "init",
            "prompts": "prompts",
            "judge": {"reward": "main"},
            "samples_per_prompt": 3,
            "batch_size": 6,
            "microbatch_size": 4,
        },
        {"policy": "init", **SCORED},
        11,
        REWARDS,
    ),
    "preference_collection: against demonstrations": Run(
        "preference_collection",
        {"policy": "reference", "demonstrations": "demonstrations", "samples_per_prompt": 1, "batch_size": 6},
        {"policy": "reference", "demonstrations": "demonstrations"},
        12,
    ),
    "reward_evaluation": Run(
        "reward_evaluation",
        {"reward_model": "reward", "data": "pairs", "microbatch_size": 5},
        {"reward_model": "reward", "data": "pairs"},
        13,
    ),
    "benchmark_evaluation": Run(
        "benchmark_evaluation",
        {"policy": "init", "benchmark": "local", "task": "sums", "microbatch_size": 7},
        {"policy": "init", "benchmark": "import_benchmark"},
        14,
    ),
    "evaluation": Run(
        "evaluation",
        {
            "candidate": "init",
            "baseline": "reference",
            "judge": {"verifier": "last_digit"},
            "also": {"reward": "main"},
            "prompts": "prompts",
            "demonstrations": "demonstrations",
            "samples_per_prompt": 4,
            "microbatch_size": 5,
        },
        {
            "candidate": "init",
            "baseline": "reference",
            "demonstrations": "demonstrations",
            "judge": "last_digit",
            **SCORED,
        },
        15,
        REWARDS,
    ),
    "evaluation: by a verifier of its own": Run(
        "evaluation",
        {
            "candidate": "reference",
            "baseline": "init",
            "judge": {"verifier": "mine"},
            "prompts": "prompts",
            "samples_per_prompt": 2,
        },
        {"candidate": "reference", "baseline": "init", "judge": "import_verifier", "prompts": "prompts"},
        16,
    ),
}

RUNS: dict[str, Run] = {**IMPORTS, **LEARNING_FROM_DATA, **PRETRAINING, **POLICIES, **JUDGED}


def kinds_behind(name: str) -> set[str]:
    """Return the kinds of stage whose revisions may change a run's result: its own, and those that made its inputs."""
    run = RUNS[name]
    made = (kinds_behind(each) for each in run.inputs.values() if each in RUNS)
    return {run.kind}.union(*made)
