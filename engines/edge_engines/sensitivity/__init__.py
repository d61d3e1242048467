"""Measure what INT8 does to each unit of a model, and choose which units keep it."""
