"""The command line with fake stages behind it: ``python -m fake_vantage run RECIPE …``."""

import flows.launch

flows.launch.RUN_STAGE = "fake_work.run_stage"

if __name__ == "__main__":
    from flows.cli import main

    main()
