"""Tests the parts of fsdp2.hf that need no ranks: headers, indices, boxes, views of tensors, tables of names."""

import itertools
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2 import hf
from fsdp2.checkpoint.folders import HOST, NewFolder
from fsdp2.hf.files import DTYPES, Box, FileTensor, parse_size, plan_files, read_checkpoint, whole_box
from fsdp2.hf.views import Names, NameTable, as_view
from safetensors_files import file_bytes


@pytest.mark.parametrize("name", hf.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert getattr(hf, name).__doc__


# ---- files


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.write_bytes(file_bytes(tensors))
    return path


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    """Each dtype, the order inside a file, names with quotes and umlauts, tensors without elements or dims."""
    of_torch = pytest.importorskip("safetensors.torch")
    zeros = torch.arange(24, dtype=torch.uint8)
    tensors = {f"{code}.weight": zeros.clone().view(dtype) for code, dtype in DTYPES.items()}
    tensors |= {'é"\\\n\x01/': torch.ones(2, 3), "a": torch.ones(0, 3), "b": torch.tensor(3.0), "c.x": torch.ones(1)}
    of_torch.save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours = write(tmp_path / "ours.safetensors", tensors).read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()
    found = read_checkpoint(tmp_path / "theirs.safetensors").tensors
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()
    }


def test_a_model_without_tensors() -> None:
    checkpoint, headers, index = plan_files([], "model", 10)
    assert index is None
    assert checkpoint.sizes["model.safetensors"] == len(headers["model.safetensors"])


def test_files_are_filled_in_order() -> None:
    """As save_pretrained fills them: a tensor above the limit has a file of its own, also in the middle."""
    sizes = {"a": 3, "b": 3, "c": 9, "d": 2, "e": 1}
    tensors = [FileTensor(name, torch.uint8, (n,), "", 0) for name, n in sizes.items()]
    checkpoint, headers, index = plan_files(tensors, "model", 6)
    names = [*headers]
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    files = {name: each.file for name, each in checkpoint.tensors.items()}
    assert files == {"c": names[0], "a": names[1], "b": names[1], "d": names[2], "e": names[2]}
    assert index is not None
    parsed = json.loads(index)
    assert parsed["metadata"] == {"total_parameters": 18, "total_size": 18}
    assert parsed["weight_map"] == files


@pytest.mark.parametrize(("size", "expected"), [(7, 7), ("7", 7), ("5GB", 5 * 10**9), ("1.5 KiB", 1536), ("2mb", 2e6)])
def test_sizes(size: Any, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["", "GB", "5 XB", -1, 0, None, True, "5GB5"])
def test_wrong_sizes(size: Any) -> None:
    with pytest.raises(ValueError, match="max_shard_size: expected a number of bytes"):
        parse_size(size)


def header(entries: Any, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
OF_8 = {"x": ENTRY}
DAMAGED: list[tuple[bytes, str]] = [
    (b"\0" * 3, "header of 0 bytes, got a file of 3"),
    (header(OF_8, b"\0" * 8)[:30], "truncated"),
    (header(OF_8, b"\0" * 7), "x ends at byte .* truncated"),
    (header(OF_8, b"\0" * 9), "appended"),
    (header(b"{x", b""), "expected JSON"),
    (header(b"\xff\xfe", b""), "expected JSON"),
    (header([1]), "expected an object in JSON, got list"),
    (header({"x": 3}), "x: expected dtype, shape and data_offsets"),
    (header({"x": ENTRY | {"shape": [-2]}}), "x: expected dtype"),
    (header({"x": ENTRY | {"shape": [True, 2]}}), "x: expected dtype"),
    (header({"x": ENTRY | {"dtype": "F99"}}), "x: expected a dtype among .*'F99'"),
    (header({"x": ENTRY | {"data_offsets": [0, 4]}}), r"x: expected 8 bytes for shape \[2\] and dtype F32, got 4"),
    (header({"x": ENTRY, "y": ENTRY}, b"\0" * 8), "y: expected it at byte .* overlap"),
    (header({"x": ENTRY, "y": ENTRY | {"data_offsets": [12, 20]}}, b"\0" * 20), "y: expected it at byte .* gap"),
    (header(b'{"x": %s, "x": %s}' % ((json.dumps(ENTRY).encode(),) * 2), b"\0" * 8), "x: expected each name once"),
    ((1 << 62).to_bytes(8, "little") + b"{}", "header of"),
    (header({"x": ENTRY | {"dtype": ["F32"]}}), r"x: expected a dtype among .*\['F32'\]"),
    (header({"x": ENTRY | {"dtype": None}}), "x: expected a dtype among .*None"),
    (header(b'{"x": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 8]}}' % (b"9" * 5000)), "expected JSON"),
    (header({"x": ENTRY | {"shape": [10**300] * 20}}), "x: expected dtype, shape"),
    (header({"x": ENTRY | {"shape": [10**18] * 300}}), "x: expected dtype, shape"),
    (header({"x": ENTRY | {"shape": [1] * 5000}}), "x: expected dtype, shape"),
    (header({"x": ENTRY | {"shape": {}}}), "x: expected 4 bytes"),
    (header(b'{"x":' * 100_000), "expected JSON"),
]


@pytest.mark.parametrize(("data", "expected"), DAMAGED, ids=[text for _, text in DAMAGED])
def test_damaged_files(data: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{expected}"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_files_that_are_no_files(make: Callable[[Path], object], tmp_path: Path) -> None:
    """A FIFO is not opened: that waits for a writer for ever."""
    for name in ("model.safetensors", "other.safetensors", "model-00001-of-00001.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        make(folder / name)
        with pytest.raises(ValueError, match=rf"{name}: expected a regular file, got a (FIFO|folder|device)"):
            read_checkpoint(folder)
    make(tmp_path / "single.safetensors")
    with pytest.raises((ValueError, FileNotFoundError), match=r"single\.safetensors.*found none"):
        read_checkpoint(tmp_path / "single.safetensors")


def two_files(folder: Path, **changes: Any) -> Path:
    """Writes two files and their index, which has `changes`."""
    write(folder / "model-00001-of-00002.safetensors", {"a": torch.ones(2)})
    write(folder / "model-00002-of-00002.safetensors", {"b": torch.ones(2)})
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"} | changes
    index = {"weight_map": {name: file for name, file in weights.items() if file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


INDICES: list[tuple[Callable[[Path], object], type[Exception], str]] = [
    (lambda folder: two_files(folder, c="model-00001-of-00002.safetensors"), ValueError, "c: .*no file has it"),
    (lambda folder: two_files(folder, a="model-00002-of-00002.safetensors"), ValueError, "a: .*no file has it"),
    (
        lambda folder: two_files(folder, a="model-00002-of-00002.safetensors", b="model-00001-of-00002.safetensors"),
        ValueError,
        r"a: .*00002\.safetensors has it, but it is in .*00001",
    ),
    (lambda folder: two_files(folder, c="model-00003-of-00003.safetensors"), FileNotFoundError, "00003.*not there"),
    (
        lambda folder: two_files(folder, c="../x.safetensors"),
        ValueError,
        "c: expected the name of a file beside it, got '../x",
    ),
    (lambda folder: two_files(folder, c=7), ValueError, "c: expected the name of a file beside it, got 7"),
    (
        lambda folder: write(two_files(folder) / "model-00002-of-00002.safetensors", {"b": torch.ones(2), "z": Z}),
        ValueError,
        "z: .*00002.*does not list it",
    ),
    (
        lambda folder: write(two_files(folder) / "model-00002-of-00002.safetensors", {"b": Z, "a": Z}),
        ValueError,
        "a: expected it in one file, got it in .*00001.* and .*00002",
    ),
    (lambda folder: write(two_files(folder) / "model.safetensors", {"a": Z}), ValueError, "got both"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), ValueError, "weight_map"),
    (lambda folder: None, FileNotFoundError, "found none"),
    (lambda folder: folder.rmdir(), FileNotFoundError, "expected a folder with safetensors files, found none"),
]
Z = torch.zeros(2)


@pytest.mark.parametrize(("make", "kind", "expected"), INDICES, ids=[text for *_, text in INDICES])
def test_wrong_indices(make: Callable[[Path], object], kind: type[Exception], expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    make(folder)
    with pytest.raises(kind, match=expected):
        read_checkpoint(folder)


def test_folders_files_and_indices(tmp_path: Path) -> None:
    two_files(tmp_path)
    expected = {"a", "b"}
    assert {*read_checkpoint(tmp_path).tensors} == expected
    assert {*read_checkpoint(tmp_path / "model.safetensors.index.json").tensors} == expected
    assert {*read_checkpoint(tmp_path / "model-00001-of-00002.safetensors").tensors} == {"a"}
    (tmp_path / "model.safetensors.index.json").unlink()
    assert {*read_checkpoint(tmp_path).tensors} == expected


def test_a_previous_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "out.previous").mkdir()
    with pytest.raises(FileNotFoundError, match=r"interrupted save.*out\.previous: rename"):
        read_checkpoint(tmp_path / "out")


# ---- boxes


def boxes(seed: int) -> tuple[tuple[int, ...], Box]:
    """Returns a random shape, and a box in it, which may be empty."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
    starts = tuple(draw.randint(0, size - 1) for size in shape)
    return shape, Box(starts, tuple(draw.randint(0, size - first) for size, first in zip(shape, starts, strict=True)))


def indices(shape: tuple[int, ...], box: Box) -> list[int]:
    whole = torch.arange(math.prod(shape)).view(shape)
    return box.of(whole, (0,) * len(shape)).flatten().tolist()


@pytest.mark.parametrize("seed", range(40))
def test_boxes(seed: int) -> None:
    """Pieces and runs together are the box, in order; a wider box has it, and runs as long as asked for."""
    shape, box = boxes(seed)
    expected = indices(shape, box)
    for most in (1, 3, 100):
        pieces = [*box.pieces(most)]
        assert [i for piece in pieces for i in indices(shape, piece)] == expected
        assert all(piece.numel <= most for piece in pieces)
    if box.numel:
        starts, length = box.runs(shape)
        assert [start + i for start in starts for i in range(length)] == expected
        for least in (2, 7, 1000):
            wide = box.widened(shape, least)
            assert {*expected} <= {*indices(shape, wide)}
            starts, length = wide.runs(shape)
            assert length >= least or len([*starts]) == 1


# ---- views

SHAPES = {"q": (4, 6), "k": (2, 6), "v": (2, 6), "e0": (3, 5), "e1": (3, 5), "s": (), "t": (2, 3, 4)}
TENSORS = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}
VIEWS: dict[str, tuple[Any, Callable[[dict[str, Tensor]], Tensor]]] = {
    "whole": ("q", lambda t: t["q"]),
    "scalar": ("s", lambda t: t["s"]),
    "cat": (hf.cat(["q", "k", "v"]), lambda t: torch.cat([t["q"], t["k"], t["v"]])),
    "stack": (hf.stack(["e0", "e1"]), lambda t: torch.stack([t["e0"], t["e1"]])),
    "stack last": (hf.stack(["e0", "e1"], dim=-1), lambda t: torch.stack([t["e0"], t["e1"]], -1)),
    "part": (hf.part("q", 0, 1, 3), lambda t: t["q"][1:3]),
    "select": (hf.select("t", 1, 2), lambda t: t["t"][:, 2]),
    "transpose": (hf.transpose("t", 0, -1), lambda t: t["t"].transpose(0, -1)),
    "all": (
        hf.stack([hf.transpose(hf.cat([hf.part(e, 0, 0, 2), hf.part(e, 0, 1, 3)]), 0, 1) for e in ("e0", "e1")]),
        lambda t: torch.stack([torch.cat([t[e][:2], t[e][1:]]).T for e in ("e0", "e1")]),
    ),
    "part of stack": (
        hf.part(hf.stack(["e0", "e1"], dim=1), 1, 1, 2),
        lambda t: torch.stack([t["e0"], t["e1"]], 1)[:, 1:2],
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_what_torch_computes(name: str) -> None:
    """Box by box in both directions: from tensors to the view, as load does it, and as save does it."""
    view, compute = VIEWS[name]
    expected = compute(TENSORS)
    shape, leaves = as_view(view).resolve(SHAPES.__getitem__)
    assert shape == tuple(expected.shape)
    for seed in range(30):
        draw = random.Random(seed)
        starts = tuple(draw.randint(0, size - 1) for size in shape)
        box = Box(starts, tuple(draw.randint(1, size - first) for size, first in zip(shape, starts, strict=True)))
        found = torch.full(box.sizes, float("nan"))
        for leaf in leaves:
            target = leaf.box.intersection(box)
            if target.numel:
                source = leaf.in_tensor(target)
                assert leaf.in_view(source) == target
                values = leaf.arrange(source.of(TENSORS[leaf.name], (0,) * TENSORS[leaf.name].dim()))
                target.of(found, box.starts).copy_(values)
        assert torch.equal(found, box.of(expected, (0,) * len(shape)))
    made = torch.full(shape, float("nan"))
    for leaf in leaves:
        source = TENSORS[leaf.name]
        for rows in itertools.pairwise(range((source.shape or (1,))[0] + 1)):
            box = whole_box(source.shape)
            if source.dim():
                box = Box((rows[0], *box.starts[1:]), (1, *box.sizes[1:]))
            found_box = leaf.in_view(box)
            if found_box is not None:
                own = box.of(source, (0,) * source.dim())
                part = leaf.in_tensor(found_box).of(own, box.starts)
                found_box.of(made, (0,) * len(shape)).copy_(leaf.arrange(part))
    assert torch.equal(made, expected)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (hf.cat(["q", "e0"]), r"cat: expected shapes that differ in dim 0 only"),
        (hf.stack(["q", "e0"]), "stack: expected shapes that differ in dim 0 only"),
        (hf.part("q", 0, 3, 9), "part: expected indices among 4 along dim 0, got 3 to 9"),
        (hf.part("q", 2, 0, 1), "part: expected a dim of 2, got 2"),
        (hf.transpose("q", 0, 3), "transpose: expected a dim of 2"),
    ],
)
def test_wrong_views(view: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        view.resolve(SHAPES.__getitem__)


def test_names_of_tensors_are_text() -> None:
    with pytest.raises(TypeError, match="expected the name of a tensor, or a view"):
        as_view(3)  # type: ignore[arg-type]


# ---- tables of names


@pytest.mark.parametrize(
    ("names", "fqn", "expected"),
    [
        (None, "a.b", "a.b"),
        ({"a.b": "c"}, "a.b", "c"),
        ({"a.b": "c"}, "a.bx", "a.bx"),
        ({"layers.{i}.w": "h.{i}.weight"}, "layers.12.w", "h.12.weight"),
        ({"layers.{i}.w": "x"}, "layers.1.2.w", "layers.1.2.w"),
        ({"model.{rest*}": "{rest}"}, "model.a.b.c", "a.b.c"),
        ({"l.{i}.{kind}": lambda i, kind: f"{kind}{int(i) + 1}"}, "l.3.up", "up4"),
        ({"a": None}, "a", None),
        (lambda fqn: fqn.upper(), "a", "A"),
    ],
)
def test_names_are_found(names: Names | None, fqn: str, expected: str | None) -> None:
    assert NameTable(names).find(fqn) == expected


def test_rows_that_match_nothing_are_refused() -> None:
    table = NameTable({"a": "b", "layer.{i}": "c"})
    table.find("a")
    with pytest.raises(ValueError, match=r"'layer\.\{i\}' matches none.* \{x\*\}"):
        table.refuse_unused()
    with pytest.raises(TypeError, match="names: expected a dict, a function or None, got list"):
        NameTable([])  # type: ignore[arg-type]


# ---- folders


def test_a_folder_takes_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own files go, others stay; leftovers of a killed save go. Also where folders can't be exchanged in one step."""
    for can_exchange in (True, False):
        if not can_exchange:
            monkeypatch.setattr("fsdp2.checkpoint.folders.exchange", lambda one, other: False)
        final = tmp_path / f"out [{can_exchange}]"
        (final / "runs").mkdir(parents=True)
        for name in (
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "config.json",
        ):
            (final / name).write_text("old")
        (final / "runs" / "log").write_text("old")
        (final / "latest").symlink_to("runs")
        left = [f".{final.name}.saving-{HOST}-{gone()}-{n:08x}" for n in range(2)]
        for name in left:
            (tmp_path / name / "below").mkdir(parents=True)
        new = NewFolder(final)
        (new.path / "model.safetensors").write_text("new")
        (new.path / "config.json").write_text("new")
        new.publish("model")
        texts = {path.name: path.read_text() for path in final.iterdir() if path.is_file()}
        assert texts == {"model.safetensors": "new", "config.json": "new", "tokenizer.json": "old"}
        assert (final / "runs" / "log").read_text() == "old"
        assert (final / "latest").is_symlink()
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def gone() -> int:
    """Returns the number of a process that has ended."""
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)
    return process


def test_what_is_left_of_saves(tmp_path: Path) -> None:
    """Of processes that have ended it goes; of another machine after a day; all else stays, and what still runs."""
    final = tmp_path / "out"
    left = [f".out.saving-{HOST}-{gone()}-0123abcd", ".out.saving-other-1-0123abcd"]
    others = [
        *(".out.saving-users-own", f".out.saving-{HOST}-1-0123abcd.bak", f".out2.saving-{HOST}-1-0123abcd"),
        *(".out.saving-young-host-1-0123abcd", ".out.previous-x-1-0123abcd"),
    ]
    for name in (*left, *others):
        (tmp_path / name).mkdir()
        if "young" not in name:
            os.utime(tmp_path / name, (0, 0))
    running = NewFolder(final)
    NewFolder(final).publish("model")
    assert sorted(os.listdir(tmp_path)) == sorted(["out", running.path.name, *others])
    running.publish("model")  # the last one wins
    assert sorted(os.listdir(tmp_path)) == sorted(["out", *others])


def test_folders_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="expected a folder, got a file"):
        NewFolder(tmp_path / "file")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for folder in (Path("."), tmp_path):
        with pytest.raises(ValueError, match="Pass a folder inside it"):
            NewFolder(folder)
    with pytest.raises(ValueError, match="a mount"):
        NewFolder(Path("/proc"))
