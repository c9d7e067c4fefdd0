"""Holds abilities of which each can be understood alone, and that programs use now and then."""
