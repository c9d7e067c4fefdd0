"""Provides the process group of simulated ranks, in place of gloo's."""

# torch declares several signatures for each collective, of which its Python calls one.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .turns import ADVICE, OutOfStep, Wait, listed, ranks_text, this_rank

_SEGMENT_NBYTES = 1 << 20  # gloo's
_ANY_RANK = -1
_Op = dist.ReduceOp
_OPERATIONS: list[tuple[str, Any, Callable[[Tensor, Tensor], Tensor]]] = [
    ("SUM", _Op.SUM, torch.add),
    ("AVG", _Op.AVG, torch.add),
    ("PRODUCT", _Op.PRODUCT, torch.mul),
    ("MIN", _Op.MIN, torch.minimum),
    ("MAX", _Op.MAX, torch.maximum),
    ("BAND", _Op.BAND, torch.bitwise_and),
    ("BOR", _Op.BOR, torch.bitwise_or),
    ("BXOR", _Op.BXOR, torch.bitwise_xor),
]


def reduce_in_ring(tensors: Sequence[Tensor], operation: str) -> Tensor:
    """Returns the sum of flat tensors, one of each rank, with the bits that gloo's ring gives.

    Block b begins at rank b-1, goes down from rank to rank, each of which adds its own elements, and ends at rank b.
    """
    first, num_ranks = tensors[0], len(tensors)
    add = next(function for name, _, function in _OPERATIONS if name == operation)
    itemsize = first.element_size()
    most = itemsize * max(1, _SEGMENT_NBYTES // itemsize)
    num_segments = math.ceil(max(math.ceil(first.numel() * itemsize / most), 2 * num_ranks) / num_ranks)
    block = num_segments * math.ceil(first.numel() / (num_segments * num_ranks))
    result = torch.empty_like(first)
    for index in range(num_ranks):
        part = slice(index * block, (index + 1) * block)
        value = tensors[index - 1][part]
        for step in range(2, num_ranks + 1):
            value = add(value, tensors[(index - step) % num_ranks][part])
        result[part] = value
    return result.div_(num_ranks) if operation == "AVG" else result


class _Call(Wait):
    """A call that one rank has begun: its part in a collective, or one end of a message.

    `shown`: name and arguments, for reports. `where`: says which call of which group it is. `given`: its tensors.
    `alike`: what must be the same on all ranks of a collective.
    """

    def __init__(self, shown: str, where: str, given: Any, alike: object = None) -> None:
        super().__init__(f"in {shown}, {where},")
        self.shown, self.given, self.alike = shown, given, alike
        # The group rank that has sent a message.
        self.source = _ANY_RANK


class LocalWork(dist.Work):
    """The work that a rank has begun, for its program to wait for."""

    def __init__(self, call: _Call, results: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._call, self._results = call, [*results]

    def wait(self, timeout: timedelta | None = None) -> bool:
        this_rank("wait").wait(self._call)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._call.can_go_on():
            this_rank("is_completed").let_others_run()
        return self._call.can_go_on()

    def is_success(self) -> bool:
        return self._call.is_done

    def exception(self) -> Any:
        return self._call.error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._results

    def get_future(self) -> Future[list[Tensor]]:
        """Waits at once: C++ that waits for a future, as DDP's does, would not let other ranks run."""
        future: Future[list[Tensor]] = Future()
        future.set_result(self.result())
        return future

    def _source_rank(self) -> int:
        return self._call.source


@dataclass
class Room:
    """Where the ranks of one group meet.

    `ranks`: the global ranks for which the first member has made the group.
    """

    ranks: list[int] | None = None
    # Those that some ranks have begun and others not: number in the group's sequence -> group rank -> its call.
    collectives: dict[int, dict[int, _Call]] = field(default_factory=dict)
    # Messages that nobody has received, and tensors that wait for one: (sender, receiver, tag) -> in their order.
    sent: dict[tuple[int, int, int], list[_Call]] = field(default_factory=dict)
    awaited: dict[tuple[int, int, int], list[_Call]] = field(default_factory=dict)


class _Options:
    """The options of a group, into which torch writes the ranks for which a program makes it."""

    def __init__(self, join: Callable[[list[int]], None]) -> None:
        self.group_name, self._join = "", join

    @property
    def global_ranks_in_group(self) -> list[int]:
        raise AttributeError("global_ranks_in_group is for torch to write")

    @global_ranks_in_group.setter
    def global_ranks_in_group(self, ranks: Sequence[int]) -> None:
        self._join([*ranks])


class LocalGroup(dist.ProcessGroup):
    """A process group of simulated ranks. Sums have the bits of gloo's, and messages between two ranks its semantics.

    Only the sums of `reduce_scatter` with a list, of more than two ranks, have another order than gloo's.
    """

    is_like_gloo = True
    """Groups of fsdp2 communicate by messages between two ranks, as over gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta | None = None, **_: object) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        own = this_rank("init_process_group")
        # The nth group that this rank makes under one name meets the nth of the other ranks.
        meeting = f"room {store.add(f'groups of rank {rank}', 1)}"
        number = int(store.compare_set(meeting, "", str(len(own.turns.rooms))))
        self._room: Room = own.turns.rooms.setdefault(number, Room())
        self._num_begun = 0
        self._ranks = [*range(size)]
        self.options = _Options(self._join)

    def getBackendName(self) -> str:
        # DDP casts the group to C++'s own class if it is named gloo.
        return "simulated"

    def _join(self, ranks: list[int]) -> None:
        """Notes for which ranks the group is; none for the default group.

        Raises:
            OutOfStep: another rank has made it for others.
        """
        self._ranks = ranks or self._ranks
        self._room.ranks = self._room.ranks or self._ranks
        if self._ranks != self._room.ranks:
            raise OutOfStep(
                f"new_group: {self._member(self.rank())} makes a group of {ranks_text(self._ranks)} where another "
                f"rank makes one of {ranks_text(self._room.ranks)}. All ranks must call new_group for each group, in "
                "the same order, also if they are no members of it; or pass use_local_synchronization=True."
            )

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def group_name(self) -> str:
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _get_backend(self, device: torch.device) -> LocalGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"simulated ranks: expected tensors on the CPU, got some on {device}")
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Does nothing: no rank waits in vain."""

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: calls are counted anyway."""

    # ---- collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> LocalWork:
        return self._reduce("all_reduce", _of(tensors), opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> LocalWork:
        return self._reduce("all_reduce_coalesced", _of(tensors), opts)

    def _reduce(self, name: str, tensors: list[Tensor], opts: Any, root: int | None = None) -> LocalWork:
        operation = _operation_of(opts)

        def run(given: list[list[Tensor]]) -> None:
            total = reduce_in_ring([_flat(each) for each in given], operation)
            for tensors in given if root is None else [given[root]]:
                _fill(tensors, total)

        text = f"{operation}, {_sizes(tensors)}{self._root(root)}"
        return self._meet(name, text, tensors, run, tensors, 2 * _nbytes(tensors))

    def reduce(self, tensors: Any, opts: Any) -> LocalWork:
        return self._reduce("reduce", _of(tensors), opts, opts.rootRank)

    def broadcast(self, tensors: Any, opts: Any) -> LocalWork:
        own, root = _of(tensors), opts.rootRank

        def run(given: list[list[Tensor]]) -> None:
            value = _flat(given[root])
            for rank, tensors in enumerate(given):
                if rank != root:
                    _fill(tensors, value)

        return self._meet("broadcast", f"{_sizes(own)}{self._root(root)}", own, run, own, _nbytes(own))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LocalWork:
        return self._gather("all_gather", _as_shaped(inputs), _as_shaped(outputs[0]))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LocalWork:
        # One list of outputs for each rank.
        return self._gather("all_gather_coalesced", _as_shaped(inputs), _as_shaped(itertools.chain(*outputs)))

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> LocalWork:
        return self._gather("all_gather_into_tensor", _as_shaped([tensor]), _as_shaped([output]))

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LocalWork:
        pairs = zip(_as_shaped(outputs), _as_shaped(inputs), strict=True)
        return self._all([self._gather("all_gather_into_tensor", [each], [output]) for output, each in pairs])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> LocalWork:
        lists = outputs[0] if len(outputs) else []  # ranks that are not the root give none
        return self._gather("gather", _as_shaped(inputs), _as_shaped(lists), opts.rootRank)

    def _gather(self, name: str, own: list[Tensor], outputs: list[Tensor], root: int | None = None) -> LocalWork:
        """Gathers `own` tensors of all ranks, one after the other, into `outputs`. `root`: of that rank only."""
        text = f"{_sizes(own)}{self._root(root)}"
        if root is None or root == self.rank():
            self._require_size(f"{name}({text})", outputs, self.size() * sum(each.numel() for each in own))

        def run(given: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            values = torch.cat([_flat(own) for own, _ in given])
            for _, outputs in given if root is None else [given[root]]:
                _fill(outputs, values)

        return self._meet(name, text, (own, outputs), run, outputs, self.size() * _nbytes(own))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> LocalWork:
        own, parts, root = _of(outputs), _of_list(inputs), opts.rootRank
        text = f"{_sizes(own)}{self._root(root)}"
        if root == self.rank():
            self._require_size(f"scatter({text})", parts, self.size() * own[0].numel())

        def run(given: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for (outputs, _), part in zip(given, given[root][1], strict=True):
                _fill(outputs, _flat([part]))

        return self._meet("scatter", text, (own, parts), run, own, _nbytes(parts))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> LocalWork:
        return self._reduce_scatter("reduce_scatter", _contiguous(outputs), _contiguous(inputs[0]), opts)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> LocalWork:
        (own, whole), operation, name = _as_shaped([output, tensor]), _operation_of(opts), "reduce_scatter_tensor"
        text = f"{operation}, {_sizes(whole.reshape(-1).chunk(self.size()))}"
        self._require_size(f"{name}({text})", [own], whole.numel() // self.size())

        def run(given: list[tuple[Tensor, Tensor]]) -> None:
            total = torch.empty_like(whole)  # summed as it lies in memory, and cut by its shape
            _fill([_in_memory(total)], reduce_in_ring([_flat([_in_memory(each)]) for _, each in given], operation))
            for (own, _), part in zip(given, total.reshape(-1).chunk(self.size()), strict=True):
                _fill([own], part)

        return self._meet(name, text, (own, whole), run, [own], 2 * _nbytes([whole]))

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LocalWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self._reduce_scatter_base(output, each, opts) for output, each in pairs])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, name: str, own: list[Tensor], parts: list[Tensor], opts: Any) -> LocalWork:
        """Sums `parts` over ranks, one for each rank, and fills `own` tensor with this rank's part."""
        operation = _operation_of(opts)
        text = f"{operation}, {_sizes(parts)}"
        self._require_size(f"{name}({text})", own, parts[self.rank()].numel())

        def run(given: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            total = reduce_in_ring([_flat(parts) for _, parts in given], operation)
            for (own, _), part in zip(given, total.split([each.numel() for each in given[0][1]]), strict=True):
                _fill(own, part)

        return self._meet(name, text, (own, parts), run, own, 2 * _nbytes(parts))

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_splits: Any, input_splits: Any, options: Any = None
    ) -> LocalWork:
        parts = [
            each.split([*splits] if splits else each.shape[0] // self.size())
            for each, splits in zip(_contiguous([output, tensor]), (output_splits, input_splits), strict=True)
        ]
        return self._all_to_all("all_to_all_single", parts[0], parts[1])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> LocalWork:
        return self._all_to_all("all_to_all", _as_shaped(outputs), _as_shaped(inputs))

    def _all_to_all(self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> LocalWork:
        def run(given: list[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
            for source, (_, sent) in enumerate(given):
                for rank, (outputs, _) in enumerate(given):
                    if outputs[source].numel() != sent[rank].numel():
                        raise RuntimeError(
                            f"{name}: {self._member(source)} sends {_sizes([sent[rank]])} to {self._member(rank)}, "
                            f"which expects {_sizes([outputs[source]])}"
                        )
                    outputs[source].copy_(sent[rank].reshape(outputs[source].shape))

        # Ranks may split their tensors differently.
        text, alike = f"{_sizes(inputs)} to {_sizes(outputs)}", str(inputs[0].dtype)
        return self._meet(name, text, (outputs, inputs), run, outputs, _nbytes(inputs), alike)

    def barrier(self, opts: Any = None) -> LocalWork:
        return self._meet("barrier", "", None, lambda _: None, [], 0)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._meet("monitored_barrier", "", None, lambda _: None, [], 0).wait()

    def _meet(
        self,
        name: str,
        text: str,
        given: Any,
        run: Callable[[list[Any]], None],
        results: Sequence[Tensor],
        num_bytes: int,
        alike: str | None = None,
    ) -> LocalWork:
        """Begins a collective. Of the ranks of the group the last one has it `run` on what each has `given`.

        `alike`: what must be the same on all ranks. None: `text`, the arguments as reports show them. `num_bytes`: what
        a ring sends of it, apart from the factor (n - 1) / n.

        Raises:
            RuntimeError: a rank has begun another collective as its nth of this group. All of them raise.
        """
        own, number = this_rank(name), self._num_begun
        self._num_begun += 1
        own.num_collectives += 1
        own.num_bytes += num_bytes * (self.size() - 1) // self.size()
        where = f"call {number} of {self._name()}"
        calls = self._room.collectives.setdefault(number, {})
        call = _Call(f"{name}({text})", where, given, (name, text if alike is None else alike))
        calls[self.rank()] = call
        first = next(iter(calls.values()))
        if first.alike != call.alike:
            _fail(calls.values(), f"ranks are out of step in {where}. {ADVICE}\n{self._report(calls)}")
        elif first.error is not None:
            call.error = first.error
        elif len(calls) == self.size():
            del self._room.collectives[number]
            own.acts_for_others = True
            try:
                with torch.inference_mode():
                    run([calls[rank].given for rank in range(self.size())])
            except RuntimeError as error:
                _fail(calls.values(), f"{error} (in {where})")
            finally:
                own.acts_for_others = False
            for each in calls.values():
                each.is_done = True
        if call.error is not None:
            raise call.error
        return LocalWork(call, results)

    # ---- messages between two ranks

    def send(self, tensors: Any, to: int, tag: int = 0) -> LocalWork:
        own, (tensor,) = this_rank("send"), _contiguous(tensors)
        own.num_messages += 1
        own.num_bytes += _nbytes([tensor])
        call = self._end("send", tensor, f"to {self._member(to)}", tag)
        call.source = self.rank()
        room = self._room
        for key in ((self.rank(), to, tag), (_ANY_RANK, to, tag)):
            if room.awaited.get(key):
                self._deliver(call, room.awaited[key].pop(0))
                break
        else:
            room.sent.setdefault((self.rank(), to, tag), []).append(call)
        return LocalWork(call)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> LocalWork:
        (tensor,) = _contiguous(tensors)
        member = "any rank" if source == _ANY_RANK else self._member(source)
        this_rank("recv")
        call, room = self._end("recv", tensor, f"from {member}", tag), self._room
        key = (source, self.rank(), tag)
        if source == _ANY_RANK:
            key = next((each for each, sent in room.sent.items() if each[1:] == key[1:] and sent), key)
        if room.sent.get(key):
            self._deliver(room.sent[key].pop(0), call)
        else:
            room.awaited.setdefault(key, []).append(call)
        return LocalWork(call)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> LocalWork:
        return self.recv(tensors, _ANY_RANK, tag)

    def _end(self, name: str, tensor: Tensor, other: str, tag: int) -> _Call:
        tagged = f", tag {tag:#x}" if tag else ""
        return _Call(f"{name}({_sizes([tensor])}) {other}", f"of {self._name()}{tagged}", tensor)

    def _deliver(self, sent: _Call, received: _Call) -> None:
        """Copies a message. Over gloo it may be shorter than the tensor that waits for it."""
        source, target = _bytes_of(sent.given), _bytes_of(received.given)
        if source.numel() > target.numel():
            _fail(
                (sent, received),
                f"a message is longer than the tensor that waits for it: {sent.shown} at {sent.place}, "
                f"{received.shown} at {received.place}",
            )
            return
        with torch.inference_mode():
            target[: source.numel()].copy_(source)
        received.source = sent.source
        sent.is_done = received.is_done = True

    # ---- texts

    def _report(self, calls: Mapping[int, _Call]) -> str:
        """Returns what the ranks call that have come to a collective, and where all others are."""
        texts = {self._ranks[rank]: f"calls {each.shown} at {each.place}" for rank, each in sorted(calls.items())}
        others = ((each.number, each.state()) for each in this_rank("a report").turns.ranks)
        return listed([*texts.items(), *((rank, state) for rank, state in others if rank not in texts)])

    def _name(self) -> str:
        if self is dist.group.WORLD:
            return "the default group"
        name = self.group_name[:8] if self.group_desc == "undefined" else self.group_desc
        return f"group {name} of {ranks_text(self._ranks)}"

    def _member(self, rank: int) -> str:
        return f"rank {self._ranks[rank]}"

    def _root(self, root: int | None) -> str:
        return "" if root is None else f", root {self._member(root)}"

    def _require_size(self, call: str, tensors: Sequence[Tensor], numel: int) -> None:
        """Raises ValueError if these tensors of this rank have not so many elements."""
        found = sum(each.numel() for each in tensors)
        if found != numel:
            own = this_rank(call).number
            raise ValueError(f"{call} on rank {own}: expected tensors of {numel} elements, got {_sizes(tensors)}")

    def _all(self, works: list[LocalWork]) -> LocalWork:
        """Returns the last of several works, once the others are done."""
        for work in works[:-1]:
            work.wait()
        return works[-1]


def _fail(calls: Iterable[_Call], text: str) -> None:
    """Has the ranks that have begun these calls raise."""
    for each in calls:
        each.error = OutOfStep(text)


def _operation_of(opts: Any) -> str:
    """Returns the name of the operation in the options of a call, or of the operation itself.

    Raises:
        RuntimeError: gloo has no such operation.
    """
    wanted = _Op.SUM if opts is None else getattr(opts, "reduceOp", opts)
    for name, operation, _ in _OPERATIONS:
        if wanted == operation:
            return name
    names = ", ".join(name for name, _, _ in _OPERATIONS)
    raise RuntimeError(f"expected an operation that gloo has, one of {names}; got {wanted}")


def _as_shaped(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors of a call that gloo reads and writes by their shapes, whatever the order of memory is. Writes
    to them are unknown to autograd.
    """
    return [each.data for each in tensors]


def _contiguous(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors of a call for which gloo takes contiguous ones, or would mix up others.

    Raises:
        ValueError: one is not contiguous.
    """
    found = _as_shaped(tensors)
    for each in found:
        if not each.is_contiguous():
            raise ValueError(
                f"expected contiguous tensors, got one of shape {[*each.shape]} and strides {[*each.stride()]}. Call "
                "contiguous() before, and copy the result back."
            )
    return found


def _of(tensors: Any) -> list[Tensor]:
    """Returns the tensors of a call that gloo reads and writes as they lie in memory, with dims in that order.

    Raises:
        ValueError: there are gaps in the memory of a tensor, or elements that share memory.
    """
    return [_in_memory(each.data) for each in ([tensors] if isinstance(tensors, Tensor) else tensors)]


def _in_memory(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if not dense.is_contiguous():
        raise ValueError(
            f"expected dense tensors, got one of shape {[*tensor.shape]} and strides {[*tensor.stride()]}: gloo would "
            "read and write elements between. Call contiguous() before, and copy the result back."
        )
    return dense


def _of_list(lists: Any) -> list[Tensor]:
    """Returns the tensors of the one list in `lists`. Ranks that are not the root give none."""
    return _of(lists[0]) if len(lists) else []


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    flat = [each.reshape(-1) for each in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _fill(tensors: Sequence[Tensor], values: Tensor) -> None:
    """Copies flat values into tensors, one after the other."""
    for tensor, part in zip(tensors, values.split([each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _sizes(tensors: Sequence[Tensor]) -> str:
    """Returns "2 x 8 float32, 3 int64"."""
    texts = (f"{each.numel()} {str(each.dtype)[6:]}" for each in tensors)
    counted = ((text, len([*same])) for text, same in itertools.groupby(texts))
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in counted)
