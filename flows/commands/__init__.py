"""The command line, and what a person sees on it."""
