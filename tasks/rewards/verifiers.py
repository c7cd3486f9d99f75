"""Verifiers: rules that decide whether a response is right, by the name that a recipe gives them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.inputs import EXACT_MATCH, Verifier
from vantage.schemas.recipe.stages import Rollouts
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection
from vantage.schemas.records.job import StageJob
from vantage.tasks.data import arithmetic
from vantage.tasks.data.rows import count_missing
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.rewards.verifier_file import FILE, VerifierFunction
from vantage.tasks.rewards.verifier_process import VerifierProcess

CONFIGURATION = "verifier.json"
"""The recipe's fields of one of its own verifiers, in the artifact; their ``source`` is a file beside it."""


class MissingAnswers(ValueError):
    """Prompts without the answers that a verifier compares with."""


def _on_a_dial(prompt: str, response: str, answer: str | None = None, *, dial: arithmetic.Dial) -> bool:
    """Return whether the response is right; the prompt itself determines the answer."""
    return arithmetic.verify(prompt, response, dial=dial)


BUILTIN_FUNCTIONS: dict[str, VerifierFunction] = {
    name: partial(_on_a_dial, dial=dial) for name, dial in arithmetic.DIALS.items()
}
"""Name → built-in verifier."""


def load_verifier(job: StageJob, name: str, *, role: str) -> VerifierFunction:
    """Return the verifier with this name in the recipe.

    Args:
        role: under which the stage reads its artifact, where it is one of the recipe's own.

    Raises:
        BrokenVerifier: a user's file cannot be used.
        MissingAnswers: it compares with answers, and prompts of the stage have none.
    """
    if name in BUILTIN_FUNCTIONS:  # which no verifier of a recipe's own is called
        return BUILTIN_FUNCTIONS[name]
    configuration = read_configuration(job.inputs[role])
    if configuration.source == EXACT_MATCH:
        refuse_missing_answers(job, name)
    return in_process(job.inputs[role], name=name)


def in_process(folder: Path, *, name: str) -> VerifierProcess:
    """Return a verifier of a recipe's own, from its artifact, in a process of its own.

    A regular expression may take for ever just like a user's function.
    """
    configuration = read_configuration(folder)
    if configuration.source == EXACT_MATCH:
        return VerifierProcess({"extract": configuration.extract}, name=name, function=EXACT_MATCH)
    file = str(folder / FILE)
    return VerifierProcess(
        {"file": file, "function": configuration.function}, name=name, function=configuration.function
    )


def read_configuration(folder: Path) -> Verifier:
    """Return the content of a verifier's artifact."""
    return Verifier.model_validate_json((folder / CONFIGURATION).read_bytes())


def verdicts(
    verifier: VerifierFunction,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
) -> list[bool]:
    """Return right or wrong, response by response."""
    cases = list(zip(prompts, responses, answers, strict=True))
    if isinstance(verifier, VerifierProcess):
        return verifier.verdicts(cases)
    return [verifier(*case) for case in cases]


def refuse_missing_answers(job: StageJob, name: str) -> None:
    """Raise MissingAnswers if a prompt of the stage's dataset, on any side, has no answer."""
    assert isinstance(job.work, Rollouts | RolloutCollection | PolicyEvaluation | PreferenceCollection)
    dataset = f"data.{job.work.prompts}"
    if lack := lack_of_answers(job.inputs["prompts"]):
        raise MissingAnswers(
            f"{job.name}: verifiers.{name} compares with answers, and {lack} prompts of {dataset} have none; "
            f"map them with {dataset}.columns.answer, or leave those rows out"
        )


def lack_of_answers(prompts: Path) -> str | None:
    """Return the number of prompts of a dataset without an answer, and which, in words; None if all have one."""
    for split in SPLITS:
        missing, rows = count_missing(prompts, split, "answer")
        if missing:
            return f"{missing} of the {rows} {split}"
    return None
