"""What only devices with streams, memory on the CPU, or simulated devices need. A step on the CPU runs little of it.

The engine enters by `streams.py` (collectives and copies in flight, and streams next to the one that computes; it makes
the objects of `owner_stream.py`, for models on several streams), by `offload.py`, `staged_shards.py` and
`write_notices.py` (shards on the CPU), and by `simulation.py` (plans, whose roots nobody else may find).
"""
