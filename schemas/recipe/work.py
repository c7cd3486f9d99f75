"""The work of a stage process: the base class of all kinds, and the implicit steps, which recipes do not contain."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.builtin_verifiers import AnyVerifier
from vantage.schemas.recipe.fields import Count, Name, Positive, is_default
from vantage.schemas.recipe.inputs import Benchmark, Content, Data, HeldOutRows, Model, Shares
from vantage.schemas.recipe.sources import StageOfRun
from vantage.schemas.recipe.terms import VerifierTerm


class Work(Frozen):
    """The work of one stage process; its ``kind`` is a row of ``vantage.schemas.kinds``."""

    if TYPE_CHECKING:  # every subclass declares its own literal
        kind: str


class ModelImport(Work):
    """An implicit step that copies a model into the store."""

    model: Model


class ImportModel(ModelImport):
    """The implicit step that copies a policy into the store: the recipe's model, or another."""

    kind: Literal["import_model"] = "import_model"


class ImportRewardModel(ModelImport):
    """The implicit step that copies a reward model into the store that was trained elsewhere."""

    kind: Literal["import_reward_model"] = "import_reward_model"


MODEL_IMPORTS = ("import_model", "import_reward_model")
"""Names of the kinds that import a model."""


SOURCE = "source"
"""Role of the artifact of another run that an import copies."""


def copied_stage(work: Work) -> StageOfRun | None:
    """Return the stage of another run that an import copies; None: it copies none."""
    origin = work.model.origin if isinstance(work, ModelImport) else None
    return origin if isinstance(origin, StageOfRun) else None


class PrepareData(Work):
    """The implicit step that maps, validates and splits one dataset of the recipe."""

    kind: Literal["prepare_data"] = "prepare_data"
    content: Content
    data: Data
    shares: Shares = Shares()
    """The recipe's held-out shares, which decide the split of each prompt."""
    alone: bool = False
    """Whether this is the recipe's only dataset beside test sets; then a number of held-out rows may exceed its share."""
    test_sets: tuple[Name, ...] = Field(default=(), exclude_if=is_default(()))
    """The recipe's test sets, whose prompts are left out; their roles are ``test_set.0``, ``test_set.1`` …"""


class MixData(Work):
    """The implicit step that mixes prepared datasets in given shares."""

    kind: Literal["mix_data"] = "mix_data"
    content: Content
    parts: tuple[Name, ...]
    """The datasets, whose roles are ``part.0``, ``part.1`` …"""
    weights: tuple[Positive, ...]
    """Share of each part; they add up to 1."""
    rows: Count | None = None
    split: HeldOutRows = HeldOutRows()


class CheckRows(Work):
    """The implicit step that reads all rows as training will: with the model's tokenizer, its chat template and the limits."""

    kind: Literal["check_rows"] = "check_rows"
    datasets: tuple[Name, ...]
    """Datasets and mixtures, whose roles are ``data.0``, ``data.1`` …"""
    contents: tuple[Content, ...]
    """Content of each dataset."""
    max_dropped: tuple[float, ...]
    """Largest share of unusable rows of each dataset."""


class VerifierUse(Frozen):
    """One place of a recipe that uses a verifier."""

    path: str
    """Path in the recipe, for messages: ``rewards.main.terms.0``."""
    term: VerifierTerm | None = None
    """The term that its verdicts score; None: it is asked for right or wrong, or for ``score``."""
    score: str | None = None
    """Name in curves of the verifier's score that decides which responses pass; None: none does."""


class ImportVerifier(Work):
    """The implicit step that copies one of the recipe's verifiers into the store, and tries it."""

    kind: Literal["import_verifier"] = "import_verifier"
    verifier: AnyVerifier
    uses: tuple[VerifierUse, ...] = Field((), exclude_if=is_default(()))
    """The recipe's uses of it, which the dry run compares with its verdicts. They are in no stage key: what is stored is the same."""


class ImportBenchmark(Work):
    """The implicit step that copies one of the recipe's folders of lm-eval tasks into the store."""

    kind: Literal["import_benchmark"] = "import_benchmark"
    benchmark: Benchmark


class MergePolicy(Work):
    """The implicit step that makes a whole policy of the adapters that a stage trained."""

    kind: Literal["merge_policy"] = "merge_policy"
    adapters: Name
    """Stage whose adapters are merged."""


class MergeRewardModel(Work):
    """The implicit step that makes a whole reward model of the adapters that a stage trained."""

    kind: Literal["merge_reward_model"] = "merge_reward_model"
    adapters: Name
    """Stage whose adapters are merged."""
