"""Loads safetensors files into a sharded model: each rank reads the bytes of its own shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checks.empty_memory import is_marked, mark, note_emptied_buffers
from ..core.compat import new_dtensor, no_torch_function
from ..core.group import FSDPParamGroup
from ..core.parameter import fqn
from ..core.state import modules_below, state_of
from ..dtensor.write_notices import notices
from ..ext.owners import owners_by_id
from .files import Box, Checkpoint, FileTensor, read_checkpoint
from .progress import Progress
from .ranks import Ranks, Replicas
from .tensors import ModelTensor, find_tensors, groups_in, meshes_of, settle, some
from .views import Leaf, Names, NameTable, as_view

# Bytes of the bucket through which all values go: the memory that a call needs besides the shards.
BUCKET_NBYTES = 32 * 1024 * 1024
# Where the parts of a shard that lie together in the file are shorter, what is between them is read, too: a read of a
# few bytes takes as long as one of a page.
LEAST_RUN_NBYTES = 512
_FileTensors = Mapping[str, FileTensor]


@dataclass(frozen=True)
class LoadReport:
    """Says what `load_model` has done.

    Args:
        num_loaded: number of parameters and buffers that were loaded, tied ones counted once.
        missing: names of parameters and buffers that no file has; they were left as they were.
        unexpected: names of tensors in the files that nothing was loaded from.
        converted: name -> (dtype in the file, dtype in the model), where these differ.
        tied: name -> further names of the same parameter.
        initialised: names of buffers, and of missing parameters, that got values from the model's own code.
        uninitialised: names of buffers that had no memory before, and that nothing has given values to.
        bytes_read: bytes of tensors that this rank has read.
    """

    num_loaded: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    converted: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    initialised: list[str] = field(default_factory=list)
    uninitialised: list[str] = field(default_factory=list)
    bytes_read: int = 0

    def __str__(self) -> str:
        lines = [f"loaded {self.num_loaded} tensors, {self.bytes_read} bytes read on this rank"]
        for kind in ("missing", "unexpected", "converted", "tied", "initialised", "uninitialised"):
            names = getattr(self, kind)
            if names:
                lines.append(f"{len(names)} {kind}: {some(names)}")
        return "\n".join(lines)


def load_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    names: Names | None = None,
    strict: bool = True,
    init: Callable[[nn.Module], object] | None = None,
    progress: bool | None = None,
) -> LoadReport:
    """Loads safetensors files into a model, of which each rank reads the bytes of its own shards.

    The model may be sharded in any way that fsdp2 offers, on meta or with memory. What is on meta gets memory: for this
    rank's shards only. Values are converted to the model's dtypes on the way, through one bucket (`BUCKET_NBYTES`, two
    on an accelerator), which is all the memory that is needed besides the shards. Replicas (HSDP, `replicate`) read
    each byte once, in turns, and broadcast it. Parameters that no fully_shard call manages, and buffers, are plain
    tensors: each rank reads them whole. Of shards along another dim than the first, ranks read each row's part, or,
    where that is shorter than 512 bytes, whole rows. Every rank must call it, between steps.

    Example:
        ```python
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        print(fsdp2.hf.load_model(model, "Qwen3-8B"))
        ```

    Args:
        model: a module, of which all, some or no submodules are sharded.
        folder: a folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names,
            or with other safetensors files, of which all are read; or the path of one file or index.
        names: says what a parameter is called in the files, where that is not its FQN: a dict from FQNs, or patterns,
            to names, or a function from FQNs to names. In a pattern, `{x}` is one part between dots, and `{x*}` any
            number of them: `{"model.{rest*}": "{rest}"}`. Instead of a name, a view that says of which parts of which
            tensors the parameter consists: `cat`, `stack`, `part`, `select`, `transpose`. In a dict, also a function
            that is called with the fields of the pattern, and returns a name or a view. None: it is in no file, and
            left as it is.
        strict: refuse files that lack a parameter or buffer of the model, or have others, and buffers without values.
            False: the report names them.
        init: is called with each module that has non-persistent buffers on meta, or missing parameters on meta, before
            anything is loaded, and must give these values. None: `_init_weights(module)` of the model, as those
            of Transformers have it, or else `reset_parameters()` of the module. Seed all ranks alike if it draws random
            numbers.
        progress: show a bar on the first rank (needs tqdm). None: for 4 GiB or more, if tqdm is installed.

    Returns:
        A report of what was loaded, missing, unexpected, converted, tied and initialised.

    Raises:
        TypeError: an argument, or a dtype that can't be converted without loss of meaning (integers, float to bool).
        FileNotFoundError: the folder, or a file of the index, is not there.
        ValueError: a damaged file, a tensor in two files, a wrong index; another shape than the model's; `strict`; tied
            parameters that differ in the files; a row of `names` that matches nothing.
        NotImplementedError: quantised parameters and other tensor subclasses.
        RuntimeError: a forward or backward runs.
            All errors are raised on all ranks. Values are written only after all names, shapes and dtypes were checked.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    path, table = Path(folder), NameTable(names)
    groups = groups_in(model)
    ranks = Ranks(meshes_of(model, groups))
    doing, bar = f"load_model({str(folder)!r})", Progress("loading", progress, ranks.is_first)
    ranks.run(lambda: settle(groups, "load_model"), doing)
    checkpoint = ranks.from_first(lambda: read_checkpoint(path))
    plan = ranks.run(lambda: _plan(find_tensors(model), checkpoint, table, path, strict), doing)
    initialised, uninitialised = ranks.run(lambda: _materialise(model, plan, groups, ranks, init, strict), doing)
    reader = _Reader(checkpoint.sizes, ranks, bar)
    ranks.run(lambda: reader.load(plan), doing)
    for group in groups:
        for notify in group.events.loaded:
            notify(group)
    return LoadReport(
        num_loaded=len(plan.sources),
        missing=plan.missing,
        unexpected=plan.unexpected,
        converted=plan.converted,
        tied={each.name: each.names[1:] for each in plan.tensors if len(each.names) > 1},
        initialised=initialised,
        uninitialised=uninitialised,
        bytes_read=reader.bytes_read,
    )


# ---- what is loaded from where


@dataclass
class _Plan:
    """Says for each tensor of the model of which tensors in the files it consists.

    `sources`: tensor of the model -> its sources; several, of which each has all, for tied parameters that the files
    have under several names.
    """

    tensors: list[ModelTensor]
    files: _FileTensors
    sources: dict[ModelTensor, list[list[Leaf]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    converted: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes, in memory, of what this rank loads."""
        return sum(each.box.numel * each.dtype.itemsize for each in self.sources)


def _plan(tensors: list[ModelTensor], checkpoint: Checkpoint, table: NameTable, folder: Path, strict: bool) -> _Plan:
    files = checkpoint.tensors
    plan, used, absent = _Plan(tensors, files), set[str](), list[str]()
    problems: list[str] = []
    for tensor in tensors:
        found: list[list[Leaf]] = []
        lacks: list[str] = []
        for name in tensor.names:
            source = table.find(name)
            if source is None:
                continue
            try:
                shape, leaves = as_view(source).resolve(lambda key: files[key].shape)
            except KeyError as error:
                lacks.append(name if error.args[0] == name else f"{error.args[0]} (for {name})")
                continue
            except ValueError as error:
                raise ValueError(f"{name}: names: {error}") from error
            used.update(leaf.name for leaf in leaves)
            found.append(leaves)
            if shape != tensor.shape:
                where = files[leaves[0].name].file
                problems.append(f"{name}: expected shape {list(tensor.shape)}, got {list(shape)} in {where}")
        if found:
            plan.sources[tensor] = found
            tensor.locate()
            for leaf in (leaf for leaves in found for leaf in leaves):
                stored = files[leaf.name].dtype
                if stored != tensor.dtype:
                    _refuse_conversion(tensor, files[leaf.name])
                    plan.converted[tensor.name] = (stored, tensor.dtype)
        elif lacks:
            plan.missing.append(tensor.name)
            absent.append(lacks[0])
    if problems:
        raise ValueError(f"load_model: {'; '.join(problems[:5])}. Build the model from the configuration of the files.")
    table.refuse_unused()
    plan.unexpected = [name for name in files if name not in used]
    if strict and (plan.missing or plan.unexpected):
        texts = [f"lacks {some(absent)}, which the model has"] if plan.missing else []
        texts += [f"has {some(plan.unexpected)}, which the model lacks"] if plan.unexpected else []
        raise ValueError(
            f"load_model: {folder} {'; and '.join(texts)}. If the files call them otherwise, pass names=; with "
            "strict=False they are left out, and the report names them."
        )
    return plan


def _refuse_conversion(tensor: ModelTensor, stored: FileTensor) -> None:
    """Raises TypeError where a conversion would change what a value means: the integers of a quantised weight, for
    example. Among floating-point dtypes it rounds; other dtypes may become wider ones of their kind.
    """
    old, new = stored.dtype, tensor.dtype
    kinds = {(dtype.is_floating_point, dtype.is_complex) for dtype in (old, new)}
    can_convert = len(kinds) == 1 and torch.float8_e8m0fnu not in (old, new)
    if not can_convert or not (new.is_floating_point or torch.promote_types(old, new) == new):
        raise TypeError(
            f"{tensor.name}: expected a dtype that converts to {new}, got {old} in {stored.file}. Give the model that "
            "dtype, or leave the tensor out by names= (None)."
        )


# ---- memory for what is on meta


def _materialise(
    model: nn.Module,
    plan: _Plan,
    groups: Sequence[FSDPParamGroup],
    ranks: Ranks,
    init: Callable[[nn.Module], object] | None,
    strict: bool,
) -> tuple[list[str], list[str]]:
    """Gives memory to what is on meta, and values to what no file has. Returns the names of what has got values, and of
    buffers that have not.
    """
    below = modules_below(model)
    loaded = {(slot.module, slot.name) for tensor in plan.sources for slot in tensor.slots}
    without: dict[nn.Module, list[str]] = {}
    buffers = []
    for module in below:
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is not None and tensor.is_meta:
                    buffers += [(module, name)] if kind is module._buffers else []
                    if tensor.numel() and (module, name) not in loaded:
                        without.setdefault(module, []).append(name)
    device = groups[0].mesh.device if groups else ranks.device
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        _give_memory(model, plan, device)
    given = [_registered(*place) for place in buffers]
    for buffer in given:
        mark(buffer)
    sharded = next((module for module in below if state_of(module) is not None), None)
    if given and sharded is not None:
        note_emptied_buffers(sharded, (), given)
    places = [(module, name) for module, its_names in without.items() for name in its_names]
    before = {place: (_registered(*place), _registered(*place)._version) for place in places}
    initialised, left = [], []
    with torch.no_grad():
        for module in without:
            _initialise(model, module, below, init)
    for (module, name), (tensor, version) in before.items():
        now, is_buffer = _registered(module, name), name in module._buffers
        has_values = is_buffer and now.dtype is not torch.bool and not is_marked(now)
        is_written = now is not tensor or now._version != version or has_values
        if is_written:
            initialised.append(fqn(below[module], name))
        elif is_buffer:
            left.append(fqn(below[module], name))
    if left and strict:
        raise ValueError(
            f"load_model: {some(left)}: no file has these buffers, which were on meta, and nothing has computed them. "
            "Pass init=, a function that is called with their module, and computes them; or strict=False, and compute "
            "them afterwards."
        )
    return initialised, left


def _registered(module: nn.Module, name: str) -> Tensor:
    found = module._buffers[name] if name in module._buffers else module._parameters[name]
    assert found is not None, "it was on meta"
    return found


def _give_memory(model: nn.Module, plan: _Plan, device: torch.device) -> None:
    """Gives memory to all parameters and buffers on meta, as `to_empty` does, but not to others, and less of it.

    A group copies new local tensors into its shard buffer. Those made here take no memory: all their elements are one.
    """
    owners = owners_by_id()
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def give(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        owned = owners.get(id(tensor))
        if owned is not None and isinstance(tensor, DTensor):
            param = owned.param
            one = torch.empty((), dtype=param.local.dtype, device=param.storage_device)
            mark(one)
            return new_dtensor(param.tensor_class, one.expand(param.local.shape), param.dtensor_spec)
        if id(tensor) not in made:
            made[id(tensor)] = tensor, torch.empty_like(tensor, device=device)
        return made[id(tensor)][1]

    with torch.no_grad():
        model._apply(give)
    for each in plan.tensors:  # torch makes a parameter for each name
        if each.param is None and len(each.slots) > 1:
            for slot in each.slots[1:]:
                kind: Any = slot.module._parameters if slot.name in slot.module._parameters else slot.module._buffers
                kind[slot.name] = each.tensor


def _initialise(
    model: nn.Module, module: nn.Module, below: Mapping[nn.Module, str], init: Callable[[nn.Module], object] | None
) -> None:
    """Calls the function that gives values to what a module has besides the files."""
    if init is not None:
        init(module)
        return
    name = f"{below[module]}."
    around = [each for each, prefix in below.items() if not prefix or name.startswith(f"{prefix}.")]
    for each in sorted(around, key=lambda each: -len(below[each])):
        of_outer: Any = getattr(each, "_init_weights", None)
        if callable(of_outer):
            of_outer(module)
            return
    own: Any = getattr(module, "reset_parameters", None)
    if own is not None:
        own()


# ---- reading


class _Reader:
    """Reads boxes of tensors in files through one bucket. `bytes_read` counts what it has read on this rank."""

    def __init__(self, sizes: Mapping[str, int], ranks: Ranks, progress: Progress) -> None:
        self.bytes_read = 0
        self._sizes, self._ranks, self._progress = sizes, ranks, progress
        self._files: dict[str, int] = {}
        self._memory = bytearray()
        self._bucket = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._sent = self._bucket
        # What went wrong while other ranks waited for this one.
        self._error: Exception | None = None

    def load(self, plan: _Plan) -> None:
        """Loads what the plan says, in the order of the files.

        Raises:
            OSError, ValueError: a file can't be read, or has changed; or tied parameters differ in the files.
        """
        files = plan.files
        ordered = sorted(plan.sources.items(), key=lambda item: _place(files[item[1][0][0].name]))
        largest = max(
            (files[leaf.name].nbytes for _, found in ordered for leaves in found for leaf in leaves), default=0
        )
        self._memory = bytearray(min(BUCKET_NBYTES, largest))
        self._bucket = torch.frombuffer(self._memory, dtype=torch.uint8) if largest else self._bucket
        notices.notify()
        try:
            with torch.no_grad(), no_torch_function(), self._progress.begin(plan.nbytes):
                for i, (tensor, found) in enumerate(ordered):
                    self._load_tensor(tensor, found[0], files, i)
                for tensor, found in ordered:
                    for other in found[1:]:
                        self._compare_tied(tensor, other, files)
        finally:
            for descriptor in self._files.values():
                os.close(descriptor)
        if self._error is not None:
            raise self._error

    def _load_tensor(self, tensor: ModelTensor, leaves: Sequence[Leaf], files: _FileTensors, i: int) -> None:
        """Loads the tensor number `i`. Replicas take turns from one tensor to the next, too."""
        local = tensor.local
        for source, target in self._pieces(tensor, leaves, files, number=i):
            own = target.of(local, tensor.box.starts)
            if self._error is None:
                with torch.inference_mode(own.is_inference()):
                    own.copy_(source)
            self._progress.add(own.nbytes)

    def _compare_tied(self, tensor: ModelTensor, leaves: Sequence[Leaf], files: _FileTensors) -> None:
        """Compares another source of a tied parameter with what was loaded."""
        for source, target in self._pieces(tensor, leaves, files, parts=4):
            own = target.of(tensor.local, tensor.box.starts)
            if self._error is None and not torch.equal(source.to(own), own):
                self._error = ValueError(
                    f"load_model: {' and '.join(tensor.names)} are one parameter of the model, but differ in the files "
                    f"({leaves[0].name} in {files[leaves[0].name].file}). Untie them in the model, or leave one out by "
                    "names= (None)."
                )

    def _pieces(
        self,
        tensor: ModelTensor,
        leaves: Sequence[Leaf],
        files: _FileTensors,
        number: int = 0,
        parts: int = 1,
    ) -> Iterator[tuple[Tensor, Box]]:
        """Yields (values, where they belong in the tensor) for all that this rank has of it.

        `number`: says with which replica the turns begin. `parts`: a piece takes no more than this part of the bucket.
        """
        replicas = Replicas(tensor.groups) if tensor.groups else None
        for leaf in leaves:
            target = leaf.box.intersection(tensor.box)
            if not target.numel:
                continue
            file, wanted = files[leaf.name], leaf.in_tensor(target)
            itemsize = file.dtype.itemsize
            around = wanted.widened(file.shape, LEAST_RUN_NBYTES // itemsize)
            for piece in around.pieces(max(1, BUCKET_NBYTES // parts // itemsize)):
                memory = self._bucket[: piece.numel * itemsize]
                if replicas is None or number % replicas.size == replicas.index:
                    self._read(file, piece)
                if replicas is not None:
                    memory = self._exchange(memory, replicas, number)
                number += 1
                inner = piece.intersection(wanted)
                if not inner.numel:
                    continue
                values = inner.of(memory.view(file.dtype).view(piece.sizes), piece.starts)
                belongs = leaf.in_view(inner)
                assert belongs is not None, "it has elements"
                yield leaf.arrange(values), belongs

    def _exchange(self, memory: Tensor, replicas: Replicas, number: int) -> Tensor:
        """Returns the bytes that one of the replicas has read, where ranks communicate."""
        if self._ranks.device.type != "cpu":
            if self._sent.device != self._ranks.device:
                self._sent = torch.empty_like(self._bucket, device=self._ranks.device)
            memory = self._sent[: memory.numel()].copy_(memory)
        replicas.broadcast(memory, number)
        return memory

    def _read(self, file: FileTensor, piece: Box) -> None:
        """Reads a box of a tensor into the bucket. An error waits until the ranks have met."""
        if self._error is not None:
            return
        try:
            descriptor = self._open(file.file)
            starts, length = piece.runs(file.shape)
            nbytes, position, view = length * file.dtype.itemsize, 0, memoryview(self._memory)
            for start in starts:
                self._read_run(descriptor, view[position : position + nbytes], file, start * file.dtype.itemsize)
                position += nbytes
        except (OSError, ValueError) as error:
            self._error = error

    def _read_run(self, descriptor: int, memory: memoryview, file: FileTensor, offset: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(descriptor, [memory[done:]], file.start + offset + done)
            if count == 0:
                raise ValueError(f"{file.file}: {file.name}: the file has become shorter while it was read")
            done += count
            self.bytes_read += count

    def _open(self, path: str) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
            size = os.fstat(self._files[path]).st_size
            if size != self._sizes[path]:
                raise ValueError(
                    f"{path}: expected {self._sizes[path]} bytes, as the first rank has found, got {size}. All ranks "
                    "must see the same files."
                )
        return self._files[path]


def _place(file: FileTensor) -> tuple[str, int]:
    return file.file, file.start
