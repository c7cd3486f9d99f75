"""A stage gets smaller bounds of a pass after memory ran out; that these change no weights is tested stage by stage."""

from vantage.attempts.micro_batches import remedy_for_memory, with_limits
from vantage.schemas.recipe.inputs import Model
from vantage.schemas.recipe.stages_on_data import SupervisedFineTuning
from vantage.schemas.recipe.work import ImportModel

SFT = SupervisedFineTuning(kind="sft", data="d", batch_size=48, microbatch_size=16, microbatch_tokens=4096)
IMPORT = ImportModel(model=Model(source="builtin:tiny"))


def test_the_bounds_are_all_that_changes() -> None:
    assert with_limits(SFT) == SFT
    assert with_limits(SFT, microbatch_tokens=512) == SFT.model_copy(update={"microbatch_tokens": 512})
    assert with_limits(SFT, microbatch_size=4) == SFT.model_copy(update={"microbatch_size": 4})
    assert with_limits(IMPORT) == IMPORT


def test_the_remedy_fits_what_was_tried() -> None:
    assert remedy_for_memory("sft", SFT, rows=32, tokens=960).startswith(
        "set stages.sft.microbatch_tokens below 960, which changes no"
    )
    assert "max_response_tokens" in remedy_for_memory("sft", SFT, rows=1, tokens=30)
    for work, rows in ((SFT, None), (IMPORT, None), (IMPORT, 4)):
        assert "microbatch" not in remedy_for_memory("step", work, rows=rows, tokens=rows)
