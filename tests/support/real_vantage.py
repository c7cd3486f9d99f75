"""Run the command line with its own stages in a process that was forked from one with fake stages (``WITH_BOTH``):
``tests.support.real_vantage run RECIPE …``.
"""

from tests.support.faked_stages import compute_really

compute_really()

if __name__ == "__main__":
    from vantage.cli.main import main

    main()
