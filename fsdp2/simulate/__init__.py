"""Runs all ranks of a program in one process: `python -m fsdp2 simulate`, and `fsdp2.testing.run`.

Ranks are threads, and one of them runs at a time. A rank hands its turn on where it waits for a collective. So a run is
deterministic, and "no rank can go on" is a fact that needs no timeout.

- `turns.py`: the ranks, who runs next, and the report if no one can.
- `group.py`: the process group, which sums in the order of gloo. `store.py`: the store.
- `process.py`: what a process has once and each rank needs for itself. It is exchanged when a turn ends.
- `world.py`: runs a program on ranks, and replaces for that time what would reach other processes.
- `memory.py`: the peak of each rank's tensors. `command.py`: the command.

Nothing here knows the engine: programs of torch's `fully_shard`, of DDP and of plain collectives run as well.
"""
