"""Provides what a user calls besides training: unsharded parameters, audits, comparisons, clipping, placements."""
