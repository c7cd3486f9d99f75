"""A rollout is cut so that every epoch sees every response once, in an order that the seed alone decides."""

import torch

from vantage.models.sequences import collate
from vantage.schemas.recipe.stages import ValuePretraining
from vantage.tasks.rollout.minibatches import OptimizerSteps, minibatches

LENGTHS = [7, 2, 9, 4, 1, 8, 3, 6]
SEQUENCES = collate([[1]] * 8, [[5] * length for length in LENGTHS], pad_token_id=0)
WORK = ValuePretraining(
    kind="value_pretraining",
    policy="p",
    init="p",
    reward="r",
    prompts="d",
    batch_size=8,
    minibatch_size=4,
    epochs=3,
    iterations=5,
)


def cut(*, seed: int = 1, iteration: int = 0) -> list[torch.Tensor]:
    epochs = minibatches(SEQUENCES, WORK, seed=seed, iteration=iteration)
    assert [len(epoch) for epoch in epochs] == [2] * 3
    return [rows for epoch in epochs for rows in epoch]


def test_every_epoch_holds_every_row_once() -> None:
    parts = cut()
    assert [len(part) for part in parts] == [4] * 6
    for epoch in range(3):
        assert sorted(torch.cat(parts[2 * epoch : 2 * epoch + 2]).tolist()) == list(range(8))


def test_rows_of_a_minibatch_go_from_short_to_long() -> None:
    for part in cut():
        lengths = [LENGTHS[row] for row in part.tolist()]
        assert lengths == sorted(lengths)


def test_the_order_is_a_function_of_seed_iteration_and_epoch() -> None:
    def sets(**where: int) -> list[set[int]]:
        return [set(part.tolist()) for part in cut(**where)]

    assert sets() == sets()
    assert sets() != sets(seed=2)
    assert sets() != sets(iteration=1)
    assert sets()[0] not in (sets()[2], sets()[3]) or sets()[0] not in (sets()[4], sets()[5])


def test_steps_are_numbered_over_all_iterations() -> None:
    """Each of 5 iterations has 3 epochs of 2 steps, 30 steps in all, so iteration 2 begins with step 12."""
    steps = list(OptimizerSteps(SEQUENCES, WORK, seed=1, iteration=2))
    assert [step.number for step in steps] == [12, 13, 14, 15, 16, 17]
    assert {step.total for step in steps} == {30}
    for step, rows in zip(steps, cut(iteration=2), strict=True):
        assert torch.equal(step.rows, rows)


def test_an_epoch_that_ends_early_leaves_the_next_ones_as_they_are() -> None:
    steps = OptimizerSteps(SEQUENCES, WORK, seed=1, iteration=0)
    taken = []
    for step in steps:
        taken.append(step.number)
        if step.number in (0, 3):
            steps.end_epoch()
    assert taken == [0, 2, 3, 4, 5]
