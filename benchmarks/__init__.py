"""Measures fsdp2 beside torch's FSDP2: `python -m benchmarks --help`."""
