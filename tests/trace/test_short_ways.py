"""The ways from a user's call to a collective are short, and a steady-state step runs few different functions.

An expert who follows a forward with a debugger passes through each of these calls.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from helpers import fake_world

PACKAGE = str(Path(fsdp2.__file__).parent) + "/"
MODULES, ENGINE = str(Path(nn.Module.__call__.__code__.co_filename).parent), torch.autograd.graph.__file__

MAX_CALLS = 7
# One of them decides what stays after a forward, in place of conditions in three.
MAX_FUNCTIONS = 108
MAX_FILES = 20

STEPS_BEFORE = 9
"""After so many steps everything that is prepared once is there. The next is none of those at which checks are due."""

COLLECTIVES = {
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
    "allreduce",
}
"""Methods of a process group that launch what a training step needs."""

PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16/fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Watch:
    """What runs of the package while it is watched.

    `functions`: the code objects that ran. `ways`: (name of a collective, the package's functions on the stack when it
    was launched, outermost first).
    """

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.ways: list[tuple[str, list[CodeType]]] = []

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_ours(frame.f_code):
            self.functions.add(frame.f_code)
        # Python 3.12.1 tells of a method of C++ only when it returns.
        elif event == "c_return" and argument.__name__ in COLLECTIVES:
            self.ways.append((argument.__name__, stack_of(frame)))

    def files(self) -> set[str]:
        return {code.co_filename.removeprefix(PACKAGE) for code in self.functions}

    def without_comprehensions(self) -> set[CodeType]:
        """Returns the functions and methods. Before Python 3.12 a comprehension is a function of its own as well."""
        return {code for code in self.functions if code.co_name not in ("<listcomp>", "<setcomp>", "<dictcomp>")}

    def longest(self, kind: str) -> list[CodeType]:
        """Returns the longest way to a collective in whose name `kind` is."""
        ways = [way for name, way in self.ways if kind in name]
        assert ways, f"no {kind} was launched, but {sorted({name for name, _ in self.ways})}"
        return max(ways, key=len)


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE)


def stack_of(frame: FrameType | None) -> list[CodeType]:
    """Returns the package's functions on the stack, outermost first, since a module's own forward or autograd ran."""
    found: list[CodeType] = []
    while frame is not None and not is_foreign(frame.f_code):
        if is_ours(frame.f_code):
            found.append(frame.f_code)
        frame = frame.f_back
    return found[::-1]


def is_foreign(code: CodeType) -> bool:
    """Returns True for what is no part of a way: this file, modules of torch, and the caller of autograd's engine."""
    return code.co_filename.startswith((__file__, MODULES, ENGINE))


@contextmanager
def watched() -> Iterator[Watch]:
    watch = Watch()
    before = sys.getprofile()
    sys.setprofile(watch.note)
    try:
        yield watch
    finally:
        sys.setprofile(before)


def described(codes: Any) -> str:
    """Returns a line for each of them, with its file."""
    return "\n".join(f"  {code.co_filename.removeprefix(PACKAGE)}: {qualified(code)}" for code in codes)


def qualified(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # Python 3.10 has none


def sharded_model(precision: str) -> nn.Module:
    model = nn.Sequential(*[Block(32) for _ in range(4)])
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=PRECISIONS[precision])
    return fully_shard(model, mesh=mesh, mp_policy=PRECISIONS[precision])


@pytest.fixture(params=PRECISIONS, scope="module")
def steady_step(request: pytest.FixtureRequest) -> Watch:
    """Returns what runs in forward and backward of a step that has everything prepared, where no check is due."""
    with fake_world(64):
        model = sharded_model(request.param)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(2, 32)
        for _ in range(STEPS_BEFORE):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with watched() as watch:
            model(x).sum().backward()
    return watch


@pytest.mark.parametrize("kind", ["gather", "reduce_scatter"])
def test_the_way_to_a_collective_is_short(steady_step: Watch, kind: str) -> None:
    """From the call of a module, or from a gradient that autograd has computed, to the process group."""
    way = steady_step.longest(kind)
    assert len(way) <= MAX_CALLS, f"{len(way)} calls:\n{described(way)}"


def test_a_step_runs_few_different_functions(steady_step: Watch) -> None:
    """Functions, methods, lambdas and generators; comprehensions are parts of their functions, as in Python 3.12."""
    functions = sorted(steady_step.without_comprehensions(), key=lambda code: (code.co_filename, code.co_firstlineno))
    assert len(functions) <= MAX_FUNCTIONS, f"{len(functions)} functions:\n{described(functions)}"


def test_a_step_runs_functions_of_few_files(steady_step: Watch) -> None:
    files = sorted(steady_step.files())
    assert len(files) <= MAX_FILES, f"{len(files)} files: {', '.join(files)}"


def test_of_the_checks_a_step_runs_what_notices_at_once_and_what_counts(steady_step: Watch) -> None:
    found = {qualified(code) for code in steady_step.functions if code.co_filename.startswith(PACKAGE + "checks/")}
    assert {name.rpartition(".")[2] for name in found} == {"pass_began", "before_gather", "unsharded", "forward_ended"}
    assert len(found) == 5
    files = {name for name in steady_step.files() if name.startswith("checks/")}
    assert files == {"checks/due.py", "checks/lost_writes.py", "checks/named_comm.py"}


def test_no_function_is_missed(steady_step: Watch) -> None:
    """The counts are of a step that gathers and reduces: four blocks and no parameter of the root's own."""
    names = {code.co_name for code in steady_step.functions}
    assert {"all_gather", "reduce_scatter"} <= names
    gathers = [name for name, _ in steady_step.ways if "gather" in name]
    scatters = [name for name, _ in steady_step.ways if "scatter" in name]
    assert len(scatters) == 4
    assert 4 < len(gathers) <= 8, "the last block stays for backward, and others are gathered twice"


def test_each_function_on_the_way_counts() -> None:
    """Also those between which functions of torch, or of the standard library, are on the stack."""
    planted = """
def direct(group, whole, own):
    group._allgather_base(whole, own)

def around(*arguments):
    reduce(lambda _, each: each(*arguments), [direct], None)
"""
    names: dict[str, Any] = {"reduce": reduce}
    exec(compile(planted, PACKAGE + "engine/planted.py", "exec"), names)
    with fake_world(4), torch.no_grad():
        arguments = torch.distributed.group.WORLD, torch.zeros(4), torch.zeros(1)
        with watched() as watch:
            names["direct"](*arguments)
            torch.no_grad()(names["around"])(*arguments)
    found = [[code.co_name for code in way] for _, way in watch.ways]
    assert found == [["direct"], ["around", "<lambda>", "direct"]]
