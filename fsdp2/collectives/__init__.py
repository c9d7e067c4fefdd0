"""Ways to communicate: over gloo, NCCL, threads, a user's hook; process groups, and memory for collectives.

The engine knows the Comm of `engine/comm.py` alone. `choose.make_comm` chooses which kind serves a process group,
and is the door by which the engine enters. A new way to communicate is a file here, and a line in `choose.py`.
"""
