"""Runs programs that were written for torch's FSDP2."""
