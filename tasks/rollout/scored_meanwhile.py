"""Let verifiers in separate processes, and servers, judge responses while the next responses are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vantage.tasks.data.examples import Codec, Prompts
from vantage.tasks.rewards.answered_scores import AnsweredScores
from vantage.tasks.rewards.scoring import Scorer
from vantage.tasks.rewards.term_scores import NamedScores
from vantage.tasks.rewards.verifier_process import VerifierProcess
from vantage.tasks.rewards.verifier_scores import NamedVerifierScores, VerifierScores


@dataclass(frozen=True)
class Meanwhile:
    """A `Listener` that passes responses on to verifiers and servers as soon as they are sampled."""

    verifiers: Sequence[VerifierProcess]
    codec: Codec
    prompts: Prompts
    indices: Sequence[int]
    """Index of each response's prompt."""
    servers: Sequence[AnsweredScores] = ()

    def sampled(self, rows: Sequence[int], responses: Sequence[list[int]]) -> None:
        """Ask about these responses; their verdicts are read later."""
        prompts = [self.indices[row] for row in rows]
        texts = self.codec.response_texts(responses)
        cases = [
            (self.prompts.texts[prompt], text, self.prompts.answers[prompt])
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        for verifier in self.verifiers:
            verifier.begin(cases)
        for server in self.servers:
            server.begin(cases)

    def keep_up(self) -> None:
        """Send the requests for which a verifier's pipe had no room before."""
        for verifier in self.verifiers:
            verifier.keep_up()

    def give_up(self) -> None:
        """Ask nothing more, since nobody will read the scores."""
        for verifier in self.verifiers:
            verifier.give_up()
        for server in self.servers:
            server.give_up()

    def in_thread(self) -> "Meanwhile":
        """Return a copy that another thread may call: it has its own tokenizer, and starts no verifier."""
        running = [verifier for verifier in self.verifiers if verifier.is_running]
        return replace(self, verifiers=running, codec=self.codec.apart)


def scored_meanwhile(
    scorer: Scorer, codec: Codec, prompts: Prompts, indices: Sequence[int]
) -> Meanwhile | None:
    """Return the listener for the scorer's verifiers and servers; None: no verifier has its own process, and there is
    no server."""
    scores = [
        term.scores.scores if isinstance(term.scores, NamedScores) else term.scores for term in scorer.terms
    ]
    asked = [each.verifier for each in scores if isinstance(each, VerifierScores | NamedVerifierScores)]
    verifiers = [each for each in asked if isinstance(each, VerifierProcess)]
    servers = [each for each in scores if isinstance(each, AnsweredScores)]
    return Meanwhile(verifiers, codec, prompts, indices, servers) if verifiers or servers else None
