"""The stages, one per file, with the code that they share for updates, rollouts, rewards, training and data."""
