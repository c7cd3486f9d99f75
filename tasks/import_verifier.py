"""The implicit step that copies a user's verifier into the store, and tries it on the prompts that it will judge."""

from vantage.schemas.recipe.sources import LocalPath
from vantage.schemas.recipe.work import ImportVerifier
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.source_files import VERIFIER_LIMIT, check_unchanged, copy_hashed
from vantage.tasks.rewards.configuration import write_configuration
from vantage.tasks.rewards.dry_run import try_verifier
from vantage.tasks.rewards.verifier_file import FILE


def run(job: StageJob[ImportVerifier]) -> StageResult:
    """Write everything that a stage needs to call the verifier, so that nothing later depends on the original file, and try it.

    Raises:
        BrokenVerifier, MissingAnswers, ForeignPrompts: the verifier cannot be used on these prompts.
        LibraryMissing, NotIsolated: a built-in verifier cannot be used on this machine.
        SourceChanged, SourceTooLarge: the file has changed since the run was planned, or is too large for a verifier.
    """
    verifier = job.work.verifier
    origin = verifier.origin
    if isinstance(origin, LocalPath):
        found = copy_hashed(origin.path, job.output / FILE, VERIFIER_LIMIT)
        check_unchanged(verifier.source, planned=job.source_sha256, found=found)
        verifier = verifier.model_copy(update={"source": FILE})
    write_configuration(verifier, job.output, name=job.name)
    try_verifier(job)
    return StageResult(metrics={})
