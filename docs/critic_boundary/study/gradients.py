"""Compute gradients of Σ c_t · log π(token t), for many sets of coefficients c over the same tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences

LAST_BLOCK = ("gate_proj", "up_proj", "down_proj")
"""Matrices of the last block's MLP. No attention follows them, so token t's log-probability reaches them at one position
alone, and its gradient is a product of two vectors there: every set of coefficients then costs a matrix product."""


@dataclass(frozen=True)
class TokenScores:
    """∇ log π of N tokens with respect to one matrix (O,I): the outer product of `signals` (N,O) and `inputs` (N,I)."""

    signals: Tensor
    inputs: Tensor

    def at(self, here: Tensor) -> "TokenScores":
        """Return the scores of some of the tokens: ``here`` (N,) is True for them."""
        return TokenScores(self.signals[here], self.inputs[here])


def last_block_scores(policy: PolicyModel, sequences: Sequences, *, temperature: float) -> list[TokenScores]:
    """Return each response token's ∇ log π with respect to the matrices of `LAST_BLOCK`, by rows and then along each response.

    Raises:
        ValueError: the policy's last block has no such MLP.
    """
    mlp = policy.causal_lm.get_decoder().layers[-1].mlp
    missing = [name for name in LAST_BLOCK if not isinstance(getattr(mlp, name, None), nn.Linear)]
    if missing:
        raise ValueError(
            f"the last block's {type(mlp).__name__} has no {missing[0]}; use a Llama-like policy"
        )
    with _frozen(policy), _captured(mlp) as captured:
        logprobs = policy(sequences, temperature=temperature)["logprobs"]
        outputs = [captured[name][1] for name in LAST_BLOCK]
        signals = torch.autograd.grad(logprobs[sequences.response_mask].sum(), outputs)
    rows, steps = sequences.response_mask.nonzero(as_tuple=True)
    positions = sequences.response_positions[rows, steps]
    return [
        TokenScores(signal[rows, positions], captured[name][0][rows, positions].detach())
        for name, signal in zip(LAST_BLOCK, signals, strict=True)
    ]


def last_block_gradients(scores: list[TokenScores], coefficients: Tensor) -> Tensor:
    """Return the gradients (J,P) of J sets of coefficients (J,N) over the tokens of `scores`."""
    parts = []
    for score in scores:
        weighted = coefficients[:, :, None] * score.signals
        parts.append((weighted.transpose(1, 2) @ score.inputs).flatten(1))
    return torch.cat(parts, dim=1)


def squared_norms(scores: list[TokenScores]) -> Tensor:
    """Return ‖∇ log π‖² of each token (N,) over all matrices of `scores`."""
    return sum(
        (score.signals.square().sum(dim=1) * score.inputs.square().sum(dim=1) for score in scores),
        start=torch.zeros(()),
    )


def all_gradients(
    policy: PolicyModel, sequences: Sequences, coefficients: Tensor, *, temperature: float
) -> Tensor:
    """Return the gradients (J,P) with respect to all parameters, of J sets of coefficients (J,N): one backward pass for
    each.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    logprobs = policy(sequences, temperature=temperature)["logprobs"][sequences.response_mask]
    gradients = []
    for number, weights in enumerate(coefficients):
        parts = torch.autograd.grad(
            (weights * logprobs).sum(), parameters, retain_graph=number + 1 < len(coefficients)
        )
        gradients.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(gradients)


@contextmanager
def _frozen(policy: PolicyModel) -> Iterator[None]:
    """Let no parameter ask for a gradient, so a graph begins only where one is asked for."""
    learning = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


@contextmanager
def _captured(mlp: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Yield name → input and output of each matrix in the passes made inside; the outputs ask for a gradient."""
    captured: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            captured[name] = (inputs[0], output if output.requires_grad else output.requires_grad_())

        return hook

    handles = [getattr(mlp, name).register_forward_hook(keep(name)) for name in LAST_BLOCK]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
