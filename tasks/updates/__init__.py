"""From a rollout to new weights: advantages, losses, optimiser steps."""
