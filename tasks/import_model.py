"""The implicit first step: check the recipe's model, and copy it into a plain Hugging Face folder."""

import shutil

from vantage.models.folders import load_tokenizer, tokenizer_digest
from vantage.models.quantisation import round_folder
from vantage.models.source_folders import copy_model, import_model, import_with_adapter
from vantage.models.template_trial import try_chat_template
from vantage.schemas.recipe.sources import PinnedSource
from vantage.schemas.recipe.work import ImportModel
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.training.scratch import FETCHED


def run(job: StageJob[ImportModel]) -> StageResult:
    """Import ``model.source``, so that nothing later depends on the original, and try its chat template.

    With ``model.quantization`` its weights are rounded after an adapter was merged into them.

    Raises:
        BrokenTemplate: the chat template, which the recipe asks for or leaves open, cannot be rendered within bounds.
    """
    model = job.work.model
    output = job.output if model.quantization is None else job.scratch / "not rounded"
    if isinstance(model.origin, PinnedSource):
        copy_model(job.scratch / FETCHED, output)
    elif model.adapter is None:
        import_model(model.source, output, seed=job.seed, planned=job.source_sha256, scratch=job.scratch)
    else:
        import_with_adapter(model, output, seed=job.seed, planned=job.source_sha256, scratch=job.scratch)
    if model.quantization is not None:
        round_folder(output, job.output)
        shutil.rmtree(output)
    if job.work.model.chat is not False:
        try_chat_template(load_tokenizer(job.output))
    return StageResult(metrics={}, tokenizer_digest=tokenizer_digest(job.output))
