"""Differences of two runs, stages, models or recipes: gathered, recorded, printed."""
