"""Built-in recipes: one YAML file describes one whole run."""
