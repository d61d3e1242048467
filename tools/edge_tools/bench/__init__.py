"""`edge-runtime bench`: measure an engine on this machine, one file per suite."""
