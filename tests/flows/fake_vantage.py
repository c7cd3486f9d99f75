"""The command line with fake stages behind it: ``python -m fake_vantage run RECIPE …``."""

from multiprocessing import forkserver

import schemas.records.attempt

schemas.records.attempt.RUN_STAGE = "tests.flows.fake_work.run_stage"
forkserver.set_forkserver_preload = lambda modules: (
    None
)  # fake stages need no torch, which takes seconds to load

if __name__ == "__main__":
    from flows.commands.main import main

    main()
