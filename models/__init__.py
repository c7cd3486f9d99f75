"""Networks, tokenising, sampling, log-probabilities, and weights on disk."""
