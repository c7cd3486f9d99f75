"""The order of examples is a function of (seed, epoch, position): every example once an epoch, wherever one starts."""

from collections import Counter

import pytest
import torch

from vantage.schemas.recipe.stages_on_data import SupervisedFineTuning
from vantage.tasks.training.data_order import WINDOW_BATCHES, DataOrder, order_of
from vantage.tasks.training.seeds import generator


def stream(order: DataOrder, num_batches: int) -> list[int]:
    return [index for number in range(num_batches) for index in order.batch(number)]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 25])
@pytest.mark.parametrize("lengths", [None, (5, 1, 3, 9, 2, 2, 8, 1, 1, 4)])
def test_every_epoch_holds_every_example_once(batch_size: int, lengths: tuple[int, ...] | None) -> None:
    order = DataOrder(num_examples=10, batch_size=batch_size, seed=3, lengths=lengths)
    positions = stream(order, -(-40 // batch_size))
    for epoch in range(4):
        assert Counter(positions[epoch * 10 : (epoch + 1) * 10]) == Counter(range(10))


def test_a_batch_does_not_depend_on_those_before_it() -> None:
    order = DataOrder(num_examples=50, batch_size=8, seed=1, lengths=tuple(range(50)))
    in_turn = [order.batch(number) for number in range(20)]
    alone = [
        DataOrder(num_examples=50, batch_size=8, seed=1, lengths=tuple(range(50))).batch(n)
        for n in (19, 0, 7)
    ]
    assert alone == [in_turn[19], in_turn[0], in_turn[7]]


def test_the_order_of_an_epoch_is_one_permutation_of_its_seed_and_number() -> None:
    order = DataOrder(num_examples=10, batch_size=4, seed=3)
    permutations = [torch.randperm(10, generator=generator(3, "order", epoch)).tolist() for epoch in range(4)]
    expected = [index for permutation in permutations for index in permutation]
    assert stream(order, 10) == expected


def test_an_order_that_is_made_anew_finds_the_epoch_that_was_shuffled_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shuffled = []
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **kw: shuffled.append(args) or randperm(*args, **kw))

    def batches(numbers: range) -> list[list[int]]:
        return [DataOrder(num_examples=12, batch_size=5, seed=41).batch(number) for number in numbers]

    batches(range(9))
    assert len(shuffled) == 4, "45 positions lie in four epochs"
    batches(range(5, 9))
    assert len(shuffled) == 4, "the last two are remembered"
    batches(range(2))
    assert len(shuffled) == 5, "and no more"


def test_orders_that_differ_in_lengths_alone_are_two() -> None:
    upwards, downwards = tuple(range(64)), tuple(range(64, 0, -1))
    first, second = (DataOrder(64, 4, seed=1, lengths=lengths) for lengths in (upwards, downwards))
    assert first != second
    assert hash(first) == hash(second), "lengths are compared and not hashed"
    alone = stream(second, 16)
    assert stream(first, 16) != alone
    assert stream(second, 16) == alone


def test_epochs_and_seeds_differ() -> None:
    order = DataOrder(num_examples=50, batch_size=50, seed=3)
    assert order.batch(0) != order.batch(1)
    assert order.batch(0) != DataOrder(num_examples=50, batch_size=50, seed=4).batch(0)


def test_batches_of_like_length_need_less_padding_and_come_in_random_order() -> None:
    lengths = tuple((7 * n) % 64 for n in range(64 * WINDOW_BATCHES))
    order = DataOrder(num_examples=len(lengths), batch_size=8, seed=2, lengths=lengths)
    batches = [[lengths[index] for index in order.batch(number)] for number in range(len(lengths) // 8)]
    plain = DataOrder(num_examples=len(lengths), batch_size=8, seed=2)
    plain_batches = [[lengths[index] for index in plain.batch(number)] for number in range(len(lengths) // 8)]

    def padding(batch: list[int]) -> int:
        return sum(max(batch) - length for length in batch)

    assert sum(map(padding, batches)) < 0.3 * sum(map(padding, plain_batches))
    longest = [max(batch) for batch in batches[:WINDOW_BATCHES]]
    assert longest != sorted(longest)


def test_number_of_batches_rounds_up() -> None:
    order = DataOrder(num_examples=100, batch_size=64, seed=0)
    assert order.num_batches(2) == 4  # 200 / 64 = 3.1
    assert order.num_batches(0.5) == 1
    assert order.num_batches(0.001) == 1


class Three:
    """Three examples of known length."""

    def __len__(self) -> int:
        return 3

    def lengths(self) -> tuple[int, ...]:
        return (4, 2, 9)


@pytest.mark.parametrize(("group_by_length", "lengths"), [(True, (4, 2, 9)), (False, None)])
def test_a_stages_order_is_what_its_recipe_says(
    group_by_length: bool, lengths: tuple[int, ...] | None
) -> None:
    work = SupervisedFineTuning(kind="sft", data="mine", batch_size=2, group_by_length=group_by_length)
    order = order_of(Three(), work, 7)
    assert (order.num_examples, order.batch_size, order.seed, order.lengths) == (3, 2, 7, lengths)
