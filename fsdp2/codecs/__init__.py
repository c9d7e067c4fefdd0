"""Codecs that compress what ranks send of weights and gradients, and ways in which replicas sum gradients.

The engine knows their protocols, Codec and ReplicaSum in `engine/codec.py`, and enters by `choose_sum.py`, when a
policy or a user's hook asks for such a sum. `fsdp2/compression.py` is what users import. A new codec is a file here,
and a line there.
"""
