"""The report of a build: what a person should know of an engine, as one page and as JSON."""
