"""Ways to communicate: over gloo, NCCL, threads, a user's functions; process groups, and memory that NCCL registers.

The engine knows the interface alone, `Comm` in `engine/comm.py`, and enters by `choose.py`: it decides which way serves
a process group, and how a user changes that. Features and checks enter by `choose.py`, too; those that issue a
collective of their own also by `watching.py` (ranks compare it first), `subgroups.py` (process groups) and
`gather_bytes.py`. Checks and plans derive ways of their own from `delegating.py`, `gloo.py` and `coalesced.py`. Meshes
that users name are read in `meshes.py`. A new way to communicate is a file here, and a line in `choose.py`.
"""
