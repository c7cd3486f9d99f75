"""Record which weights TRL gives the tokens of another sampler on the minibatches of ``peer_cases.py``: ``importance_by_trl.json``.

    python -m tests.algorithms.record_importance TRL

where the argument is a checkout of huggingface/trl. The weights are made by one statement in a long method of its trainer, which is
read out of the file and run as it is. The file names the commit.
"""

import ast
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.algorithms.peer_cases import COUNT, PeerCase, peer_case
from tests.algorithms.record_peers import commit_of

RECORD = Path(__file__).with_name("importance_by_trl.json")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CONDITION = "self.use_vllm and self.vllm_importance_sampling_correction"
WEIGHTS = "vllm_importance_sampling_ratio"


def bounds(case: PeerCase) -> tuple[float, float]:
    """Return the lowest and the highest ratio of a minibatch."""
    return 1 - case.clip_range_low, 1 + case.clip_range_high


def summed(weights: Tensor, case: PeerCase) -> list[float]:
    """Return what shows every weight (B,T): their sum along the direction, and how many are not 0."""
    valid = (weights * case.mask).expand_as(case.mask)
    return [(valid * case.direction).sum().item(), float((valid != 0).sum())]


def by_trl(trl: Path) -> Callable[[PeerCase, str], Tensor]:
    """Return TRL's weights (B,T) or (B,1) of a minibatch: the policy's are ``logprobs``, the sampler's ``old_logprobs``."""
    file = trl / "trl/trainer/grpo_trainer.py"
    [statement] = [
        node
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.If) and ast.unparse(node.test) == CONDITION and _makes_weights(node)
    ]
    code = compile(ast.Module([statement], []), str(file), "exec")

    def weights(case: PeerCase, mode: str) -> Tensor:
        lowest, highest = bounds(case)
        settings = {"mode": mode, "clip_min": lowest, "clip_max": highest, "correction": True}
        scope: dict[str, Any] = {
            "self": SimpleNamespace(
                use_vllm=True, **{f"vllm_importance_sampling_{name}": each for name, each in settings.items()}
            ),
            "completion_mask": case.mask.double(),
            "tool_mask": None,
            "old_per_token_logps": case.logprobs,
            "sampling_per_token_logps": case.old_logprobs,
            "torch": torch,
            "math": math,
        }
        exec(code, scope)
        found: Tensor = scope[WEIGHTS]
        return found

    return weights


def _makes_weights(statement: ast.If) -> bool:
    """Return whether a branch assigns the exponential of log-ratios to the weights."""
    return any(ast.unparse(each) == f"{WEIGHTS} = torch.exp(logps_diff)" for each in statement.body)


def main() -> None:
    """Write the record."""
    weights = by_trl(Path(sys.argv[1]))
    record: dict[str, Any] = {"commit": commit_of(Path(sys.argv[1]))}
    for mode in MODES:
        cases = map(peer_case, range(COUNT))
        record[mode] = [[float(f"{x:.9g}") for x in summed(weights(case, mode), case)] for case in cases]
    RECORD.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
