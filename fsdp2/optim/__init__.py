"""Optimizers and averages that work on the flat shards of whole groups."""
