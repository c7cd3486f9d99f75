"""Offer the flow of ``tests.support.fake_flow`` with the stages of ``tests.support.fake_models``."""

from tests.support.faked_stages import compute_with

compute_with("tests.support.fake_models.run_stage")

from vantage.flows.pipeline import pipeline  # noqa: E402

__all__ = ["pipeline"]
