"""The audit: from a deployed model back to the bytes of its data, with a verdict for every edge."""
