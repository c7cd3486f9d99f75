"""Record what OpenRLHF's ``reinforce_baseline`` gives the rollouts of ``kl_credit_cases.py``: ``kl_credit_by_openrlhf.json``.

    python -m tests.algorithms.record_kl_credit OPENRLHF

where the argument is a checkout of OpenRLHF/OpenRLHF. Its methods are read out of their file and run as they are, with one
change: they compute in float64 and not in float32. The file names the commit.
"""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.algorithms.kl_credit_cases import COUNT, KlCreditCase, kl_credit_case, shown
from tests.algorithms.record_peers import commit_of, functions

RECORD = Path(__file__).with_name("kl_credit_by_openrlhf.json")
MAKER = "openrlhf/trainer/ppo_utils/experience_maker.py"


def by_openrlhf(checkout: Path, case: KlCreditCase) -> Tensor:
    """Return OpenRLHF's advantages (B,T) of a rollout, whose responses are one experience each half."""
    rewards = functions(checkout / "openrlhf/models/utils.py", ("compute_reward", "compute_approx_kl"))
    found = functions(
        checkout / MAKER,
        ("compute_advantages_and_returns", "get_cumulative_returns"),
        compute_reward=rewards["compute_reward"],
        apply_length_penalties=lambda experiences, args: None,
        itertools=itertools,
    )
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        kl = rewards["compute_approx_kl"](case.logprobs, case.ref_logprobs)
        halves = torch.arange(len(case.scores)).tensor_split(2)
        experiences = [
            SimpleNamespace(
                index=rows.tolist(),
                rewards=case.scores[rows],
                kl=kl[rows],
                action_mask=case.mask[rows],
                info={},
            )
            for rows in halves
        ]
        advantage = SimpleNamespace(estimator="reinforce_baseline", gamma=1.0, no_std_norm=False)
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=case.samples),
            algo=SimpleNamespace(advantage=advantage),
            reward=SimpleNamespace(clip_range=None),
        )
        maker: Any = SimpleNamespace(
            strategy=SimpleNamespace(args=args),
            kl_ctl=SimpleNamespace(value=case.kl_coef),
            advantage_estimator="reinforce_baseline",
        )
        maker.get_cumulative_returns = lambda *given: found["get_cumulative_returns"](maker, *given)
        made = found["compute_advantages_and_returns"](maker, experiences)
    return torch.cat([each.advantages for each in made])


def main() -> None:
    """Write the record."""
    torch.set_default_dtype(torch.float64)
    checkout = Path(sys.argv[1])
    cases = [kl_credit_case(number) for number in range(COUNT)]
    record = {
        "source": f"OpenRLHF/OpenRLHF, {MAKER}: compute_advantages_and_returns with reinforce_baseline",
        "commit": commit_of(checkout),
        "advantages": [
            [float(f"{x:.9g}") for x in shown(by_openrlhf(checkout, case), case)] for case in cases
        ],
    }
    RECORD.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
