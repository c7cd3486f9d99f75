"""Estimate memory, time and cost of a recipe's stages before anything runs. No tensor library is loaded."""
