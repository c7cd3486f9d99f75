"""Turn a rollout into new weights: advantages, losses, optimiser steps."""
