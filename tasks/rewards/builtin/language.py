"""``builtin:language``: is the response in a language? The library py3langid decides.

An empty response, and one without a letter (numbers, punctuation, emoji), is in no language, so it is wrong. The library
confuses short texts: measure how often before training on it.
"""

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier, LanguageVerifier
from vantage.tasks.rewards.builtin.expressions import as_unicode
from vantage.tasks.rewards.builtin.judge import Judge


def load(verifier: BuiltinVerifier) -> Judge:
    """Return the identification. Raises ValueError if the library does not know the language."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    assert isinstance(verifier, LanguageVerifier)
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    if verifier.language not in identifier.labels:
        known = ", ".join(sorted(identifier.labels))
        raise ValueError(f"language={verifier.language} is not known to py3langid; name one of {known}")

    def judge(response: str, _: str | None) -> bool:
        if not any(map(str.isalpha, response)):
            return False
        found, probability = identifier.classify(as_unicode(response))
        return bool(found == verifier.language and probability >= verifier.at_least)

    return judge
