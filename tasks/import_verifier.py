"""The implicit step of a verifier: the user's file, tried and copied into the store."""

import shutil

from schemas.job import ImportVerifier, StageJob, StageResult
from schemas.recipe import EXACT_MATCH
from tasks.rewards.verifier_file import FILE, load_function
from tasks.rewards.verifiers import CONFIGURATION


def run(job: StageJob) -> StageResult:
    """Write what a stage needs to call the verifier, so that nothing later depends on where its file lies.

    Raises:
        BrokenVerifier: the file cannot be used.
    """
    assert isinstance(job.work, ImportVerifier)
    verifier = job.work.verifier
    if verifier.source != EXACT_MATCH:
        shutil.copyfile(verifier.source, job.output / FILE)
        load_function(job.output / FILE, verifier.function, name=job.name.partition(".")[2])
        verifier = verifier.model_copy(update={"source": FILE})
    (job.output / CONFIGURATION).write_text(verifier.model_dump_json(indent=2) + "\n")
    return StageResult(metrics={})
