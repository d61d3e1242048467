"""Know the board: what each module is. Telemetry and installation are not part of this version."""
