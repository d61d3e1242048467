"""Own the engine in a process of its own and run the steps."""
