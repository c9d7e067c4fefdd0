"""Loads safetensors files into a sharded model: each rank reads the bytes of its own shards."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..checkpoint.folders import check_path, path_text
from ..checkpoint.parts import bytes_in
from ..shards.find import before_write, groups_managing, shards_of
from ..shards.tensors import check_bool, fqn, is_marked, mark, no_torch_function, require_module
from .adapters import add_copies, initialise
from .conversion import Converter, converter_of
from .files import Box, Checkpoint, FileTensor, read_checkpoint
from .ranks import Ranks, Replicas
from .scales import DEQUANTISE, Scales, find_packed, find_scales
from .tensors import ModelTensor, find_tensors, meshes_of, registered, settle, some
from .views import Leaf, Names, NameTable, as_view, pattern_of

# Bytes of the bucket through which all values go: the memory that a call needs besides the shards.
BUCKET_NBYTES = 32 * 1024 * 1024
# Where the parts of a shard that lie together in the file are shorter, what is between them is read, too: a read of a
# few bytes takes as long as one of a page.
LEAST_RUN_NBYTES = 512
# Elements that are dequantised at a time: their values, and their scales, take four bytes each meanwhile.
SCALED_NUMEL = 1024 * 1024


@dataclass
class LoadReport:
    """Says what `load_model` has done.

    Args:
        num_loaded: number of parameters and buffers that were loaded, tied ones counted once.
        missing: names of parameters and buffers that no file has, with the name that was looked for if that is another;
            they were left as they were.
        unexpected: names of tensors in the files that nothing was loaded from.
        ignored: names of such tensors that `unexpected=`, or the class of a model of Transformers, has announced, or
            that `names=` leaves out (None).
        converted: name -> (dtype in the file, dtype in the model), where these differ.
        tied: name -> further names of the same parameter.
        initialised: names of buffers, and of missing parameters, that got values from the model's own code.
        uninitialised: names of buffers that had no memory before, and that nothing has given values to.
        bytes_read: bytes of tensors that this rank has read.
    """

    num_loaded: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    converted: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    initialised: list[str] = field(default_factory=list)
    uninitialised: list[str] = field(default_factory=list)
    bytes_read: int = 0

    def __str__(self) -> str:
        lines = [f"loaded {self.num_loaded} tensors, {self.bytes_read} bytes read on this rank"]
        for kind in ("missing", "unexpected", "ignored", "converted", "tied", "initialised", "uninitialised"):
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
    unexpected: Sequence[str] = (),
    convert: bool = True,
    init: Callable[[nn.Module], object] | None = None,
) -> LoadReport:
    """Loads safetensors files into a model, of which each rank reads the bytes of its own shards.

    The model may be sharded in any way that fsdp2 or torch's FSDP2 offers, on meta or with memory. What is on meta gets
    memory: for this rank's shards only. What needs no conversion is read to its place in a shard on the CPU. All else
    goes through one bucket (`BUCKET_NBYTES`, two for replicas on an accelerator), which is all the memory that is
    needed besides the shards; where the model is on meta, each group of fsdp2 also has its unsharded memory for a
    moment, as in `to_empty`. Every rank must call it, between steps.

    Values are converted to the model's dtypes on the way. Files in FP8 may have scales for blocks (`<name>_scale_inv`,
    with `weight_block_size` in the `quantization_config` of the config.json beside the files), or for each row or
    tensor (`<name>_scale`): each rank reads its values and the scales that these need, multiplies them in fp32, and
    rounds once. A model that has parameters in FP8 gets the values and the scales as they are.

    Which bytes are read: replicas (HSDP, `replicate`) read each byte once, in turns, and broadcast it. Of shards along
    another dim than the first, ranks read each row's part, or, where that is shorter than 512 bytes, whole rows.
    Parameters that no fully_shard call manages, and buffers, are plain tensors, which each rank reads whole. So do
    ranks whose parameters have a mesh of their own, smaller than that of the model: if these are other experts on each
    rank, `names` must say so.

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
            that is called with the fields of the pattern, and returns a name or a view. None: it is left as it is,
            whether a file has a tensor of its FQN or not, and initialised if it is on meta.
        strict: refuse files that lack a parameter or buffer of the model, or have others, and buffers without values.
            False: the report names them.
        unexpected: names, or patterns of names, of tensors in the files that the model lacks on purpose.
        convert: convert names and shapes of a model of Transformers as its `from_pretrained` does, by the mapping that
            Transformers (5 or newer) has for its class: experts that the files have apart, fused projections, prefixes.
            `names` goes before; a function as `names` says everything. False: only `names` counts. Adapters that peft
            has added before are left out: the files are those of the model around which they are. LoRA on meta is
            initialised by peft.
        init: is called with each module that has non-persistent buffers on meta, or missing parameters on meta, before
            anything is loaded, and must give these values. None: `_init_weights(module)` of the model, as those
            of Transformers have it, or else `reset_parameters()` of the module. Seed all ranks alike if it draws random
            numbers.

    Returns:
        A report of what was loaded, missing, unexpected, converted, tied and initialised.

    Raises:
        TypeError: an argument, or a dtype that can't be converted without loss of meaning (integers, float to bool).
        FileNotFoundError: the folder, or a file of the index, is not there.
        ValueError: a damaged file, a tensor in two files, a wrong index; another shape than the model's, or scales of
            another shape than config.json says; `strict`; tied parameters that differ in the files; a row of `names`
            that matches nothing; another folder on some rank.
        NotImplementedError: quantised parameters, and other tensor subclasses; files that are quantised in another way
            than FP8 (MXFP8, 4 bits); a parameter that Transformers computes from tensors in the files.
        RuntimeError: a forward or backward runs.
            All errors are raised on all ranks. Values are written only after all names, shapes and dtypes were checked.
    """
    require_module("model", model, "load_model")
    groups, doing = groups_managing(model), "fsdp2.hf.load_model"

    def check() -> tuple[NameTable, list[re.Pattern[str]]]:
        check_path("folder", folder)
        check_bool("strict", strict)
        check_bool("convert", convert)
        if init is not None and not callable(init):
            raise TypeError(f"init: expected a function of a module, or None, got {init!r}")
        settle(groups, "load_model")
        return NameTable(names), _patterns(unexpected)

    ranks = Ranks(meshes_of(model, groups))
    table, may_be = ranks.run(check, doing)
    ranks.require_same("load_model", {"folder": path_text(folder), "strict": strict, "convert": convert})
    checkpoint = ranks.from_first(lambda: read_checkpoint(Path(folder)))
    tensors, report = find_tensors(model), LoadReport()
    convert = convert and not table.is_function
    find_converter = partial(converter_of, model, tensors, without_adapters=True)
    converter = ranks.run(lambda: find_converter() if convert else None, doing)
    matching = ranks.run(lambda: _find_sources(model, tensors, checkpoint, table, converter, may_be, report), doing)
    if strict and (report.missing or report.unexpected):
        packed = find_packed(report.unexpected) if report.missing else None
        if packed is not None:
            raise NotImplementedError(
                f"load_model: {folder} lacks {report.missing[0]}, and has packed values as {packed}. {DEQUANTISE}"
            )
        raise ValueError(f"load_model: {folder} {_contradictions(report)}")
    empty = [each for each in matching.sources if each.tensor.is_meta]
    ranks.run(lambda: _materialise(model, tensors, matching.sources, ranks.device, init, strict, report), doing)
    reader = _Reader(checkpoint, matching.scales, ranks)
    try:
        ranks.run(lambda: reader.load(matching.sources), doing)
    except BaseException:
        for each in empty:  # so that no forward takes a half for weights
            mark(each.tensor)
        raise
    report.bytes_read = reader.bytes_read
    if converter is not None:
        converter.note(model)
    for group in groups:
        group.note_loaded()
    return report


# ---- what is loaded from where

# Tensor of the model -> of which tensors in the files it consists; several times if a tied one is there several times.
_Sources = dict[ModelTensor, list[list[Leaf]]]


def _patterns(unexpected: Sequence[str]) -> list[re.Pattern[str]]:
    if (
        not isinstance(unexpected, Iterable)
        or isinstance(unexpected, str)
        or not all(isinstance(each, str) for each in unexpected)
    ):
        raise TypeError(f"unexpected: expected a list of names or patterns, got {unexpected!r}")
    return [re.compile(pattern_of(each)) for each in unexpected]


def _contradictions(report: LoadReport) -> str:
    """Says what files lack and what they have besides the model, and what a user can write then."""
    lacks, has, advice = report.missing, report.unexpected, ["If the files call them otherwise, pass names=."]
    found = [f"lacks {some(lacks)}, which the model has"] if lacks else []
    found += [f"has {some(has)}, which the model lacks"] if has else []
    if lacks:
        first = lacks[0].partition(" ")[0]
        advice.append(f'What is new in the model, a head for example, is named in names: {{"{first}": None}}.')
    if has:
        advice.append(f'What the model lacks on purpose is named in unexpected: ["{has[0]}"].')
    return f"{'; and '.join(found)}. {' '.join(advice)} With strict=False they are left out, and the report names them."


def _find_sources(
    model: nn.Module,
    tensors: list[ModelTensor],
    checkpoint: Checkpoint,
    table: NameTable,
    converter: Converter | None,
    may_be: Sequence[re.Pattern[str]],
    report: LoadReport,
) -> _Matching:
    """Finds what is loaded from where, and adds to the report what is missing, unexpected, converted and tied.

    `may_be`: patterns of tensors in the files that the model lacks on purpose.
    """
    reading = None if converter is None else converter.read(checkpoint.tensors)
    adapters: set[ModelTensor] = set()
    if reading is not None:
        table.converted, adapters = reading.sources, reading.adapters
        add_copies(model, tensors, reading.sources)
    matching = _Matching(checkpoint, table, report)
    for tensor in tensors:
        matching.match(tensor, may_lack=tensor in adapters)
    table.refuse_unused()
    matching.refuse_shapes()
    report.num_loaded = len(matching.sources)
    ignored = [*may_be]
    if reading is not None:
        ignored += [re.compile(f".*?(?:{pattern}).*") for pattern in reading.unexpected]
        missing = re.compile("|".join(reading.missing) or "(?!)")
        report.missing = [name for name in report.missing if not missing.search(name)]
    matching.note_unused(ignored)
    return matching


class _OtherShape(NamedTuple):
    """Says that files have another shape than the model: the sentence for an error, and the tensors in the files."""

    text: str
    in_files: list[str]


class _Matching:
    """Matches the tensors of a model with those of files.

    `sources`: what is loaded from where. `scales`: name of a tensor in the files that is dequantised -> its scales.

    Args:
        checkpoint: the files.
        table: says what a tensor is called there.
        report: gets what is missing, converted, tied, unexpected and ignored.
    """

    def __init__(self, checkpoint: Checkpoint, table: NameTable, report: LoadReport) -> None:
        self._files, self._quantization = checkpoint.tensors, checkpoint.quantization
        self._table, self._report = table, report
        self.sources: _Sources = {}
        self.scales: dict[str, Scales] = {}
        # Names in the files from which something is loaded; and those that the user leaves out.
        self._used, self._left_out = set[str](), set[str]()
        self._wrong: dict[str, _OtherShape] = {}

    def match(self, tensor: ModelTensor, may_lack: bool) -> None:
        """Finds one tensor of the model, under each of its names. `may_lack`: it need not be there."""
        lacks: list[str] = []
        for name in tensor.names:
            try:
                found = self._look_up(name)
            except KeyError as error:
                lacks.append(name if error.args[0] == name else f"{name} ({error.args[0]} in the files)")
                continue
            if found is None:
                self._left_out.add(name)  # what a file has under that name, too
            else:
                self._take(tensor, name, *found)
        if tensor in self.sources:
            tensor.locate()
        elif lacks and not may_lack:
            self._report.missing.append(lacks[0])
        if len(tensor.names) > 1:
            self._report.tied[tensor.name] = tensor.names[1:]

    def _look_up(self, name: str) -> tuple[tuple[int, ...], list[Leaf]] | None:
        """Returns the shape in the files of what is called so in the model, and of what it consists there; None if it
        is left out.

        Raises:
            KeyError: no file has it.
            ValueError: the view that `names` has for it is wrong.
        """
        try:
            source = self._table.find(name)
            return None if source is None else as_view(source).resolve(lambda key: self._files[key].shape)
        except ValueError as error:
            raise ValueError(f"{name}: names: {error}") from error

    def _take(self, tensor: ModelTensor, name: str, shape: tuple[int, ...], leaves: list[Leaf]) -> None:
        """Takes what was found for a tensor under one name, unless that has another shape."""
        if shape != tensor.shape:
            where = f"{leaves[0].name} of {self._files[leaves[0].name].file}"
            text = f"{name}: expected shape {list(tensor.shape)}, got {list(shape)} in {where}"
            self._wrong[name] = _OtherShape(text, [*dict.fromkeys(leaf.name for leaf in leaves)])
            return
        self.sources.setdefault(tensor, []).append(leaves)
        for leaf in leaves:
            self._used.add(leaf.name)
            stored = self._files[leaf.name]
            if stored.dtype != tensor.dtype:
                scales = find_scales(stored, self._files, self._quantization)
                if scales is not None and leaf.seen not in (None, stored.shape):
                    raise NotImplementedError(
                        f"{tensor.name}: {stored.file} has it quantised, with scales for shape {list(stored.shape)}, "
                        f"and it is read as shape {list(leaf.seen)}. {DEQUANTISE}"
                    )
                if scales is not None:
                    self.scales[stored.name] = scales
                    self._used.add(scales.file.name)
                _refuse_conversion(tensor, stored)
                self._report.converted[tensor.name] = (stored.dtype, tensor.dtype)

    def refuse_shapes(self) -> None:
        """Raises ValueError if some tensors have other shapes in the files."""
        if not self._wrong:
            return
        (name, first), *others = self._wrong.items()
        more = f", and {len(others)} more have other shapes: {some([other for other, _ in others])}" if others else ""
        rest = f"unexpected={json.dumps(first.in_files)}" if len(first.in_files) < 4 else "strict=False"
        raise ValueError(
            f"{first.text}{more}. Build the model from the configuration of the files; or leave each out: "
            f'names={{"{name}": None}}, {rest}.'
        )

    def note_unused(self, ignored: Sequence[re.Pattern[str]]) -> None:
        """Adds to the report what nothing was loaded from. `ignored`: patterns of names that may be there."""
        for name in self._files:
            if name not in self._used:
                expected = name in self._left_out or any(pattern.fullmatch(name) for pattern in ignored)
                (self._report.ignored if expected else self._report.unexpected).append(name)


def _refuse_conversion(tensor: ModelTensor, stored: FileTensor) -> None:
    """Raises TypeError where a conversion would change what a value means: the integers of a quantised weight, for
    example. Among floating-point dtypes it rounds; other dtypes may become wider ones of their kind.
    """
    old, new = stored.dtype, tensor.dtype
    kinds = {(dtype.is_floating_point, dtype.is_complex) for dtype in (old, new)}
    can_convert = len(kinds) == 1 and torch.float8_e8m0fnu not in (old, new)
    if not can_convert or not (new.is_floating_point or torch.promote_types(old, new) == new):
        what = f"expected a dtype that converts to {new}, got {old} in {stored.file}"
        raise TypeError(f"{tensor.name}: {what}. Give the model that dtype, or leave it out by names= (None).")


# ---- memory for what is on meta


def _materialise(
    model: nn.Module,
    tensors: Sequence[ModelTensor],
    sources: _Sources,
    device: torch.device,
    init: Callable[[nn.Module], object] | None,
    strict: bool,
    report: LoadReport,
) -> None:
    """Gives memory to what is on meta, and values to what no file has, which it adds to the report."""
    below = {module: name for name, module in model.named_modules()}
    on_meta = [
        (module, name)
        for module in below
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.is_meta
    ]
    if not on_meta:
        return
    _give_memory(model, tensors, device)
    loaded = {(slot.module, slot.name) for tensor in sources for slot in tensor.slots}
    rest = {place: registered(*place) for place in on_meta if place not in loaded}
    buffers = [registered(*place) for place in on_meta if place[1] in place[0]._buffers]
    for tensor in (*buffers, *rest.values()):
        mark(tensor)
    if buffers:
        shards_of(model).note_emptied(buffers)
    rest = {place: tensor for place, tensor in rest.items() if tensor.numel()}
    versions = {place: tensor._version for place, tensor in rest.items()}
    with torch.no_grad():
        of_adapters = initialise(model, rest) if init is None else set()
        for module in dict.fromkeys(module for module, _ in rest):
            if module not in of_adapters:
                _initialise(module, below, init)
    for (module, name), tensor in rest.items():
        now, is_buffer = registered(module, name), name in module._buffers
        is_written = now is not tensor or now._version != versions[module, name]
        if is_written or (is_buffer and now.dtype is not torch.bool and not is_marked(now)):
            report.initialised.append(fqn(below[module], name))
        elif is_buffer:
            report.uninitialised.append(fqn(below[module], name))
    if report.uninitialised and strict:
        raise ValueError(
            f"load_model: {some(report.uninitialised)}: no file has these buffers, which were on meta, and nothing has "
            "computed them. Pass init=, a function that is called with their module; or strict=False, and compute them."
        )


def _give_memory(model: nn.Module, tensors: Sequence[ModelTensor], device: torch.device) -> None:
    """Gives memory to all parameters and buffers on meta, as `to_empty` does, but not to others, and less of it."""
    shards = shards_of(model)

    def give(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        param = shards.find(tensor)
        return torch.empty_like(tensor, device=device) if param is None else param.empty(device)

    with torch.no_grad():
        model._apply(give)
    for each in (each for each in tensors if each.param is None):  # torch makes a parameter for each name
        for slot in each.slots[1:]:
            kind: Any = slot.module._parameters if each.is_parameter else slot.module._buffers
            kind[slot.name] = each.tensor


def _initialise(module: nn.Module, below: Mapping[nn.Module, str], init: Callable[[nn.Module], object] | None) -> None:
    """Calls the function that gives values to what a module has besides the files."""
    name = f"{below[module]}."
    around = [each for each, prefix in below.items() if not prefix or name.startswith(f"{prefix}.")]
    of_outer = [getattr(each, "_init_weights", None) for each in sorted(around, key=lambda each: -len(below[each]))]
    function: Any = next(filter(callable, [init, *of_outer]), None)
    own: Any = getattr(module, "reset_parameters", None)
    if function is not None:
        function(module)
    elif own is not None:
        own()


# ---- reading


class _Reader:
    """Reads boxes of tensors in files through one bucket. `bytes_read` counts what it has read on this rank."""

    def __init__(self, checkpoint: Checkpoint, scales: Mapping[str, Scales], ranks: Ranks) -> None:
        self.bytes_read = 0
        self._files, self._sizes, self._scales = checkpoint.tensors, checkpoint.sizes, scales
        self._ranks = ranks
        self._opened: dict[str, int] = {}
        self._bucket = self._sent = torch.empty(0, dtype=torch.uint8)
        # What went wrong while other ranks waited for this one.
        self._error: Exception | None = None

    def load(self, sources: _Sources) -> None:
        """Loads all tensors, in the order of the files.

        Raises:
            OSError, ValueError: a file can't be read, or has changed; or tied parameters differ in the files.
        """
        order = {name: i for i, name in enumerate(self._files)}
        ordered = sorted(sources.items(), key=lambda item: order[item[1][0][0].name])
        before_write()
        try:
            with torch.no_grad(), no_torch_function():
                for i, (tensor, found) in enumerate(ordered):
                    self._load_tensor(tensor, found[0], i)
                for tensor, found in ordered:
                    for leaves in found[1:]:
                        self._compare_tied(tensor, leaves)
        finally:
            for descriptor in self._opened.values():
                os.close(descriptor)
        if self._error is not None:
            raise self._error

    def _load_tensor(self, tensor: ModelTensor, leaves: Sequence[Leaf], i: int) -> None:
        """Loads the tensor number `i`. Replicas take turns from one tensor to the next, too."""
        for source, target in self._pieces(tensor, leaves, BUCKET_NBYTES, number=i, in_place=True):
            try:
                if source is target:
                    if not target.is_inference():
                        increment_version(target)
                elif self._error is None:
                    with torch.inference_mode(target.is_inference()):
                        target.copy_(source)
            except RuntimeError as error:  # raised once all pieces were exchanged
                self._error = error

    def _compare_tied(self, tensor: ModelTensor, leaves: Sequence[Leaf]) -> None:
        """Compares another source of a tied parameter with what was loaded."""
        for source, loaded in self._pieces(tensor, leaves, BUCKET_NBYTES // 4, number=0):
            if self._error is None and not torch.equal(source.to(loaded), loaded):
                where = f"{leaves[0].name} in {self._files[leaves[0].name].file}"
                self._error = ValueError(
                    f"load_model: {' and '.join(tensor.names)} are one parameter of the model, but differ in the files "
                    f"({where}). Untie them in the model, or leave one out by names= (None)."
                )

    def _pieces(
        self, tensor: ModelTensor, leaves: Sequence[Leaf], most_nbytes: int, number: int, in_place: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (values in the files, the part of this rank's shard where they belong), piece by piece.

        `number`: says with which replica the turns begin. `in_place`: what the shard can hold as it is in the file is
        read to its place there, and both are one tensor.
        """
        replicas, local = Replicas(tensor.groups) if tensor.groups else None, tensor.local
        may_stay = in_place and local.is_cpu and (replicas is None or self._ranks.device.type == "cpu")
        for leaf in leaves:
            target = leaf.box.intersection(tensor.box)
            if not target.numel:
                continue
            file, wanted = self._files[leaf.name], leaf.in_tensor(target)
            scales = self._scales.get(leaf.name) if file.dtype != tensor.dtype else None
            if leaf.seen is not None:
                file = file._replace(shape=leaf.seen)
            itemsize = file.dtype.itemsize
            around = wanted.widened(file.shape, LEAST_RUN_NBYTES // itemsize)
            most = most_nbytes // itemsize if scales is None else SCALED_NUMEL
            same = scales is None and file.dtype == tensor.dtype and leaf.dims == (*range(len(file.shape)),)
            for piece in around.pieces(max(1, most)):
                inner, turn = piece.intersection(wanted), number % (replicas.size if replicas else 1)
                number += 1
                belongs = leaf.in_view(inner) if inner.numel else None
                region = local if belongs is None else belongs.of(local, tensor.box.starts)
                stays = may_stay and same and inner == piece and region.is_contiguous()
                memory = _as_bytes(region) if stays else self._bucket_of(piece.numel * itemsize)
                if replicas is None or turn == replicas.index:
                    self._read(file, piece, memory)
                if replicas is not None:
                    memory = self._exchange(memory, replicas, turn)
                if stays:
                    yield region, region
                elif belongs is not None:
                    values = inner.of(memory.view(file.dtype).view(piece.sizes), piece.starts)
                    if scales is not None:
                        values = scales.multiply(values, self._read_scales(scales, inner), inner)
                    yield leaf.arrange(values), region

    def _bucket_of(self, nbytes: int) -> Tensor:
        """Returns the first bytes of the bucket, which grows when a piece needs it."""
        if self._bucket.numel() < nbytes:
            self._bucket = torch.empty(nbytes, dtype=torch.uint8)
        return self._bucket[:nbytes]

    def _read_scales(self, scales: Scales, box: Box) -> Tensor:
        """Returns the scales of a box. They are few, and each replica reads them."""
        wanted, file = scales.around(box), scales.file
        piece = wanted.widened(file.shape, LEAST_RUN_NBYTES // file.dtype.itemsize)
        found = torch.empty(piece.sizes, dtype=file.dtype)
        self._read(file, piece, _as_bytes(found))
        return wanted.of(found, piece.starts)

    def _exchange(self, memory: Tensor, replicas: Replicas, source: int) -> Tensor:
        """Returns the bytes that one of the replicas has read, where ranks communicate."""
        if self._ranks.device.type != "cpu":
            if self._sent.numel() < memory.numel():
                self._sent = torch.empty_like(memory, device=self._ranks.device)
            memory = self._sent[: memory.numel()].copy_(memory)
        replicas.broadcast(memory, source)
        return memory

    def _read(self, file: FileTensor, piece: Box, memory: Tensor) -> None:
        """Reads a box of a tensor into memory. An error waits until the ranks have met."""
        try:
            starts, length = piece.runs(file.shape)
            itemsize, done, view = file.dtype.itemsize, 0, bytes_in(memory)
            for start in starts if self._error is None else ():
                end = done + length * itemsize
                position = file.start + start * itemsize - done
                while done < end:
                    count = os.preadv(self._open(file.file), [view[done:end]], position + done)
                    if count == 0:
                        raise ValueError(f"{file.file}: {file.name}: the file has become shorter while it was read")
                    done += count
                    self.bytes_read += count
        except (OSError, ValueError) as error:
            self._error = error

    def _open(self, path: str) -> int:
        if path not in self._opened:
            self._opened[path] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO has a size of 0, without waiting
            size = os.fstat(self._opened[path]).st_size
            if size != self._sizes[path]:
                what = f"expected {self._sizes[path]} bytes, as the first rank has found, got {size}"
                raise ValueError(f"{path}: {what}. All ranks must see the same files.")
        return self._opened[path]


def _as_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
