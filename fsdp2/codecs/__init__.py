"""Codecs by which weights and gradients travel compressed, and sums between replicas other than one all-reduce.

The engine knows the Codec of `engine/codec.py` and the ReplicaSum of `replicas.py`, which is the door by which it
enters. `fsdp2/compression.py` is what users import. A new codec is a file here, and a line there.
"""
