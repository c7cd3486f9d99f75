"""Rules that say whether a response is right, by the name that a recipe gives them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from schemas.job import StageJob
from schemas.recipe import EXACT_MATCH, PolicyEvaluation, PreferenceCollection, Rollouts
from schemas.recipe import Verifier as Configuration
from tasks.data import arithmetic
from tasks.data.rows import count_missing
from tasks.data.splits import SPLITS
from tasks.rewards.exact_match import exact_match
from tasks.rewards.verifier_file import FILE, Verifier, load_function

CONFIGURATION = "verifier.json"
"""The recipe's words for one of its own verifiers, in the artifact; their ``source`` is a file beside it."""


class MissingAnswers(ValueError):
    """Prompts without the answers that a verifier compares with."""


def _on_a_dial(prompt: str, response: str, answer: str | None = None, *, dial: arithmetic.Dial) -> bool:
    """The prompt itself says what is right."""
    return arithmetic.verify(prompt, response, dial=dial)


VERIFIERS: dict[str, Verifier] = {
    name: partial(_on_a_dial, dial=dial) for name, dial in arithmetic.DIALS.items()
}
"""The built-in ones."""


def load_verifier(job: StageJob, name: str, *, role: str) -> Verifier:
    """The verifier that the recipe calls ``name``.

    Args:
        role: under which the stage reads its artifact, where it is one of the recipe's own.

    Raises:
        BrokenVerifier: a user's file cannot be used.
        MissingAnswers: it compares with answers, and prompts of the stage have none.
    """
    if name in VERIFIERS:  # which no verifier of a recipe's own is called
        return VERIFIERS[name]
    configuration = read_configuration(job.inputs[role])
    if configuration.source == EXACT_MATCH:
        refuse_missing_answers(job, name)
        return partial(_compare, extract=configuration.extract)
    return load_function(job.inputs[role] / FILE, configuration.function, name=name)


def read_configuration(folder: Path) -> Configuration:
    """What a verifier's artifact says of it."""
    return Configuration.model_validate_json((folder / CONFIGURATION).read_bytes())


def verdicts(
    verifier: Verifier, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str | None]
) -> list[bool]:
    """Right or wrong, response by response."""
    return [verifier(*case) for case in zip(prompts, responses, answers, strict=True)]


def refuse_missing_answers(job: StageJob, name: str) -> None:
    """MissingAnswers where a prompt of the stage's dataset, on whichever side, has none."""
    for split in SPLITS:
        missing, rows = count_missing(job.inputs["prompts"], split, "answer")
        if missing:
            assert isinstance(job.work, Rollouts | PolicyEvaluation | PreferenceCollection)
            dataset = job.work.prompts
            raise MissingAnswers(
                f"{job.name}: verifiers.{name} compares with answers, and {missing} of the {rows} {split} prompts of "
                f"data.{dataset} have none; map them with data.{dataset}.columns.answer, or leave those rows out"
            )


def _compare(prompt: str, response: str, answer: str | None, *, extract: str | None) -> bool:
    assert answer is not None  # or the stage would have been refused
    return exact_match(response, answer, extract=extract)
