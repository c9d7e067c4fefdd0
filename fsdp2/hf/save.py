"""Saves a sharded model as safetensors files: each rank writes its own rows to their place in the final files."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoint.folders import NewFolder, check_path, naming, path_text
from ..shards.find import groups_managing
from ..shards.tensors import bits_of, check_bool, checksum, no_torch_function, require_module
from .adapters import find_adapter
from .conversion import Converter, converter_of
from .files import CODES, FileTensor, Layout, NewFiles, parse_size, plan_files
from .load import BUCKET_NBYTES
from .ranks import Ranks, Replicas
from .tensors import ModelTensor, find_tensors, meshes_of, settle, some
from .views import Leaf, View, as_view

# The name, in errors, of all that decides where in the files a rank writes.
_PLANNED = "the planned files (by max_shard_size, names, convert and the model)"


def save_model(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    names: Mapping[str, str | View] | None = None,
    convert: bool = True,
) -> int:
    """Saves a model as safetensors files in a folder, which `from_pretrained` of Transformers loads.

    It takes models of fsdp2, of torch's FSDP2, and plain ones.

    Each rank writes its own rows to their place in the final files. Nothing is gathered, and nothing is written twice;
    replicas take turns. The files are those that `safetensors.torch.save_file` writes for the plain model, to the byte:
    `model.safetensors`, or, from `max_shard_size` on, several and `model.safetensors.index.json`. A tied parameter is
    saved once, under its first name. A model of Transformers is saved in the layout of its `save_pretrained`, and gets
    its `config.json`. Of buffers that differ between ranks, those of the first rank are saved. Every rank must call it,
    between steps.

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
        convert: convert names and shapes of a model of Transformers as its `save_pretrained` does: experts that the
            model has in one parameter are apart in the files. False: other parameters than those in `names` keep their
            names and shapes, which `from_pretrained` reads as well, unless it converts tensors with these names.

    Returns:
        The number of bytes of tensors that this rank has written.

    Raises:
        TypeError: an argument.
        ValueError: a size, or a folder that can't be replaced; adapters of peft, which `save_adapter` saves; names that
            save some elements of a parameter twice or never; parameters that differ between ranks that hold the same;
            another folder, or other files, on some rank.
        NotImplementedError: quantised parameters and other tensor subclasses; a dtype that safetensors lacks.
        OSError: a file can't be written.
        RuntimeError: a parameter is on meta; a forward or backward runs; a rank has died; another save into the folder
            runs, of this program or another one.
            All errors are raised on all ranks, and leave the previous folder as it was.
    """
    require_module("model", model, "save_model")

    def add_files(target: Path) -> None:
        _save_config(model, target, dtype)

    def make_plan(ranks: Ranks) -> Plan:
        tensors = find_tensors(model)

        def plan() -> Plan:
            check_bool("convert", convert)
            if names is not None and not isinstance(names, Mapping):
                raise TypeError(f"names: expected a dict of names, got {names!r}")
            if getattr(model, "peft_config", None) and names is None:
                what = "the model has adapters of peft. Save them by fsdp2.hf.save_adapter(model, folder)"
                raise ValueError(f"save_model: {what}, or merge them before.")
            converter = converter_of(model, tensors) if convert else None
            return plan_save(tensors, names or {}, dtype, parse_size(max_shard_size), "model", converter)

        return ranks.run(plan, "fsdp2.hf.save_model")

    return _save(model, folder, dtype, make_plan, "model", add_files)


def save_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    adapter_name: str = "default",
) -> int:
    """Saves an adapter of a model alone, in peft's layout, as `save_model` saves a whole model.

    A model of peft, or one of Transformers with an adapter, gives `adapter_model.safetensors` and
    `adapter_config.json`, which `PeftModel.from_pretrained` loads: what peft's `save_pretrained` writes, to the byte,
    for each kind of adapter but those of which it computes tensors (prompts). Of any model without peft, all parameters
    with `lora_` in their names are saved, under their FQNs. Every rank must call it, between steps.

    Args:
        model: a module, of which all, some or no submodules are sharded.
        folder: is made, with its parents, or replaced.
        dtype: the dtype of floating-point tensors in the file. None: that of the parameters.
        adapter_name: the adapter to save, if peft has several.

    Returns:
        The number of bytes of tensors that this rank has written.

    Raises:
        ValueError: there is no such adapter.
        NotImplementedError: peft computes what it saves, as of prompt tuning. The error says what to write instead.
            Besides, what `save_model` raises.
    """
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}

    def add_files(target: Path) -> None:
        if configs:
            config = copy.copy(configs[adapter_name])
            base: Any = getattr(model, "get_base_model", lambda: model)()
            config.base_model_name_or_path = (
                config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
            )
            config.inference_mode = True
            if config.task_type is None:  # as peft writes it
                name = type(base).__name__.removeprefix("FSDP")
                config.auto_mapping = {"base_model_class": name, "parent_library": type(base).__module__}
            config.save_pretrained(str(target))

    def make_plan(ranks: Ranks) -> Plan:
        tensors = find_tensors(model)

        def plan() -> Plan:
            if configs and adapter_name not in configs:
                raise ValueError(f"adapter_name: expected one of {', '.join(configs)}, got {adapter_name!r}")
            lora = {name: name for tensor in tensors for name in tensor.names if "lora_" in name}
            if not configs and not lora:
                raise ValueError(
                    "save_adapter: expected parameters with lora_ in their names, found none. Use save_model."
                )
            names = find_adapter(model, tensors, adapter_name) if configs else lora
            return plan_save(tensors, names, dtype, None, "adapter_model", only=True)

        return ranks.run(plan, "fsdp2.hf.save_adapter")

    return _save(model, folder, dtype, make_plan, "adapter_model", add_files)


def _save_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Saves the configuration of a model of Transformers, as its `save_pretrained` does."""
    original = getattr(model, "config", None)
    if not hasattr(original, "save_pretrained"):
        return
    config: Any = copy.deepcopy(original)
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    if hasattr(config, "quantization_config") and not any(each.dtype.itemsize == 1 for each in model.parameters()):
        del config.quantization_config  # load_model has dequantised the files
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(str(folder))
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        generation.save_pretrained(str(folder))


# ---- what is saved where


class Plan(NamedTuple):
    """Says which files there are, of which parameters each tensor in them consists, and which these are, by name."""

    files: NewFiles
    leaves: dict[str, list[Leaf]]
    sources: dict[str, ModelTensor]


def plan_save(
    tensors: Sequence[ModelTensor],
    names: Mapping[str, str | View],
    dtype: torch.dtype | None,
    most_nbytes: int | None,
    stem: str,
    converter: Converter | None = None,
    only: bool = False,
) -> Plan:
    """Plans the files. `only`: of the parameters that `names` has, and no others."""
    by_name = {name: tensor for tensor in tensors for name in tensor.names}

    def shape_of(name: str) -> tuple[int, ...]:
        if name not in by_name:
            raise ValueError(f"names: expected names of parameters or persistent buffers, got {name!r}")
        return by_name[name].shape

    resolved = {name: as_view(source).resolve(shape_of) for name, source in names.items()}
    named = {by_name[leaf.name] for _, leaves in resolved.values() for leaf in leaves}
    rest: Mapping[str, str | View] = {}
    layout: Layout | None = None
    if converter is not None:
        rest, layout = converter.write(named)
    elif not only:
        rest = {tensor.name: tensor.name for tensor in tensors if tensor not in named}
    if twice := next((name for name in rest if name in resolved), None):
        raise ValueError(f"names: expected names that no other parameter has, got {twice!r}")
    resolved |= {name: as_view(source).resolve(shape_of) for name, source in rest.items()}
    used_in: dict[ModelTensor, list[str]] = {}
    for name, (_, leaves) in resolved.items():
        for tensor in dict.fromkeys(by_name[leaf.name] for leaf in leaves):
            used_in.setdefault(tensor, []).append(name)
    order = [name for tensor in tensors if tensor in used_in for name in used_in[tensor]]
    new: dict[str, FileTensor] = {}
    leaves_of: dict[str, list[Leaf]] = {}
    for name in dict.fromkeys(order if converter is None else [*rest, *order]):
        shape, leaves_of[name] = resolved[name]
        new[name] = FileTensor(name, _saved_dtype(name, leaves_of[name], by_name, dtype), shape, "", 0)
    numels: dict[ModelTensor, int] = {}
    for leaf in (leaf for leaves in leaves_of.values() for leaf in leaves):
        numels[by_name[leaf.name]] = numels.get(by_name[leaf.name], 0) + leaf.box.numel
    for tensor, numel in numels.items():
        tensor.locate(to_save=True)
        if not only and numel != math.prod(tensor.shape):
            what = f"each of its {math.prod(tensor.shape)} elements to be saved once, got {numel}"
            raise ValueError(f"names: {tensor.name}: expected {what} in {some(used_in[tensor])}")
    if layout is not None:  # what `names` has is in blocks of its own
        own = {name: (-i, math.prod(new[name].shape)) for i, name in enumerate(new) if name not in layout.blocks}
        layout = layout._replace(blocks={**own, **layout.blocks})
    return Plan(plan_files([*new.values()], stem, most_nbytes, layout), leaves_of, by_name)


def _saved_dtype(
    name: str, leaves: Sequence[Leaf], sources: Mapping[str, ModelTensor], dtype: torch.dtype | None
) -> torch.dtype:
    own = {sources[leaf.name].dtype for leaf in leaves}
    chosen, *others = {dtype if dtype is not None and each.is_floating_point else each for each in own}
    if others:
        raise ValueError(f"names: {name}: expected parameters of one dtype, got {some(map(str, own))}")
    if chosen not in CODES:
        raise NotImplementedError(f"{name}: safetensors files hold no {chosen}. Pass dtype=, or convert it.")
    return chosen


def _save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None,
    make_plan: Callable[[Ranks], Plan],
    stem: str,
    add_files: Callable[[Path], None],
) -> int:
    """Saves what is planned of a model. `add_files` is called with the new folder on the first rank."""
    groups = groups_managing(model)

    def check() -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype: expected a floating-point torch.dtype or None, got {dtype!r}")
        check_path("folder", folder)
        settle(groups, "fsdp2.hf.save_model")

    ranks = Ranks(meshes_of(model, groups))
    ranks.run(check, "fsdp2.hf.save_model")
    ranks.require_same("save_model", {"folder": path_text(folder), "dtype": str(dtype)})
    plan = make_plan(ranks)
    ranks.require_same("save_model", {_PLANNED: _digest_of(plan)})
    return write_files(plan, Path(folder), ranks, _find_turns(plan, ranks), stem, add_files)


def write_files(
    plan: Plan,
    folder: Path,
    ranks: Ranks,
    turns: Mapping[ModelTensor, Turns],
    stem: str,
    add_files: Callable[[Path], None],
) -> int:
    """Writes what is planned into a new folder, which takes the place of `folder` then. Every rank must call it.

    Args:
        plan: the files, and of what they consist.
        folder: is made, with its parents, or replaced.
        ranks: the ranks that write.
        turns: a tensor of the plan -> which of its pieces this rank writes.
        stem: how the names of the files begin.
        add_files: is called with the new folder on the first rank.

    Returns:
        The bytes of tensors that this rank has written.
    """
    doing, named = "fsdp2.hf.save_model", naming(folder, sum(plan.files.checkpoint.sizes.values()))
    made: list[NewFolder] = []

    @named
    def begin() -> str:
        made.append(NewFolder(folder))
        for name, header in plan.files.headers.items():
            with (made[0].path / name).open("xb") as file:
                file.write(header)
                file.truncate(plan.files.checkpoint.sizes[name])
        (made[0].path / "probe").write_bytes(bytes(ranks.size))
        return str(made[0].path)

    @named
    def finish() -> None:
        if ranks.is_first:
            if plan.files.index_text is not None:
                (made[0].path / f"{stem}.safetensors.index.json").write_bytes(plan.files.index_text)
            add_files(made[0].path)
            made[0].publish(stem)

    try:
        path = Path(ranks.from_first(begin))
        writer, pieces = _Writer(), _pieces(plan, turns, path)
        with torch.no_grad(), no_torch_function():
            if _can_share_writes(path / "probe", ranks):
                ranks.run(named(lambda: writer.write_all(pieces)), doing)
            else:
                ranks.run(named(_send_to_first(pieces, writer, ranks)), doing)
        ranks.run(finish, doing)
    except BaseException:
        for each in made:
            each.remove()
        raise
    return writer.bytes_written


def _digest_of(plan: Plan) -> str:
    """Returns a text that is equal on all ranks that plan the same files of the same parameters."""
    return hashlib.sha256(repr((plan.files.headers, plan.files.index_text, plan.leaves)).encode()).hexdigest()[:8]


def _can_share_writes(probe: Path, ranks: Ranks) -> bool:
    """Returns True if all ranks can write to one file, and the first sees all that they have written."""
    own = _Piece(str(probe), [ranks.index], 1, memoryview(b"\1"))
    try:
        _Writer().write_all(iter([own]))
        could = True
    except OSError:
        could = False
    could = ranks.all(could, "writing to one file")

    def has_all() -> bool:
        found = probe.read_bytes()
        probe.unlink()
        return could and found == b"\1" * ranks.size

    return ranks.from_first(has_all)


# ---- who writes what


class Turns(NamedTuple):
    """Says that this rank writes the pieces `own`, `own + size`, ... of a tensor's part; -1: none."""

    own: int
    size: int


def _find_turns(plan: Plan, ranks: Ranks) -> dict[ModelTensor, Turns]:
    """Returns with how many ranks this one shares the writes of each tensor. All ranks must call it.

    Raises:
        ValueError: ranks hold the same part of a parameter with different values.
    """
    turns = {}
    others: list[ModelTensor] = []
    for tensor in dict.fromkeys(plan.sources[leaf.name] for leaves in plan.leaves.values() for leaf in leaves):
        mesh: Any = getattr(tensor.tensor, "device_mesh", None)
        if tensor.groups is not None and mesh.mesh.numel() == ranks.size:
            replicas = Replicas(tensor.groups)
            turns[tensor] = Turns(replicas.index, replicas.size)
        else:  # which ranks hold the same part, their meshes don't tell
            others.append(tensor)
    if others:
        own = ranks.run(lambda: [(each.box, _digest(each)) for each in others], "computing checksums of parameters")
        of_all = ranks.gather(own)
        for tensor, *facts in zip(others, *of_all, strict=True):
            if len({*facts}) > len({box for box, _ in facts}):
                raise ValueError(
                    f"{tensor.name}: expected equal values on all ranks that hold the same part of it, got others. If "
                    "each rank has a tensor of its own (experts), make it a DTensor on the axis of these ranks before "
                    "fully_shard; if it should be equal, call sync_module_states."
                )
            holders = [rank for rank, (box, _) in enumerate(facts) if box == tensor.box]
            own_turn = holders.index(ranks.index)
            turns[tensor] = Turns(own_turn, len(holders)) if tensor.is_parameter else Turns(own_turn and -1, 1)
    return turns


def _digest(tensor: ModelTensor) -> int:
    """Returns a checksum of this rank's part of a parameter; 0 for a buffer, which the first rank alone saves."""
    return int(checksum(bits_of(tensor.local))) if tensor.is_parameter and tensor.local.numel() else 0


class _Piece(NamedTuple):
    """Describes bytes for a file: runs of equal length, where these belong, and the bytes of all runs.

    `data` lies in a bucket until the next piece is made.
    """

    path: str
    offsets: list[int]
    run_nbytes: int
    data: memoryview


def _pieces(plan: Plan, turns: Mapping[ModelTensor, Turns], folder: Path) -> Iterator[_Piece]:
    """Yields all that this rank writes, in the order of the files."""
    memory = bytearray(BUCKET_NBYTES)
    bucket = torch.frombuffer(memory, dtype=torch.uint8)
    for number, file in enumerate(plan.files.checkpoint.tensors.values()):
        itemsize = file.dtype.itemsize
        for leaf in plan.leaves[file.name]:
            tensor = plan.sources[leaf.name]
            box = leaf.in_view(tensor.box)
            for i, piece in enumerate(box.pieces(len(memory) // itemsize) if box is not None else (), number):
                if i % turns[tensor].size == turns[tensor].own:
                    nbytes = piece.numel * itemsize
                    values = leaf.arrange(tensor.values(leaf.in_tensor(piece)))
                    bucket[:nbytes].view(file.dtype).view(piece.sizes).copy_(values)
                    starts, length = piece.runs(file.shape)
                    offsets = [file.start + start * itemsize for start in starts]
                    yield _Piece(str(folder / file.file), offsets, length * itemsize, memoryview(memory)[:nbytes])


class _Writer:
    """Writes pieces into files that exist. `bytes_written` counts them."""

    def __init__(self) -> None:
        self.bytes_written = 0
        self._opened: dict[str, int] = {}

    def write_all(self, pieces: Iterator[_Piece]) -> None:
        """Writes all, and waits until the disk has it."""
        try:
            for each in pieces:
                self.write(each)
        finally:
            self.close()

    def write(self, piece: _Piece) -> None:
        """Writes one piece."""
        if piece.path not in self._opened:
            self._opened[piece.path] = os.open(piece.path, os.O_WRONLY)
        done = 0
        for i, offset in enumerate(piece.offsets):
            first, end = i * piece.run_nbytes, (i + 1) * piece.run_nbytes
            while done < end:
                done += os.pwrite(self._opened[piece.path], piece.data[done:end], offset + done - first)
        self.bytes_written += done

    def close(self) -> None:
        """Closes the files, when the disk has them."""
        opened, self._opened = self._opened, {}
        try:
            for descriptor in opened.values():
                os.fsync(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)


def _send_to_first(pieces: Iterator[_Piece], writer: _Writer, ranks: Ranks) -> Callable[[], None]:
    """Has the first rank write what all ranks have: they send it piece by piece, one rank after the other.

    Returns a function that closes the files, and raises what failed on this rank.
    """
    if ranks.is_first:
        what = "ranks can't all write to one file there: the first receives all rows, and writes them"
        logging.getLogger("fsdp2").warning(f"saving: {what}. A folder that all ranks share is faster.")
    failed: Exception | None = None
    for source in range(ranks.size):
        while True:
            piece: Any = None
            try:
                piece = next(pieces, None) if source == ranks.index else None
            except Exception as error:  # raised once the others have sent theirs
                failed = error
            sent = piece and tuple(piece._replace(data=bytes(piece.data)))
            received = pickle.loads(ranks.broadcast_bytes(pickle.dumps(sent), source))
            if received is None:
                break
            if ranks.is_first and failed is None:
                try:
                    writer.write(_Piece(*received))
                except OSError as error:
                    failed = error

    def finish() -> None:
        writer.close()
        if failed is not None:
            raise failed

    return finish
