"""The report of a run: gathered from its records and artifacts as plain values, then drawn as one HTML page."""
