"""Pages and files made of a run for others: model cards, bills of materials, exported models."""
