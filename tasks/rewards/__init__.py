"""Score responses: reward models and verifiers, weighted and summed."""
