"""The rows of ``vantage.schemas.kinds`` for the steps that no recipe names: import of models, data and verifiers, and merges."""

from vantage.schemas.kind import Kind
from vantage.schemas.metric_names import ROWS
from vantage.schemas.recipe.work import (
    CheckRows,
    ImportBenchmark,
    ImportModel,
    ImportRewardModel,
    ImportVerifier,
    MergePolicy,
    MergeRewardModel,
    MixData,
    PrepareData,
)

IMPLICIT_KINDS = (
    Kind(
        work=ImportModel,
        module="vantage.tasks.import_model",
        makes="policy",
        revision=2,
        imports="model",
    ),
    Kind(
        work=ImportRewardModel,
        module="vantage.tasks.import_reward_model",
        makes="reward_model",
        revision=1,
        imports="model",
    ),
    Kind(
        work=PrepareData,
        module="vantage.tasks.prepare_data",
        makes="dataset",
        revision=6,
        imports="data",
        numbers=(
            *ROWS,
            "source_rows",
            "dropped_rows",
            "repeated_rows",
            "unused_rows",
            "contaminated_rows",
            "near_duplicate_rows",
        ),
    ),
    Kind(
        work=MixData,
        module="vantage.tasks.mix_data",
        makes="dataset",
        revision=1,
        mixes=True,
        numbers=(*ROWS, "unused_rows", "rows_again"),
    ),
    Kind(
        work=CheckRows,
        module="vantage.tasks.check_rows",
        makes="row_check",
        revision=1,
        checks=True,
        numbers=("checked_rows", "unusable_rows"),
    ),
    Kind(
        work=ImportVerifier,
        module="vantage.tasks.import_verifier",
        makes="verifier",
        revision=2,
        imports="verifier",
    ),
    Kind(
        work=ImportBenchmark,
        module="vantage.tasks.import_benchmark",
        makes="benchmark",
        revision=1,
        imports="benchmark",
    ),
    Kind(
        work=MergePolicy,
        module="vantage.tasks.merge_adapters",
        makes="policy",
        revision=1,
        merges=True,
        reads={"adapters": ("policy",)},
    ),
    Kind(
        work=MergeRewardModel,
        module="vantage.tasks.merge_adapters",
        makes="reward_model",
        revision=1,
        merges=True,
        reads={"adapters": ("reward_model",)},
    ),
)
