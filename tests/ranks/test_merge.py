"""Tests `python -m fsdp2 merge`: checkpoints of torch.distributed.checkpoint become files of Hugging Face.

Ranks train and save a checkpoint; one process without ranks merges it. The oracle is the plain tensors of the ranks'
model, and the bytes that safetensors writes for these.
"""

import errno
import io
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard, hf
from fsdp2.__main__ import main
from fsdp2.checkpoint.stored import Checkpoint
from fsdp2.hf import save
from fsdp2.hf.files import read_checkpoint
from helpers import full, run_ranks
from models import MixedDtypes, OddMLP, TinyGPT
from safetensors_files import file_bytes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")


def saved(
    folder: Path, build: Callable[[], nn.Module], world_size: int = 2, replicas: int = 1, wrap: str = "plain"
) -> dict[str, Tensor]:
    """Has ranks save a checkpoint after a step of an optimizer. Returns the full tensors of the model.

    `wrap`: "plain": {"model", "optimizer", "step"}; "whole": the model's state dict alone; "app": in a further dict.
    """

    def body(rank: int, size: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = build()
        mesh = init_device_mesh("cpu", (replicas, size // replicas)) if replicas > 1 else None
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        state: Any = {"model": weights, "optimizer": moments, "step": 1}
        dcp.save({"plain": state, "whole": weights, "app": {"app": state}}[wrap], checkpoint_id=folder)
        return {name: full(each).detach().clone() for name, each in weights.items()}

    return run_ranks(world_size, body)[0]  # type: ignore[no-any-return]


def in_files(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of safetensors files."""
    found = {}
    for name, each in read_checkpoint(folder).tensors.items():
        with Path(each.file).open("rb") as file:
            file.seek(each.start)
            data = bytearray(file.read(each.nbytes))
        flat = torch.frombuffer(data, dtype=each.dtype) if data else torch.empty(0, dtype=each.dtype)
        found[name] = flat.view(each.shape)
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype
        assert (
            torch.equal(found[name].view(torch.uint8), each.reshape(each.shape).contiguous().view(torch.uint8))
            if (each.dim())
            else torch.equal(found[name], each)
        ), name


@pytest.mark.parametrize("wrap", ["plain", "whole", "app"])
@pytest.mark.parametrize("build", [OddMLP, TinyGPT, MixedDtypes])
def test_one_file_has_the_bytes_of_safetensors(build: Callable[[], nn.Module], wrap: str, tmp_path: Path) -> None:
    expected = saved(tmp_path / "checkpoint", build, wrap=wrap)
    assert not dist.is_initialized()
    report = hf.merge_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == file_bytes(expected)
    assert report.num_tensors == len(expected)
    assert report.nbytes == sum(each.nbytes for each in expected.values())
    assert all("optimizer" in name or "step" in name for name in report.left_out)
    assert bool(report.left_out) == (wrap != "whole")


def test_replicas_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    expected = saved(tmp_path / "checkpoint", TinyGPT, 4, replicas=2)
    hf.merge_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert_equal(in_files(tmp_path / "out"), expected)


def test_several_files_and_another_dtype(tmp_path: Path) -> None:
    """As save_model writes them; memory holds one piece of a tensor at a time."""
    expected = saved(tmp_path / "checkpoint", lambda: TinyGPT(depth=2))
    most = max(each.nbytes for each in expected.values())
    read: list[int] = []
    function = Checkpoint.read

    def counted(reader: Checkpoint, name: str, target: Tensor, starts: Sequence[int]) -> None:
        read.append(target.nbytes)
        function(reader, name, target, starts)

    with (
        mock.patch.object(save, "BUCKET_NBYTES", 256),
        mock.patch.object(Checkpoint, "read", counted),
    ):
        report = hf.merge_checkpoint(tmp_path / "checkpoint", tmp_path / "out", torch.bfloat16, most)
    assert len(report.files) > 1
    assert len(read) > 1
    assert max(read) <= 2 * 256, "a bucket of bfloat16 is read as float32"
    assert sum(read) == sum(each.nbytes for each in expected.values())
    assert_equal(in_files(tmp_path / "out"), {name: each.bfloat16() for name, each in expected.items()})
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()

    plain = TinyGPT(depth=2)
    plain.load_state_dict(expected)
    hf.save_model(plain, tmp_path / "plain", torch.bfloat16, most)
    for path in (tmp_path / "plain").iterdir():
        assert {*in_files(tmp_path / "out")} == {*in_files(tmp_path / "plain")}
        assert path.suffix in (".json", ".safetensors")


def test_names_and_other_files(tmp_path: Path) -> None:
    expected = saved(tmp_path / "checkpoint", OddMLP)
    (tmp_path / "out").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (tmp_path / "out" / name).write_text(name)
    first, *_ = expected
    names = {first: "", "{x*}": "model.{x}"}
    report = hf.merge_checkpoint(tmp_path / "checkpoint", tmp_path / "out", names=names)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert_equal(in_files(tmp_path / "out"), {f"model.{n}": each for n, each in expected.items() if n != first})
    assert f"model.{first}" in report.left_out


def test_load_model_reads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What merge writes, load_model reads. The folder has a path with dots here."""
    expected = saved(tmp_path / "checkpoint", TinyGPT)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    hf.merge_checkpoint("../checkpoint", "../out")
    again = TinyGPT()
    hf.load_model(again, tmp_path / "out")
    assert_equal(dict(again.state_dict()), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"key": "optimizer.nothing"}, ValueError, "key: expected a key of a dict with tensors"),
        ({"names": {"nothing": "x"}}, ValueError, "'nothing' matches none"),
        ({"names": lambda name: "same"}, ValueError, "another name for each tensor, got 'same'"),
        ({"names": lambda name: None}, ValueError, "got none for all of them"),
        ({"dtype": torch.int8}, TypeError, "expected a floating-point torch.dtype"),
        ({"max_shard_size": "much"}, ValueError, "max_shard_size"),
    ],
)
def test_errors_leave_the_folder(arguments: Any, error: type[Exception], text: str, tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", OddMLP)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("before")
    with pytest.raises(error, match=text):
        hf.merge_checkpoint(tmp_path / "checkpoint", tmp_path / "out", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"]
    assert (tmp_path / "out" / "model.safetensors").read_text() == "before"


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, what in (("empty", "a folder without it"), ("missing", "no such folder")):
        with pytest.raises(FileNotFoundError, match=f"with a file .metadata; got {what}"):
            hf.merge_checkpoint(tmp_path / name, tmp_path / "out")
    saved(tmp_path / "checkpoint", OddMLP)
    for file in (tmp_path / "checkpoint").glob("*.distcp"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="distcp"):
        hf.merge_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- folders from elsewhere


@pytest.fixture(scope="module")
def of_odd_mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint for tests that change copies of it, and the tensors of the model."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    return folder, saved(folder, OddMLP)


class _Calls:
    """Is pickled as the call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def change_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))


def _attribute_of_a_function(_: Any) -> Any:
    """`Metadata.__init__.__globals__`, by the names with dots that a pickle may have."""
    from torch.distributed.checkpoint.metadata import Metadata

    return _Calls(getattr, Metadata, "__init__")


def _as_a_tensor(metadata: Any) -> None:
    """An object that says that it is a tensor: torch would read it by torch.load(weights_only=False)."""
    stored = metadata.state_dict_metadata
    stored["step"].__dict__.update(stored["model.wide.weight"].__dict__)
    stored["model.wide.weight"] = stored["step"]


def _in_another_folder(metadata: Any) -> None:
    for each in metadata.storage_data.values():
        each.relative_path = "../evil.pt"


HOSTILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "instead of the metadata": (lambda _: _Calls(os.mkdir, "ran"), r"names posix\.mkdir, which .* nothing was called"),
    "builtins": (lambda _: _Calls(eval, "__import__('os').mkdir('ran')"), r"names builtins\.eval"),
    "deep inside": (lambda found: found.planner_data.update(x=_Calls(os.mkdir, "ran")), r"names posix\.mkdir"),
    "a function of torch": (lambda _: _Calls(torch.load, "evil.pt", None, None), r"names torch\.serialization\.load"),
    "attributes": (_attribute_of_a_function, "which is no value of an Enum"),
    "an object as a tensor": (_as_a_tensor, "expected"),
    "files elsewhere": (
        _in_another_folder,
        r"a file outside of the folder for model\.\S+, .*evil\.pt",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_metadata_runs_nothing(kind: str, of_odd_mlp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(of_odd_mlp[0], tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    torch.save(_Calls(os.mkdir, "ran"), "evil.pt")
    change, text = HOSTILE[kind]
    change_metadata(tmp_path / "checkpoint", change)
    if kind == "an object as a tensor":  # is left out, as all that is no tensor
        assert "model.wide.weight" in hf.merge_checkpoint("checkpoint", "out").left_out
    else:
        with pytest.raises(ValueError, match=f"checkpoint.*{text}"):
            hf.merge_checkpoint("checkpoint", "out")
        assert not Path("out").exists()
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["step", "model.wide.weight"])
def test_entries_run_nothing(name: str, of_odd_mlp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no tensor is not read, and the bytes of a tensor are read as a tensor only."""
    source, expected = of_odd_mlp
    shutil.copytree(source, tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    evil = io.BytesIO()
    torch.save(_Calls(os.mkdir, "ran"), evil)
    Path("checkpoint/evil.distcp").write_bytes(evil.getvalue().ljust(1 << 16, b"\0"))

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                info.relative_path, info.offset = "evil.distcp", 0
                info.length = max(info.length, len(evil.getvalue()))

    change_metadata(Path("checkpoint"), change)
    if name == "step":
        hf.merge_checkpoint("checkpoint", "out")
        assert_equal(in_files(Path("out")), expected)
    else:
        with pytest.raises(ValueError, match=r"evil\.distcp: model\.wide\.weight: expected a tensor of shape"):
            hf.merge_checkpoint("checkpoint", "out")
    assert not Path("ran").exists()


def truncated(folder: Path) -> None:
    for file in folder.glob("__1*.distcp"):
        file.write_bytes(file.read_bytes()[:100])


def overwritten(folder: Path) -> None:
    for file in folder.glob("__1*.distcp"):
        file.write_bytes(b"x" * file.stat().st_size)


def fifo(folder: Path) -> None:
    for file in folder.glob("__1*.distcp"):
        file.unlink()
        os.mkfifo(file)


def without_a_part(metadata: Any) -> None:
    metadata.state_dict_metadata["model.wide.weight"].chunks.pop()


def huge(metadata: Any) -> None:
    stored = metadata.state_dict_metadata["model.wide.weight"]
    stored.size = torch.Size([1 << 40])
    stored.chunks = [ChunkStorageMetadata(torch.Size([0]), stored.size)]


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncated, r"__1_0\.distcp: model\.\S+: expected it at bytes \d+ to \d+, but the file has 100"),
    "overwritten": (
        overwritten,
        r"__1_0\.distcp: model\.\S+: expected a tensor of shape .* as torch.save writes it, got something",
    ),
    "fifo": (fifo, r"__1_0\.distcp: expected a regular file, got a FIFO"),
    "empty metadata": (lambda folder: (folder / ".metadata").write_bytes(b""), r"\.metadata: expected .*\(EOFError"),
    "garbage": (lambda folder: (folder / ".metadata").write_bytes(b"h\x65garbage"), r"\.metadata: expected .*damaged"),
    "a list": (lambda folder: change_metadata(folder, lambda _: [1]), r"\.metadata: expected .* got list"),
    "no tensors": (
        lambda folder: change_metadata(folder, lambda found: found.state_dict_metadata.update(x=3)),
        r"\.metadata: .* got no dict of tensors",
    ),
    "no places": (
        lambda folder: change_metadata(folder, lambda found: found.storage_data.clear()),
        r"\.metadata: .*model\.\S+: expected \d+ elements for shape .* in 0 bytes of files",
    ),
    "a part is missing": (
        lambda folder: change_metadata(folder, without_a_part),
        r"\.metadata: .*model\.wide\.weight: expected \d+ elements for shape",
    ),
    "a huge shape": (lambda folder: change_metadata(folder, huge), r"model\.wide\.weight: expected 1099511627776 el"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_checkpoints(
    kind: str, of_odd_mlp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each ends with the file and the tensor, on the command line in one line; and nothing is written."""
    shutil.copytree(of_odd_mlp[0], tmp_path / "checkpoint")
    damage, text = DAMAGED[kind]
    damage(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=text):
        hf.merge_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
    monkeypatch.setattr(sys, "argv", ["fsdp2", "merge", str(tmp_path / "checkpoint"), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert re.search(f"error: .*{text}", capsys.readouterr().err)


def test_what_the_error_advises(of_odd_mlp: Any, tmp_path: Path) -> None:
    """Torch reads a folder of one's own whose metadata names a class of one's own."""
    source, expected = of_odd_mlp
    shutil.copytree(source, tmp_path / "checkpoint")
    change_metadata(tmp_path / "checkpoint", lambda found: setattr(found, "version", Fraction(1)))
    with pytest.raises(ValueError, match=r"names fractions\.Fraction.*dcp_to_torch_save\(folder, file\)"):
        hf.merge_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "model.pt")
    assert_equal(torch.load(tmp_path / "model.pt")["model"], expected)


def test_a_full_disk(of_odd_mlp: Any, tmp_path: Path) -> None:
    shutil.copytree(of_odd_mlp[0], tmp_path / "checkpoint")

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with (
        mock.patch.object(
            Path, "open", lambda path, mode, real=Path.open: Full() if mode == "xb" else real(path, mode)
        ),
        pytest.raises(OSError, match=r"No space left on device; .* need [\d,]+ bytes in: '.*out'"),
    ):
        hf.merge_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    expected = saved(tmp_path / "checkpoint", OddMLP)
    command = ["fsdp2", "merge", str(tmp_path / "checkpoint"), str(tmp_path / "out")]
    for more, code in (
        (["--dtype", "bfloat16", "--rename", "{x*}=net.{x}", "--key", "model"], 0),
        (["--rename", "x"], 2),
        (["--key", "nothing"], 2),
    ):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
    shown = capsys.readouterr()
    assert f"{len(expected)} tensors, " in shown.out
    assert "left out: optimizer.state." in shown.out
    assert "expected OLD=NEW, got 'x'" in shown.err
    assert "there are model" in shown.err
    assert_equal(in_files(tmp_path / "out"), {f"net.{name}": each.bfloat16() for name, each in expected.items()})
