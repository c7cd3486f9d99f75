"""Make the operations of a small run, and the entries that they add up to."""

from tests.ledger.small_run import artifact, sha
from vantage.ledger.entries import RunEntry, apply_operation
from vantage.ledger.operations import (
    FinishStage,
    Input,
    OpenRun,
    OpenStage,
    Operation,
    RecordReuse,
)
from vantage.schemas.records.artifacts import Dataset, PolicyCheckpoint


def policy(name: str) -> PolicyCheckpoint:
    return artifact(PolicyCheckpoint, name, {})


DEMONSTRATIONS = Dataset(
    uri="objects/d", digest=sha("d"), stage_key=sha("dk"), parents={}, content="demonstrations"
)
OPEN_RUN = OpenRun(time=1, run_id="0001-tiny-abcdef", experiment="tiny", name="tiny", recipe={})
OPEN_STAGE = OpenStage(
    time=2,
    stage="sft",
    kind="sft",
    stage_key=sha("k"),
    attempt=1,
    params={},
    inputs={
        "init": Input(stage="model", artifact=policy("model")),
        "data": Input(stage="data.demonstrations", artifact=DEMONSTRATIONS),
    },
)
FINISH_STAGE = FinishStage(
    time=3, stage="sft", outcome="completed", artifact=policy("sft"), provenance={}, reason=None
)
REUSE = RecordReuse(
    time=4, stage="sft", kind="sft", stage_key=sha("k"), params={}, inputs={}, artifact=policy("sft")
)


def entry(*operations: Operation) -> RunEntry:
    total = None
    for operation in operations:
        total = apply_operation(total, operation)
    assert total is not None
    return total
