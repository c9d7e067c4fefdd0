"""Replays all ranks of a pipeline together: the step with its bubbles and with what stages send to each other.

    python -m benchmarks.phantom.run -m benchmarks.phantom.record --out FOLDER --schedule 1F1B --all-places ...
    python -m benchmarks.phantom.pipeline FOLDER [options]       (those of benchmarks.phantom.timeline for the machine)

Each rank is replayed as `timeline` does it, and waits where torch's schedule waits for a send or receive. As in
ProcessGroupNCCL, the batches of a rank are one stream, in the order in which the schedule issues them. A batch begins
when the compute stream has done what was issued before it, and ends with the last of its messages. A message passes
when both ranks have begun its batch: it takes a latency, and the time of its bytes on the sender's card, which the
sender's collectives share. Each stage has as many ranks as parameters are sharded over, and its ranks are in a row.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from . import timeline
from .prices import Machine, Ring

LINK = -1  # the stream of a rank's sends and receives


class Rank(timeline.Replay):
    """Replays one rank, and exchanges messages with the others."""

    def __init__(
        self,
        record: dict[str, Any],
        machine: Machine,
        lasts: Sequence[float],
        begun: dict[tuple[int, str], float],
        arrived: dict[tuple[int, str], float],
    ) -> None:
        super().__init__(record, machine, lasts)
        # By step: when batches of sends (">F0.1") and receives ("<F0.1") have begun, and messages ("F0.1") have passed.
        self.begun, self.arrived = begun, arrived
        about = self.about
        self.to_neighbour = Ring.of((0, about["ranks"] * about["replicas"]), machine)
        self.nbytes = self.prices.tokens * self.prices.shape.dim * (4 if about["fp32"] else 2)
        self.ends: list[float] = []  # of the steps

    def run_steps(self, steps: int) -> Iterator[str]:
        """Runs steps, and yields a description of what it waits for while that has not begun on another rank."""
        for step in range(steps):
            batches: dict[str, timeline.Queue] = {}
            for mark in self.run(step == steps - 1):
                _, verb, messages = mark.split(" ", 2)
                if verb == "begin":
                    yield from self._exchange(messages.split())
                    batches[messages] = self.streams[LINK]
                elif batches[messages].ready > self.streams[0].ready:
                    self.streams[0] = batches[messages]
            self.ends.append(self.streams[0].ready)

    def _exchange(self, messages: list[str]) -> Iterator[str]:
        """Issues one batch."""
        compute, link = self.streams[0], self.streams[LINK]
        if compute.ready > link.ready:
            self.streams[LINK] = timeline.Queue(compute.ready, compute.by)
        begin = self._next(LINK)[0]
        step = self.turn
        self.begun.update({(step, message): begin for message in messages})
        to_send = [message[1:] for message in messages if message[0] == ">"]
        while True:
            for name in [*to_send]:
                if (step, "<" + name) in self.begun:
                    self.arrived[step, name] = self._send(max(begin, self.begun[step, "<" + name]))
                    to_send.remove(name)
            missing = [message for message in messages if (step, message[1:]) not in self.arrived]
            if not missing:
                break
            yield f"step {step}: {' '.join(missing)}"
        end = max(self.arrived[step, message[1:]] for message in messages)
        self._run(LINK, "collective", end, " ".join(messages))

    def _send(self, begin: float) -> float:
        """Returns when a message has passed that both ranks have begun."""
        begin += self.to_neighbour.latency(self.machine, "ncclSend")
        busy = self.to_neighbour.busy(self.machine, "ncclSend", self.nbytes)
        index = len(self.sent)
        self.sent.append((begin, busy))
        return begin + (self.lasts[index] if index < len(self.lasts) else max(busy.values(), default=0.0))


def replay(records: Sequence[dict[str, Any]], machine: Machine, steps: int = 3) -> dict[str, Any]:
    """Returns times in us of the last step. "step" is from the end of a step on all ranks to that of the next one.

    "ranks" has for each rank the parts of its step, as `timeline.breakdown` names them. "exposed other" is what the
    compute stream waits for messages: bubbles and sends.

    Args:
        records: one for each rank, in the order of the stages.

    Raises:
        RuntimeError: ranks wait for each other.
    """
    lasts: list[list[float]] = [[] for _ in records]
    for _ in range(1 if machine.own_links else timeline.MOST_REPLAYS):
        ranks = _run_once(records, machine, lasts, steps)
        found = [timeline.shared(rank.sent) for rank in ranks]
        off = max(
            abs(a - b)
            for new, old in zip(found, lasts, strict=True)
            for a, b in [(0.0, 0.0), *zip_longest(new, old, fillvalue=0.0)]
        )
        lasts = found
        if off < timeline.CLOSE_US:
            break
    ends = [max(rank.ends[step] for rank in ranks) for step in range(steps)]
    return {"step": ends[-1] - ends[-2], "ranks": [timeline.breakdown(rank.works, *rank.ends[-2:]) for rank in ranks]}


def _run_once(records: Sequence[dict[str, Any]], machine: Machine, lasts: list[list[float]], steps: int) -> list[Rank]:
    begun: dict[tuple[int, str], float] = {}
    arrived: dict[tuple[int, str], float] = {}
    ranks = [Rank(record, machine, last, begun, arrived) for record, last in zip(records, lasts, strict=True)]
    running = {place: rank.run_steps(steps) for place, rank in enumerate(ranks)}
    while running:
        before = len(begun) + len(arrived)
        waits = {place: next(running[place], "") for place in [*running]}
        running = {place: running[place] for place, wait in waits.items() if wait}
        if running and all(waits.values()) and len(begun) + len(arrived) == before:
            raise RuntimeError(f"expected that a message passes, but the ranks wait for each other: {waits}")
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    timeline.add_machine(parser)
    args = parser.parse_args()
    for path in sorted((args.folder / "0").glob("*.json")):
        folders = sorted((each for each in args.folder.iterdir() if each.is_dir()), key=lambda each: int(each.name))
        records = [json.loads((folder / path.name).read_text()) for folder in folders]
        machine = timeline.machine_of(args)
        result = replay(records, machine)
        print(f"{path.stem}: a step takes {result['step'] / 1e3:.2f} ms")
        for record, parts in zip(records, result["ranks"], strict=True):
            shown = {what: round(time / 1e3, 2) for what, time in parts.items() if isinstance(time, float)}
            alone = timeline.replay(record, machine)["step"] / 1e3
            gib = record["memory"]["allocated"] / 2**30
            print(f"  rank {record['about']['place']}: {gib:.2f} GiB, alone {alone:.2f} ms,", shown)


if __name__ == "__main__":
    main()
