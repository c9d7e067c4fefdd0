"""Runs torch's CUDA build without a GPU: stub libraries stand in for CUDA's. See README.md."""
