"""The flow with fake stages behind it, as a deployment's entrypoint: ``tests.flows.fake_flow.pipeline``."""

from tests.flows.faked_stages import compute_with

compute_with("tests.flows.fake_work.run_stage")

from flows.pipeline import pipeline  # noqa: E402

__all__ = ["pipeline"]
