"""Saves a sharded model as safetensors files: each rank writes its own rows to their place in the final files."""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks.checksum import bits_of, checksum
from ..core.compat import no_torch_function
from ..ext.rank_facts import gather_objects
from .files import Box, NewFile, NewTensor, is_known, parse_size, plan_files
from .folders import NewFolder
from .load import BUCKET_NBYTES
from .progress import Progress
from .ranks import Ranks, Replicas
from .tensors import ModelTensor, find_tensors, groups_in, meshes_of, settle, some
from .views import Leaf, View, as_view

_PROBE = "probe"


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    names: Mapping[str, str | View] | None = None,
    progress: bool | None = None,
) -> int:
    """Saves a model as safetensors files in a folder, which `from_pretrained` of Transformers loads.

    Each rank writes its own rows to their place in the final files. Nothing is gathered, and nothing is written twice;
    replicas take turns. The files are those that `safetensors.torch.save_file` writes for the plain model, to the byte:
    `model.safetensors`, or, from `max_shard_size` on, several and `model.safetensors.index.json`. A tied parameter is
    saved once, under its first name. A model of Transformers also gets its `config.json`. Of buffers that differ
    between ranks, those of the first rank are saved. Every rank must call it, between steps.

    The files are written in a new folder beside `folder`, which then takes its place in one step: whenever the program
    is killed, the folder is either the previous one or the new one. (Where the filesystem can't exchange folders, the
    previous one has another name for a moment, by which `load_model` refers to it.) All files in it that are not of the
    model stay. Where ranks can't write to one file, because each machine has its own disk or the filesystem has no
    shared writes, the first rank receives the rows, one bucket at a time, and writes them.

    Example:
        ```python
        fsdp2.hf.save_model(model, "trained", dtype=torch.bfloat16)
        AutoModelForCausalLM.from_pretrained("trained")
        ```

    Args:
        model: a module, of which all, some or no submodules are sharded.
        folder: is made, with its parents, or replaced.
        dtype: the dtype of floating-point tensors in the files. None: that of the parameters.
        max_shard_size: bytes of tensors in a file, as a number or a text such as "5GB". A larger tensor has its own.
        names: names in the files -> the parameter, or the view of parameters, that is saved under this name, as in
            `load_model`. Parameters that are named there are saved under these names only.
        progress: show a bar on the first rank (needs tqdm). None: for 4 GiB or more, if tqdm is installed.

    Returns:
        The number of bytes of tensors that this rank has written.

    Raises:
        TypeError: an argument.
        ValueError: a size, or a folder that can't be replaced; adapters of peft, which `save_adapter` saves; names that
            save some elements of a parameter twice or never; parameters that differ between ranks that hold the same.
        NotImplementedError: quantised parameters and other tensor subclasses; a dtype that safetensors lacks.
        OSError: a file can't be written.
        RuntimeError: a parameter is on meta; a forward or backward runs; a rank has died.
            All errors are raised on all ranks, and leave the previous folder as it was.
    """
    if getattr(model, "peft_config", None) and names is None:
        raise ValueError(
            "save_model: the model has adapters of peft. Save them by fsdp2.hf.save_adapter(model, folder), or merge "
            "them before."
        )
    most = parse_size(max_shard_size)

    def add_files(target: Path) -> None:
        _save_config(model, target, dtype)

    return _save(model, folder, dtype, most, names, "model", add_files, progress, "save_model")


def save_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    adapter_name: str = "default",
    progress: bool | None = None,
) -> int:
    """Saves the LoRA adapters of a model alone, in peft's layout, as `save_model` saves a whole model.

    A model of peft, or one of Transformers with an adapter, gives `adapter_model.safetensors` and
    `adapter_config.json`, which `PeftModel.from_pretrained` loads: what peft would save, under peft's names. Of any
    other model, all parameters with `lora_` in their names are saved, under their FQNs.

    Args:
        model: a module, of which all, some or no submodules are sharded.
        folder: is made, with its parents, or replaced.
        dtype: the dtype of floating-point tensors in the file. None: that of the parameters.
        adapter_name: the adapter to save, if peft has several.
        progress: show a bar on the first rank (needs tqdm). None: for 4 GiB or more, if tqdm is installed.

    Returns:
        The number of bytes of tensors that this rank has written.

    Raises:
        ValueError: there is no such adapter.
        NotImplementedError: peft would save a tensor that is no parameter of the model.
            Besides, what `save_model` raises.
    """
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    if configs and adapter_name not in configs:
        raise ValueError(f"adapter_name: expected one of {', '.join(configs)}, got {adapter_name!r}")
    named = {name for tensor in find_tensors(model) for name in tensor.names}
    names = _names_of_peft(model, adapter_name, named) if configs else {n: n for n in named if "lora_" in n}
    if not names:
        raise ValueError("save_adapter: expected parameters with lora_ in their names, found none. Use save_model.")

    def add_files(target: Path) -> None:
        if configs:
            config = copy.copy(configs[adapter_name])
            base: Any = getattr(model, "get_base_model", lambda: model)()
            config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None)
            config.inference_mode = True
            if config.task_type is None:  # as peft writes it
                name = type(base).__name__.removeprefix("FSDP")
                config.auto_mapping = {"base_model_class": name, "parent_library": type(base).__module__}
            config.save_pretrained(str(target))

    given: Any = dict(sorted(names.items()))
    return _save(model, folder, dtype, None, given, "adapter_model", add_files, progress, "save_adapter", only=True)


def _names_of_peft(model: nn.Module, adapter_name: str, named: set[str]) -> dict[str, str]:
    """Returns name in peft's file -> FQN. Markers go through peft's own function, which selects and renames them."""
    from peft import get_peft_model_state_dict

    markers = {name: torch.empty(0, device="meta") for name in named}
    names = {id(marker): name for name, marker in markers.items()}
    found = {}
    for name, marker in get_peft_model_state_dict(model, state_dict=markers, adapter_name=adapter_name).items():
        if id(marker) not in names:
            raise NotImplementedError(f"save_adapter: {name}: peft computes it. Use full_params and peft's function.")
        prefix = "" if name.startswith("base_model.") else "base_model.model."  # of transformers' add_adapter
        found[prefix + name] = names[id(marker)]
    return found


def _save_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Saves the configuration of a model of Transformers, as its `save_pretrained` does."""
    original = getattr(model, "config", None)
    if not hasattr(original, "save_pretrained"):
        return
    config: Any = copy.deepcopy(original)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(str(folder))
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        generation.save_pretrained(str(folder))


# ---- what is saved where


class _Plan(NamedTuple):
    """Says which files there are, and of which parts of the model's tensors each tensor in them consists."""

    files: list[NewFile]
    index_text: bytes | None
    leaves: dict[str, list[Leaf]]
    tensors: dict[str, NewTensor]
    sources: dict[str, ModelTensor]


def _plan(
    tensors: Sequence[ModelTensor],
    names: Mapping[str, str | View] | None,
    dtype: torch.dtype | None,
    most_nbytes: int | None,
    stem: str,
    only: bool,
) -> _Plan:
    by_name = {name: tensor for tensor in tensors for name in tensor.names}

    def shape_of(name: str) -> tuple[int, ...]:
        if name not in by_name:
            raise ValueError(f"names: expected names of parameters or persistent buffers, got {name!r}")
        return by_name[name].shape

    resolved = {name: as_view(source).resolve(shape_of) for name, source in (names or {}).items()}
    used_by: dict[ModelTensor, list[str]] = {}
    for name, (_, leaves) in resolved.items():
        for leaf in leaves:
            used_by.setdefault(by_name[leaf.name], []).append(name)
    ordered: dict[str, tuple[tuple[int, ...], list[Leaf]]] = {}
    for tensor in tensors:
        if tensor in used_by:
            ordered.update({name: resolved[name] for name in used_by[tensor]})
        elif not only:
            ordered[tensor.name] = as_view(tensor.name).resolve(shape_of)
    saved: dict[ModelTensor, int] = {}
    new = []
    for name, (shape, leaves) in ordered.items():
        dtypes = {_saved_dtype(by_name[leaf.name], dtype) for leaf in leaves}
        if len(dtypes) > 1:
            raise ValueError(f"names: {name}: expected parameters of one dtype, got {some([*map(str, dtypes)])}")
        new.append(NewTensor(name, dtypes.pop(), shape))
        for leaf in leaves:
            saved[by_name[leaf.name]] = saved.get(by_name[leaf.name], 0) + leaf.box.numel
    for tensor, numel in saved.items():
        tensor.locate()
        if tensor.tensor.is_meta:
            raise RuntimeError(f"{tensor.name} is on meta: it has no values. Load or initialise the model first.")
        if numel != math.prod(tensor.shape):
            raise ValueError(
                f"names: {tensor.name}: expected each of its {math.prod(tensor.shape)} elements to be saved once, got "
                f"{numel} elements in {some(used_by[tensor])}"
            )
    files, index = plan_files(new, stem, most_nbytes or sum(each.nbytes for each in new) + 1)
    leaves_of = {name: leaves for name, (_, leaves) in ordered.items()}
    return _Plan(files, index, leaves_of, {each.name: each for each in new}, by_name)


def _saved_dtype(tensor: ModelTensor, dtype: torch.dtype | None) -> torch.dtype:
    chosen = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    if not is_known(chosen):
        raise NotImplementedError(f"{tensor.name}: safetensors files hold no {chosen}. Pass dtype=, or convert it.")
    return chosen


def _save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None,
    most_nbytes: int | None,
    names: Mapping[str, str | View] | None,
    stem: str,
    add_files: Callable[[Path], None],
    progress: bool | None,
    function: str,
    only: bool = False,
) -> int:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating-point torch.dtype or None, got {dtype!r}")
    groups = groups_in(model)
    ranks = Ranks(meshes_of(model, groups))
    doing, bar = f"{function}({str(folder)!r})", Progress("saving", progress, ranks.is_first)
    ranks.run(lambda: settle(groups, function), doing)
    plan = ranks.run(lambda: _plan(find_tensors(model), names, dtype, most_nbytes, stem, only), doing)
    turns = _find_turns(plan, ranks)
    made: list[NewFolder] = []

    def begin() -> str:
        made.append(NewFolder(Path(folder)))
        _begin_files(plan, made[0].path)
        (made[0].path / _PROBE).write_bytes(bytes(ranks.size))
        return str(made[0].path)

    try:
        path = Path(ranks.from_first(begin))
        shared = _can_share_writes(path / _PROBE, ranks)
        writes = _writes(plan, turns, path)
        with torch.no_grad(), no_torch_function(), bar.begin(sum(file.size for file in plan.files) // ranks.size):
            sink = _Files(bar)
            if shared:
                ranks.run(lambda: sink.write_all(writes), doing)
            else:
                _send_to_first(writes, sink, ranks, doing)

        def finish() -> None:
            if plan.index_text is not None:
                (path / f"{stem}.safetensors.index.json").write_bytes(plan.index_text)
            add_files(path)
            made[0].publish(stem)

        ranks.run(lambda: finish() if ranks.is_first else None, doing)
    except BaseException:
        for each in made:
            each.remove()
        raise
    return sink.bytes_written if shared or ranks.is_first else 0


def _begin_files(plan: _Plan, folder: Path) -> None:
    """Writes the headers, and gives the files their sizes."""
    for file in plan.files:
        with (folder / file.name).open("xb") as opened:
            opened.write(file.header)
            opened.truncate(file.size)


def _can_share_writes(probe: Path, ranks: Ranks) -> bool:
    """Returns True if all ranks can write to one file, and the first sees all that they have written."""

    def write_own() -> bool:
        try:
            descriptor = os.open(probe, os.O_WRONLY)
            try:
                os.pwrite(descriptor, b"\1", ranks.index)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return True

    could = ranks.all(write_own())

    def read_all() -> bool:
        found = probe.read_bytes()
        probe.unlink()
        return could and found == b"\1" * ranks.size

    return ranks.from_first(read_all)


# ---- who writes what


class _Turns(NamedTuple):
    """Says that this rank writes the pieces `own`, `own + size`, ... of a tensor's part; -1: none."""

    own: int
    size: int


def _find_turns(plan: _Plan, ranks: Ranks) -> dict[ModelTensor, _Turns]:
    """Returns with how many ranks this one shares the writes of each tensor. All ranks must call it.

    Raises:
        ValueError: ranks hold the same part of a parameter with different values.
    """
    turns = {}
    others: list[ModelTensor] = []
    for tensor in dict.fromkeys(plan.sources[leaf.name] for leaves in plan.leaves.values() for leaf in leaves):
        mesh = getattr(tensor.tensor, "device_mesh", None)
        if tensor.groups is not None and mesh is not None and mesh.mesh.numel() == ranks.size:
            replicas = Replicas(tensor.groups)
            turns[tensor] = _Turns(replicas.index, replicas.size)
        else:
            others.append(tensor)
    if not others:
        return turns
    own = ranks.run(lambda: [(each.box, _digest(each)) for each in others], "comparing parameters between ranks")
    of_all = [facts for _, facts in sorted(gather_objects((ranks.index, own), ranks.groups, ranks.device))]
    for i, tensor in enumerate(others):
        holders = [rank for rank, facts in enumerate(of_all) if facts[i][0] == tensor.box]
        for facts in of_all:
            if any(facts[i][0] == each[i][0] and facts[i][1] != each[i][1] for each in of_all):
                raise ValueError(
                    f"{tensor.name}: expected equal values on all ranks that hold the same part of it, got others. If "
                    "each rank has a tensor of its own (experts), make it a DTensor on the axis of these ranks before "
                    "fully_shard; if it should be equal, call sync_module_states."
                )
        is_parameter = tensor.slots[0].name in tensor.slots[0].module._parameters
        own_turn = holders.index(ranks.index)
        turns[tensor] = _Turns(own_turn, len(holders)) if is_parameter else _Turns(own_turn and -1, 1)
    return turns


def _digest(tensor: ModelTensor) -> int:
    """Returns a checksum of this rank's part of a parameter; 0 for a buffer, which the first rank alone saves."""
    if tensor.slots[0].name not in tensor.slots[0].module._parameters or not tensor.local.numel():
        return 0
    return int(checksum(bits_of(tensor.local)))


class _Write(NamedTuple):
    """Bytes, which lie in a bucket until the next ones are made, and where in which file they belong."""

    path: str
    offset: int
    data: memoryview


def _writes(plan: _Plan, turns: Mapping[ModelTensor, _Turns], folder: Path) -> Iterator[_Write]:
    """Yields all that this rank writes, in the order of the files."""
    memory = bytearray(BUCKET_NBYTES)
    bucket = torch.frombuffer(memory, dtype=torch.uint8)
    for file in plan.files:
        path = str(folder / file.name)
        for number, (name, start) in enumerate(file.starts.items()):
            new = plan.tensors[name]
            for leaf in plan.leaves[name]:
                tensor = plan.sources[leaf.name]
                box = leaf.in_view(tensor.box)
                pieces = box.pieces(len(memory) // new.dtype.itemsize) if box is not None else ()
                for i, piece in enumerate(pieces, number):
                    if i % turns[tensor].size != turns[tensor].own:
                        continue
                    _fill(bucket, new.dtype, tensor, leaf, piece)
                    starts, length = piece.runs(new.shape)
                    nbytes, position = length * new.dtype.itemsize, 0
                    for first in starts:
                        data = memoryview(memory)[position : position + nbytes]
                        yield _Write(path, start + first * new.dtype.itemsize, data)
                        position += nbytes


def _fill(bucket: Tensor, dtype: torch.dtype, tensor: ModelTensor, leaf: Leaf, piece: Box) -> None:
    """Copies a box of a tensor in a file, from this rank's part of a parameter, to the beginning of the bucket."""
    values = leaf.arrange(leaf.in_tensor(piece).of(tensor.local, tensor.box.starts))
    bucket[: piece.numel * dtype.itemsize].view(dtype).view(piece.sizes).copy_(values)


class _Files:
    """Writes bytes into files that exist. `bytes_written` counts them."""

    def __init__(self, progress: Progress) -> None:
        self.bytes_written = 0
        self._progress = progress
        self._descriptors: dict[str, int] = {}

    def write_all(self, writes: Iterator[_Write]) -> None:
        """Writes all, and waits until the disk has it."""
        try:
            for each in writes:
                self.write(each)
        finally:
            self.close()

    def write(self, write: _Write) -> None:
        """Writes some bytes."""
        if write.path not in self._descriptors:
            self._descriptors[write.path] = os.open(write.path, os.O_WRONLY)
        done = 0
        while done < len(write.data):
            done += os.pwrite(self._descriptors[write.path], write.data[done:], write.offset + done)
        self.bytes_written += done
        self._progress.add(done)

    def close(self) -> None:
        """Closes the files, when the disk has them."""
        descriptors, self._descriptors = self._descriptors, {}
        try:
            for descriptor in descriptors.values():
                os.fsync(descriptor)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)


def _send_to_first(writes: Iterator[_Write], sink: _Files, ranks: Ranks, doing: str) -> None:
    """Has the first rank write what all ranks have: they send it bucket by bucket, one rank after the other."""
    error: Exception | None = None
    for source in range(ranks.size):
        while True:
            batch = list[tuple[str, int, bytes]]()
            if source == ranks.index and error is None:
                try:
                    nbytes = 0
                    while nbytes < BUCKET_NBYTES and (each := next(writes, None)) is not None:
                        batch.append((each.path, each.offset, bytes(each.data)))
                        nbytes += len(each.data)
                except Exception as raised:
                    error = raised
            received = pickle.loads(ranks.broadcast_bytes(pickle.dumps(batch), source))
            if not received:
                break
            if ranks.is_first and error is None:
                try:
                    for path, offset, data in received:
                        sink.write(_Write(path, offset, memoryview(data)))
                except OSError as raised:
                    error = raised
    if ranks.is_first:
        try:
            sink.close()
        except OSError as raised:
            error = raised
    ranks.agree(error, doing)
