"""A term that is a trained reward model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vantage.models.folders import tokenizer_digest
from vantage.models.heads import ScalarModel, load_scalar, scores
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.terms import ModelTerm
from vantage.tasks.rewards.reencoding import Reencoder, reencoder_of
from vantage.tasks.rewards.step_scores import StepScores, finder_of
from vantage.tasks.rewards.term_scores import Responses, Source
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.networks import is_offloaded, placed
from vantage.tasks.training.offloading import on_device
from vantage.tasks.training.passes import passes_of


class TokenizersDiffer(ValueError):
    """Two models that must read the same ids have different tokenizers."""


@dataclass(frozen=True)
class ModelScores:
    """The scores of whole responses by a loaded model."""

    model: ScalarModel
    reencoder: Reencoder | None = None
    """Encodes responses again for a model with another tokenizer or chat template; None: it reads the policy's ids."""

    def __call__(self, given: Responses) -> Tensor:
        """Return the scores (B,) of the responses."""
        sequences = given.sequences if self.reencoder is None else self.reencoder.sequences(given)
        return _scores(self.model, sequences, given.limits).to(given.device)


def load(term: ModelTerm, source: Source) -> ModelScores | StepScores:
    """Return the model's score of whole responses, or of their steps.

    Raises:
        TokenizersDiffer: steps end at tokens of the policy, and the model has another tokenizer.
        UnreadablePrompt: the model has another tokenizer or chat template, and cannot read a prompt.
    """
    inputs = source.job.inputs
    own = tokenizer_digest(inputs[source.role])
    others = [policy for policy in source.tokenizers_of if tokenizer_digest(inputs[policy]) != own]
    if others and term.step_ends is not None:
        raise TokenizersDiffer(
            f"{source.path}.step_ends scores the policy's tokens, and model={term.model!r} has another tokenizer or chat template "
            f"than {others[0]}; leave step_ends out, or train the reward model from the same model as the policy"
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
        return StepScores(finder_of(term.step_ends, source), ask=None, model=model, path=source.path)
    if not others:
        return ModelScores(model)
    window = getattr(model.backbone.config.get_text_config(), "max_position_embeddings", None)
    return ModelScores(model, reencoder_of(source, model=term.model, window=window))


def _scores(model: ScalarModel, sequences: Sequences, limits: PassLimits) -> Tensor:
    """Return the scores; all equal responses to a prompt have exactly the score of the first of them.

    The rounding of a score depends on the padding and on the place in the batch. Between equal responses the difference
    would look like a preference: a uniform group would not count as one, and its advantages would be rounding divided
    by rounding.
    """
    with on_device(model):
        found = torch.zeros(len(sequences), device=model.device)
        for part in passes_of(sequences, limits):
            progress.phase("scoring", part.done, len(sequences))
            part.put(scores(model, part.select(sequences)), into=found)
    return ranks.total(found)[sequences.first_equal_rows()]
