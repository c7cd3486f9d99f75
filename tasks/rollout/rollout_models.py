"""The models that sample a rollout, score it and shape its rewards."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from vantage.models.policy import PolicyModel
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.stages import Rollouts, samples_ahead
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Codec, codec_of
from vantage.tasks.rewards.scoring import Scorer, load_scorer
from vantage.tasks.rollout.ahead import AheadEngine
from vantage.tasks.rollout.engine import LocalEngine, RolloutEngine, SamplesBeside, load_engine
from vantage.tasks.rollout.fitting_engine import fit_to_memory
from vantage.tasks.training.found_limits import Sampler, Taken
from vantage.tasks.training.networks import fixed_policy
from vantage.tasks.training.optimization import Precision, frozen_dtype

Job = TypeVar("Job", bound=StageJob[Rollouts | RolloutCollection])


@dataclass(frozen=True)
class RolloutModels:
    """The models that a rollout needs, and their settings."""

    policy: PolicyModel
    engine: RolloutEngine
    """Samples from the policy, with the weights that it received last."""
    reference: PolicyModel | None
    """The policy to which KL is measured; None: KL is not measured, and counts as 0."""
    scorer: Scorer | None
    """Scores the responses by the reward; None: this stage scores nothing."""
    codec: Codec
    limits: PassLimits
    precision: Precision
    """Precision that policy, engine and reference share."""
    ahead: bool = False
    """Whether a rollout is sampled while another trains."""

    @property
    def sampler(self) -> Sampler | None:
        """Return the policy for sampling, with its settings; None: this stage neither samples nor scores."""
        if self.scorer is None:
            return None
        is_beside = self.ahead and isinstance(self.engine, LocalEngine)  # servers have their own memory
        return Sampler(self.policy, self.precision, self.codec.pad_token_id, beside_training=is_beside)

    def ready(self, job: Job, taken: Taken) -> "tuple[RolloutModels, Job]":
        """Return the models, with an engine that samples as the recipe asks, and the job, both limited by the memory of
        this device.

        Args:
            taken: the memory that the stage's passes need.
        """
        engine, job = fit_to_memory(self.engine, job, taken, device=self.policy.device)
        if self.ahead and isinstance(engine, LocalEngine | SamplesBeside):
            engine = AheadEngine(engine)
        return replace(self, limits=job.work.pass_limits, engine=engine), job

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Use this around the loop: the engine starts with the policy's weights, and sampling ahead ends with the loop."""
        with self.engine:
            self.sync_engine()  # an earlier attempt may have left other weights
            yield

    def sync_engine(self) -> None:
        """Give the engine the policy's weights; call it whenever they have changed, before anything is sampled."""
        self.engine.take_weights(self.policy.causal_lm.named_parameters())


def load_rollout_models(
    job: StageJob,
    work: Rollouts | RolloutCollection,
    policy: PolicyModel,
    *,
    role: str,
    with_reference: bool,
    with_scorer: bool = True,
) -> RolloutModels:
    """Return the models beside ``policy``, on its device: engine, reference, the reward of ``work``, and the codec.

    Args:
        role: role of the policy in the job's inputs; all these models share its tokenizer.

    Raises:
        TokenizersDiffer, BrokenVerifier, MissingAnswers: see ``load_scorer``.
    """
    codec, device = codec_of(job, role), policy.device
    return RolloutModels(
        policy=policy,
        engine=load_engine(
            policy,
            codec,
            limits=work.rollout.limits(work.pass_limits),
            precision=work.arithmetic,
            rollout=work.rollout,
        ),
        reference=fixed_policy(job, "reference", device) if with_reference else None,
        scorer=load_scorer(
            job, work.reward, tokenizers_of=[role], device=device, dtype=frozen_dtype(work.arithmetic)
        )
        if with_scorer
        else None,
        codec=codec,
        limits=work.pass_limits,
        precision=work.arithmetic,
        ahead=samples_ahead(work),
    )
