"""Turn a checkpoint into an engine folder."""
