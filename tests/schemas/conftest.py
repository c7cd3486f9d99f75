"""Make a small recipe of every stage kind, as text with known lines and as a plain mapping."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.schemas import by_schema

RECIPE = """\
recipe: small
model: {source: "builtin:tiny"}
data:
  demos: {source: "builtin:arithmetic/demonstrations"}
  pairs: {source: "builtin:arithmetic/preferences"}
  tasks: {source: "builtin:arithmetic/prompts"}
rewards:
  main:
    terms:
      - {model: reward}
stages:
  sft: {kind: sft, data: demos}
  reward:
    kind: reward_model
    init: sft
    data: pairs
    centre_on: demos
    gate: {metric: pair_accuracy, at_least: 0.7}
  value:
    kind: value_pretraining
    policy: sft
    init: reward
    reward: main
    prompts: tasks
    gate: {metric: explained_variance, at_least: 0.3}
  policy:
    kind: policy_optimization
    algorithm: vapo
    init: sft
    critic: value
    reward: main
    prompts: tasks
  evaluation:
    kind: evaluation
    candidate: policy
    baseline: sft
    judge: {verifier: arithmetic}
    prompts: tasks
    gate: {metric: accuracy_gain, at_least: 0.0}
publish:
  - {stage: policy, registered_model: small, alias: champion, after: evaluation}
"""


@pytest.fixture(autouse=True)
def _same_by_schema(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Assert that the JSON schema says of each recipe or sweep that a test loads what the loader does."""
    yield from by_schema.watch(monkeypatch)


@pytest.fixture
def text() -> str:
    """Return the recipe as its author wrote it; line numbers in tests count from here."""
    return RECIPE


@pytest.fixture
def plain() -> dict[str, Any]:
    """Return the recipe as a mapping that a test may change."""
    return copy.deepcopy(yaml.safe_load(RECIPE))
