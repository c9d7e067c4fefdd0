"""Fixes for DTensor operations on sharded parameters: table.py lists them, and fixes.py puts them in force."""
