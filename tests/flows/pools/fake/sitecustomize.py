"""For the processes of a test's run and worker: every stage is a fake one, torch is not loaded, leases are short."""

import vantage.storage.leases
from tests.support.faked_stages import compute_with

compute_with("tests.support.fake_work.run_stage")
vantage.storage.leases.LEASE_SECONDS = 5.0
