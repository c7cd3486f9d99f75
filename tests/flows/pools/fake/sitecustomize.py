"""Let the processes of a test's run and worker, which import this, compute fake stages without torch.

They also send MLflow nothing, and their leases are short.
"""

import sys

# Not for the helper of multiprocessing that each process starts, which would load our package for nothing.
if not any("multiprocessing.resource_tracker" in argument for argument in sys.orig_argv):
    import vantage.storage.leases
    from tests.support.faked_stages import compute_with
    from tests.support.unsent import send_nothing

    compute_with("tests.support.fake_work.run_stage")
    send_nothing()
    vantage.storage.leases.LEASE_SECONDS = 5.0
