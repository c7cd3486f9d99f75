"""Offer the flow with fake stages behind it as a deployment's entrypoint: ``tests.support.fake_flow.pipeline``."""

from tests.support.faked_stages import compute_with

compute_with("tests.support.fake_work.run_stage")

from vantage.flows.pipeline import pipeline  # noqa: E402

__all__ = ["pipeline"]
