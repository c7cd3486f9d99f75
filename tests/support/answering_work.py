"""Compute fake stages that read their scores from answers, as a stage with a judge does, and mark each question that is asked."""

from tests.support.fake_work import mark
from tests.support.fake_work import run_stage as run_fake_stage
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.stored_answers import StoredAnswer, question_digest
from vantage.tasks.rewards.answer_file import AnswerFile
from vantage.tasks.training.scratch import ANSWERS

QUESTIONS = ("b?", "a?", "c?")


def run_stage(job: StageJob) -> StageResult:
    """Make one attempt at any kind of work."""
    if isinstance(job.work, PolicyOptimization):
        file = AnswerFile(job.scratch / ANSWERS)
        for number, text in enumerate(QUESTIONS):
            asked = {"model": "critic", "messages": [{"role": "user", "content": text}]}
            if not file.number_of(question_digest(asked)):
                mark(job, f"asked {text}")
                file.add(
                    StoredAnswer(
                        question=question_digest(asked),
                        time=0,
                        asked=asked,
                        answer=f"score: {number}",
                        question_tokens=2,
                        answer_tokens=1,
                    )
                )
        file.close()
    return run_fake_stage(job)
