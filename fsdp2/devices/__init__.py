"""What only devices with streams, memory on the CPU, or simulated devices need. A step on the CPU runs little of it.

The engine enters by `streams.py` (collectives and copies beside the stream that computes), `home_streams.py` (models on
several streams), `offload.py` and `write_notices.py` (shards on the CPU), and `simulation.py` (plans).
"""
