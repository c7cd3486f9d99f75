"""A row is shown as the text of its tokens, in pieces that are trained on or not."""

import pytest

from vantage.models.builtin import build_builtin
from vantage.models.folders import load_tokenizer
from vantage.schemas.conversations import Message
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.stages_on_data import TrainOn
from vantage.tasks.data.examples import Codec
from vantage.tasks.data.rendering import render


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """Return a codec with one token a character, whose limits are shorter than the rows."""
    folder = tmp_path_factory.mktemp("model")
    build_builtin("tiny", folder, seed=0)
    generation = Generation(max_prompt_tokens=2, max_response_tokens=2)
    return Codec(tokenizer=load_tokenizer(folder), generation=generation, chat=False)


def test_a_response_is_trained_on_and_its_prompt_is_not(codec: Codec) -> None:
    shown = render(
        codec, "1 + 2", None, Message(role="assistant", content="= 3", extra=None), train_on="last_response"
    )
    bos, eos = codec.tokenizer.bos_token, codec.tokenizer.eos_token
    assert shown.parts == [(f"{bos}1 + 2", False), (f"= 3{eos}", True)], "nothing is cut off"
    assert (shown.prompt_tokens, shown.response_tokens) == (6, 4)


def test_a_prompt_alone_has_one_piece(codec: Codec) -> None:
    shown = render(codec, "1 + 2", None, None, train_on="last_response")
    assert shown.parts == [(f"{codec.tokenizer.bos_token}1 + 2", False)]
    assert (shown.prompt_tokens, shown.response_tokens) == (6, 0)


@pytest.mark.parametrize(("train_on", "learns_earlier"), [("all_responses", True), ("last_response", False)])
def test_earlier_answers_are_trained_on_if_the_recipe_says_so(
    codec: Codec, train_on: TrainOn, learns_earlier: bool
) -> None:
    bos, eos = codec.tokenizer.bos_token, codec.tokenizer.eos_token
    turns = [("user", "1 + 2"), ("assistant", "= 3"), ("user", "+ 4")]
    messages = [Message(role=role, content=content, extra=None) for role, content in turns]
    answer = Message(role="assistant", content="= 7", extra=None)
    shown = render(codec, "1 + 2", messages, answer, train_on=train_on)
    asked, said = f"{bos}User:\n1 + 2\n\nAssistant:\n", f"= 3{eos}"
    asked_again = "\n\nUser:\n+ 4\n\nAssistant:\n"
    prompt = (
        [(asked, False), (said, True), (asked_again, False)]
        if learns_earlier
        else [(f"{asked}{said}{asked_again}", False)]
    )
    assert shown.parts == [*prompt, (f"= 7{eos}", True)]
    # one token a character, but for BOS and two EOS
    assert (shown.prompt_tokens, shown.response_tokens) == (
        len("User:\n1 + 2\n\nAssistant:\n= 3\n\nUser:\n+ 4\n\nAssistant:\n") + 2,
        4,
    )
