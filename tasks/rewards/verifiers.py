"""Verifiers: rules that judge a response, by the name that a recipe gives them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vantage.schemas.recipe.builtin_verifiers import COMPARING, ROW_OF, CodeVerifier
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.stages import Rollouts
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection, RolloutCollection
from vantage.schemas.recipe.verifiers import EXACT_MATCH, Right, Verifier
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.verdict_form import RIGHT_OR_WRONG, VerdictForm
from vantage.tasks.data import arithmetic
from vantage.tasks.data.rows import count_missing
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.rewards.configuration import read_configuration, refuse_other_libraries
from vantage.tasks.rewards.sandbox import longest_call, refuse_without_isolation
from vantage.tasks.rewards.verdicts import Verdict
from vantage.tasks.rewards.verifier_file import FILE, VerifierFunction
from vantage.tasks.rewards.verifier_process import VerifierProcess

FORM = "verdicts.json"
"""The form of the verdicts as the dry run found it, in the artifact; absent for right or wrong."""


class MissingAnswers(ValueError):
    """Prompts without the answers that a verifier compares with."""


class UndecidedVerifier(ValueError):
    """A verifier returns scores, and ``right`` is missing or does not fit the scores."""


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
        role: role in which the stage reads the verifier's artifact, if it is one of the recipe's own.

    Raises:
        BrokenVerifier: a user's file cannot be used.
        MissingAnswers: the verifier compares with answers, and prompts of the stage have none.
    """
    if name in BUILTIN_FUNCTIONS:  # no verifier of a recipe may have such a name
        return BUILTIN_FUNCTIONS[name]
    configuration = read_configuration(job.inputs[role])
    if configuration.source in COMPARING:
        refuse_missing_answers(job, name)
    return in_process(job.inputs[role], name=name)


def load_deciding_verifier(job: StageJob, name: str, *, role: str) -> VerifierFunction:
    """Return the verifier with this name, for a reader that asks for right or wrong.

    Raises:
        UndecidedVerifier: the verifier returns scores, and nothing in the recipe defines which of them are right.
        BrokenVerifier, MissingAnswers: see ``load_verifier``.
    """
    verifier = load_verifier(job, name, role=role)
    refuse_undecided(name, form_of(verifier), right_of(verifier), reader=role)
    return verifier


def refuse_undecided(name: str, form: VerdictForm, right: Right | None, *, reader: str) -> None:
    """Raise UndecidedVerifier unless the verifier decides what is right, by its verdict or by the recipe's ``right``."""
    if form.kind != "right_or_wrong" and right is None:
        example = "{at_least: 0.5}" if form.kind == "score" else f"{{score: {form.names[0]}, at_least: 0.5}}"
        raise UndecidedVerifier(
            f"verifiers.{name} returns {form}, and {reader} asks for right or wrong; define what is right, for example "
            f"verifiers.{name}.right: {example}"
        )


def refuse_unfit_right(name: str, form: VerdictForm, right: Right | None) -> None:
    """Raise UndecidedVerifier if ``right`` does not fit the form of the verdicts."""
    if right is None:
        return
    about = f"verifiers.{name} returns {form}, and right"
    if form.kind == "right_or_wrong":
        raise UndecidedVerifier(f"{about} is for scores; remove right")
    if form.kind == "score" and right.score is not None:
        raise UndecidedVerifier(f"{about}.score={right.score} is a named score; remove right.score")
    if form.kind == "named_scores" and right.score not in form.names:
        raise UndecidedVerifier(
            f"{about}.score={right.score} is none of them; set right.score to one of them"
        )


def in_process(folder: Path, *, name: str) -> VerifierProcess:
    """Return one of the recipe's own verifiers, from its artifact, in a separate process; its verdicts have the form
    that the dry run found."""
    return process_of(folder, name=name, form=read_form(folder))


def process_of(folder: Path, *, name: str, form: VerdictForm | None) -> VerifierProcess:
    """Return the process of a verifier whose verdicts have this form; None: the dry run, which finds it.

    A regular expression may take for ever just like a user's function.
    """
    configuration = read_configuration(folder)
    if configuration.source == EXACT_MATCH:
        return VerifierProcess({"extract": configuration.extract}, name=name, function=EXACT_MATCH)
    if configuration.source in ROW_OF:
        refuse_other_libraries(configuration, folder, name=name)
        return builtin_process(configuration, name=name, form=form)
    return VerifierProcess(
        {"file": str(folder / FILE), "function": configuration.function},
        name=name,
        function=configuration.function,
        form=form,
        right=configuration.right,
    )


def builtin_process(
    configuration: Verifier, *, name: str, form: VerdictForm | None = RIGHT_OR_WRONG
) -> VerifierProcess:
    """Return a built-in verifier in a separate process; ``form`` as in ``process_of``.

    Raises:
        NotIsolated: the verifier runs programs, and the kernel of this machine does not isolate them.
    """
    seconds = None
    if isinstance(configuration, CodeVerifier):
        refuse_without_isolation(configuration, name=name)
        seconds = longest_call(configuration)
    return VerifierProcess(
        {"builtin": configuration.model_dump(mode="json")},
        name=name,
        function=configuration.source,
        form=form,
        right=configuration.right,
        call_seconds=seconds,
    )


def write_form(folder: Path, form: VerdictForm) -> None:
    """Write the form of a verifier's verdicts into its artifact, unless it is right or wrong."""
    if form != RIGHT_OR_WRONG:
        (folder / FORM).write_text(form.model_dump_json(indent=2) + "\n")


def read_form(folder: Path) -> VerdictForm:
    """Return the form of a verifier's verdicts from its artifact."""
    file = folder / FORM
    return VerdictForm.model_validate_json(file.read_bytes()) if file.exists() else RIGHT_OR_WRONG


def form_of(verifier: VerifierFunction) -> VerdictForm:
    """Return the form of a loaded verifier's verdicts."""
    form = verifier.form if isinstance(verifier, VerifierProcess) else RIGHT_OR_WRONG
    assert form is not None  # only in a dry run the form is not known
    return form


def right_of(verifier: VerifierFunction) -> Right | None:
    """Return which scores of a loaded verifier count as right, if the recipe defines it."""
    return verifier.right if isinstance(verifier, VerifierProcess) else None


def verdicts(
    verifier: VerifierFunction,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
) -> list[Verdict]:
    """Return the verdicts, response by response."""
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
    """Describe how many and which prompts of a dataset have no answer; None if all have one."""
    for split in SPLITS:
        missing, rows = count_missing(prompts, split, "answer")
        if missing:
            return f"{missing} of the {rows} {split}"
    return None
