"""Checks over several fields of a recipe: errors and warnings of the loader."""
