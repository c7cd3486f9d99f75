"""``builtin:format``: does the response consist of its sections, in order, each once?

``tags: [think, answer]`` is ``<think>…</think><answer>…</answer>``. White space may be around and between sections, and
nothing else. Every section has text other than white space, and none of the tags. A response that was cut off lacks a closing
tag, so it is wrong. Tags are compared as they are, with their case.
"""

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier, FormatVerifier
from vantage.tasks.rewards.builtin.judge import Judge


def load(verifier: BuiltinVerifier) -> Judge:
    """Return the check."""
    assert isinstance(verifier, FormatVerifier)
    marks = [mark for tag in verifier.tags for mark in (f"<{tag}>", f"</{tag}>")]

    def judge(response: str, _: str | None) -> bool:
        if any(response.count(mark) != 1 for mark in marks):
            return False
        texts = []
        for mark in marks:
            before, found, response = response.partition(mark)
            if not found:  # the mark is missing, or comes before the mark that should precede it
                return False
            texts.append(before)
        around, sections = [*texts[::2], response], texts[1::2]
        return not any(text.strip() for text in around) and all(text.strip() for text in sections)

    return judge
