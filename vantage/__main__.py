"""``python -m vantage``: the command line of this installation, whatever the search path finds."""

from vantage.cli.main import main

if __name__ == "__main__":
    main()
