"""From rows of text to token ids, and which row stands on which side of a split."""
