"""Checksums of weights as vLLM holds them equal sha256 of bytes that NumPy joins and pads."""

import hashlib
from typing import Any

import numpy
import pytest
import torch

from vantage.tasks.rollout import checksums
from vantage.tasks.rollout.checksums import Checksums, GivenWeights, by_parameter
from vantage.tasks.rollout.held_weights import WeightsDiffer


def sha256(*arrays: Any) -> str:
    return hashlib.sha256(numpy.concatenate(arrays).tobytes()).hexdigest()


def numbers(*shape: int) -> Any:
    return numpy.random.default_rng(sum(shape)).normal(size=shape).astype(numpy.float32)


def test_parts_are_joined_in_vllms_order_alone() -> None:
    query, key, value = numbers(4, 3), numbers(2, 3), numbers(1, 3)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    given, disordered = GivenWeights(torch.float32), GivenWeights(torch.float32)
    for name, weight in zip(names, (query, key, value), strict=True):
        given.add(name, torch.tensor(weight))
    for place in (1, 0, 2):
        disordered.add(names[place], torch.tensor((query, key, value)[place]))
    joined = "model.layers.0.self_attn.qkv_proj.weight"
    assert given.right()[joined] == {sha256(query, key, value)}
    assert joined not in disordered.right()
    assert sha256(key) in given.right()[names[1]]


def test_an_embedding_may_be_padded_and_a_vector_is_not() -> None:
    embedding, bias = numbers(100, 3), numbers(100)
    given = GivenWeights(torch.float32)
    given.add("embed.weight", torch.tensor(embedding))
    given.add("head.bias", torch.tensor(bias))
    padded = numpy.zeros((28, 3), dtype=numpy.float32)
    assert given.right() == {
        "embed.weight": {sha256(embedding), sha256(embedding, padded)},
        "head.bias": {sha256(bias)},
    }


def test_weights_are_hashed_in_the_type_that_vllm_holds() -> None:
    """A bfloat16 is the upper half of a float32, rounded to even."""
    weight = numbers(8, 8)
    bits = weight.view(numpy.uint32)
    halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
    given = GivenWeights(torch.bfloat16)
    given.add("w", torch.tensor(weight))
    assert sha256(halves) in given.right()["w"]


def test_parts_of_workers_are_no_parameters() -> None:
    """Two workers of tensor parallelism hold the same norm and other rows of a matrix."""
    first = {"dp0:pp0:pcp0:tp0:norm.weight": "a", "dp0:pp0:pcp0:tp0:mlp.base_layer.weight": "b"}
    second = {"dp0:pp0:pcp0:tp1:norm.weight": "a", "dp0:pp0:pcp0:tp1:mlp.base_layer.weight": "c"}
    assert by_parameter([first | second]) == by_parameter([first, second]) == {"norm.weight": "a"}
    assert by_parameter([first]) == {"norm.weight": "a", "mlp.weight": "b"}


def test_what_never_agreed_is_not_asked_for_and_what_did_must() -> None:
    """A packed matrix has other bytes from the start. Each vLLM has its own layout and is asked once in each update."""
    weights = {"norm": torch.tensor(numbers(4)), "packed": torch.tensor(numbers(4, 4))}
    held = {"norm": sha256(numbers(4)), "packed": "other bytes"}
    compared, asked = Checksums(None, "float32"), []

    def hand_over() -> set[str]:
        """Hand the same weights over again, and return which are hashed."""
        given = compared.begin(weights.values())
        assert given is not None
        for name, weight in weights.items():
            given.add(name, weight)
        return {*given.right()}

    def answer(**changes: str) -> dict[str, str]:
        asked.append(changes)
        return held | changes

    assert hand_over() == {"norm", "packed"}
    compared.compare("", lambda names: answer())
    compared.compare("", lambda names: answer(norm="others"))
    compared.compare(" at another", lambda names: {"norm": "others"})
    compared.compare(" at a third", lambda names: None)
    assert len(asked) == 1
    assert hand_over() == {"norm"}, "what never agreed is not hashed again"
    compared.compare("", lambda names: answer(packed="others"))
    assert len(asked) == 2
    for wrong in (answer(norm="others"), {"packed": "other bytes"}):
        hand_over()
        with pytest.raises(
            WeightsDiffer, match=r"the sha256 of 1 of the 1 that agreed before differ.* of norm;"
        ):
            compared.compare("", lambda names, wrong=wrong: wrong)  # type: ignore[misc]


def test_after_the_first_comparison_parts_are_hashed_as_their_whole_alone() -> None:
    parts = {f"layer.{part}_proj.weight": torch.tensor(numbers(2, 3)) for part in ("gate", "up")}
    for only, hashed in (
        ({"layer.gate_up_proj.weight"}, {"layer.gate_up_proj.weight"}),
        ({"layer.up_proj.weight"}, {"layer.up_proj.weight"}),
        (None, {*parts, "layer.gate_up_proj.weight"}),
    ):
        given = GivenWeights(torch.float32, only=only)
        for name, weight in parts.items():
            given.add(name, weight)
        assert given.right().keys() == hashed


def test_large_weights_are_compared_in_parts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update compares at most 16 bytes, or one larger weight: first two vectors of 8 bytes, then a matrix of 36,
    then a vector of 4. Weights that never agreed have no turn. All weights of a new vLLM are compared at once."""
    monkeypatch.setattr(checksums, "MOST_BYTES", 16)
    sizes = {"a": (2,), "packed": (5,), "b": (2,), "c": (3, 3), "d": (1,)}
    weights = {name: torch.tensor(numbers(*shape)) for name, shape in sizes.items()}
    held = {name: sha256(numbers(*shape)) for name, shape in sizes.items()} | {"packed": "other bytes"}
    compared = Checksums(None, "float32")

    def hand_over(*places: str) -> tuple[set[str], list[Any]]:
        given = compared.begin(weights.values(), places)
        assert given is not None
        for name, weight in weights.items():
            given.add(name, weight)
        asked: list[Any] = []
        for place in places:
            compared.compare(place, lambda names: (asked.append(names), held)[1])
        return {*given.right()}, asked

    assert hand_over("") == ({*sizes}, [None])
    for part in (("a", "b"), ("c",), ("d",), ("a", "b")):
        assert hand_over("") == ({*part}, [part])
    assert hand_over("", " at another") == ({"a", "b", "c", "d"}, [None, None])
    assert hand_over("", " at another") == ({"c"}, [("c",)] * 2)
    hand_over("")
    held["c"] = "others"
    assert hand_over("")[1] == [("a", "b")], "it is not the turn of c"
    with pytest.raises(WeightsDiffer, match=r"the sha256 of 1 of the 1 that agreed before differ.* of c;"):
        hand_over("")


def test_a_vllm_that_was_never_compared_as_a_whole_is_not_compared_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checksums, "MOST_BYTES", 4)
    weights = {"a": torch.tensor(numbers(2))}
    compared = Checksums(None, "float32")
    for asked in (None, ("a",)):
        given = compared.begin(weights.values())
        assert given is not None
        given.add("a", weights["a"])
        compared.compare("", lambda names, asked=asked: {"a": sha256(numbers(2))} if names == asked else {})  # type: ignore[misc]
    compared.compare(" at another", lambda names: pytest.fail("its layout is not known"))


@pytest.mark.parametrize("answer", [None, {"a": "other bytes"}], ids=["computes-none", "agrees-nowhere"])
@pytest.mark.parametrize("is_large", [True, False])
def test_large_weights_are_not_hashed_in_vain(
    answer: dict[str, str] | None, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "MOST_BYTES", 4 if is_large else 8)
    weights = [torch.tensor(numbers(2))]
    compared = Checksums(None, "float32")
    first = compared.begin(weights)
    assert first is not None
    first.add("a", weights[0])
    compared.compare("", lambda names: answer)
    assert (compared.begin(weights) is None) == is_large


@pytest.mark.parametrize(
    ("chosen", "numbers_of_weights", "is_compared"),
    [(None, 8, True), (None, 9, False), (True, 9, True), (False, 8, False)],
)
def test_large_weights_are_compared_on_request(
    chosen: bool | None, numbers_of_weights: int, is_compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight has two bytes in bfloat16, and more than 16 bytes count as large here."""
    monkeypatch.setattr(checksums, "MOST_BYTES_AT_FIRST", 16)
    compared = Checksums(chosen, "bfloat16")
    assert (compared.begin([torch.zeros(numbers_of_weights)]) is not None) == is_compared
    if not is_compared:
        compared.compare("", lambda names: pytest.fail("nothing is compared"))
