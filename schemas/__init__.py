"""The data types of Vantage: recipe, algorithm switches, artifacts, tables, verdicts, metrics."""
