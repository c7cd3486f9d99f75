"""What a response is worth: reward models and verifiers, weighted and summed."""
