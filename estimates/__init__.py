"""Memory, time and cost of a recipe's stages, worked out before anything runs. No tensor library is loaded."""
