"""Try a verifier on the prompts that it will judge, before anything is trained."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vantage.schemas.recipe.builtin_verifiers import COMPARING, ROW_OF
from vantage.schemas.recipe.terms import names_in_curves
from vantage.schemas.recipe.work import ImportVerifier
from vantage.schemas.records.job import StageJob
from vantage.schemas.records.verdict_form import RIGHT_OR_WRONG, VerdictForm
from vantage.tasks.data.rows import Row, read_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.rewards.term_scores import refuse_unknown_score
from vantage.tasks.rewards.verdicts import Verdict, common_form, is_close
from vantage.tasks.rewards.verifier_calls import Case
from vantage.tasks.rewards.verifier_file import BrokenVerifier, shown_case
from vantage.tasks.rewards.verifier_process import VerifierProcess
from vantage.tasks.rewards.verifier_scores import refuse_unfit
from vantage.tasks.rewards.verifiers import (
    BUILTIN_FUNCTIONS,
    MissingAnswers,
    lack_of_answers,
    process_of,
    refuse_undecided,
    refuse_unfit_right,
    write_form,
)

ROWS = 4
"""Number of rows from each side of each dataset."""

PLACE = "prompts."
"""Prefix of the roles of the datasets whose prompts the verifier will judge."""


class ForeignPrompts(ValueError):
    """A built-in verifier cannot judge some of the prompts."""


def try_verifier(job: StageJob[ImportVerifier]) -> None:
    """Ask the verifier in ``job.output`` about the first prompts of each dataset.

    Each prompt is tried with its own answer, an empty text, and the prompt itself as the response. If some rows lack an
    answer, one of them is tried. A built-in verifier is tried on every prompt.

    Raises:
        BrokenVerifier: a user's verifier fails, returns no verdict, or verdicts of different forms.
        MissingAnswers: the verifier compares with answers, and some prompts have none.
        ForeignPrompts: a built-in verifier cannot judge some prompt.
        UndecidedVerifier: what the recipe defines as right is missing, or does not fit the verdicts.
        UnfitScores: a term of the recipe does not fit the verdicts.
        UnknownScore: the recipe counts the passes of a score that the verifier does not return.
    """
    verifier = job.work.verifier
    name = job.name.partition(".")[2]
    folders = [folder for role, folder in sorted(job.inputs.items()) if role.startswith(PLACE)]
    if name in BUILTIN_FUNCTIONS:
        _refuse_unfit_uses(job, name, RIGHT_OR_WRONG)
        for folder in folders:
            _try_built_in(name, folder)
        return
    if verifier.source in COMPARING:
        for folder in folders:
            _refuse_missing_answers(name, folder)
    cases = [case for folder in folders for row in _first_rows(folder) for case in _cases(row)]
    if verifier.source in ROW_OF:  # the verifier must be able to read every answer
        cases += [(row["prompt"], "", row.get("answer")) for folder in folders for row in _all_rows(folder)]
    form = _found_form(job.output, cases or [("1 + 1?", "2", "2")], name=name)
    sys.stdout.write(f"vantage: verifiers.{name} returns {form} for each of {len(cases)} responses\n")
    refuse_unfit_right(name, form, verifier.right)
    _refuse_unfit_uses(job, name, form)
    write_form(job.output, form)


def _found_form(folder: Path, cases: Sequence[Case], *, name: str) -> VerdictForm:
    """Return the form of the verifier's verdicts on the cases, which all have it."""
    process = process_of(folder, name=name, form=None)
    try:
        verdicts = process.verdicts(cases)
        form = common_form(verdicts)
        for case, verdict in zip(cases, verdicts, strict=True):
            process.fit(verdict, form, case)
        if process.takes_batch:
            _refuse_dependence(process, dict(zip(cases, verdicts, strict=True)), name=name)
    finally:
        process.close()
    return form


def _refuse_dependence(process: VerifierProcess, verdicts: Mapping[Case, Verdict], *, name: str) -> None:
    """Raise BrokenVerifier if the verdict on a case changes with the other cases in the call, or with their order,
    since batches depend on the engine and the number of ranks."""
    cases = list(verdicts)
    for asked in ([case] for case in cases[:ROWS]), [cases[::-1]]:
        for batch in asked:
            for case, again in zip(batch, process.verdicts(batch), strict=True):
                if not is_close(verdicts[case], again):
                    raise BrokenVerifier(
                        f"verifiers.{name}: of {len(cases)} responses in one call, one has the verdict "
                        f"{json.dumps(verdicts[case])}, and in a call with {len(batch)} in another order "
                        f"{json.dumps(again)}, for {shown_case(*case)}; let the verdict depend on the response alone, not "
                        "on others in the batch or on chance"
                    )


def _refuse_unfit_uses(job: StageJob[ImportVerifier], name: str, form: VerdictForm) -> None:
    for use in job.work.uses:
        if use.score is not None:
            names = names_in_curves(name, form.names)
            refuse_unknown_score(
                use.score, names, path=use.path, of=f"verifiers.{name}, which returns {form}"
            )
        elif use.term is None:
            refuse_undecided(name, form, job.work.verifier.right, reader=use.path)
        else:
            refuse_unfit(use.term, form, path=use.path)


def _try_built_in(name: str, folder: Path) -> None:
    for split in SPLITS:
        for number, row in enumerate(read_rows(folder, split), 1):
            try:
                BUILTIN_FUNCTIONS[name](row["prompt"], "", None)
            except ValueError as error:
                raise ForeignPrompts(
                    f"verifiers.{name}: prompt {number} of {split}: {error}; judge these prompts by a verifier of your "
                    "own (verifiers: in the recipe) or by a reward"
                ) from None


def _refuse_missing_answers(name: str, folder: Path) -> None:
    if lack := lack_of_answers(folder):
        raise MissingAnswers(
            f"verifiers.{name} compares with answers, and {lack} prompts that it will judge have none; map them with "
            "columns.answer of their data, or leave those rows out"
        )


def _all_rows(folder: Path) -> Iterator[Row]:
    for split in SPLITS:
        yield from read_rows(folder, split)


def _first_rows(folder: Path) -> list[Row]:
    rows = []
    for split in SPLITS:
        all_rows = read_rows(folder, split)
        rows += all_rows[:ROWS]
        rows += [row for row in all_rows[ROWS:] if row.get("answer") is None][:1]
    return rows


def _cases(row: Row) -> list[tuple[str, str, str | None]]:
    prompt, answer = row["prompt"], row.get("answer")
    responses = dict.fromkeys([*([] if answer is None else [answer]), "", prompt])
    return [(prompt, response, answer) for response in responses]
