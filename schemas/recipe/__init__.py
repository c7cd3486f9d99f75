"""The classes of a recipe."""
