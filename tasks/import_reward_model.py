"""The implicit step that imports a reward model which was trained elsewhere."""

from vantage.models.folders import load_tokenizer, tokenizer_digest
from vantage.models.reward_folders import copy_reward_model, import_reward_model
from vantage.models.template_trial import try_chat_template
from vantage.schemas.recipe.sources import PinnedSource
from vantage.schemas.recipe.work import ImportRewardModel
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.training.scratch import FETCHED


def run(job: StageJob[ImportRewardModel]) -> StageResult:
    """Import ``model.source``, so that nothing later depends on the original, and try its chat template.

    Raises:
        UnsafeModel: the model is no reward model, or its folder is refused.
        BrokenTemplate: its chat template cannot be rendered within bounds.
    """
    model = job.work.model
    if isinstance(model.origin, PinnedSource):
        copy_reward_model(job.scratch / FETCHED, job.output)
    else:
        import_reward_model(model.source, job.output, planned=job.source_sha256, scratch=job.scratch)
    if job.work.model.chat is not False:
        try_chat_template(load_tokenizer(job.output))
    return StageResult(metrics={}, tokenizer_digest=tokenizer_digest(job.output))
