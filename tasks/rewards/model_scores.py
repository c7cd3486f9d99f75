"""A term that is a trained reward model."""

import torch
from torch import Tensor

from vantage.models.folders import tokenizer_digest
from vantage.models.heads import ScalarModel, load_scalar, scores
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.terms import ModelTerm
from vantage.tasks.rewards.step_scores import StepScores, finder_of
from vantage.tasks.rewards.term_scores import Source, TermScores
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.networks import is_offloaded, placed
from vantage.tasks.training.offloading import on_device
from vantage.tasks.training.passes import passes_of


class TokenizersDiffer(ValueError):
    """Two models that must read the same ids have different tokenizers."""


def load(term: ModelTerm, source: Source) -> TermScores | StepScores:
    """Return the model's score of whole responses, or of their steps.

    Raises:
        TokenizersDiffer: it was trained with another tokenizer than the policy's.
    """
    inputs = source.job.inputs
    for policy in source.tokenizers_of:
        if tokenizer_digest(inputs[source.role]) != tokenizer_digest(inputs[policy]):
            raise TokenizersDiffer(
                f"{source.path}.model={term.model!r} has another tokenizer than {policy}; "
                "train the reward model from the same model as the policy"
            )
    files, work = source.job.model(source.role), source.job.work
    model = placed(
        lambda: load_scalar(files, role="reward", dtype=source.dtype, training="nothing"),
        files,
        source.device,
        precision=work.arithmetic if isinstance(work, Stage) else "float32",
        offload=is_offloaded(source.job, "reward"),
    )
    if term.step_ends is not None:
        return StepScores(finder_of(term.step_ends, source), ask=None, model=model)
    return scored_by(model)


def scored_by(model: ScalarModel) -> TermScores:
    """Return scores by a loaded model."""
    return lambda given: _scores(model, given.sequences, given.limits)


def _scores(model: ScalarModel, sequences: Sequences, limits: PassLimits) -> Tensor:
    """Return the scores; equal responses to a prompt have equal scores, bit by bit: those of the first of them.

    A pass rounds a row by its padding and its place in the batch. Between equal responses the difference would look
    like a preference: a uniform group would not be seen as one, and its advantages would be rounding divided by rounding.
    """
    with on_device(model):
        found = torch.zeros(len(sequences), device=model.device)
        for part in passes_of(sequences, limits):
            progress.phase("scoring", part.done, len(sequences))
            part.put(scores(model, part.select(sequences)), into=found)
    return ranks.total(found)[sequences.first_equal_rows()]
