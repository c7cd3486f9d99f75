"""Count for each prompt how many of a policy's responses pass; report prompts that became too easy or stay
impossible."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vantage.algorithms.score_distribution import are_above
from vantage.schemas.recipe.prompt_selection import DifficultyReport
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.storage.durable_files import write_file
from vantage.tasks.data.examples import Prompts
from vantage.tasks.rewards.term_scores import refuse_unknown_score
from vantage.tasks.rollout.rollouts import Scored

REPORT = "prompt_difficulty.json"
"""File of the artifact with the prompts."""
LISTED = 1000
"""Most prompts of each kind in the file."""
_SHOWN_CHARACTERS = 200

Case = tuple[str, str | None]


@dataclass(frozen=True)
class Seen:
    """Groups of responses that were sampled together, including those that the rollout leaves out."""

    cases: Sequence[Case]
    """Prompt and answer of each group, (G)."""
    passed: Tensor
    """(G,): number of the group's responses that pass."""
    responses: int
    """Responses in each group."""


def seen_groups(scored: Scored, rule: DifficultyReport, *, samples_per_prompt: int) -> Seen:
    """Return the groups of a batch of responses, in which those to one prompt are adjacent."""
    scores = scored.scores.weighted_sum if rule.term is None else scored.scores.by_term[rule.term]
    passes = are_above(scores, rule.passes_above).view(-1, samples_per_prompt).sum(dim=1).cpu()
    sampled = scored.sampled
    cases = list(zip(sampled.prompts, sampled.answers, strict=True))[::samples_per_prompt]
    return Seen(cases, passes, samples_per_prompt)


class PromptDifficulty(nn.Module):
    """Counts of the training prompts (P), which are saved in the checkpoints."""

    responses: Tensor
    """(P,): number of all responses so far."""
    passed: Tensor
    """(P,): number of responses that passed."""
    visits: Tensor
    """(P,): number of groups so far."""
    easy_in_a_row: Tensor
    """(P,): number of newest groups in a row whose responses all passed."""

    def __init__(self, prompts: Prompts, rule: DifficultyReport) -> None:
        super().__init__()
        self._rule = rule
        self._number_of: dict[Case, int] = {}
        for number, case in enumerate(zip(prompts.texts, prompts.answers, strict=True)):
            self._number_of.setdefault(case, number)
        for name in ("responses", "passed", "visits", "easy_in_a_row"):
            self.register_buffer(name, torch.zeros(len(prompts), dtype=torch.int64))

    def count(self, seen: Sequence[Seen]) -> None:
        """Add the groups of one iteration, in the order in which they were sampled."""
        for batch in seen:
            for case, passed in zip(batch.cases, batch.passed.tolist(), strict=True):
                number = self._number_of[case]
                self.responses[number] += batch.responses
                self.passed[number] += passed
                self.visits[number] += 1
                is_easy = passed == batch.responses
                self.easy_in_a_row[number] = self.easy_in_a_row[number] + 1 if is_easy else 0

    @property
    def too_easy(self) -> Tensor:
        """Return which prompts (P,) are too easy: all responses of their last groups passed."""
        return self.easy_in_a_row >= self._rule.after

    @property
    def impossible(self) -> Tensor:
        """Return which prompts (P,) stay impossible: of all their groups, no response passed."""
        return (self.visits >= self._rule.after) & (self.passed == 0)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of too easy and impossible prompts so far."""
        return {
            "prompts_too_easy": int(self.too_easy.sum()),
            "prompts_impossible": int(self.impossible.sum()),
        }

    def write(self, folder: Path) -> None:
        """Write the prompts of each kind into the folder, the most visited ones first."""
        cases = {number: case for case, number in self._number_of.items()}
        found = {
            **self.metrics(),
            "prompts_visited": int((self.visits > 0).sum()),
            **{
                name: [self._shown(number, cases[number][0]) for number in self._most_visited(which)]
                for name, which in (("too_easy", self.too_easy), ("impossible", self.impossible))
            },
        }
        write_file(folder / REPORT, json.dumps(found, indent=1, ensure_ascii=False).encode() + b"\n")

    def _most_visited(self, which: Tensor) -> list[int]:
        numbers = which.nonzero()[:, 0]
        order = self.visits[numbers].argsort(descending=True, stable=True)
        chosen: list[int] = numbers[order][:LISTED].tolist()
        return chosen

    def _shown(self, number: int, prompt: str) -> dict[str, str | int]:
        return {
            "prompt": prompt[:_SHOWN_CHARACTERS],
            "groups": int(self.visits[number]),
            "responses": int(self.responses[number]),
            "passed": int(self.passed[number]),
        }


def load_difficulty(
    job: StageJob[ResolvedPolicyOptimization], prompts: Prompts, *, score_names: Sequence[str]
) -> PromptDifficulty | None:
    """Return the counts that the recipe asks for; None: it asks for none.

    Args:
        score_names: names of the reward's scores.

    Raises:
        UnknownScore: the score that decides what passes is none of the reward's scores.
    """
    rule = job.work.difficulty
    if rule is None:
        return None
    if rule.term is not None:
        path = f"stages.{job.name}.difficulty.term"
        refuse_unknown_score(rule.term, score_names, path=path, of=f"rewards.{job.work.reward}")
    return PromptDifficulty(prompts, rule)
