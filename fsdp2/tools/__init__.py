"""Provides functions besides training: unsharded parameters, audits, comparisons, clipping, padding reports."""
