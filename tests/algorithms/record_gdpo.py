"""Record what verl's GDPO gives the rollouts of ``gdpo_cases.py``: ``gdpo_by_verl.json``.

    python -m tests.algorithms.record_gdpo VERL

where the argument is a checkout of verl-project/verl. The function is read out of its file and run as it is, with one
change: its tensors of scores and weights are in float64 and not in float32, since its rounding is larger than what is
compared. The record also holds how far its own float32 is from that. The file names the commit.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.algorithms.gdpo_cases import COUNT, GdpoCase, gdpo_case, shown
from tests.algorithms.record_peers import commit_of, functions

RECORD = Path(__file__).with_name("gdpo_by_verl.json")


def by_verl(verl: Path, dtype: torch.dtype) -> Callable[[GdpoCase], Tensor]:
    """Return verl's advantages (B,T) of a rollout, computed in ``dtype``."""
    typed = SimpleNamespace(**{**vars(torch), "float32": dtype})
    of_numpy = np.float32 if dtype == torch.float32 else np.float64
    numpy = SimpleNamespace(asarray=np.asarray, ndarray=np.ndarray, float32=of_numpy)
    whitening = functions(
        verl / "verl/utils/torch_functional.py",
        ("masked_sum", "masked_mean", "masked_var", "masked_whiten"),
    )
    names = ("compute_grpo_outcome_advantage", "compute_gdpo_outcome_advantage")
    found = functions(
        verl / "verl/trainer/ppo/core_algos.py",
        names,
        torch=typed,
        np=numpy,
        verl_F=SimpleNamespace(**whitening),
    )

    def advantages(case: GdpoCase) -> Tensor:
        keys = [f"score_{number}" for number in range(case.scores.shape[1])]
        mask = case.mask.to(dtype)
        made: tuple[Tensor, Any] = found["compute_gdpo_outcome_advantage"](
            token_level_rewards=torch.zeros_like(mask),
            response_mask=mask,
            index=case.groups.numpy(),
            config={"gdpo_reward_keys": keys, "gdpo_reward_weights": list(case.weights)},
            non_tensor_batch=dict(zip(keys, case.scores.T.to(dtype).numpy(), strict=True)),
            batch={
                "prompts": torch.zeros(len(mask), 1),
                "attention_mask": torch.cat([torch.ones(len(mask), 1), mask], dim=1).long(),
            },
        )
        return made[0]

    return advantages


def main() -> None:
    """Write the record."""
    verl = Path(sys.argv[1])
    precise, its_own = by_verl(verl, torch.float64), by_verl(verl, torch.float32)
    cases = [gdpo_case(number) for number in range(COUNT)]
    farthest = max(float((its_own(case).double() - precise(case)).abs().max()) for case in cases)
    record = {
        "source": "verl-project/verl, verl/trainer/ppo/core_algos.py: compute_gdpo_outcome_advantage",
        "commit": commit_of(verl),
        "float32_differs_by_at_most": float(f"{farthest:.2g}"),
        "advantages": [[float(f"{x:.9g}") for x in shown(precise(case), case)] for case in cases],
    }
    RECORD.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
