"""Optimizers that need whole matrices, on sharded parameters: each matrix is updated by one rank."""
