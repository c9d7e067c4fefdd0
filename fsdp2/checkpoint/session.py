"""Keeps layouts, locks and memory for copies from one save of a group of ranks to the next, and takes its two rounds.

In the first round ranks compare what they save. Ranks that do not know each other's tensors tell them, and compute the
layout. Then each rank writes its file. In the second round the first rank commits them all in one step.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..shards.ranks import moves_data
from .content import Content
from .folders import JobLock, replace_folder
from .layout import FORMAT, LAYOUT, METADATA, Kind, Layout, Place, file_of
from .listing import remove_old, saved_after
from .memory import machine, make_memory, memory_of
from .parts import file_head, lengths_around, part_chunks, write_file
from .pickled import StoredObject, metadata_chunks
from .ranks import Team, attempt, digest_of
from .snapshot import Snapshot
from .state import OPTIMIZER, PER_RANK

if TYPE_CHECKING:
    from .saving import Saving

# What the first rank answers in the first round.
_GO, _LEARN, _DIFFER = range(3)
# Of so many kinds of states, the layout is remembered.
_MOST_KNOWN = 4


class Choices(NamedTuple):
    """The arguments of a save that must be alike on all ranks; see `save`."""

    folder: Path
    keep_last: int | None
    in_memory: bool
    trainable_only: bool
    flat_keys: bool


class Agreed(NamedTuple):
    """The facts about a save that all ranks know alike.

    Args:
        layout: of the checkpoint.
        digest: a number that is equal where all is.
        own: a number that is equal on ranks with the kind of this rank.
        kinds: the index of the kind of each rank.
        places: what this rank writes.
        around: see `lengths_around`, on the first rank.
        memory: the place in memory of the folder around the checkpoint, if it is saved there.
        paths: key -> the keys and indices on the way to it.
    """

    layout: Layout
    digest: int
    own: int
    kinds: list[int]
    places: list[Place]
    around: dict[str, tuple[Tensor, Tensor]]
    memory: Path | None
    paths: dict[str, tuple[Any, ...]]


class Save(NamedTuple):
    """A save that ranks have agreed on.

    Args:
        content: what this rank saves.
        choices: the arguments.
        agreed: what all ranks know.
        save_id: the name of the save; no other has it.
        final: the folder of the checkpoint.
        new: the hidden folder that takes its place.
    """

    content: Content
    choices: Choices
    agreed: Agreed
    save_id: str
    final: Path
    new: Path


class Session:
    """The state that the saves of one team share. Its methods but `write` must be called by all ranks of the team."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.team = Team(group)
        self.count = 0
        self.running: Saving | None = None
        self.buffer: Tensor | None = None
        """Memory for a snapshot."""
        self._known: dict[tuple[Kind, Path | None], Agreed] = {}
        self._locks: dict[Path, JobLock] = {}

    def end_previous(self) -> None:
        """Waits for the save that runs. Raises what it has met, on all ranks, unless each has got it from `wait`."""
        previous, self.running = self.running, None
        if previous is None or (error := previous._join()) is None:  # on all ranks
            return
        if not self.team.decide(None, [previous._is_told], lambda rows: min(told for told, *_ in rows)):
            raise error

    def agree(self, content: Content | None, choices: Choices | None, failed: Exception | None) -> Save:
        """Compares what ranks save. Raises on all ranks what any of them has met.

        Args:
            content: what this rank saves.
            choices: the arguments.
            failed: why there are none.
        """
        self.count += 1
        if content is None or choices is None:
            self.team.decide(failed, (), lambda rows: _GO)
            raise AssertionError("decide raises")
        key = content.kind, choices.folder.parent if choices.in_memory else None
        agreed = self._known.get(key)
        own = digest_of(content.kind.to_json().encode()) if agreed is None else agreed.own

        def choose(rows: list[list[int]]) -> int:
            if len({arguments for arguments, *_ in rows}) > 1:
                raise ValueError(
                    "save: expected the same folder, choices and number of earlier saves on all ranks, got "
                    f"{choices.folder} and keep_last={choices.keep_last} on the first rank, and others on other ranks"
                )
            if len({(kind, plain) for _, _, kind, plain, *_ in rows}) > len({kind for _, _, kind, *_ in rows}):
                return _DIFFER
            known = {digest for _, digest, *_ in rows}
            return _GO if len(known) == 1 and 0 not in known else _LEARN

        arguments = digest_of(f"{choices} {self.count} {self.team.run_id}".encode())
        plain = digest_of(json.dumps(content.plain).encode())
        verdict = self.team.decide(failed, [arguments, 0 if agreed is None else agreed.digest, own, plain], choose)
        if verdict == _DIFFER:
            every = self.team.gather(content.plain)
            names = sorted({n for each in every for n in each if each[n] != every[0].get(n, each[n])})
            raise ValueError(
                f"save: {', '.join(names[:5])}: expected plain tensors and options of the optimizer that are equal on "
                "all ranks, of which a checkpoint keeps one, got others on some ranks. An optimizer that computes on "
                "local rows must make its states DTensors; or save its state_dict() in per_rank=."
            )
        if verdict == _LEARN:
            while len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = self._learn(content, choices, own)
        agreed, save_id = self._known[key], f"{self.team.run_id}-{self.count}"
        final = (agreed.memory or choices.folder.parent) / choices.folder.name
        return Save(content, choices, agreed, save_id, final, final.with_name(f".{final.name}.fsdp2-{save_id}"))

    def _learn(self, content: Content, choices: Choices, own: int) -> Agreed:
        """Tells all ranks what each kind of them holds. Two collectives, and one broadcast for each kind."""
        team, memory = self.team, self._memory(choices.folder.parent) if choices.in_memory else None
        told = [content.kind, content.plain, content.state.stored_paths]
        text = json.dumps(told, separators=(",", ":")).encode()
        numbers = team.gather(own)
        kinds: list[tuple[list[int], Kind]] = []
        plain, paths = dict[str, int](), dict[str, tuple[Any, ...]]()
        of_rank = [0] * team.size
        for number in dict.fromkeys(numbers):
            members = [index for index, each in enumerate(numbers) if each == number]
            sent = team.broadcast(text, members[0])
            for index in members:
                of_rank[index] = len(kinds)
            kind, checksums, of_kind = json.loads(sent)
            others = sorted(name for name in checksums if plain.get(name, checksums[name]) != checksums[name])
            if others:  # on all ranks alike
                raise ValueError(
                    f"save: {', '.join(others[:3])}: expected one value on all ranks, got another on rank "
                    f"{team.members[members[0]]}, whose parameters are others. Pipeline stages with an optimizer each "
                    "have the same names for their options: save with flat_keys=True."
                )
            plain |= checksums
            paths |= {name: tuple(path) for name, path in of_kind.items()}
            kinds.append(([team.members[i] for i in members], Kind.from_json(kind)))
        layout = Layout(kinds)  # what it raises, it raises on all ranks
        digest = digest_of(repr((numbers, torch.__version__, str(memory))).encode())
        around = lengths_around(layout.tensors) if team.is_first else {}
        return Agreed(layout, digest, own, of_rank, layout.places_of(team.rank), around, memory, paths)

    def _memory(self, home: Path) -> Path:
        """Returns the place in memory of a folder, the same on all ranks, and locks both."""
        if len({*self.team.gather(machine())}) > 1:  # on all ranks alike
            raise NotImplementedError(
                "save: in_memory: expected ranks on one machine, got ranks on several, which do not share memory. Save "
                "with in_memory=False."
            )

        def make() -> Path | None:
            if not self.team.is_first:
                return None
            place = make_memory(home)
            self._lock(home)
            return place

        self.team.run(make)
        return self.team.run(lambda: make_memory(home))

    def _lock(self, folder: Path) -> None:
        """Keeps other jobs from saving into a folder until this process ends."""
        if folder not in self._locks:
            self._locks[folder] = JobLock(folder)
            self._locks[folder].clean(folder, self.team.run_id)

    def take_snapshot(self, save: Save) -> Snapshot:
        """Copies what a rank will write into memory that is kept for the next save: see `Snapshot`."""
        names = [place.name for place in save.agreed.places]
        snapshot = Snapshot(save.content.state, names, save.content.later, self.buffer)
        self.buffer = snapshot.buffer
        return snapshot

    def write(self, save: Save, values: Callable[[str], Tensor]) -> tuple[int, int]:
        """Writes the file of this rank. Returns its bytes, and those of its index of objects.

        `values`: returns this rank's part of a tensor, or a copy of it.
        """
        content, agreed, final, rank = save.content, save.agreed, save.final, self.team.rank
        final.parent.mkdir(parents=True, exist_ok=True)
        if self.team.is_first:
            self._lock(final.parent)
            is_free = not final.exists() or (final / METADATA).is_file()
            if not is_free and not (final.is_dir() and not any(final.iterdir())):
                what = "a folder with other files" if final.is_dir() else "a file"
                raise FileExistsError(f"{final}: expected a checkpoint, an empty folder or none, got {what}")
        save.new.mkdir(exist_ok=True)
        end, index, written = Layout.end_of(agreed.places), {}, []
        for name, data in content.objects.items():
            if agreed.layout.objects[name] == rank:
                index[name] = [end, len(data)]
                written.append(data)
                end += len(data)
        listed = json.dumps(index).encode() if index else b""
        more, head = b"".join((*written, listed, content.per_rank)), file_head(save.save_id, rank)
        dtypes = {name: parts.dtype for name, parts in agreed.layout.tensors.items()}
        local = lambda place: values(place.name).cpu().contiguous()  # noqa: E731
        return write_file(save.new / file_of(rank), part_chunks(head, agreed.places, local, dtypes, more)), len(listed)

    def finish(self, save: Save, values: Callable[[str], Tensor], failed: Exception | None) -> int:
        """Writes, meets the other ranks, and commits on the first one. Returns the bytes of this rank's file.

        `failed`: what this rank has met before. Raises what any rank has met, on all ranks.
        """
        written, failed = (None, failed) if failed is not None else attempt(lambda: self.write(save, values))
        numbers = [*(written or (0, 0)), len(save.content.per_rank)]
        remove = partial(shutil.rmtree, save.new, ignore_errors=True)
        self.team.decide(failed, numbers, lambda rows: self._commit(save, rows), undo=remove)
        if self.team.is_first:
            home, keep_last = save.choices.folder.parent, save.choices.keep_last
            if keep_last is not None:
                remove_old(home, keep_last, self.team.run_id)
            if (memory := memory_of(home)) is not None:
                remove_old(memory, int(save.choices.in_memory), self.team.run_id)
        return numbers[0]

    def _commit(self, save: Save, rows: list[list[int]]) -> int:
        """Puts the checkpoint in its place. `rows`: of each rank, the bytes of its file, index, and own values."""
        layout, new, objects = save.agreed.layout, save.new, dict[str, StoredObject]()
        for rank, (nbytes, index_nbytes, own_nbytes, *_) in zip(self.team.members, rows, strict=True):
            path = new / file_of(rank)
            found = path.stat().st_size if path.exists() else None
            if found != nbytes:
                raise OSError(
                    f"{path}: expected the {nbytes:,} bytes that rank {rank} has written, the first rank sees "
                    f"{'no file' if found is None else f'{found:,}'}. Save into a folder that all ranks share."
                )
            if own_nbytes:
                objects[f"{PER_RANK}.{rank}"] = StoredObject(rank, nbytes - own_nbytes, own_nbytes)
            if index_nbytes:
                with path.open("rb") as file:
                    file.seek(nbytes - own_nbytes - index_nbytes)
                    index = json.loads(file.read(index_nbytes))
                objects |= {name: StoredObject(rank, *at) for name, at in index.items()}
        paths = save.agreed.paths | {name: (PER_RANK, name) for name in objects if name not in layout.objects}
        joined = dict(paths)
        if save.choices.flat_keys:  # torch's functions for state dicts join the keys in an optimizer
            of_optimizer = (name for name, path in paths.items() if path[0] == OPTIMIZER)
            joined |= {name: (OPTIMIZER, ".".join(map(str, paths[name][1:]))) for name in of_optimizer}
        content = {
            "format": FORMAT,
            "save_id": save.save_id,
            "time": max(time.time(), saved_after(save.choices.folder.parent)),
            "members": self.team.members,
            "kinds": [[kind.to_json() for _, kind in layout.kinds], save.agreed.kinds],
            "objects": objects,
            "paths": paths,
        }
        write_file(new / LAYOUT, [json.dumps(content, separators=(",", ":")).encode()])
        chunks = metadata_chunks(layout.tensors, layout.offsets, save.agreed.around, objects, joined, save.save_id)
        write_file(new / METADATA, chunks)
        replace_folder(new, save.final)
        return 0


_sessions: WeakKeyDictionary[Any, Session] = WeakKeyDictionary()


def session_of(function: str, group: dist.ProcessGroup | None, failed: Exception | None) -> Session:
    """Returns what the saves of a process group share; of all ranks for None. Every rank of it must call it.

    What is no process group is as None: `failed` then says so to all ranks.

    Raises:
        RuntimeError: the ranks are simulated; or `failed`, which there are no others to tell.
    """
    group = group if isinstance(group, dist.ProcessGroup) else None
    key: Any = group or dist.group.WORLD
    if key is not None and not moves_data([key], torch.device("cpu")):
        raise failed or RuntimeError(
            f"{function}: expected ranks that communicate, got a simulated process group, whose other ranks have no "
            "shards"
        )
    key = Session if key is None else key  # this process alone
    if key not in _sessions:
        _sessions[key] = Session(group)
    return _sessions[key]
