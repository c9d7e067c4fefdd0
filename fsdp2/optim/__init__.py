"""Flat optimizer steps and averages, and optimizers of whole matrices, for sharded parameters."""
