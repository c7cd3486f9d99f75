"""Let verifiers judge responses in processes of their own while the next responses are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

from vantage.tasks.data.examples import Codec, Prompts
from vantage.tasks.rewards.scoring import Scorer
from vantage.tasks.rewards.term_scores import NamedScores
from vantage.tasks.rewards.verifier_process import VerifierProcess
from vantage.tasks.rewards.verifier_scores import NamedVerifierScores, VerifierScores
from vantage.tasks.rollout.engine import Listener


@dataclass(frozen=True)
class Meanwhile:
    """A `Listener` that passes responses on to verifiers as soon as they are sampled."""

    verifiers: Sequence[VerifierProcess]
    codec: Codec
    prompts: Prompts
    indices: Sequence[int]
    """Index of each response's prompt."""

    def sampled(self, rows: Sequence[int], responses: Sequence[list[int]]) -> None:
        """Ask the verifiers about these responses; the verdicts are waited for later."""
        prompts = [self.indices[row] for row in rows]
        texts = self.codec.response_texts(responses)
        cases = [
            (self.prompts.texts[prompt], text, self.prompts.answers[prompt])
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        for verifier in self.verifiers:
            verifier.begin(cases)

    def keep_up(self) -> None:
        """Send the requests for which a verifier's pipe had no room before."""
        for verifier in self.verifiers:
            verifier.keep_up()


def scored_meanwhile(
    scorer: Scorer, codec: Codec, prompts: Prompts, indices: Sequence[int]
) -> Listener | None:
    """Return the listener for the scorer's verifiers; None: none of them has a process of its own."""
    scores = [
        term.scores.scores if isinstance(term.scores, NamedScores) else term.scores for term in scorer.terms
    ]
    asked = [each.verifier for each in scores if isinstance(each, VerifierScores | NamedVerifierScores)]
    verifiers = [each for each in asked if isinstance(each, VerifierProcess)]
    return Meanwhile(verifiers, codec, prompts, indices) if verifiers else None
