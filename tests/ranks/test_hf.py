"""Tests fsdp2.hf on ranks: loading and saving safetensors files, in every way to shard, and errors on all ranks.

The oracle is a plain model: its values, and the bytes of the file that safetensors writes for it.
"""

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import helpers
from fsdp2 import CPUOffloadPolicy, ShardPlacementResult, fully_shard, hf, replicate
from fsdp2.engine.events import Change, Observer
from fsdp2.engine.state import require_state
from fsdp2.hf import load, save
from helpers import RankError, assert_same, full, leaves, run_checks, run_ranks, world_sizes
from models import ConvNet, Experts, MixedDtypes, OddMLP, TinyGPT, TinyLSTM, TinyModel
from safetensors_files import calls_of, file_bytes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")


class Buffered(TinyModel):
    """A persistent buffer, a computed one, a scalar, a parameter that is left out of sharding, tied to another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.plain = nn.Parameter(torch.randn(3))
        self.alias = nn.Module()
        self.alias.plain = self.plain
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.angles.copy_(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T * self.scalar)[:, :3] * self.plain + self.angles[:3]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a plain model, tied ones once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor.detach()))
    return dict(found.values())


def write(folder: Path, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> Path:
    """Writes model.safetensors on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in tensors.items()}
        (folder / "model.safetensors").write_bytes(file_bytes(tensors))
    if dist.is_initialized():
        dist.barrier()
    return folder


def on_meta(build: Callable[[], Any], shard: Callable[[Any], object]) -> Any:
    with torch.device("meta"):
        model = build()
    shard(model)
    return model


def assert_like(model: nn.Module, expected: dict[str, Tensor]) -> None:
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, value in expected.items():
        assert_same(full(state[name]), value, 0, 0, name)


# ---- ways to shard


def whole(model: nn.Module) -> None:
    fully_shard(model)


def last_dim(model: nn.Module) -> None:
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.dim() else None)


def offloaded(model: nn.Module) -> None:
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def replicas(model: nn.Module) -> None:
    size = dist.get_world_size()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2) if size > 1 else (1, 1)))


def replicated(model: nn.Module) -> None:
    replicate(model)


def without_plain(model: Any) -> None:
    fully_shard(model, ignored_params={model.plain} if hasattr(model, "plain") else None)


def one_block(model: Any) -> None:
    """Most of the model is not sharded at all."""
    fully_shard(model.blocks[0] if hasattr(model, "blocks") else model)


BUILDS: list[Callable[[], Any]] = [
    OddMLP,
    lambda: TinyGPT(tied=True),
    TinyLSTM,
    ConvNet,
    Experts,
    MixedDtypes,
    Buffered,
]
WAYS = [whole, leaves, last_dim, offloaded, replicas, replicated, without_plain, one_block]


def round_trips(shard: Callable[[Any], object], folder: Path) -> None:
    """Loaded on meta and with memory, saved to the same bytes; each byte is read once and written once."""
    for i, build in enumerate(BUILDS):
        if (shard is leaves and i == 6) or (shard is replicas and dist.get_world_size() == 3):
            continue  # a module without forward; ranks that do not divide by two
        if shard in (replicated, without_plain, one_block, offloaded) and i in (0, 2, 3):
            continue  # they add little
        torch.manual_seed(i)
        plain = build()
        expected = state_of(plain)
        source = write(folder / f"source {shard.__name__} {i}", expected)
        data = (source / "model.safetensors").read_bytes()
        nbytes = sum(each.nbytes for each in expected.values())
        model = on_meta(build, shard)
        with calls_of("preadv") as reads:
            report = hf.load_model(model, source)
        assert sum(reads) == report.bytes_read
        assert (report.missing, report.unexpected, report.converted, report.uninitialised) == ([], [], {}, [])
        assert report.num_loaded == len(expected)
        assert report.tied == ({"embed.weight": ["head.weight"]} if i == 1 else report.tied)
        assert_like(model, expected)
        total = torch.tensor([report.bytes_read])
        dist.all_reduce(total)
        whole_ones = sum(t.nbytes for n, t in expected.items() if not is_shared(model, n))
        if shard is not last_dim:  # which reads whole rows, as they are short
            assert int(total) == nbytes + whole_ones * (dist.get_world_size() - 1)
        again = build()
        shard(again)
        hf.load_model(again, source)
        assert_like(again, expected)
        for name, buffer in plain.named_buffers():
            assert_same(model.get_buffer(name), buffer, 0, 0, name)
        target = folder / f"target {shard.__name__} {i}"
        with calls_of("pwrite") as writes:
            written = hf.save_model(model, target)
        total = torch.tensor([written])
        dist.all_reduce(total)
        assert int(total) == nbytes
        assert sum(writes) == written + 1, "and one byte to probe the filesystem"
        assert (target / "model.safetensors").read_bytes() == data
        assert os.listdir(target) == ["model.safetensors"]
        model(plain.example(rows=12, seed=0))


def is_shared(model: nn.Module, name: str) -> bool:
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return hasattr(state[name], "device_mesh")


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3, 4)))
def test_ways_to_shard(world_size: int, tmp_path: Path) -> None:
    def check(shard: Callable[[Any], object]) -> Callable[[], None]:
        return lambda: round_trips(shard, tmp_path)

    ways = {1: [whole, replicated, without_plain], 4: [last_dim, replicas]}.get(world_size, WAYS)
    run_checks(world_size, [(shard.__name__, check(shard)) for shard in ways], timeout=120)


def several_files(folder: Path) -> None:
    """As the package writes them, tensor by tensor, in another dtype; load_model converts them back."""
    torch.manual_seed(0)
    plain = TinyGPT()
    model = TinyGPT()
    model.load_state_dict(plain.state_dict())
    fully_shard(model.blocks[0])
    fully_shard(model)
    target = folder / "several"
    hf.save_model(model, target, torch.bfloat16, max_shard_size="1KB")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    expected = {name: each.bfloat16() for name, each in state_of(plain).items()}
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())
    assert {*index["weight_map"]} == {*expected}
    files = sorted({*index["weight_map"].values()})
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    if dist.get_rank() == 0 and of_torch is not None:
        for file in files:
            tensors = {name: expected[name] for name, where in index["weight_map"].items() if where == file}
            assert (target / file).read_bytes() == of_torch.save(tensors, metadata={"format": "pt"})
    again = on_meta(TinyGPT, whole)
    report = hf.load_model(again, target)
    assert report.converted == dict.fromkeys(expected, (torch.bfloat16, torch.float32))
    assert_like(again, {name: each.float() for name, each in expected.items()})
    hf.save_model(model, target)
    assert sorted(os.listdir(target)) == ["model.safetensors"], "the former files are gone"


try:
    import safetensors.torch as of_torch
except ImportError:
    of_torch: Any = None  # type: ignore[no-redef]


class One(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self) -> Tensor:
        return self.weight


def cut(model: nn.Module, dim: int) -> None:
    fully_shard(model, shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))


def bytes_in(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def large_tensors_go_through_the_bucket(folder: Path) -> None:
    """In pieces, with runs between that are read, or skipped."""
    torch.manual_seed(0)
    for shape in ((9, 1000), (1, 7000), (300, 3), (5, 3, 401), (40, 300, 2)):
        for dim in range(len(shape)):
            plain = One(shape)
            source = write(folder / f"large {shape}", state_of(plain))
            for placed in (whole, replicas):
                if placed is replicas and dist.get_world_size() % 2:
                    continue
                model = on_meta(
                    lambda shape=shape: One(shape),
                    lambda model, dim=dim, placed=placed: (
                        fully_shard(model, shard_placement_fn=lambda p: Shard(dim))
                        if placed is whole
                        else placed(model)
                    ),
                )
                with mock.patch.object(load, "BUCKET_NBYTES", 4096), mock.patch.object(save, "BUCKET_NBYTES", 4096):
                    hf.load_model(model, source)
                    assert_like(model, state_of(plain))
                    hf.save_model(model, folder / "large saved")
                assert bytes_in(folder / "large saved") == bytes_in(source)
                dist.barrier()


def columns_are_read_alone(folder: Path) -> None:
    """Of rows of which each rank's part is longer than 512 bytes, no rank reads another's."""
    plain = nn.Linear(1024, 16, bias=False)
    source = write(folder / "columns", state_of(plain))
    model = on_meta(
        lambda: nn.Linear(1024, 16, bias=False), lambda model: fully_shard(model, shard_placement_fn=lambda p: Shard(1))
    )
    report = hf.load_model(model, source)
    assert report.bytes_read == model.weight.to_local().nbytes
    assert_like(model, state_of(plain))


# ---- tensor parallelism


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def tensor_parallel(folder: Path) -> None:
    """Rows that both axes cut, uneven ones; the norm is plain on the axis of tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Pair()
    source = write(folder / "tp", state_of(plain))
    nbytes = sum(each.nbytes for each in state_of(plain).values())

    def shard(model: nn.Module) -> None:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])

    model = on_meta(Pair, shard)
    hf.load_model(model, source)
    assert_like(model, state_of(plain))
    written = torch.tensor([hf.save_model(model, folder / "tp saved")])
    dist.all_reduce(written)
    assert int(written) == nbytes
    assert bytes_in(folder / "tp saved") == bytes_in(source)
    with torch.no_grad():  # as experts that each rank of the other axis has for itself
        model.norm.weight.add_(mesh.get_local_rank("tp"))
    with pytest.raises(ValueError, match=r"norm\.weight: expected equal values on all ranks that hold the same part"):
        hf.save_model(model, folder / "tp saved")


def conditional_block(model: Any) -> None:
    fully_shard(model.blocks[0], conditional=True)
    fully_shard(model)


def wrapped_blocks(model: Any) -> None:
    """The names that the wrapper adds are not in the files."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fully_shard(checkpoint_wrapper(block))
    fully_shard(model, reshard_after_forward=2)


def experts_on_a_part_of_the_ranks(model: Any) -> None:
    """The others have the same experts, which no mesh says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "own"))
    own = ShardPlacementResult(Shard(0), mesh["own"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=lambda p: own if p.dim() == 3 else None)


def experts_on_an_axis(model: Any) -> None:
    """Expert parallelism: three experts over two ranks, which FSDP cuts further."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    for name in ("up", "down"):
        value = getattr(model, name).detach()
        setattr(model, name, nn.Parameter(distribute_tensor(value, mesh["ep"], [Shard(0)])))
    fully_shard(model, mesh=mesh["dp"])


def other_ways(folder: Path) -> None:
    for build, shard in (
        (TinyGPT, conditional_block),
        (TinyGPT, wrapped_blocks),
        (Experts, experts_on_a_part_of_the_ranks),
        (Experts, experts_on_an_axis),
    ):
        torch.manual_seed(0)
        source = write(folder / f"source {shard.__name__}", state_of(build()))
        model: Any = build()
        shard(model)
        hf.load_model(model, source)
        hf.save_model(model, folder / shard.__name__)
        assert bytes_in(folder / shard.__name__) == bytes_in(source), shard.__name__


# ---- names


class Fused(nn.Module):
    """Three experts, and queries, keys and values in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.gate_up = nn.Parameter(torch.randn(3, 8, 4))
            layer.qkv = nn.Linear(4, 8)

    def forward(self) -> None:
        pass


FUSED: hf.views.Names = {  # type: ignore[name-defined]
    "layers.{i}.gate_up": lambda i: hf.stack(
        [hf.cat([f"h.{i}.experts.{e}.{part}.weight" for part in ("gate", "up")]) for e in range(3)]
    ),
    "layers.{i}.qkv.{kind}": lambda i, kind: hf.cat([f"h.{i}.{part}.{kind}" for part in "qkv"]),
}
APART: dict[str, Any] = {
    f"h.{i}.experts.{e}.{part}.weight": hf.part(hf.select(f"layers.{i}.gate_up", 0, e), 0, 4 * j, 4 * j + 4)
    for i in range(2)
    for e in range(3)
    for j, part in enumerate(("gate", "up"))
} | {
    f"h.{i}.{part}.{kind}": hf.part(f"layers.{i}.qkv.{kind}", 0, first, last)
    for i in range(2)
    for part, first, last in (("q", 0, 4), ("k", 4, 6), ("v", 6, 8))
    for kind in ("weight", "bias")
}


def apart(model: Any) -> dict[str, Tensor]:
    found = {}
    for i, layer in enumerate(model.layers):
        for e in range(3):
            for name, value in zip(("gate", "up"), layer.gate_up[e].chunk(2), strict=True):
                found[f"h.{i}.experts.{e}.{name}.weight"] = value.detach()
        for kind in ("weight", "bias"):
            parts = getattr(layer.qkv, kind).split([4, 2, 2])
            found |= {f"h.{i}.{name}.{kind}": value.detach() for name, value in zip("qkv", parts, strict=True)}
    return found


def mapped_names(folder: Path) -> None:
    """Experts stacked, projections fused, on the way in and back; what fits no pattern keeps its name."""
    torch.manual_seed(0)
    plain = Fused()
    source = write(folder / "apart", apart(plain))
    for dim in (0, 1):
        model = on_meta(Fused, lambda model, dim=dim: cut(model, dim))
        hf.load_model(model, source, names=FUSED)
        assert_like(model, state_of(plain))
        hf.save_model(model, folder / "apart again", names=APART)
        assert bytes_in(folder / "apart again") == bytes_in(source)
    split = on_meta(lambda: Apart(plain), whole)
    hf.save_model(model, folder / "fused")
    back = {name: APART[name] for name in apart(plain)}
    hf.load_model(split, folder / "fused", names=lambda fqn: back[fqn.removeprefix("all.").replace("/", ".")])
    for name, value in apart(plain).items():
        assert_same(full(split.all.get_parameter(name.replace(".", "/"))), value, 0, 0, name)
    renamed = on_meta(OddMLP, whole)
    inner = OddMLP()
    write(folder / "prefixed", {f"model.{name}": value for name, value in state_of(inner).items()})
    hf.load_model(renamed, folder / "prefixed", names={"{rest*}": "model.{rest}"})
    assert_like(renamed, state_of(inner))
    with pytest.raises(ValueError, match=r"'no\.such' matches none"):
        hf.load_model(renamed, folder / "prefixed", names={"no.such": "x"}, strict=False)
    with pytest.raises(
        ValueError, match=r"layers\.0\.gate_up: expected each of its 96 elements to be saved once, got 16"
    ):
        hf.save_model(model, folder / "x", names={"e": hf.part(hf.select("layers.0.gate_up", 0, 0), 0, 0, 4)})
    with pytest.raises(ValueError, match="expected names of parameters or persistent buffers, got 'nothing'"):
        hf.save_model(model, folder / "x", names={"e": "nothing"})
    assert not (folder / "x").exists()


class Apart(nn.Module):
    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.all = nn.Module()
        for name, value in apart(fused).items():
            self.all.register_parameter(name.replace(".", "/"), nn.Parameter(torch.empty(value.shape)))

    def forward(self) -> None:
        pass


# ---- what is reported, and what is refused


def strictness(folder: Path) -> None:
    torch.manual_seed(0)
    plain = OddMLP()
    state = state_of(plain)
    lacking = {"wide.weight": state["wide.weight"], "other": torch.ones(2)}
    source = write(folder / "lacking", lacking)
    model = on_meta(OddMLP, whole)
    expected = r"lacks wide\.bias, .* and 2 more, which the model has; and has other, which the model lacks.*names="
    with pytest.raises(ValueError, match=expected):
        hf.load_model(model, source)
    assert all(p.is_meta for p in model.parameters()), "nothing was changed"
    report = hf.load_model(model, source, strict=False, init=lambda module: module.reset_parameters())
    assert sorted(report.missing) == sorted({*state} - {"wide.weight"})
    assert sorted(report.initialised) == sorted(report.missing)
    assert report.unexpected == ["other"]
    assert "7 missing: wide.bias" in str(report)
    assert "1 unexpected: other" in str(report)
    assert_like(model, {"wide.weight": state["wide.weight"]})
    model(plain.example(rows=2, seed=0))
    some = on_meta(OddMLP, whole)
    names = {name: None for name in state if name != "wide.weight"}
    report = hf.load_model(
        some, source, names=names, unexpected=["o{x}"], init=lambda module: module.reset_parameters()
    )
    assert (report.missing, report.unexpected, report.ignored) == ([], [], ["other"])
    assert sorted(report.initialised) == sorted(names)
    assert "1 ignored: other" in str(report)
    only = on_meta(OddMLP, whole)
    names = {"wide.weight": "wide.weight", "{rest*}": None}
    report = hf.load_model(only, source, names=names, strict=False, init=lambda module: None)
    assert report.missing == []
    with pytest.raises(RuntimeError, match="to_empty gave it memory, and nobody has initialised it"):
        only(plain.example(rows=2, seed=0))


def buffers_that_no_file_has(folder: Path) -> None:
    torch.manual_seed(0)
    plain = Buffered()
    source = write(folder / "buffers", state_of(plain))
    model = on_meta(Buffered, whole)
    expected = "angles: no file has these buffers, which were on meta, and nothing has computed them.*init="
    with pytest.raises(ValueError, match=expected):
        hf.load_model(model, source, init=lambda module: None)
    model = on_meta(Buffered, whole)
    report = hf.load_model(model, source, init=lambda module: None, strict=False)
    assert report.uninitialised == ["angles"]
    model = on_meta(Buffered, whole)
    report = hf.load_model(model, source, init=lambda module: module.angles.copy_(torch.ones(4)))
    assert report.initialised == ["angles"]
    assert model.alias.plain is model.plain
    assert report.tied == {"plain": ["alias.plain"]}
    assert torch.equal(model.angles, torch.ones(4))


def tied_parameters(folder: Path) -> None:
    """Under any of their names; under both, if they are equal."""
    torch.manual_seed(0)
    plain = TinyGPT(tied=True)
    state = state_of(plain)
    for name, other in (("head.weight", None), ("head.weight", state["embed.weight"])):
        changed = {name if key == "embed.weight" else key: value for key, value in state.items()}
        changed |= {"embed.weight": other} if other is not None else {}
        source = write(folder / f"tied {other is None}", changed)
        model = on_meta(lambda: TinyGPT(tied=True), whole)
        hf.load_model(model, source)
        assert_like(model, state)
        assert model.embed.weight is model.head.weight
    write(source, changed | {"head.weight": state["embed.weight"] + 1})
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight are one parameter .* differ in the files"):
        hf.load_model(model, source)


def wrong_contents(folder: Path) -> None:
    """Each on all ranks, with the name and the file; the model keeps its values."""
    torch.manual_seed(0)
    plain = OddMLP()
    state = state_of(plain)
    model = OddMLP()
    before = {name: value.clone() for name, value in state_of(model).items()}
    whole(model)
    cases: list[tuple[dict[str, Tensor], type[Exception], str]] = [
        (
            {"wide.weight": torch.ones(5, 7)},
            ValueError,
            r"wide\.weight: expected shape \[7, 5\], got \[5, 7\] in .*model",
        ),
        (
            {"wide.weight": torch.ones(7, 5, dtype=torch.int32)},
            TypeError,
            r"wide\.weight: expected a dtype that .*int32",
        ),
        ({"wide.bias": torch.ones(7, dtype=torch.complex64)}, TypeError, r"wide\.bias: expected a dtype that converts"),
    ]
    for i, (changes, kind, expected) in enumerate(cases):
        with pytest.raises(kind, match=expected):
            hf.load_model(model, write(folder / f"wrong {i}", state | changes))
    source = write(folder / "cut", state)
    path = source / "model.safetensors"
    if dist.get_rank() == 0:
        path.write_bytes(path.read_bytes()[:-3])
    dist.barrier()
    with pytest.raises(ValueError, match=r"model\.safetensors: .* truncated"):
        hf.load_model(model, source)
    with pytest.raises(FileNotFoundError, match="expected a folder with safetensors files"):
        hf.load_model(model, folder / "nothing")
    source = write(folder / "twice", state)
    if dist.get_rank() == 0:
        (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
        (source / "model-00002-of-00002.safetensors").write_bytes(file_bytes({"wide.bias": torch.ones(7)}))
    dist.barrier()
    with pytest.raises(ValueError, match=r"wide\.bias: expected it in one file, got it in .*00001.* and .*00002"):
        hf.load_model(model, source)
    if dist.get_rank() == 0:
        weights = {name: "model-00001-of-00002.safetensors" for name in state if name != "wide.bias"}
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    dist.barrier()
    with pytest.raises(ValueError, match=r"wide\.bias: .*00001.* has it, but .*index\.json does not list it"):
        hf.load_model(model, source)
    assert_like(model, before)


def files_that_differ_between_ranks(folder: Path) -> None:
    """As on disks of each machine: an error of one rank is raised on all, whatever they were doing."""
    torch.manual_seed(0)
    state = state_of(OddMLP())
    rank = dist.get_rank()
    source = write(folder / "differ", state)
    for shard in (whole, replicas, replicated):
        model = on_meta(OddMLP, shard)
        opened = os.open

        def fails(path: Any, *args: Any, opened: Any = opened) -> int:
            if rank == 1 and str(path).endswith("model.safetensors"):
                raise OSError(f"no {path}")
            return opened(path, *args)

        with mock.patch.object(os, "open", fails), pytest.raises(OSError, match=r"^(rank 1: )?no .*model\.safetensors"):
            hf.load_model(model, source)
    short = folder / "short"
    write(short, state)
    real = load.read_checkpoint
    with (
        mock.patch.object(
            load, "read_checkpoint", lambda path: real(path)._replace(sizes=dict.fromkeys(real(path).sizes, 3))
        ),
        pytest.raises(ValueError, match=r"expected 3 bytes, as the first rank has found, got .*All ranks must see"),
    ):
        hf.load_model(model, short)


def arguments(folder: Path) -> None:
    model = OddMLP()
    whole(model)
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got str"):
        hf.load_model("model", folder)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="names: expected a dict"):
        hf.load_model(model, folder, names=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected: expected a list of names or patterns, got 'other'"):
        hf.load_model(model, folder, unexpected="other")
    with pytest.raises(TypeError, match=r"dtype: expected a floating-point .* got torch\.int8"):
        hf.save_model(model, folder / "x", torch.int8)
    with pytest.raises(ValueError, match="max_shard_size: expected a number of bytes"):
        hf.save_model(model, folder / "x", max_shard_size="many")
    with pytest.raises(ValueError, match="save_adapter: expected parameters with lora_ in their names, found none"):
        hf.save_adapter(model, folder / "x")
    with pytest.raises(RuntimeError, match=r"wide\.weight is on meta: it has no values"):
        hf.save_model(on_meta(OddMLP, whole), folder / "x")
    on_one_rank: tuple[dict[str, Any], ...] = (
        {"names": 3},
        {"unexpected": 3},
        {"init": 3},
        {"strict": 3},
        {"convert": 3},
    )
    for each in on_one_rank if dist.get_rank() else [{}] * len(on_one_rank):
        with pytest.raises(TypeError, match=r"^(rank \d: )?\w+: expected"):
            hf.load_model(model, folder, **each)
    for each in ({"names": 3}, {"dtype": 3}, {"max_shard_size": -1}) if dist.get_rank() else [{}] * 3:
        with pytest.raises((TypeError, ValueError), match=r"^(rank \d: )?\w+: expected"):
            hf.save_model(model, folder / "x", **each)

    def inside(*_: Any) -> None:
        with pytest.raises(RuntimeError, match=r"load_model: a forward or backward of .* runs"):
            hf.load_model(model, folder)

    plain, wrapped = OddMLP(), DistributedDataParallel(OddMLP())
    hf.save_model(wrapped, folder / "of DDP")
    hf.load_model(plain, folder / "of DDP")
    assert_like(plain, wrapped.module.state_dict())
    model.narrow.register_forward_hook(inside)
    model(model.example(rows=2, seed=0))
    assert not (folder / "x").exists()


# ---- a model that is in use


class Loads(Observer):
    def __init__(self) -> None:
        self.count = 0

    def changed(self, group: Any, change: Change, replaced: Any) -> None:
        self.count += change is Change.LOADED


def new_values_are_seen(folder: Path) -> None:
    """Though groups were unsharded before; ranks that began with different weights may load; optimizers keep them."""
    torch.manual_seed(7)
    plain = TinyGPT()
    source = write(folder / "seen", state_of(plain))
    torch.manual_seed(dist.get_rank())
    model = TinyGPT()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    tokens = plain.example(rows=2, seed=0)
    params = [*model.parameters()]
    counted_loads = Loads()
    require_state(model).root.add(counted_loads)
    hf.load_model(model, source)
    assert counted_loads.count == 3
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert_same(model(tokens), plain(tokens), 1e-5, 1e-6, "output")
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(1)
    write(source, state_of(plain))
    model.unshard()
    hf.load_model(model, source)
    assert_same(model(tokens), plain(tokens), 1e-5, 1e-6, "output after another load")


def own_adapters(folder: Path) -> None:
    """LoRA layers that are not peft's: those parameters alone, under their names."""

    class WithLora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 4)
            self.lora_a, self.lora_b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.lora_b(self.lora_a(x))

    torch.manual_seed(0)
    plain = WithLora()
    model = WithLora()
    model.load_state_dict(plain.state_dict())
    fully_shard(model)
    hf.save_adapter(model, folder / "adapter")
    assert os.listdir(folder / "adapter") == ["adapter_model.safetensors"]
    again = WithLora()
    fully_shard(again)
    report = hf.load_model(again, folder / "adapter" / "adapter_model.safetensors", strict=False)
    assert sorted(report.missing) == ["base.bias", "base.weight"]
    assert_like(again, {name: value for name, value in state_of(plain).items() if "lora" in name})


def no_shared_writes(folder: Path) -> None:
    """Where one rank can't write to the files of the first: the first writes all, and the bytes are the same."""
    torch.manual_seed(0)
    plain = TinyGPT()
    source = write(folder / "shared", state_of(plain))
    for shard in (whole, replicas if dist.get_world_size() % 2 == 0 else whole):
        model = on_meta(TinyGPT, shard)
        hf.load_model(model, source)
        opened = os.open

        def fails(path: Any, flags: int, *args: Any, opened: Any = opened) -> int:
            if dist.get_rank() == 1 and flags & os.O_WRONLY:
                raise FileNotFoundError(f"no {path}")
            return opened(path, flags, *args)

        with (
            mock.patch.object(os, "open", fails),
            mock.patch.object(save, "BUCKET_NBYTES", 2048),
            mock.patch.object(logging.getLogger("fsdp2"), "warning") as warning,
        ):
            written = hf.save_model(model, folder / "by the first")
        assert warning.call_count == (dist.get_rank() == 0)
        assert (written > 0) == (dist.get_rank() == 0)
        path = folder / "by the first" / "model.safetensors"
        assert path.read_bytes() == (source / "model.safetensors").read_bytes()
        dist.barrier()


def errors_while_saving(folder: Path) -> None:
    """On one rank: raised on all, and the previous folder is as it was."""
    torch.manual_seed(0)
    model = TinyGPT()
    whole(model)
    target = folder / "kept"
    hf.save_model(model, target)
    before = (target / "model.safetensors").read_bytes()
    for shared in (True, False):
        written = os.pwrite

        def fails(descriptor: int, data: Any, offset: int, written: Any = written, who: int = int(shared)) -> int:
            if len(data) > 1 and dist.get_rank() == who:
                raise OSError(28, "No space left on device")
            return written(descriptor, data, offset)

        with (
            mock.patch.object(os, "pwrite", fails),
            mock.patch.object(save, "_can_share_writes", return_value=shared),
            pytest.raises(OSError, match=r"No space left on device; the files .* need [\d,]+ bytes in: '.*kept'"),
        ):
            hf.save_model(model, target)
        dist.barrier()
        assert bytes_in(target) == before
        assert [path.name for path in folder.iterdir() if path.name.startswith(".kept")] == []
        dist.barrier()


def other_arguments_on_a_rank(folder: Path) -> None:
    """Ranks that would write, or read, other files than the first one: an error on all, before anything is written."""
    torch.manual_seed(0)
    model, rank = TinyGPT(), min(dist.get_rank(), 1)
    whole(model)
    source = write(folder / "same", state_of(TinyGPT()))
    for name, values in {
        "folder": (folder / "w0", folder / "w1"),
        "dtype": (None, torch.bfloat16),
        "max_shard_size": ("5GB", "1KB"),
        "names": (None, {"other": next(name for name, _ in model.named_parameters())}),
    }.items():
        given = {"folder": folder / "w0", name: values[rank]}
        with pytest.raises(
            ValueError, match=rf"save_model: .*{name}.*: expected the same on all ranks, got .* on rank 1"
        ):
            hf.save_model(model, **given)
    for name, arguments in {
        "folder": ((source,), (folder / "missing",)),
        "strict": ((source,), (source, False)),
    }.items():
        with pytest.raises(ValueError, match=f"load_model: {name}.*expected the same on all ranks, got .* on rank 1"):
            hf.load_model(model, arguments[rank][0], strict=len(arguments[rank]) == 1)
    for call in hf.load_model, hf.save_model:
        with pytest.raises(TypeError, match=r"^(rank 1: )?folder: expected a path, got None"):
            call(model, None if rank else source)  # type: ignore[operator]
    assert sorted(path.name for path in folder.iterdir() if path.name.endswith(("w0", "w1"))) == []
    os.chdir(folder)
    hf.save_model(model, "w0" if rank else Path("./w0"))  # one path in two ways
    hf.load_model(model, "w0/" if rank else "w0")


CHECKS: dict[Callable[[Path], None], tuple[int, ...]] = {
    several_files: (1, 3),
    large_tensors_go_through_the_bucket: (2, 3),
    columns_are_read_alone: (2,),
    tensor_parallel: (4,),
    other_ways: (4,),
    mapped_names: (1, 3),
    strictness: (3,),
    buffers_that_no_file_has: (2,),
    tied_parameters: (1, 3),
    wrong_contents: (3,),
    files_that_differ_between_ranks: (2,),
    arguments: (3,),
    new_values_are_seen: (1, 3),
    own_adapters: (2,),
    no_shared_writes: (2, 3),
    errors_while_saving: (2,),
    other_arguments_on_a_rank: (3,),
}


@pytest.mark.parametrize("world_size", world_sizes(1, 3, nightly=(2, 4)))
def test_loading_and_saving(world_size: int, tmp_path: Path) -> None:
    checks = [check for check, sizes in CHECKS.items() if world_size in sizes]
    run_checks(world_size, [(check.__name__, lambda check=check: check(tmp_path)) for check in checks], timeout=120)


# ---- ranks that die


def saved(folder: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    model = TinyGPT()
    fully_shard(model)
    hf.save_model(model, folder)
    return model


@pytest.mark.parametrize("moment", ["first write", "last write", "sync", "before the exchange", "after the exchange"])
def test_kill_9_leaves_a_whole_folder(moment: str, tmp_path: Path) -> None:
    """One rank, killed at each kind of moment: the folder is the previous one, or after the exchange the new one."""
    target = tmp_path / "out"

    def body(rank: int, world_size: int) -> None:
        model = saved(target, seed=0)
        (target / "model.safetensors").rename(target / "kept.txt")
        hf.save_model(model, target)

        def die(*_: Any, **__: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        count, written = iter(range(100)), os.pwrite
        last = len(state_of(TinyGPT()))

        def write_some(*args: Any) -> int:
            return die() if next(count) == {"first write": 1, "last write": last}.get(moment, 99) else written(*args)

        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        with mock.patch.object(os, "pwrite", write_some):
            if moment == "sync":
                os.fsync = die  # type: ignore[assignment]
            if moment == "before the exchange":
                save.NewFolder.publish = die  # type: ignore[method-assign]
            if moment == "after the exchange":
                shutil.rmtree = die  # type: ignore[assignment]
            hf.save_model(model, target)

    with pytest.raises(RankError, match="died without a report"):
        run_ranks(1, body, timeout=60)
    torch.manual_seed(0)
    expected = state_of(TinyGPT())
    if moment == "after the exchange":
        expected = {name: value + 1 for name, value in expected.items()}
    assert sorted(os.listdir(target)) == ["kept.txt", "model.safetensors"]

    def loads(rank: int, world_size: int) -> None:
        model = on_meta(TinyGPT, whole)
        hf.load_model(model, target)
        assert_like(model, expected)
        hf.save_model(model, target)

    run_ranks(1, loads)
    assert os.listdir(tmp_path) == ["out"], "what the killed save has left is gone"


def test_a_rank_that_dies_while_saving(tmp_path: Path) -> None:
    """The others raise, and the previous folder is whole.

    They end with their error, as programs do: a rank that waits for one of them only learns of the death from its end.
    """
    target = tmp_path / "out"

    def body(rank: int, world_size: int) -> None:
        model = saved(target, seed=0)
        (tmp_path / "before").write_bytes((target / "model.safetensors").read_bytes())
        dist.barrier()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        written = os.pwrite

        def dies(*args: Any) -> int:
            if rank == 1 and len(args[1]) > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return written(*args)

        with mock.patch.object(os, "pwrite", dies):
            try:
                hf.save_model(model, target)
            except RuntimeError as error:
                (tmp_path / f"error {rank}").write_text(str(error))
                os._exit(1)

    with mock.patch.object(helpers, "GRACE_S", 60), pytest.raises(RankError, match="died without a report") as caught:
        run_ranks(3, body, timeout=60)
    assert "fsdp2.hf.save_model" in (tmp_path / "error 0").read_text()
    assert (tmp_path / "error 2").exists(), str(caught.value)
    assert (target / "model.safetensors").read_bytes() == (tmp_path / "before").read_bytes()


# ---- several programs


def test_two_programs_that_save_into_one_folder(tmp_path: Path) -> None:
    """The last one wins, and the folder is whole all the time."""
    target = tmp_path / "out"

    models = [TinyGPT() for _ in range(2)]
    states = [state_of(model) for model in models]
    hf.save_model(models[0], target)

    def body(rank: int, _: int) -> None:
        dist.barrier()
        dist.destroy_process_group()
        for _ in range(25):
            hf.save_model(models[rank], target)
            again = TinyGPT()
            hf.load_model(again, target)
            found = state_of(again)
            assert any(all(torch.equal(found[name], state[name]) for name in state) for state in states)

    run_ranks(2, body)
    assert os.listdir(tmp_path) == ["out"]


# ---- without a process group


def test_a_plain_model_without_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = TinyGPT()
    assert not dist.is_initialized()
    hf.save_model(plain, tmp_path / "plain")
    with torch.device("meta"):
        again = TinyGPT()
    hf.load_model(again, tmp_path / "plain")
    assert_like(again, state_of(plain))
