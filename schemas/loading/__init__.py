"""From a file, and overrides, to a recipe, or to everything that is wrong with it."""
