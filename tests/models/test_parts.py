"""Sequences in parts, and prompts that are read once for all their responses, give what each gives alone, in every family."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tasks.test_model_families import FAMILIES
from vantage.models.builtin import build_builtin
from vantage.models.folders import _attention_implementation, load_policy
from vantage.models.heads import ScalarModel, scores_and_logprobs, values_and_final
from vantage.models.logprobs import response_logprobs
from vantage.models.output_head import LanguageHead, output_head
from vantage.models.parts import Cuts, Parts, in_parts
from vantage.models.pass_counts import taken_counts
from vantage.models.scalar_head import fresh_head
from vantage.models.sequences import Sequences, collate

DRAW = torch.Generator().manual_seed(5)


def ids(count: int) -> list[int]:
    return torch.randint(4, 60, (count,), generator=DRAW).tolist()


PROMPTS = [ids(3), ids(21), ids(9)]
"""The second is longer than the windows of the families that have one."""
PROMPT_OF = (0, 1, 0, 2, 1, 1, 2, 0)
LENGTHS = (2, 7, 30, 1, 19, 19, 5, 11)
CUTS = {
    "whole sequences": Cuts([[0, 3, 6], [1, 2, 4, 5, 7]]),
    "prompts at once": Cuts([[0, 3, 6, 1], [2, 4, 5, 7]], prompts=[[0, 1, 3]]),
    "prompts one by one": Cuts([[4, 5, 7, 0], [1], [2, 3, 6]], prompts=[[1], [3], [0]]),
    "all responses at once": Cuts([[7, 2, 0, 3, 6, 1, 5, 4]], prompts=[[3, 0], [1]]),
}


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    responses = [ids(length) for length in LENGTHS]
    return collate([PROMPTS[place] for place in PROMPT_OF], responses, pad_token_id=0)


def of_family(name: str) -> PreTrainedModel:
    torch.manual_seed(7)
    attention = _attention_implementation(FAMILIES[name])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        copy.deepcopy(FAMILIES[name]), attn_implementation=attention
    )
    # Without a kernel the softmax is in float32, where the lowest number of float64, with which it masks, is -inf
    return model.eval() if model.config._attn_implementation == "eager" else model.double().eval()


def found_by(model: PreTrainedModel, sequences: Sequences) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return all that a policy, a critic and a reward model read, and what gradients a loss of all of it has."""
    backbone = model.base_model
    head = fresh_head(backbone, seed=3, bias=True).to(model.dtype)
    critic = ScalarModel(
        backbone, head, score_shift=0.3, language_head=LanguageHead(output_head(model), is_tied=False)
    )
    policy = response_logprobs(model, sequences, temperature=0.7, with_entropy=True)
    assert policy.entropy is not None
    found = [
        policy.logprobs,
        policy.entropy,
        *values_and_final(critic, sequences),
        *scores_and_logprobs(critic, sequences, first_rows=5),
    ]
    model.zero_grad()
    draw = torch.Generator().manual_seed(11)
    torch.stack(
        [(each * torch.randn(each.shape, generator=draw, dtype=each.dtype)).sum() for each in found]
    ).sum().backward()
    gradients = [
        each.grad.clone() for each in (*model.parameters(), *head.parameters()) if each.grad is not None
    ]
    return [each.detach() for each in found], gradients


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_finds_what_it_finds_in_rows_of_their_own(
    family: str, cuts: str, sequences: Sequences
) -> None:
    """Log-probabilities, entropies, values, scores, and gradients of a loss of them all are equal up to the rounding of
    norms and some softmaxes, which are in float32 even here. One token more or less that is attended to changes the
    second digit."""
    model = of_family(family)
    alone, gradients_alone = found_by(model, sequences)
    found, gradients = found_by(model, in_parts(sequences, CUTS[cuts]))
    for ours, theirs in zip(found, alone, strict=True):
        rtol, atol = (1e-6, 1e-8) if ours.dtype == torch.float64 else (1e-4, 1e-5)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    assert len(gradients) == len(gradients_alone) > 10
    for ours, theirs in zip(gradients, gradients_alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_is_computed_is_counted(sequences: Sequences, tmp_path: Path) -> None:
    """The passes read three prompts of at most 21 positions, and parts of 4 rows of 7 and 4 rows of 30 positions."""
    build_builtin("tiny", tmp_path, seed=0)
    model = load_policy(tmp_path)
    taken_counts()
    with torch.no_grad():
        response_logprobs(model, in_parts(sequences, CUTS["prompts at once"]), temperature=1.0)
    counts = taken_counts()
    assert counts.passes == 3
    assert counts.positions == 3 * 21 + 4 * 7 + 4 * 30
    assert int(counts.tokens) == 3 + 21 + 9 + sum(LENGTHS)


def test_a_token_stands_where_its_part_begins(sequences: Sequences) -> None:
    """Positions equal those by hand: prompts are left-padded to 21; rows 0, 3, 6, 1 have 7, and rows 2, 4, 5, 7 have
    30.
    """
    laid = in_parts(sequences, CUTS["prompts at once"])
    assert isinstance(laid.layout, Parts)
    # prompts come in the order of their first sequences: 0 (3 tokens), 1 (21), 3 (9)
    rows, columns = laid.places(torch.tensor([0, 0, 4, 3, 6, 5]), torch.tensor([2, 3, 0, 8, 9 + 4, 21 + 18]))
    assert rows.tolist() == [0] * 6
    assert columns.tolist() == [20, 63, 21, 62, 63 + 2 * 7 + 4, 63 + 28 + 2 * 30 + 18]


def test_a_selection_is_laid_out_anew(sequences: Sequences) -> None:
    laid = in_parts(sequences, CUTS["prompts at once"])
    assert laid.select([0, 1]).layout is None and laid.to("cpu").layout is None


def test_equal_prompts_are_found(sequences: Sequences) -> None:
    """A prompt that another one begins with is another prompt, whatever follows it."""
    assert sequences.first_equal_prompts() == [0, 1, 0, 3, 1, 1, 3, 0]
    alike = collate([[5, 6], [5], [5, 6]], [[9], [6, 9], [9]], pad_token_id=0)
    assert alike.first_equal_prompts() == [0, 1, 0]
