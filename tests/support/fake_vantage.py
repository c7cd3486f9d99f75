"""Run the command line with fake stages behind it: ``python -m tests.support.fake_vantage run RECIPE …``."""

from tests.support.faked_stages import compute_with

compute_with("tests.support.fake_work.run_stage")

if __name__ == "__main__":
    from vantage.cli.main import main

    main()
