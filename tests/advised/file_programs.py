"""Follows the advice of errors of fsdp2.hf."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from advised.registry import Net, build, compared, follows, refused, same, same_parameters, shard
from fsdp2 import full_params, hf, sync_module_states
from safetensors_files import file_bytes


def new_folder() -> Path:
    """Returns a folder that all ranks share, and that exists."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    return Path(name[0])


def by_first(write: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        write()
    dist.barrier()


def files_of(plain: Any, **changes: Any) -> Path:
    """Returns a folder with the tensors of a plain model, some changed, or left out (None)."""
    folder = new_folder()
    tensors = {name.replace("__", "."): value for name, value in changes.items()}
    state = {name: value for name, value in {**plain.state_dict(), **tensors}.items() if value is not None}
    by_first(lambda: (folder / "model.safetensors").write_bytes(file_bytes(state)))
    return folder


@follows("An interrupted save has left the previous one as {}: rename it", "got both. Remove the stale one")
def folders_that_are_left() -> None:
    plain = build()
    good = files_of(plain)
    gone = good.parent / f"{good.name}-x"
    left = good.parent / f"{gone.name}.previous"
    by_first(lambda: os.rename(good, left))
    model = shard(build(seed=1))
    text = refused(lambda: hf.load_model(model, gone))
    assert str(left) in text
    by_first(lambda: os.rename(left, gone))
    hf.load_model(model, gone)
    same_parameters(model, plain)
    stale = gone / "model.safetensors.index.json"
    by_first(lambda: stale.write_text('{"weight_map": {}}'))
    refused(lambda: hf.load_model(model, gone))
    by_first(stale.unlink)
    hf.load_model(model, gone)
    same_parameters(model, plain)


@follows("or the folder that the program works in, does not allow. Pass a folder inside it")
def saved_where_the_program_works() -> None:
    model, here = shard(build()), Path.cwd()
    folder = new_folder()
    os.chdir(folder)
    try:
        refused(lambda: hf.save_model(model, folder))
        hf.save_model(model, folder / "inside")
    finally:
        os.chdir(here)
    again = shard(build(seed=2))
    hf.load_model(again, folder / "inside")
    same_parameters(again, build())


@follows(
    "If the files call them otherwise, pass names=",
    "Build the model from the configuration of the files",
    "Give the model that dtype, or leave it out by names= (None)",
)
def files_of_another_model() -> None:
    plain = build()
    folder = files_of(plain, head__weight=None, out__weight=plain.head.weight.data)
    refused(lambda: hf.load_model(shard(build(seed=1)), folder))
    model = shard(build(seed=1))
    hf.load_model(model, folder, names={"head.weight": "out.weight"})
    same_parameters(model, plain)
    model = shard(build(seed=1))
    report = hf.load_model(model, folder, strict=False)
    assert "head.weight" in str(report)
    same(model.head.weight.detach(), build(seed=1).head.weight.detach(), "left out")
    same(model.stem.weight.detach(), plain.stem.weight.detach(), "loaded")

    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 4)

    refused(lambda: hf.load_model(shard(build(Wider)), files_of(plain)))
    model = shard(build(seed=1))
    hf.load_model(model, files_of(plain))
    same_parameters(model, plain)
    folder = files_of(plain, head__bias=torch.tensor([1, 2, 3]))

    class Counts(Net):
        def __init__(self, dtype: Any) -> None:
            super().__init__()
            del self.head.bias
            self.head.register_buffer("bias", torch.zeros(3, dtype=dtype))

    for dtype in (torch.bool, torch.int64):
        model = shard(build(lambda dtype=dtype: Counts(dtype)))
        if dtype is torch.bool:
            refused(lambda model=model: hf.load_model(model, folder))
            hf.load_model(model, folder, names={"head.bias": None})
            same(model.stem.weight.detach(), plain.stem.weight.detach(), "left out")
        else:
            hf.load_model(model, folder)
            assert model.head.bias.tolist() == [1, 2, 3]


@follows("Pass init=, a function that is called with their module; or strict=False, and compute them")
def buffers_that_no_file_has() -> None:
    class Rotated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.zeros(3), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.angles

    def fill(module: Any) -> None:
        if "angles" in module._buffers:
            module.angles.copy_(torch.arange(3.0))

    folder = files_of(build())

    def on_meta() -> Any:
        with torch.device("meta"):
            return shard(Rotated())

    refused(lambda: hf.load_model(on_meta(), folder))
    for options in ({"init": fill}, {"strict": False}):
        model = on_meta()
        hf.load_model(model, folder, **options)
        if "strict" in options:
            fill(model)
        same(model.angles, torch.arange(3.0), "angles")
        same_parameters(model, build())


@follows("Untie them in the model, or leave one out by names= (None)")
def tied_weights_that_differ_in_files() -> None:
    class Tied(Net):
        def __init__(self, tied: bool = True) -> None:
            super().__init__()
            self.again = nn.Linear(5, 5)
            if tied:
                self.again.weight = self.stem.weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.again(x))

    plain = build(lambda: Tied(False))
    folder = files_of(plain)
    refused(lambda: hf.load_model(shard(build(Tied, seed=1)), folder))
    model = shard(build(lambda: Tied(False), seed=1))
    hf.load_model(model, folder)
    same_parameters(model, plain)
    model = shard(build(Tied, seed=1))
    hf.load_model(model, folder, names={"again.weight": None})
    same(model.stem.weight.detach(), plain.stem.weight.detach(), "stem")


@follows("found none. Use save_model", "Load or initialise the model first")
def saved_without_adapters_or_values() -> None:
    model, folder = shard(build()), new_folder()
    refused(lambda: hf.save_adapter(model, folder / "adapter"))
    with torch.device("meta"):
        empty = shard(Net())
    refused(lambda: hf.save_model(empty, folder / "empty"))
    hf.save_model(model, folder / "model")
    hf.load_model(empty, folder / "model")
    hf.save_model(empty, folder / "again")
    same_parameters(empty, build())
    assert (folder / "model" / "model.safetensors").read_bytes() == (
        folder / "again" / "model.safetensors"
    ).read_bytes()


@follows("Pass dtype=, or convert it")
def dtypes_that_files_lack() -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        return
    model, folder = shard(build()), new_folder()
    model.register_buffer("table", torch.zeros(4, dtype=torch.complex128))
    refused(lambda: hf.save_model(model, folder / "one"))
    model.table = torch.zeros(4, dtype=torch.complex64)
    hf.save_model(model, folder / "two")
    again = shard(build(seed=1))
    again.register_buffer("table", torch.ones(4, dtype=torch.complex64))
    hf.load_model(again, folder / "two")
    same_parameters(again, build())
    assert not again.table.any()


@follows(
    "If each rank has a tensor of its own (experts), make it a DTensor on the axis of these ranks before fully_shard",
    "if it should be equal, call sync_module_states",
)
def values_that_differ() -> None:
    def with_extra(value: Tensor) -> Any:
        model = build()
        model.extra = nn.Parameter(value, requires_grad=False)
        return model

    rank, folder, mesh = dist.get_rank(), new_folder(), init_device_mesh("cpu", (2,))
    own_value = torch.full((2, 3), float(rank))
    model = with_extra(own_value.clone())
    shard(model.block)
    refused(lambda: hf.save_model(model, folder / "one"))
    sync_module_states(model)
    hf.save_model(model, folder / "equal")
    again = with_extra(torch.ones(2, 3))
    hf.load_model(again, folder / "equal")
    same(again.extra.detach(), torch.zeros(2, 3), "equal")
    model = with_extra(own_value)
    model.extra = nn.Parameter(DTensor.from_local(own_value, mesh, [Shard(0)]), requires_grad=False)
    shard(model.block)
    hf.save_model(model, folder / "experts")
    again = with_extra(torch.ones(4, 3))
    hf.load_model(again, folder / "experts")
    same(again.extra.detach(), torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None].expand(4, 3), "experts")


@follows("Convert it afterwards, or take it out meanwhile", "{}: {}. Call it between steps")
def tensors_that_are_not_dense() -> None:
    model, folder = shard(build()), new_folder()
    model.register_buffer("table", torch.eye(3).to_sparse())
    refused(lambda: hf.save_model(model, folder / "one"))
    table = model.table
    del model.table
    hf.save_model(model, folder / "one")
    model.register_buffer("table", table)
    with full_params(model, offload_to_cpu=True):
        refused(lambda: hf.save_model(model, folder / "two"))
    again = shard(build(seed=1))
    hf.load_model(again, folder / "one")
    same_parameters(again, build())
    model = build()
    model.register_buffer("table", table)
    model.table = model.table.to_dense()
    hf.save_model(shard(model), folder / "three")
    compared.append("converted")


@follows("Pass key=", ranks=0)
def checkpoints_of_several_models() -> None:
    folder = Path(tempfile.mkdtemp())
    first, second = build(), build(seed=1)
    complex_ = torch.ones(3, dtype=torch.complex128)
    state = {"first": first.state_dict(), "second": {**second.state_dict(), "odd": complex_}}
    dcp.save(state, checkpoint_id=folder / "checkpoint", no_dist=True)
    refused(lambda: hf.merge_checkpoint(folder / "checkpoint", folder / "out"))
    hf.merge_checkpoint(folder / "checkpoint", folder / "out", key="first")
    again = build(seed=2)
    hf.load_model(again, folder / "out")
    same_parameters(again, first)
    refused(lambda: hf.merge_checkpoint(folder / "checkpoint", folder / "out", key="second"))
    hf.merge_checkpoint(folder / "checkpoint", folder / "out", key="second", names={"odd": ""})
    hf.load_model(again, folder / "out")
    same_parameters(again, second)
