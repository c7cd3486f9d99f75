"""Load a recipe from a file with overrides, with all problems reported at once."""
