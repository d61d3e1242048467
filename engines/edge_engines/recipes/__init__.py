"""Recipes, one per model and device class: plain TOML, read by `edge_engines.recipe`."""
