"""Turn token ids into logits and back into text, for one engine."""
