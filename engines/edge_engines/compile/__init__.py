"""Turn a graph into what the target loads."""
