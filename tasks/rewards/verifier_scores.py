"""Score responses by a verifier: 1 for a right response and the term's value for a wrong one, or the numbers that it returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.records.verdict_form import VerdictForm
from vantage.tasks.rewards.step_scores import StepScores, finder_of
from vantage.tasks.rewards.term_scores import NamedScores, Responses, Source, TermScores
from vantage.tasks.rewards.verifier_file import VerifierFunction
from vantage.tasks.rewards.verifiers import form_of, load_verifier, right_of, verdicts
from vantage.tasks.training import ranks


class UnfitScores(ValueError):
    """A term of the recipe does not fit what its verifier returns."""


def load(term: VerifierTerm, source: Source) -> TermScores | NamedScores | StepScores:
    """Return the term's verifier, loaded.

    Raises:
        BrokenVerifier, MissingAnswers: see ``load_verifier``.
        UnfitScores: the term's fields are for another form of verdict.
    """
    verifier = load_verifier(source.job, term.verifier, role=source.role)
    form = form_of(verifier)
    refuse_unfit(term, form, path=source.path)
    if term.step_ends is not None:
        ask = partial(_scores_of_beginnings, verifier, term.wrong)
        names = form.names if form.kind == "named_scores" else ()
        return StepScores(finder_of(term.step_ends, source), ask, names=names, path=source.path)
    if form.kind == "named_scores":
        return NamedScores(form.names, NamedVerifierScores(verifier, form.names))
    return scored_by(verifier, wrong=term.wrong)


def refuse_unfit(term: VerifierTerm, form: VerdictForm, *, path: str) -> None:
    """Raise UnfitScores if the term has fields that its verifier's form of verdict does not read, or names other scores."""
    about = f"{path}: verifier {term.verifier!r} returns {form}"
    if term.wrong and form.kind != "right_or_wrong":
        raise UnfitScores(f"{about}, and wrong={term.wrong:g} is the score of a wrong response; remove wrong")
    if form.kind != "named_scores":
        if term.scores:
            raise UnfitScores(f"{about}, and scores names {', '.join(term.scores)}; remove scores")
        return
    if term.clip is not None or term.offset or term.whiten:
        raise UnfitScores(f"{about}; give clip, offset and whiten to each of them under scores")
    if not term.scores:
        return
    if unknown := [name for name in term.scores if name not in form.names]:
        raise UnfitScores(f"{about}, and not {', '.join(unknown)}; correct the names under scores")
    if unnamed := [name for name in form.names if name not in term.scores]:
        raise UnfitScores(
            f"{about}, and scores has no {', '.join(unnamed)}; add it, with weight: 0 if it is only recorded"
        )


def scored_by(verifier: VerifierFunction, *, wrong: float = 0.0) -> TermScores:
    """Return scores by a loaded verifier."""

    return VerifierScores(verifier, wrong)


@dataclass(frozen=True)
class VerifierScores:
    """Scores by a verifier: its number, or 1 for a right response and ``wrong`` for a wrong one."""

    verifier: VerifierFunction
    wrong: float

    @property
    def is_graded(self) -> bool:
        """Whether the verifier returns numbers."""
        return form_of(self.verifier).kind != "right_or_wrong"

    def __call__(self, given: Responses) -> Tensor:
        """Return scores (B,)."""
        found = _scores(self.verifier, self.wrong, given.prompts, given.responses, given.answers)
        return found.to(given.device)


@dataclass(frozen=True)
class NamedVerifierScores:
    """Scores by a verifier that returns several named ones."""

    verifier: VerifierFunction
    names: tuple[str, ...]

    def __call__(self, given: Responses) -> Tensor:
        """Return scores (B,N)."""
        found = _numbers(self.verifier, given.prompts, given.responses, given.answers, names=self.names)
        return found.float().to(given.device)


def _scores(
    verifier: VerifierFunction,
    wrong: float,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
) -> Tensor:
    """Return scores (B,) on the CPU: the verifier's numbers, or 1 for a right response and ``wrong`` for a wrong one."""
    if form_of(verifier).kind == "right_or_wrong":
        return torch.where(judged(verifier, prompts, responses, answers), 1.0, wrong)
    return _numbers(verifier, prompts, responses, answers, names=()).squeeze(1).float()


def _scores_of_beginnings(
    verifier: VerifierFunction,
    wrong: float,
    prompts: Sequence[str],
    beginnings: Sequence[str],
    answers: Sequence[str | None],
) -> Tensor:
    """Return scores (B,K) on the CPU: K named scores, or a single one."""
    form = form_of(verifier)
    if form.kind == "named_scores":
        return _numbers(verifier, prompts, beginnings, answers, names=form.names).float()
    return _scores(verifier, wrong, prompts, beginnings, answers)[:, None]


def judged(
    verifier: VerifierFunction,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
) -> Tensor:
    """Return which responses are right, (B,), on the CPU; one rank asks about each."""
    form = form_of(verifier)
    if form.kind == "right_or_wrong":
        return _numbers(verifier, prompts, responses, answers, names=()).squeeze(1).bool()
    right = right_of(verifier)
    assert right is not None  # a verifier without it was refused when it was loaded
    found = _numbers(verifier, prompts, responses, answers, names=form.names)
    column = form.names.index(right.score) if right.score is not None else 0
    return found[:, column] >= right.at_least


def _numbers(
    verifier: VerifierFunction,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
    *,
    names: tuple[str, ...],
) -> Tensor:
    """Return the verdicts as numbers, (B,1) or (B,N) in the order of names, in float64 on the CPU; one rank asks about
    each response."""
    mine = ranks.own(len(prompts))
    numbers = torch.zeros(len(prompts), len(names) or 1, dtype=torch.float64)
    rows = [
        [verdict[name] for name in names] if isinstance(verdict, dict) else [float(verdict)]
        for verdict in verdicts(verifier, prompts[mine], responses[mine], answers[mine])
    ]
    numbers[mine] = torch.tensor(rows, dtype=torch.float64).view(-1, numbers.shape[1])
    numbers = ranks.total(numbers)
    if form_of(verifier).kind == "right_or_wrong":
        return numbers
    return numbers[_first_equal_cases(prompts, responses, answers)]


def _first_equal_cases(
    prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str | None]
) -> list[int]:
    """Return for each case the row of the first equal case.

    Equal responses to a prompt have equal scores: a difference by rounding or chance would look like a preference.
    """
    first: dict[tuple[str, str, str | None], int] = {}
    cases = zip(prompts, responses, answers, strict=True)
    return [first.setdefault(case, row) for row, case in enumerate(cases)]
