"""Know the board: the place of profiles, telemetry and installation, which are not part of this version."""
