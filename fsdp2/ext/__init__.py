"""Holds the abilities that are built on the core's events and strategies, each in a file of its own."""
