"""Runs all ranks of a program in one process: `python -m fsdp2 simulate`, and `fsdp2.testing.run`.

Ranks are threads of which one runs at a time. A rank hands its turn on where it waits for a collective, so that a run is
deterministic, and "no rank can go on" is a fact and no timeout.

- `turns.py`: the ranks, who runs next, and the report if no one can.
- `group.py`: the process group, which sums in the order of gloo.
- `process.py`: what a process has once and each rank has for itself; it is exchanged when a turn ends.
- `command.py`: the command.

Nothing here knows the engine: programs of torch's `fully_shard`, of DDP and of plain collectives run as well.
"""
