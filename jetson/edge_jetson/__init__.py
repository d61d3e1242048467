"""Know the board: profiles, telemetry, installation."""
