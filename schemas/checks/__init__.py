"""What a loader refuses or warns of beyond single fields."""
