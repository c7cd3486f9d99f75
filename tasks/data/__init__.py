"""Turn rows of text into token ids, and divide rows among the sides of a split."""
