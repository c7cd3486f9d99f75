"""A tokenizer that fails on a text is refused with the text, and errors of other origin are not taken for that."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vantage.models.tokenising import UnencodableText, tokenise
from vantage.tasks.training.preemption import Requested


def of(model: models.Model) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


WITHOUT_UNKNOWN = {
    "unigram": lambda: of(models.Unigram([("</s>", 0.0), ("a", -1.0), ("b", -1.0)])),
    "words": lambda: of(models.WordLevel({"</s>": 0, "a": 1, "b": 2}, unk_token="<unk>")),
}


@pytest.mark.parametrize("kind", WITHOUT_UNKNOWN)
def test_a_text_that_a_tokenizer_cannot_encode_is_named_with_a_remedy(kind: str) -> None:
    """The library raises a bare Exception, which would count as a fault of ours."""
    tokenizer = WITHOUT_UNKNOWN[kind]()
    assert tokenise(tokenizer, ["a b", "b"], add_special_tokens=False) == [[1, 2], [2]]
    with pytest.raises(UnencodableText) as refused:
        tokenise(tokenizer, ["a b", "a zebra", "b"], add_special_tokens=False)
    said = str(refused.value)
    assert said.startswith("the model's tokenizer fails on the text 'a zebra' (")
    assert "fetch its tokenizer.json again" in said


@pytest.mark.parametrize("error", [Requested, MemoryError, KeyboardInterrupt])
def test_what_is_not_the_tokenizers_goes_on_up(error: type[BaseException]) -> None:
    def encode(*_: object, **__: object) -> None:
        raise error

    with pytest.raises(error):
        tokenise(encode, ["a"], add_special_tokens=False)  # type: ignore[arg-type]


def test_a_panic_of_the_library_is_a_fault_of_the_tokenizer() -> None:
    PanicException = type("PanicException", (BaseException,), {})

    def encode(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    with pytest.raises(UnencodableText, match=r"fails on the text 'a' \(index out of bounds\)"):
        tokenise(encode, ["a"], add_special_tokens=False)  # type: ignore[arg-type]
