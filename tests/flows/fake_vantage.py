"""The command line with fake stages behind it: ``python -m tests.flows.fake_vantage run RECIPE …``."""

from tests.flows.faked_stages import compute_with

compute_with("tests.flows.fake_work.run_stage")

if __name__ == "__main__":
    from flows.commands.main import main

    main()
