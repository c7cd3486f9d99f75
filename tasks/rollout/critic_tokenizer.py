"""Refuse a critic that would read other ids than its policy writes."""

from typing import Any

from vantage.models.folders import tokenizer_digest
from vantage.schemas.records.job import StageJob
from vantage.tasks.rewards.model_scores import TokenizersDiffer


def refuse_other_tokenizer_of_critic(job: StageJob[Any], critic: str, policy: str) -> None:
    """Raise TokenizersDiffer if the model in the role ``critic`` has another tokenizer or chat template than the one in ``policy``.

    A reward model of another family scores whole responses, whose text it encodes with its own tokenizer. A critic has a value for each token
    of the policy.
    """
    if tokenizer_digest(job.inputs[critic]) == tokenizer_digest(job.inputs[policy]):
        return
    named, of = getattr(job.work, critic, None), getattr(job.work, policy, None)
    raise TokenizersDiffer(
        f"{critic}={named!r} has another tokenizer or chat template than {policy}={of!r}, and a critic reads the policy's "
        f"tokens; name a policy or a reward model that was trained from the same model as {of!r}"
    )
