"""The nouns of Vantage: recipe, algorithm switches, artifacts, tables, verdicts, metrics."""
