"""Predicts memory, communication and time of settings before any rank runs."""
