"""Text to calibrate, rank and judge a quantised model with: what ships with the project, or the user's own."""
