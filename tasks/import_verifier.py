"""The implicit step of a verifier: the user's file, tried and copied into the store."""

from pathlib import Path

from schemas.job import ImportVerifier, StageJob, StageResult
from schemas.recipe import EXACT_MATCH
from schemas.source_files import VERIFIER_LIMIT, copy_hashed, refuse_changed
from tasks.rewards.verifier_file import FILE, load_function
from tasks.rewards.verifiers import CONFIGURATION


def run(job: StageJob) -> StageResult:
    """Write what a stage needs to call the verifier, so that nothing later depends on where its file lies.

    Raises:
        BrokenVerifier: the file cannot be used.
        SourceChanged, SourceTooLarge: it is not the file that the run was planned with, or too large for one.
    """
    assert isinstance(job.work, ImportVerifier)
    verifier = job.work.verifier
    if verifier.source != EXACT_MATCH:
        found = copy_hashed(Path(verifier.source), job.output / FILE, VERIFIER_LIMIT)
        refuse_changed(verifier.source, planned=job.source_sha256, found=found)
        load_function(job.output / FILE, verifier.function, name=job.name.partition(".")[2])
        verifier = verifier.model_copy(update={"source": FILE})
    (job.output / CONFIGURATION).write_text(verifier.model_dump_json(indent=2) + "\n")
    return StageResult(metrics={})
