"""Read model files: what they describe, and their weights one tensor at a time."""
