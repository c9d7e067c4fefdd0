"""Saves a checkpoint: each rank writes one file from its shards, and the first rank commits them all in one step."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..shards import codec_state
from ..shards.ranks import moves_data
from ..shards.tensors import check_bool, tensors_in
from .folders import JobLock, check_path, replace_folder
from .layout import FORMAT, LAYOUT, METADATA, Kind, Layout, Place, file_of
from .listing import remove_old
from .memory import machine, make_memory, memory_of
from .parts import bytes_in, file_head, lengths_around, write_file, write_parts
from .pickled import StoredObject, metadata_chunks
from .ranks import NUMBERS, Team, attempt
from .snapshot import Snapshot
from .state import MODEL, OPTIMIZER, PER_RANK, Optimizers, State, check_arguments, states_of

CODECS = "fsdp2.codecs"
"""The name in `per_rank` of what codecs keep between steps."""
# What the first rank answers at the end of a save.
_DONE, _AGREE, _FAILED, _DIFFER = range(4)
# Of so many kinds of states, the layout is remembered.
_MOST_KNOWN = 4


class _Agreed(NamedTuple):
    """What all ranks know alike.

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
    """What each rank tells the first one at the end of a save."""

    has_failed: int
    agreed: int  # 0: this rank does not know the layout of its state
    arguments: int
    plain: int  # a checksum of plain tensors and options of the optimizer
    nbytes: int  # of the file
    index_nbytes: int
    per_rank_nbytes: int
    kind: int


class Saving:
    """A save, which `save` returns.

    Attributes:
        path: the folder of the checkpoint, a `pathlib.Path`.
        nbytes: bytes that this rank has written; 0 before the end.
        step_waited_s: seconds for which `optimizer.step` waited for the snapshot of `wait=False`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes, self.step_waited_s = path, 0, 0.0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_told = False
        self._is_copied = threading.Event()
        self._hooks: list[Any] = []

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "running"
        return f"Saving({str(self.path)!r}, {state})"

    def done(self) -> bool:
        """Returns True if the save has ended, also if it has failed. It does not wait."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is complete and on the disk. It does not communicate: ranks may call it or not.

        Raises:
            Exception: the save has failed; on all ranks, see `save`.
        """
        if (error := self._join()) is not None:
            self._is_told = True
            raise error

    def _join(self) -> BaseException | None:
        """Waits for the end, and returns what the save has met."""
        if self._thread is not None:
            self._thread.join()
        return self._error

    def _run(self, session: _Session, made: _Attempt, snapshot: Snapshot | None) -> None:
        try:
            if snapshot is not None:
                _, made.failed = attempt(snapshot.finish)
            self._is_copied.set()
            session.finish(self, made)
        except BaseException as error:
            self._error = error
        finally:
            self._is_copied.set()

    def _before_step(self, *_: Any) -> None:
        """Called before each step of the optimizers: waits until the snapshot has what the step will change."""
        began = time.perf_counter()
        self._is_copied.wait()
        self.step_waited_s += time.perf_counter() - began
        for each in self._hooks:
            each.remove()
        self._hooks.clear()


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    wait: bool = True,
    keep_last: int | None = None,
    trainable_only: bool = False,
    in_memory: bool = False,
    flat_keys: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Saves a checkpoint that any number of ranks can load, with `load` or with torch.distributed.checkpoint.

    Every rank must call it, between steps. Each writes one file, in order, from its own shards; replicas share the
    work. The first save compares the ranks. Each save ends with one round of 64 bytes for each rank. The checkpoint
    takes the place of `folder` in one step when all files are on the disk: a kill at any moment leaves the previous
    checkpoints whole. What the kill has left behind, the next job removes.

    With `wait=False` it returns when it knows what to write. A thread copies this rank's shards into host memory while
    the next forward and backward run, and writes them from there. An `optimizer.step()` that comes before the copy has
    ended waits for it. The copy is kept for the next save: it takes as much memory as the shards and the states of the
    optimizer. Another save waits until this one has ended, and raises what it has met unless `wait()` has done so on
    all ranks. Before the program ends or destroys its process groups, call `wait()` of what is returned.

    Example:
        ```python
        fsdp2.checkpoint.save(f"runs/step-{step:06}", model, optimizer, extra={"schedule": schedule, "step": step})
        ```

    Args:
        folder: the folder of this checkpoint, on a disk that all ranks share. A checkpoint of this name is replaced.
        model: the model. Its parts are saved under "model" and their FQNs.
        optimizer: one optimizer, several, or None. Saved under "optimizer".
        extra: name -> a value that all ranks have alike: one with `state_dict()`, such as a scheduler, or numbers,
            texts, tensors, lists and dicts. Names in the flat state dict begin with it.
        per_rank: name -> a value of each rank, such as `RandomStates()` or a data loader with `state_dict()`. What
            codecs keep between steps is among them. It is loaded on as many ranks only.
        wait: return when the checkpoint is complete.
        keep_last: remove all checkpoints of fsdp2 beside it but the last `keep_last`, this one included, when it is
            complete. None: remove none.
        trainable_only: leave out frozen parameters: of LoRA, the adapters remain.
        in_memory: save into the memory of this machine (`/dev/shm`) instead of the disk. `latest` and `load` find the
            checkpoint there as if it were in `folder`, also after ranks were killed, until the machine ends. The next
            save beside it, to memory or the disk, replaces it. It takes as much memory as the shards and the states,
            and twice as much during a save. All ranks must be on one machine.
        flat_keys: name everything by FQNs: the model's keys without "model", and the optimizer's as
            `optimizer.param_groups.<FQN>.lr`, so that pipeline stages with an optimizer each do not share names. So
            torchtitan loads it. `load` knows by itself.
        process_group: the ranks that save together. None: all.

    Returns:
        A `Saving`.

    Raises:
        ValueError: ranks differ in an argument, or share a tensor in different ways; a name in `extra` is taken; plain
            tensors of the optimizer differ between ranks.
        TypeError: an argument; a value that can't be loaded without running code.
        NotImplementedError: a tensor is of a subclass, or is distributed in another way than by chunks; `in_memory` on
            several machines.
        FileExistsError: `folder` is there, and is no checkpoint.
        OSError: the disk is full, read-only or not there. The error names the file.
        RuntimeError: another job saves into the folder around `folder`; an earlier save has failed.
        All errors are raised on all ranks, and leave earlier checkpoints as they are.
    """
    made = _Attempt()
    _, made.failed = attempt(
        lambda: made.check(
            folder, model, optimizer, extra, per_rank, wait, keep_last, trainable_only, in_memory, flat_keys
        )
    )
    session = session_of("save", process_group, made.failed)
    session.begin(made)
    if made.failed is None:
        _, made.failed = attempt(lambda: made.collect(model, extra, per_rank, trainable_only, flat_keys))
    saving = Saving(made.final)
    if wait is not False:
        session.finish(saving, made)
        return saving
    snapshot = None
    if made.failed is None:
        snapshot, made.failed = attempt(lambda: made.take_snapshot(session))
    session.running = saving
    saving._hooks += [each.register_step_pre_hook(saving._before_step) for each in made.optimizers]
    saving._thread = threading.Thread(target=saving._run, args=(session, made, snapshot), name="fsdp2.checkpoint")
    saving._thread.start()
    return saving


class _Attempt:
    """What one rank is about to save. Whatever its methods raise, `failed`, is told to all ranks at the end."""

    def __init__(self) -> None:
        self.failed: Exception | None = None
        self.final, self.new, self.save_id = Path(), Path(), ""
        """The folder of the checkpoint, the hidden one that will take its place, and the name of the save."""
        self.in_memory = False
        self.keep_last: int | None = None
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.state, self.kind = State({}), Kind((), (), ())
        self.plain: dict[str, int] = {}
        """Checksums of the optimizer's plain tensors and options, which must be alike on all ranks."""
        self.per_rank = b""
        self.objects: dict[str, bytes] = {}
        self.values: Callable[[str], Tensor] = self.state.local
        """Returns this rank's part of a tensor, or of its copy."""
        self.later: dict[str, Callable[[], int]] = {}
        """See `State.may_be_copied_later`."""

    def check(
        self,
        folder: Any,
        model: Any,
        optimizer: Any,
        extra: Any,
        per_rank: Any,
        wait: Any,
        keep_last: Any,
        trainable_only: Any,
        in_memory: Any,
        flat_keys: Any,
    ) -> None:
        """Checks the arguments of `save`. It does not communicate."""
        check_path("folder", folder)
        self.optimizers = check_arguments("save", model, optimizer)
        _check_values("extra", extra)
        _check_values("per_rank", per_rank)
        check_bool("wait", wait)
        check_bool("trainable_only", trainable_only)
        check_bool("in_memory", in_memory)
        check_bool("flat_keys", flat_keys)
        for name, value in (extra or {}).items():
            if flat_keys and isinstance(value, Tensor):
                raise ValueError(
                    f"extra: {name}: expected no tensor with flat_keys=True, where tensors without a dict are the "
                    f"model's. Pass it inside a dict."
                )
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ValueError(f"keep_last: expected a number from 1 on, or None, got {keep_last!r}")
        self.final, self.in_memory, self.keep_last = Path(folder).absolute(), in_memory, keep_last

    def collect(
        self,
        model: nn.Module,
        extra: Mapping[str, Any] | None,
        per_rank: Mapping[str, Any] | None,
        trainable_only: bool,
        flat_keys: bool,
    ) -> None:
        """Finds out what this rank holds."""
        nested = states_of(model, self.optimizers, trainable_only=trainable_only, keep_empty=True, flat_keys=flat_keys)
        self.state = State(nested | {name: state_of(value) for name, value in (extra or {}).items()}, flat_keys)
        self.later = self.state.may_be_copied_later(model)
        own = {name: state_of(value) for name, value in (per_rank or {}).items()}
        if codecs := codec_state.state_dict(model):
            own[CODECS] = codecs
        self.per_rank = pickled("per_rank", own) if own else b""
        self.objects = {name: pickled(name, value) for name, value in self.state.objects.items()}
        self.kind = self.state.kind()
        for name in (name for name, path in self.state.paths.items() if path[0] == OPTIMIZER):
            tensor, value = self.state.tensors.get(name), self.state.objects.get(name)
            if tensor is not None and not isinstance(tensor, DTensor):
                self.plain[name] = zlib.crc32(bytes_in(tensor.detach().cpu().contiguous()))
            elif tensor is None and _is_plain(value):
                self.plain[name] = zlib.crc32(repr(value).encode())
        self.values = self.state.local

    def arguments(self) -> int:
        """Returns a number that is equal on ranks that save the same."""
        return _number(f"{self.final}\n{self.keep_last}\n{self.in_memory}\n{self.save_id}".encode())

    def take_snapshot(self, session: _Session) -> Snapshot:
        """Copies into host memory what the next forward may change, and prepares to copy the rest."""
        agreed = session.known.get(self.key)
        # Where this rank does not know what it will write, it copies all that it has.
        names = [*self.state.tensors] if agreed is None else [place.name for place in agreed.places]
        snapshot = Snapshot(self.state, names, self.later, session.buffer)
        session.buffer, self.values = snapshot.buffer, snapshot.value
        return snapshot

    @property
    def key(self) -> tuple[Kind, Path | None]:
        """What ranks have to agree on: what this rank holds, and a place in memory for a folder."""
        return self.kind, self.final.parent if self.in_memory else None

    def write(self, agreed: _Agreed, rank: int) -> tuple[int, int]:
        """Writes the file of this rank. Returns its bytes, and those of the index of its objects."""
        self.new.mkdir(exist_ok=True)
        path = self.new / file_of(rank)
        path.unlink(missing_ok=True)
        end, index, written = Layout.end_of(agreed.places), {}, []
        for name, data in self.objects.items():
            if agreed.layout.objects[name] == rank:
                index[name] = [end, len(data)]
                written.append(data)
                end += len(data)
        listed = json.dumps(index).encode() if index else b""
        dtypes = {name: parts.dtype for name, parts in agreed.layout.tensors.items()}
        more, head = b"".join((*written, listed, self.per_rank)), file_head(self.save_id, rank)
        values = lambda place: self.values(place.name).cpu().contiguous()  # noqa: E731
        return write_parts(path, head, agreed.places, values, dtypes, more), len(listed)


class _Session:
    """What the saves of one team share: the layouts that ranks have agreed on, the lock, and memory for snapshots."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.team = Team(group)
        self.count = 0
        self.running: Saving | None = None
        self.buffer: Tensor | None = None
        self.known: dict[tuple[Kind, Path | None], _Agreed] = {}
        self._locks: dict[Path, JobLock] = {}

    def begin(self, made: _Attempt) -> None:
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

    def prepare(self, made: _Attempt) -> None:
        """Checks on the first rank that this job may save there, and removes what killed jobs have left."""
        made.final.parent.mkdir(parents=True, exist_ok=True)
        self.lock(made.final.parent)
        if made.final.exists() and not (made.final / METADATA).is_file():
            what = "a folder with other files" if made.final.is_dir() else "a file"
            if not (made.final.is_dir() and not any(made.final.iterdir())):
                raise FileExistsError(f"{made.final}: expected a checkpoint, an empty folder or none, got {what}")

    def lock(self, folder: Path) -> None:
        """Keeps other jobs from saving into a folder until this process ends."""
        if folder not in self._locks:
            self._locks[folder] = JobLock(folder)
            self._locks[folder].clean(folder, self.team.run_id)

    def write(self, made: _Attempt, agreed: _Agreed) -> tuple[int, int]:
        """Writes the file of this rank; see `_Attempt.write`."""
        if agreed.memory is not None:
            made.final = agreed.memory / made.final.name
        made.new = made.final.with_name(f".{made.final.name}.fsdp2-{made.save_id}")
        if self.team.is_first:
            self.prepare(made)
        made.final.parent.mkdir(parents=True, exist_ok=True)
        return made.write(agreed, self.team.rank)

    def finish(self, saving: Saving, made: _Attempt) -> None:
        """Writes, meets the other ranks, and commits on the first one. Raises what any rank has met, on all ranks."""
        team, verdict, arguments, home = self.team, _AGREE, made.arguments(), made.final.parent
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
                _number(json.dumps(made.plain).encode()),
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
            remove_old(home, made.keep_last, team.run_id)
        if (memory := memory_of(home)) is not None:
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

    def _agree(self, made: _Attempt) -> None:
        """Tells all ranks what each kind of them holds. Two collectives, and one broadcast for each kind."""
        own, team, memory = made.kind, self.team, None
        if made.in_memory:
            memory = self._memory(made.final.parent)
        text = json.dumps([own, made.plain, made.state.stored_paths], separators=(",", ":")).encode()
        numbers = team.gather(_number(own.to_json().encode()))
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
        digest = _number(repr((numbers, torch.__version__, str(memory))).encode())
        while len(self.known) >= _MOST_KNOWN:
            del self.known[next(iter(self.known))]
        around = lengths_around(layout.tensors) if team.is_first else {}
        places = layout.places_of(team.rank)
        self.known[made.key] = _Agreed(layout, digest, of_rank[team.index] + 1, of_rank, places, around, memory, paths)


class _Commit:
    """What the first rank does at the end of a save. `failed`: what it has met."""

    def __init__(self, made: _Attempt, agreed: _Agreed | None, team: Team) -> None:
        self._made, self._agreed, self._team = made, agreed, team
        self.failed: Exception | None = None

    def choose(self, rows: list[list[int]]) -> int:
        """Returns what all ranks do next, for their records."""
        records = [_Record(*row) for row in rows]
        if any(each.has_failed for each in records):
            return _FAILED
        if len({each.arguments for each in records}) > 1:
            self.failed = ValueError(
                "save: expected the same folder, keep_last, in_memory and number of earlier saves on all ranks, got "
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


_sessions: dict[Any, _Session] = {}


def session_of(function: str, group: dist.ProcessGroup | None, failed: Exception | None) -> _Session:
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
    for each in [each for each in _sessions if each is not key and not _is_alive(each)]:
        del _sessions[each]
    if key not in _sessions:
        _sessions[key] = _Session(group)
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


def _number(data: bytes) -> int:
    """Returns 63 bits of a hash, and never 0."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1 | 1


def _check_values(argument: str, values: Any) -> None:
    """Checks the names in `extra` or `per_rank`."""
    if values is not None and not (isinstance(values, Mapping) and all(isinstance(name, str) for name in values)):
        raise TypeError(f"{argument}: expected a dict with texts as keys, or None, got {values!r}")
    taken = {MODEL, OPTIMIZER, PER_RANK, CODECS} & {*(values or ())}
    if taken:
        raise ValueError(f"{argument}: expected names other than {', '.join(sorted(taken))}, which save gives itself")


def state_of(value: Any) -> Any:
    """Returns the state of a value: `value.state_dict()` if it has one."""
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def pickled(name: str, value: Any) -> bytes:
    """Returns what torch.save writes of a value that is no tensor.

    Raises:
        NotImplementedError: it has shards of a DTensor, which other ranks would lose.
        TypeError: it can be loaded only by running code.
    """
    if any(isinstance(each, DTensor) for each in tensors_in(value)):
        raise NotImplementedError(
            f"{name}: expected values that all ranks have whole, got a DTensor inside a dict whose keys are no texts, "
            "or in an object. Pass optimizers as optimizer=, and tensors under keys that are texts."
        )
    file = io.BytesIO()
    try:
        torch.save(value, file)
        if not _is_plain(value):
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(
            f"{name}: expected numbers, texts, tensors, lists, tuples and dicts, which load without running code, got "
            f"{type(value).__name__}: {str(error).splitlines()[0]}"
        ) from error
    return file.getvalue()


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (int, float, str, bool)
