"""Predicts memory, communication and time of settings before any rank runs, and shards a model as the best says."""
