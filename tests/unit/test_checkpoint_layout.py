"""Tests where each byte of a checkpoint lies, without ranks and without files: the layout, and the index of torch."""

import io
import json
import pickle
import random
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2.checkpoint.layout import FILE_HEAD, Entry, Kind, Layout, Mesh, boxes_of
from fsdp2.checkpoint.parts import PageSums, bytes_in, head_and_tail, lengths_around
from fsdp2.checkpoint.pickled import StoredObject, metadata_chunks
from fsdp2.checkpoint.state import State, box_of_rank, cuts_of, nest
from fsdp2.torch_private.checkpoints import STORAGE_INFO
from helpers import fake_world


def llama_8b(ranks: int) -> Kind:
    """Returns what each rank of a fully sharded Llama 8B with AdamW holds: 291 parameters, 1,164 tensors."""
    width, hidden, keys = 4096, 14336, 1024
    shapes: dict[str, tuple[int, ...]] = {"embed": (128256, width), "head": (128256, width), "norm": (width,)}
    for layer in range(32):
        shapes |= {f"{layer}.{name}": (rows, width) for name, rows in (("q", width), ("k", keys), ("v", keys))}
        shapes |= {f"{layer}.o": (width, width), f"{layer}.w1": (hidden, width), f"{layer}.w3": (hidden, width)}
        shapes |= {f"{layer}.w2": (width, hidden), f"{layer}.n1": (width,), f"{layer}.n2": (width,)}
    entries = [Entry(f"model.{name}", "float32", shape, 0, ((0, 0),)) for name, shape in shapes.items()]
    for name, shape in shapes.items():
        entries.append(Entry(f"optimizer.state.{name}.step", "float32", (), -1, ()))
        entries += [Entry(f"optimizer.state.{name}.{m}", "float32", shape, 0, ((0, 0),)) for m in ("m", "v")]
    return Kind((Mesh((ranks,), tuple(range(ranks))),), tuple(entries), ("optimizer.param_groups.0.lr",))


def drawn_kinds(seed: int) -> list[tuple[list[int], Kind]]:
    """Returns kinds of ranks with random meshes and tensors. Two kinds hold the same tensors on other sub-meshes."""
    draw = random.Random(seed)
    shape = tuple(draw.choice((1, 2, 3)) for _ in range(draw.choice((1, 2, 3))))
    size = torch.Size(shape).numel()
    ranks = draw.sample(range(2 * size), size)
    halves = draw.random() < 0.5
    groups = [[2 * rank + i for rank in ranks] for i in range(1 + halves)]
    entries = []
    for i in range(6):
        dims = tuple(draw.choice((0, 1, 2, 3, 5, 7)) for _ in range(draw.choice((0, 1, 2, 3))))
        axes = draw.sample(range(len(shape)), draw.randint(0, len(shape))) if dims else []
        cuts = tuple((axis, draw.randrange(len(dims))) for axis in axes)
        mesh = draw.choice((0, -1)) if not cuts else 0
        entries.append(Entry(f"t{i}", draw.choice(("float32", "bfloat16", "int64")), dims, mesh, cuts))
    return [(group, Kind((Mesh(shape, tuple(group)),), tuple(entries), ("a", "b"))) for group in groups]


@pytest.mark.parametrize("seed", range(40))
def test_each_element_is_written_once_and_nothing_overlaps(seed: int) -> None:
    kinds = drawn_kinds(seed)
    layout = Layout(kinds)
    for entry in kinds[0][1].entries:
        parts, count = layout.tensors[entry.name], torch.zeros(entry.shape, dtype=torch.int64)
        for start, size in zip(parts.starts.tolist(), parts.sizes.tolist(), strict=True):
            count[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
        assert (count == 1).all(), entry
    for rank in {rank for members, _ in kinds for rank in members}:
        end = FILE_HEAD
        for place in (places := layout.places_of(rank)):
            head, tail = head_and_tail(layout.tensors[place.name].dtype, place.sizes)
            assert place.offset - len(head) >= end, "behind the part before"
            end = place.offset + place.nbytes + len(tail)
            parts = layout.tensors[place.name]
            index = [*map(tuple, parts.starts.tolist())].index(place.starts)
            assert parts.writers[index] == rank
            assert layout.offsets[place.name][index] == place.offset, "as all ranks compute it"
        assert Layout.end_of(places) >= end


@pytest.mark.parametrize("seed", range(10))
def test_a_layout_follows_from_what_a_file_says(seed: int) -> None:
    kinds = drawn_kinds(seed)
    again = Layout([(members, Kind.from_json(json.loads(kind.to_json()))) for members, kind in kinds])
    assert [kind for _, kind in again.kinds] == [kind for _, kind in kinds]
    assert {n: o.tolist() for n, o in again.offsets.items()} == {
        n: o.tolist() for n, o in Layout(kinds).offsets.items()
    }


def test_kinds_that_differ_are_refused() -> None:
    one = Kind((), (Entry("x", "float32", (3,), -1, ()),), ())
    other = Kind((), (Entry("x", "float32", (4,), -1, ()),), ())
    with pytest.raises(ValueError, match=r"x: expected one dtype, shape and way to shard it .* \[3\] .* \[4\]"):
        Layout([([0], one), ([1], other)])


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(0))])
def test_chunks_are_those_of_torch(placements: Any) -> None:
    """The local shape of each rank of a mesh of 2 x 3, as torch cuts it."""
    whole = torch.arange(5 * 7).view(5, 7)
    for rank in range(6):
        with fake_world(6, rank=rank):
            mesh = init_device_mesh("cpu", (2, 3))
            local = whole
            for axis, each in enumerate(placements):
                if isinstance(each, Shard):
                    chunks = local.chunk(mesh.size(axis), each.dim)
                    at = mesh.get_coordinate()[axis]
                    local = chunks[at] if at < len(chunks) else local.narrow(each.dim, 0, 0)
            tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=(5, 7), stride=(7, 1))
            cuts = cuts_of("x", tensor)
            numbers = [(mesh.size(axis), dim) for axis, dim in cuts]
            at = torch.tensor([[mesh.get_coordinate()[axis] for axis, _ in cuts]])
            (start,), (size,) = (each.tolist() for each in boxes_of((5, 7), numbers, at))
            box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            assert torch.equal(whole[box], local)
            assert box_of_rank("x", tensor) == box


def test_other_placements_are_refused() -> None:
    from torch.distributed.tensor import Partial

    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(NotImplementedError, match=r"^x: expected a DTensor that each axis of its mesh shards"):
            cuts_of("x", tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (2, 1, 9)])
def test_parts_are_what_torch_loads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = (torch.rand(shape) * 4).to(dtype)
    head, tail = head_and_tail(dtype, shape)
    found = torch.load(io.BytesIO(head + bytes(bytes_in(values)) + tail), weights_only=True)
    assert found.dtype == dtype
    assert found.shape == shape
    assert bytes(bytes_in(found)) == bytes(bytes_in(values))


@pytest.mark.parametrize("nbytes", [0, 5, 4096, 4097, 20_003])
def test_checksums_of_pieces(nbytes: int) -> None:
    """However bytes are cut, and wherever they lie in memory; each bit counts, and the order of pages."""
    draw = random.Random(nbytes)
    memory = torch.randint(0, 256, (nbytes + 1,), dtype=torch.uint8)
    values = memory[1:]

    def checksum(cuts: list[int]) -> int:
        sums = PageSums()
        for start, end in pairwise([0, *cuts, nbytes]):
            sums.add(bytes_in(values[start:end]))
        return sums.value()

    expected = checksum([])
    for _ in range(20):
        assert checksum(sorted(draw.randrange(nbytes + 1) for _ in range(draw.randrange(9)))) == expected
    for at in {draw.randrange(nbytes) for _ in range(20)} if nbytes else ():
        bit = 1 << draw.randrange(8)
        values[at] ^= bit
        assert checksum([]) != expected
        values[at] ^= bit
    if nbytes > 3 * 4096:
        values[:8192] = torch.cat((values[4096:8192], values[:4096]))
        assert checksum([]) != expected


def objects_of_torch(layout: Layout, around: dict[str, tuple[Tensor, Tensor]], stored: Any, paths: Any) -> Metadata:
    """Returns the metadata as torch's own classes make it."""
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for name, parts in layout.tensors.items():
        chunks = []
        rows = zip(parts.starts.tolist(), parts.sizes.tolist(), parts.writers.tolist(), strict=True)
        for i, (start, size, writer) in enumerate(rows):
            chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(size)))
            head, tail = int(around[name][0][i]), int(around[name][1][i])
            begin = int(layout.offsets[name][i]) - head
            length = head + int(parts.nbytes[i]) + tail
            places[MetadataIndex(name, torch.Size(start), i)] = STORAGE_INFO(f"__{writer}_0.distcp", begin, length)
        properties = TensorProperties(dtype=parts.dtype)
        described[name] = TensorStorageMetadata(properties, torch.Size(parts.shape), chunks)
    for name, at in stored.items():
        described[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = STORAGE_INFO(f"__{at.rank}_0.distcp", at.offset, at.nbytes)
    return Metadata(described, dict(paths), places, StorageMeta(save_id="name"))


@pytest.mark.parametrize("seed", range(20))
def test_metadata_is_what_torch_pickles(seed: int) -> None:
    layout = Layout(drawn_kinds(seed))
    around = lengths_around(layout.tensors)
    stored = {"a": StoredObject(3, 5, 1 << 40), "b": StoredObject(0, 1, 2)}
    paths = {name: ("x", 3, name) for name in (*layout.tensors, "a", "b")}
    chunks = metadata_chunks(layout.tensors, layout.offsets, around, stored, paths, "name")
    found = pickle.loads(b"".join(map(bytes, chunks)))
    expected = objects_of_torch(layout, around, stored, paths)
    assert found == expected
    assert [index.index for index in found.storage_data] == [index.index for index in expected.storage_data]


def test_layout_and_metadata_of_4096_ranks() -> None:
    """Llama 8B with AdamW: 2.9 million parts, without a process group, at a twentieth of the price of objects.

    The price of objects is measured beside it, with 32 ranks: machines differ too much for a limit in seconds.
    """
    assert not dist.is_initialized()
    few = Layout([(range(32), llama_8b(32))])
    around, began = lengths_around(few.tensors), time.process_time()
    pickle.dumps(objects_of_torch(few, around, {}, {}))
    of_an_object = (time.process_time() - began) / sum(len(parts.writers) for parts in few.tensors.values())

    kind, began = llama_8b(4096), time.process_time()
    layout = Layout([(range(4096), kind)])
    own = layout.places_of(17)
    chunks = metadata_chunks(layout.tensors, layout.offsets, lengths_around(layout.tensors), {}, {}, "name")
    nbytes = sum(len(each) for each in chunks)
    seconds = time.process_time() - began
    assert sum(len(parts.writers) for parts in layout.tensors.values()) == 2_887_443
    total = sum(torch.Size(entry.shape).numel() for entry in kind.entries) * 4
    assert sum(int(parts.nbytes.sum()) for parts in layout.tensors.values()) == total
    assert 0.9 < sum(place.nbytes for place in own) * 4096 / total < 1.2  # chunks of 32 of 128,256 rows
    assert nbytes < 150 * 2_887_443
    objects = of_an_object * 2_887_443
    assert seconds < objects / 20, f"{seconds:.1f} s of CPU, and {objects:.1f} with an object for each part"


def test_flat_keys_are_those_of_torch() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    nested = {
        "model": {"a.b": torch.ones(1)},
        "optimizer": {"state": {"w": {"step": torch.ones(1)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
        "schedule": {"lrs": [1, 2], "_schedulers": [{"x": 1}, {"y": [2, {"z": 3}]}]},
        "step": 3,
    }
    state, (flat, paths) = State(nested), flatten_state_dict(nested)
    assert {**state.tensors, **state.objects} == flat
    assert state.paths == paths
    assert nest({path: flat[name] for name, path in paths.items()}) == nested


def test_dicts_with_other_keys_stay_whole() -> None:
    """torch makes texts of the keys: MultiStepLR then loads other milestones."""
    state = State({"schedule": {"milestones": {30: 1}}, "empty": {}})
    assert state.objects == {"schedule.milestones": {30: 1}, "empty": {}}
