"""Fixes for DTensor operations on sharded parameters; fixes.py puts them in force."""
