"""How ranks agree on a layout, and how the first rank commits what all have written."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..shards.ranks import moves_data
from .attempt import Attempt
from .folders import JobLock, replace_folder
from .layout import FORMAT, LAYOUT, METADATA, Kind, Layout, Place, file_of
from .listing import remove_old
from .memory import machine, make_memory, memory_of
from .parts import lengths_around, write_file
from .pickled import StoredObject, metadata_chunks
from .ranks import NUMBERS, Team, attempt, digest_of
from .snapshot import Snapshot
from .state import PER_RANK

if TYPE_CHECKING:
    from .saving import Saving

# What the first rank answers at the end of a save.
_DONE, _AGREE, _FAILED, _DIFFER = range(4)
# Of so many kinds of states, the layout is remembered.
_MOST_KNOWN = 4


class Agreed(NamedTuple):
    """The facts about a save that all ranks know alike.

    `digest`: a number that is equal where all is. `kind`: of this rank. `kinds`: the index of the kind of each rank.
    `places`: what this rank writes. `around`: see `lengths_around`, on the first rank. `memory`: the place in memory of
    the folder around the checkpoint, where the checkpoint is to be in memory. `paths`: key -> the keys and indices on
    the way to it.
    """

    layout: Layout
    digest: int
    kind: int
    kinds: list[int]
    places: list[Place]
    around: dict[str, tuple[Tensor, Tensor]]
    memory: Path | None
    paths: dict[str, tuple[Any, ...]]


class _Record(NamedTuple):
    """The numbers that each rank tells the first one at the end of a save."""

    has_failed: int
    agreed: int  # 0: this rank does not know the layout of its state
    arguments: int
    plain: int  # a checksum of plain tensors and options of the optimizer
    nbytes: int  # of the file
    index_nbytes: int
    per_rank_nbytes: int
    kind: int


class Session:
    """The state that the saves of one team share: layouts that ranks have agreed on, the lock, memory for snapshots."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.team = Team(group)
        # Ranks may be threads: each knows of its own process groups which are destroyed.
        self.thread = threading.get_ident()
        self.count = 0
        self.running: Saving | None = None
        self.buffer: Tensor | None = None
        self.known: dict[tuple[Kind, Path | None], Agreed] = {}
        self._locks: dict[Path, JobLock] = {}

    def begin(self, made: Attempt) -> None:
        """Names a save, and waits for the one that runs.

        Raises what that has met, on all ranks, unless each has got it from `wait`.
        """
        self.count += 1
        made.save_id = f"{self.team.run_id}-{self.count}"
        previous, self.running = self.running, None
        if previous is None:
            return
        error = previous._join()
        if error is not None:  # on all ranks
            numbers = [previous._is_told, *[0] * (NUMBERS - 1)]
            if not self.team.decide(numbers, lambda rows: min(row[0] for row in rows)):
                raise error

    def prepare(self, made: Attempt) -> None:
        """Checks on the first rank that this job may save there, and removes what killed jobs have left."""
        made.final.parent.mkdir(parents=True, exist_ok=True)
        self.lock(made.final.parent)
        if made.final.exists() and not (made.final / METADATA).is_file():
            what = "a folder with other files" if made.final.is_dir() else "a file"
            if not (made.final.is_dir() and not any(made.final.iterdir())):
                raise FileExistsError(f"{made.final}: expected a checkpoint, an empty folder or none, got {what}")

    def take_snapshot(self, made: Attempt) -> Snapshot:
        """Copies what a rank will write into memory that is kept for the next save; see `Attempt.take_snapshot`."""
        snapshot = made.take_snapshot(self.known.get(made.key), self.buffer)
        self.buffer = snapshot.buffer
        return snapshot

    def lock(self, folder: Path) -> None:
        """Keeps other jobs from saving into a folder until this process ends."""
        if folder not in self._locks:
            self._locks[folder] = JobLock(folder)
            self._locks[folder].clean(folder, self.team.run_id)

    def write(self, made: Attempt, agreed: Agreed) -> tuple[int, int]:
        """Writes the file of this rank; see `Attempt.write`."""
        if agreed.memory is not None:
            made.final = agreed.memory / made.final.name
        made.new = made.final.with_name(f".{made.final.name}.fsdp2-{made.save_id}")
        if self.team.is_first:
            self.prepare(made)
        made.final.parent.mkdir(parents=True, exist_ok=True)
        return made.write(agreed, self.team.rank)

    def finish(self, saving: Saving, made: Attempt) -> None:
        """Writes, meets the other ranks, and commits on the first one. Raises what any rank has met, on all ranks."""
        team, verdict, arguments = self.team, _AGREE, made.digest()
        while verdict == _AGREE:
            agreed = self.known.get(made.key)
            nbytes = index_nbytes = 0
            if agreed is not None and made.failed is None:
                written, made.failed = attempt(lambda agreed=agreed: self.write(made, agreed))  # type: ignore[misc]
                nbytes, index_nbytes = written or (0, 0)
            record = _Record(
                int(made.failed is not None),
                0 if agreed is None else agreed.digest,
                arguments,
                digest_of(json.dumps(made.plain).encode()),
                nbytes,
                index_nbytes,
                len(made.per_rank),
                0 if agreed is None else agreed.kind,
            )
            commit = _Commit(made, agreed, team)
            verdict = team.decide(record, commit.choose)
            if verdict == _AGREE:
                self._agree(made)
        if verdict == _DIFFER:
            every = team.gather(made.plain)
            names = sorted({n for own in every for n in own if own[n] != every[0].get(n, own[n])})
            made.failed = ValueError(
                f"save: {', '.join(names[:5])}: expected plain tensors and options of the optimizer that are equal on "
                "all ranks, of which a checkpoint keeps one, got others on some ranks. An optimizer that computes on "
                "local rows must make its states DTensors; or save its state_dict() in per_rank=."
            )
        if verdict != _DONE:
            if made.new.name:
                shutil.rmtree(made.new, ignore_errors=True)
            team.raise_together(made.failed or commit.failed)
        saving.nbytes, saving.path = nbytes, made.final
        if not team.is_first:
            return
        if made.keep_last is not None:
            remove_old(made.home, made.keep_last, team.run_id)
        if (memory := memory_of(made.home)) is not None:
            remove_old(memory, int(made.in_memory), team.run_id)

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
            self.lock(home)
            return place

        self.team.run(make)
        return self.team.run(lambda: make_memory(home))

    def _agree(self, made: Attempt) -> None:
        """Tells all ranks what each kind of them holds. Two collectives, and one broadcast for each kind."""
        own, team, memory = made.kind, self.team, None
        if made.in_memory:
            memory = self._memory(made.home)
        text = json.dumps([own, made.plain, made.state.stored_paths], separators=(",", ":")).encode()
        numbers = team.gather(digest_of(own.to_json().encode()))
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
        layout, failed = attempt(lambda: Layout(kinds))
        if layout is None:  # on all ranks alike
            assert failed is not None
            raise failed
        digest = digest_of(repr((numbers, torch.__version__, str(memory))).encode())
        while len(self.known) >= _MOST_KNOWN:
            del self.known[next(iter(self.known))]
        around = lengths_around(layout.tensors) if team.is_first else {}
        places = layout.places_of(team.rank)
        self.known[made.key] = Agreed(layout, digest, of_rank[team.index] + 1, of_rank, places, around, memory, paths)


class _Commit:
    """The decision of the first rank at the end of a save. `failed`: the error that it has met."""

    def __init__(self, made: Attempt, agreed: Agreed | None, team: Team) -> None:
        self._made, self._agreed, self._team = made, agreed, team
        self.failed: Exception | None = None

    def choose(self, rows: list[list[int]]) -> int:
        """Returns what all ranks do next, for their records."""
        records = [_Record(*row) for row in rows]
        if any(each.has_failed for each in records):
            return _FAILED
        if len({each.arguments for each in records}) > 1:
            self.failed = ValueError(
                "save: expected the same folder, choices and number of earlier saves on all ranks, got "
                f"{self._made.final} and keep_last={self._made.keep_last} on the first rank, and others on other ranks"
            )
            return _FAILED
        if len({each.agreed for each in records}) > 1 or not records[0].agreed:
            return _AGREE
        if len({(each.kind, each.plain) for each in records}) > len({each.kind for each in records}):
            return _DIFFER
        _, self.failed = attempt(lambda: self._commit(records))
        return _DONE if self.failed is None else _FAILED

    def _commit(self, records: list[_Record]) -> None:
        made, agreed = self._made, self._agreed
        assert agreed is not None
        layout, members = agreed.layout, self._team.members
        objects: dict[str, StoredObject] = {}
        for rank, record in zip(members, records, strict=True):
            path = made.new / file_of(rank)
            found = path.stat().st_size if path.exists() else None
            if found != record.nbytes:
                raise OSError(
                    f"{path}: expected the {record.nbytes:,} bytes that rank {rank} has written, the first rank sees "
                    f"{'no file' if found is None else f'{found:,}'}. Save into a folder that all ranks share."
                )
            if record.per_rank_nbytes:
                start = record.nbytes - record.per_rank_nbytes
                objects[f"{PER_RANK}.{rank}"] = StoredObject(rank, start, record.per_rank_nbytes)
            if record.index_nbytes:
                with path.open("rb") as file:
                    file.seek(record.nbytes - record.per_rank_nbytes - record.index_nbytes)
                    index = json.loads(file.read(record.index_nbytes))
                objects |= {name: StoredObject(rank, *at) for name, at in index.items()}
        paths = agreed.paths | {name: (PER_RANK, name) for name in objects if name not in layout.objects}
        content = {
            "format": FORMAT,
            "save_id": made.save_id,
            "time": time.time(),
            "members": members,
            "kinds": [[kind.to_json() for _, kind in layout.kinds], agreed.kinds],
            "objects": objects,
            "paths": paths,
        }
        write_file(made.new / LAYOUT, [json.dumps(content, separators=(",", ":")).encode()])
        chunks = metadata_chunks(layout.tensors, layout.offsets, agreed.around, objects, paths, made.save_id)
        write_file(made.new / METADATA, chunks)
        replace_folder(made.new, made.final, self._team.run_id)


_sessions: dict[Any, Session] = {}


def session_of(function: str, group: dist.ProcessGroup | None, failed: Exception | None) -> Session:
    """Returns what the saves of a process group share; of all ranks for None. Every rank of it must call it.

    Raises:
        TypeError: `group` is no process group.
        RuntimeError: the ranks are simulated; or `failed`, which there are no others to tell.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{function}: process_group: expected a process group or None, got {type(group).__name__}")
    groups: list[Any] = [group or dist.group.WORLD]
    if dist.is_initialized() and not moves_data(groups, torch.device("cpu")):
        raise failed or RuntimeError(
            f"{function}: expected ranks that communicate, got a simulated process group, whose other ranks have no "
            "shards"
        )
    key = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
    own = [each for each, session in _sessions.items() if session.thread == threading.get_ident()]
    for each in own:
        if each is not key and not _is_alive(each):
            del _sessions[each]
    if key not in _sessions:
        _sessions[key] = Session(group)
    return _sessions[key]


def _is_alive(group: Any) -> bool:
    """Returns False for a process group that was destroyed."""
    if group is None or not dist.is_initialized():
        return False
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True
