"""Rows of one prompt are one cluster, whatever stands for the prompt."""

from hypothesis import given
from hypothesis import strategies as some

from vantage.tasks.training.measured import clusters_of, clusters_of_ids


def test_clusters_are_numbered_as_their_prompts_first_stand() -> None:
    prompts = [[7, 1], [2], [], [7, 1], [2, 0], [], [2]]
    assert clusters_of_ids(prompts).tolist() == [0, 1, 2, 0, 3, 2, 1]
    assert clusters_of_ids([]).tolist() == []


@given(some.lists(some.lists(some.integers(0, 2**31 - 1), max_size=3)))
def test_token_ids_cluster_as_their_tuples_do(prompts: list[list[int]]) -> None:
    assert clusters_of_ids(prompts).tolist() == clusters_of(list(map(tuple, prompts))).tolist()
