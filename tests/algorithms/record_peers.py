"""Record what other libraries' losses are on the minibatches of ``peer_cases.py``: ``losses_by_peers.json``.

    python -m tests.algorithms.record_peers VERL TRL SKYWORK

where the arguments are checkouts of volcengine/verl, huggingface/trl and SkyworkAI/Skywork-OR1. Functions are read out of
their files and run as they are, so that nothing of these libraries has to be installed. Of each minibatch the record holds
the loss and the projection of its gradient. The file names the commits.
"""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.algorithms.peer_cases import COUNT, PeerCase, entropies_of, peer_case, projected

RECORD = Path(__file__).with_name("losses_by_peers.json")
VERL_LOSSES = ("gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "vanilla")


def functions(file: Path, names: Sequence[str], **given: Any) -> dict[str, Any]:
    """Return functions and classes of a file by name, without running the rest of it, decorators or annotations."""
    scope: dict[str, Any] = {"torch": torch, "np": np, "defaultdict": defaultdict, **given}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef):
                    each.decorator_list, each.returns = [], None
                    for argument in (*each.args.args, *each.args.kwonlyargs):
                        argument.annotation = None
            exec(compile(ast.Module([node], []), str(file), "exec"), scope)
    return scope


def by_verl(verl: Path) -> dict[str, Callable[[PeerCase, Tensor], Tensor]]:
    """Return verl's losses of a minibatch, with the name of each in verl."""
    helpers = functions(verl / "verl/utils/torch_functional.py", ("masked_mean", "masked_sum"))

    class Config(SimpleNamespace):
        """Stands for verl's class of settings."""

    names = ("agg_loss", *(f"compute_policy_loss_{name}" for name in VERL_LOSSES))
    found = functions(
        verl / "verl/trainer/ppo/core_algos.py",
        names,
        verl_F=SimpleNamespace(**helpers),
        ActorConfig=Config,
        AlgoConfig=type("AlgoConfig", (), {}),
    )

    def loss(name: str, case: PeerCase, leaf: Tensor) -> Tensor:
        policy_loss = SimpleNamespace(
            clip_cov_ratio=case.share, clip_cov_lb=0.1, clip_cov_ub=2.0, kl_cov_ratio=case.share, ppo_kl_coef=case.kl_coef
        )  # fmt: skip
        config = Config(
            clip_ratio=0.2, clip_ratio_low=case.clip_range_low, clip_ratio_high=case.clip_range_high, clip_ratio_c=3.0,
            tau_pos=case.temperatures[0], tau_neg=case.temperatures[1], global_batch_info={}, policy_loss=policy_loss,
            get=lambda name, default: 3.0 if name == "clip_ratio_c" else default,
        )  # fmt: skip
        if name == "geo_mean":  # its ranges bound the logarithm of the ratio
            config.clip_ratio_low = -float(np.log1p(-case.clip_range_low))
            config.clip_ratio_high = float(np.log1p(case.clip_range_high))
        advantages = case.response_advantages if name == "geo_mean" else case.advantages
        torch.manual_seed(7)  # clip_cov draws from torch's generator
        made: tuple[Tensor, Any] = found[f"compute_policy_loss_{name}"](
            case.old_logprobs, leaf, advantages, case.mask.double(), config=config,
            rollout_is_weights=case.weights if name == "vanilla" else None,
        )  # fmt: skip
        return made[0]

    return {name: partial(loss, name) for name in VERL_LOSSES}


def by_trl(trl: Path) -> dict[str, Callable[[PeerCase, Tensor], Tensor]]:
    """Return losses of TRL's trainer: its method runs on an object that has the settings and one process."""
    file = trl / "trl/trainer/grpo_trainer.py"
    identity = {"gather": lambda x: x, "gather_for_metrics": lambda x: x, "reduce": lambda x, reduction: x}
    utilities = {name: lambda x: torch.zeros(()) for name in ("nanmin", "nanmax")}
    compute = functions(file, ("_compute_loss",), **utilities)["_compute_loss"]

    def loss(case: PeerCase, leaf: Tensor, kind: str, level: str, beta: float) -> Tensor:
        highest = 1 + case.clip_range_high if kind == "cispo" else case.clip_range_high
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
            accelerator=SimpleNamespace(num_processes=1, **identity),
            args=SimpleNamespace(
                delta=None,
                use_bias_correction_kl=True,
                sapo_temperature_pos=case.temperatures[0],
                sapo_temperature_neg=case.temperatures[1],
            ),
            model=SimpleNamespace(training=True),
            loss_type=kind,
            importance_sampling_level=level,
            beta=beta,
            epsilon_low=case.clip_range_low,
            epsilon_high=highest,
            current_gradient_accumulation_steps=1,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False,
            use_vllm=False,
            use_adaptive_entropy=False,
            entropy_coef=0.0,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
        )
        trainer.accelerator.sync_gradients = False
        ids = torch.zeros(leaf.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :0],
            "prompt_mask": ids[:, :0],
            "completion_ids": ids,
            "completion_mask": case.mask.double(),
            "advantages": case.response_advantages[:, 0] * (beta == 0),
            "old_per_token_logps": case.old_logprobs,
            "ref_per_token_logps": case.ref_logprobs,
            "num_items_in_batch": case.mask.sum(),
        }
        found: Tensor = compute(trainer, None, inputs)
        return found

    return {
        "gspo": lambda case, leaf: loss(case, leaf, "grpo", "sequence", 0.0),
        "cispo": lambda case, leaf: loss(case, leaf, "cispo", "token", 0.0),
        "sapo": lambda case, leaf: loss(case, leaf, "sapo", "token", 0.0),
        "sapo of responses": lambda case, leaf: loss(case, leaf, "sapo", "sequence", 0.0),
        "k3 with its bias corrected": lambda case, leaf: loss(case, leaf, "grpo", "token", 1.0),
    }


def by_skywork(skywork: Path) -> list[list[float]]:
    """Return what Skywork-OR1's controller of the entropy applies after each of some measurements, case by case."""
    controller = functions(skywork / "verl/trainer/ppo/core_algos.py", ("EntController",))["EntController"]
    cases = []
    for number in range(COUNT):
        settings = {"init_ent_coef": 0.01, "max_ent_coef": 0.02, "min_ent_coef": 0.0, "delta_ent_coef": 0.005}
        made, applied = controller(**settings, target_ent=0.25, use_adapt_ent=True), []
        for entropy in entropies_of(number):
            made.update(entropy)
            applied.append(round(made.value * made.entropy_loss_enabled, 6))
        cases.append(applied)
    return cases


def recorded(losses: dict[str, Callable[[PeerCase, Tensor], Tensor]]) -> dict[str, list[list[float]]]:
    """Return each loss and its projected gradient, case by case."""
    made: dict[str, list[list[float]]] = {}
    for name, loss in losses.items():
        made[name] = []
        for number in range(COUNT):
            case = peer_case(number)
            leaf = case.logprobs.clone().requires_grad_()
            made[name].append([float(f"{x:.9g}") for x in projected(loss(case, leaf), leaf, case.direction)])
    return made


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Write the record."""
    torch.set_default_dtype(torch.float64)  # otherwise TRL's temperatures are rounded to float32
    verl, trl, skywork = map(Path, sys.argv[1:4])
    record = {
        "commits": {
            name: commit_of(path) for name, path in (("verl", verl), ("trl", trl), ("skywork", skywork))
        },
        "verl": recorded(by_verl(verl)),
        "trl": recorded(by_trl(trl)),
        "skywork": by_skywork(skywork),
    }
    RECORD.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
