"""Take further measurements of a policy at each validation, if the recipe names the data for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vantage.algorithms.score_distribution import distance_to, quantiles
from vantage.algorithms.uncertainty import Estimate, clustered_mean
from vantage.models.policy import PolicyModel
from vantage.schemas.metric_names import (
    JUDGE_OF_PREFERENCES,
    REWARD_DATA_PERCENTILES,
    REWARD_OF_PREFERENCES,
    SCORE_PERCENTILES,
)
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Codec, Completions, Prompts, read_completions, read_prompts
from vantage.tasks.data.splits import TRAIN, VALIDATION
from vantage.tasks.rewards.model_scores import ModelScores
from vantage.tasks.rewards.scoring import Scorer, Scores, scores_of, weighted_sum
from vantage.tasks.rewards.term_scores import Responses
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.training import progress
from vantage.tasks.training.likelihood import measure_likelihood
from vantage.tasks.training.measured import clusters_of_ids
from vantage.tasks.training.offloading import on_device

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Demonstrations:
    """Held-out demonstrations, and how likely they are under the reference."""

    examples: Completions
    limits: PassLimits
    reference_nll: float | None
    """Mean per token, in nats; None: the stage has no reference."""

    def measure(self, policy: PolicyModel) -> dict[str, float]:
        """Return the policy's mean NLL per token, and how far it has risen above the reference's."""
        nll = mean_nll(policy, self.examples, limits=self.limits)
        rise = {} if self.reference_nll is None else {"demonstration_nll_rise": nll - self.reference_nll}
        return {"demonstration_nll": nll, **rise}


@dataclass(frozen=True)
class RewardData:
    """The scores that the reward's models give to the responses on which they were trained."""

    models: Scorer
    """The reward, without its other terms."""
    scores: Tensor
    """(N,), of chosen and rejected responses."""
    is_whole_reward: bool
    """Whether the reward has no other terms, so that these scores are rewards."""
    accuracy: Mapping[str, Estimate] = field(default_factory=dict)
    """Shares of the held-out pairs in which the reward, and the watch's judge, prefer the chosen response."""

    def measure(self, by_term: Mapping[str, Tensor]) -> dict[str, float]:
        """Return how far the scores of other responses are from the scores of these.

        Args:
            by_term: term → scores (B,) of the other responses.
        """
        distance = distance_to(weighted_sum(by_term, self.models), self.scores)
        shown = dict(zip(REWARD_DATA_PERCENTILES, percentiles(self.scores), strict=True))
        of_pairs = {name: estimate.value for name, estimate in self.accuracy.items()}
        found = {"reward_data_distance": distance, **of_pairs, **(shown if self.is_whole_reward else {})}
        return {name: value for name, value in found.items() if value == value}


@dataclass(frozen=True)
class Monitors:
    """All monitors of a stage."""

    demonstrations: Demonstrations | None = None
    reward_data: RewardData | None = None

    @property
    def preference_accuracy(self) -> Mapping[str, Estimate]:
        """Shares of held-out pairs whose chosen response the reward or the judge prefers; empty if no pairs are
        named."""
        return {} if self.reward_data is None else self.reward_data.accuracy

    def measure(self, policy: PolicyModel, scores: Scores) -> dict[str, float]:
        """Return the metrics of the present policy.

        Args:
            scores: scores of its responses to the validation prompts.
        """
        found: dict[str, float] = {}
        if self.demonstrations is not None:
            with progress.within("demonstrations"):
                found |= self.demonstrations.measure(policy)
        if self.reward_data is not None:
            found |= self.reward_data.measure(scores.by_term)
        return found


def load_monitors(
    job: StageJob[ResolvedPolicyOptimization], models: RolloutModels, *, judge: Scorer | None = None
) -> Monitors:
    """Return the monitors that the recipe asks for; models that do not learn are measured here, once per attempt.

    Args:
        judge: the reward that judges in the stage's watch, if one does.

    Raises:
        NothingLeft: no row of a dataset fits the recipe's limits.
    """
    limits = models.limits.or_rows(job.work.minibatch_size)
    demonstrations = reward_data = None
    if "demonstrations" in job.inputs:
        demonstrations = _demonstrations(job, models, limits)
    if "preferences" in job.inputs and models.scorer is not None:
        reward_data = _reward_data(job, models.scorer, models, limits, judge=judge)
    return Monitors(demonstrations, reward_data)


def percentiles(scores: Tensor) -> list[float]:
    """Return the percentiles of ``SCORE_PERCENTILES`` of scores (N,)."""
    return quantiles(scores, [percent / 100 for percent in SCORE_PERCENTILES])


def mean_nll(policy: PolicyModel, examples: Completions, *, limits: PassLimits) -> float:
    """Return the mean NLL of all tokens that are learnt, in nats per token."""
    with on_device(policy):
        measured = measure_likelihood(policy, examples, limits=limits)
    return measured.nll.sum().item() / measured.num_tokens.sum().item()


def _demonstrations(
    job: StageJob[ResolvedPolicyOptimization], models: RolloutModels, limits: PassLimits
) -> Demonstrations:
    count = job.work.validation_samples
    examples = read_completions(
        job.inputs["demonstrations"],
        VALIDATION,
        ["response"],
        models.codec,
        train_on="all_responses",
        enough=count,
    )
    examples = first_rows(examples, count)
    nll = None
    if models.reference is not None:
        with progress.within("demonstrations under the reference"):
            nll = mean_nll(models.reference, examples, limits=limits)
    return Demonstrations(examples, limits, nll)


def _reward_data(
    job: StageJob[ResolvedPolicyOptimization],
    scorer: Scorer,
    models: RolloutModels,
    limits: PassLimits,
    *,
    judge: Scorer | None,
) -> RewardData:
    only, judging = _models_of(scorer), None if judge is None else _models_of(judge)
    asked = (*only.terms, *(() if judging is None else judging.terms))
    reads_texts = any(isinstance(each.scores, ModelScores) and each.scores.reencoder for each in asked)
    found, accuracy = [], {}
    for split in (TRAIN, VALIDATION):
        pairs = read_completions(
            job.inputs["preferences"], split, SIDES, models.codec, enough=job.work.validation_samples
        )
        texts = read_prompts(job.inputs["preferences"], split, models.codec) if reads_texts else None
        with progress.within("preferences"):
            first = first_rows(pairs, job.work.validation_samples)
            found.append(pair_scores(only, first, models, limits, texts=texts))
            if split == VALIDATION and only.terms:
                accuracy[REWARD_OF_PREFERENCES] = _share_preferred(found[-1], first)
            if split == VALIDATION and judging is not None and judging.terms:
                by_judge = pair_scores(judging, first, models, limits, texts=texts)
                accuracy[JUDGE_OF_PREFERENCES] = _share_preferred(by_judge, first)
    is_whole = len(only.terms) == len(scorer.terms)
    return RewardData(only, torch.cat(found), is_whole_reward=is_whole, accuracy=accuracy)


def _models_of(scorer: Scorer) -> Scorer:
    """Return a reward without its other terms."""
    return replace(scorer, terms=tuple(term for term in scorer.terms if term.is_model), missing_eos=None)


def _share_preferred(scores: Tensor, pairs: Completions) -> Estimate:
    """Return the share of pairs whose chosen response scores higher, ties as a half; all pairs of a prompt are one cluster.

    ``scores`` (2N,): scores of N chosen and then of N rejected responses.
    """
    chosen, rejected = scores.double().cpu().chunk(2)
    return clustered_mean(((chosen - rejected).sign() + 1) / 2, clusters_of_ids(pairs.prompt_ids))


@torch.no_grad()
def pair_scores(
    scorer: Scorer,
    pairs: Completions,
    models: RolloutModels,
    limits: PassLimits,
    *,
    texts: Prompts | None = None,
) -> Tensor:
    """Return the scores (2N,) of the chosen and then of the rejected responses of N pairs, by reward models.

    ``texts``: prompts of the pairs, for reward models with another tokenizer than the policy's, which read text.
    """
    sequences = pairs.batch(range(len(pairs))).to(models.policy.device)
    given = Responses(sequences, (), (), (), models.policy.device, limits)
    if texts is not None:
        given = with_texts(given, texts, models.codec)
    return weighted_sum(scores_of(scorer, given), scorer)


def with_texts(given: Responses, prompts: Prompts, codec: Codec) -> Responses:
    """Return the responses with their texts, the texts of their prompts, and which of them were not cut off."""
    places = {tuple(ids): place for place, ids in enumerate(prompts.ids)}
    rows = [places[tuple(ids)] for ids in given.sequences.prompt_rows()]
    responses, turns = given.sequences.response_rows(), prompts.conversations
    stops = codec.stop_token_ids
    return replace(
        given,
        prompts=[prompts.texts[row] for row in rows],
        responses=codec.whole_texts(responses),
        answers=[None] * len(rows),
        ended_rows=torch.tensor([ids[-1] in stops for ids in responses]),
        conversations=None if turns is None else [turns[row] for row in rows],
    )


def first_rows(examples: Completions, count: int) -> Completions:
    """Return the first ``count`` rows, or all if there are fewer."""
    return replace(
        examples,
        prompt_ids=examples.prompt_ids[:count],
        response_ids={side: responses[:count] for side, responses in examples.response_ids.items()},
        learnt=None if examples.learnt is None else examples.learnt[:count],
    )
