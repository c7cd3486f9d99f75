"""For the processes of a test's run and worker: every stage is a fake one, torch is not loaded, leases are short."""

import storage.leases
from tests.flows.faked_stages import compute_with

compute_with("tests.flows.fake_work.run_stage")
storage.leases.LEASE_SECONDS = 5.0
