"""As ``tests.flows.fake_flow``, with the stages of ``tests.flows.fake_models``."""

from tests.flows.faked_stages import compute_with

compute_with("tests.flows.fake_models.run_stage")

from flows.pipeline import pipeline  # noqa: E402

__all__ = ["pipeline"]
