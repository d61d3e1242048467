"""Say what an engine will need and how fast it can be, before anything is built or loaded."""
