"""Digests do not depend on how groups are cut, and one flipped bit is found: between replicas by the next check that is
due, and between two runs, or the ranks of one, in its step, by `python -m fsdp2 diff`.

The oracle of digests is the hash in Python's integers, of the whole tensors.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2 import fully_shard, replicate
from fsdp2.checks.digest_files import first_difference, main, read_run
from fsdp2.checks.digests import digests_of
from fsdp2.engine.events import Observer
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.state import groups_below, require_state
from fsdp2.parameters.checksum import PART, digest
from helpers import full, run_ranks

MASK = (1 << 64) - 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale  # type: ignore[no-any-return]


def shard(sizes: tuple[int, ...], how: str = "") -> Any:
    torch.manual_seed(0)
    model, mesh = Net(), init_device_mesh("cpu", sizes)
    if how == "replicate":
        return replicate(model, mesh=mesh)
    options = {"shard_placement_fn": lambda param: Shard(param.dim() - 1)} if how == "last dim" else {}
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh, **(options if part is not model else {}))
    return model


# ---- the digest


def by_integers(tensor: Tensor, first: int) -> int:
    """Returns the digest of a whole tensor, as `digest` says it, element by element."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = 0
    for i, bits in enumerate(tensor.detach().contiguous().view(kind).flatten().tolist()):
        mixed = ((first + i) * 0x2545F4914F6CDD1D + bits * 0x1E3779B97F4A7C15) & MASK
        total += mixed ^ mixed >> 32
    return total & MASK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_digest_of_a_tensor(dtype: torch.dtype) -> None:
    whole = torch.randn(9, 11, dtype=torch.float64).to(dtype)
    assert int(digest(whole, 5)) & MASK == by_integers(whole, 5)
    rows = sum(int(digest(part, 11 * i)) for i, part in zip((0, 2, 3), whole.split([2, 1, 6]), strict=True))
    columns = sum(
        int(digest(part, i, part.size(1), 11)) for i, part in zip((0, 4), whole.split([4, 7], 1), strict=True)
    )
    assert rows & MASK == columns & MASK == int(digest(whole)) & MASK
    large = torch.randn(200_000).to(dtype)  # several chunks
    assert int(digest(large)) & MASK == by_integers(large, 0)


@pytest.mark.parametrize(
    ("ranks", "sizes", "how"), [(1, (1,), ""), (2, (2,), "last dim"), (4, (4,), ""), (4, (2, 2), "")]
)
def test_digests_of_shards_add_up_to_that_of_the_whole(ranks: int, sizes: tuple[int, ...], how: str) -> None:
    def told(_: int, __: int) -> dict[str, tuple[int, int]]:
        model = shard(sizes, how)
        optimizer = torch.optim.AdamW(model.parameters())
        torch.manual_seed(0)
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        found = {}
        for group in groups_below(model):
            wholes: dict[str, int] = {}
            for i, param in enumerate(group.params):
                own = {"weight": param.sharded, "gradient": param.sharded.grad, **optimizer.state[param.sharded]}
                for kind, tensor in own.items():
                    if isinstance(tensor, DTensor):
                        wholes[kind] = wholes.get(kind, 0) + by_integers(full(tensor), i * PART)
            digests = digests_of(group, [optimizer.state])
            for kind in wholes:
                total = torch.stack([torch.zeros((), dtype=torch.int64), *digests.get(kind, [])]).sum()
                dist.all_reduce(total, group=group.mesh.shard_group)
                found[f"{group.name} {kind}"] = int(total) & MASK, wholes[kind] & MASK
        return found

    for of_rank in run_ranks(ranks, told):
        assert len(of_rank) == 3 * 4
        for name, (got, expected) in of_rank.items():
            assert got == expected, name


# ---- planted flips


def flip(tensor: Tensor) -> None:
    """Flips the lowest bit of the first element that this rank holds."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    with torch.no_grad():
        local.view(torch.int32).view(-1)[:1].bitwise_xor_(1)


class FlipsReceived(Observer):
    """Flips a bit of what a group has gathered, once, before its digest is taken."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name

    def unsharded(self, group: FSDPParamGroup) -> None:
        if group.name == self.name:
            self.name = None
            flip(torch.empty(0, dtype=torch.int32).set_(group.unsharded.storage, 0, (1,)))  # type: ignore[call-overload]


Fault = tuple[str, int, int]
"""What is flipped of the group `second`, in which step, and on which rank."""


def run(folder: Path, sizes: tuple[int, ...], steps: range, fault: Fault | None = None, every: int | None = 1) -> None:
    model = shard(sizes)
    kind, at, on = fault or ("", 0, 0)
    is_here = dist.get_rank() == on
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    flips = FlipsReceived("second")
    model(torch.zeros(1, 5))  # builds the root
    log = fsdp2.DigestLog(model, optimizer, folder, every=every)
    for step in steps:
        if (kind, is_here, at) == ("received weights", True, step):
            events = require_state(model).root.events
            events.set_observers((flips, *events.observers))
        source = torch.Generator().manual_seed(step)
        rows = [torch.randn(2, 5, generator=source) for _ in range(4)]
        with fsdp2.accumulate(model, sync="each", global_batches=4) as acc:
            for i in acc.batches:
                acc.backward(model(rows[i]).square().sum(), weight=2)
        if (kind, is_here, at) == ("gradient", True, step):
            flip(model.second.weight.grad)
        optimizer.step()
        if (kind, is_here, at) == ("weight", True, step):
            flip(model.second.weight)
        if (kind, is_here, at) == ("exp_avg", True, step):
            flip(optimizer.state[model.second.weight]["exp_avg"])
        assert log.record(step) is (every == 1 or step in (1, 2, 4, 8))
        optimizer.zero_grad()


def test_a_flipped_bit_is_found_in_its_step_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults: dict[str, Fault] = {each.split()[0]: (each, 3, 1) for each in KINDS}

    def runs(*_: Any) -> None:
        run(tmp_path / "right", (2,), range(1, 6))
        for name, fault in faults.items():
            run(tmp_path / name, (2,), range(1, 6), fault)

    run_ranks(2, runs)
    for name, (kind, _, _) in faults.items():
        assert main([str(tmp_path / "right"), str(tmp_path / name)]) == 1
        told = capsys.readouterr().out
        assert told.startswith(f"first differs: second, {kind}, step 3, rank"), told
        ranks = "0, 1" if kind == "received weights" else "1"  # one of two that have received the same
        assert f"{ranks} (" in told
        assert "equal in 2 recorded steps before, the last is 2" in told
    assert main([str(tmp_path / "right")]) == 0
    assert main([str(tmp_path / "received")]) == 1
    assert "ranks of run 1 hold different bits" in capsys.readouterr().out
    assert main([str(tmp_path / "right"), str(tmp_path / "no such run")]) == 2


KINDS = ("received weights", "gradient", "exp_avg", "weight")


def test_runs_on_other_numbers_of_ranks_have_the_same_digests(tmp_path: Path) -> None:
    run_ranks(4, lambda *_: run(tmp_path / "four", (2, 2), range(1, 5)))
    run_ranks(1, lambda *_: run(tmp_path / "one", (1,), range(1, 5)))
    run_ranks(2, lambda *_: run(tmp_path / "flipped", (2,), range(1, 5), ("gradient", 4, 0)))
    four, one, flipped = (read_run(tmp_path / name) for name in ("four", "one", "flipped"))
    assert len(four) == 4
    assert first_difference(four, one) is None
    found = first_difference(one, flipped)
    assert found is not None
    assert (found.group, found.kind, found.step, [*found.ranks]) == ("second", "gradient", 4, [])
    assert "of all ranks together" in str(found)


def test_ranks_of_one_run_are_compared_where_most_of_them_agree(tmp_path: Path) -> None:
    run_ranks(4, lambda *_: run(tmp_path, (4, 1), range(1, 4), ("weight", 2, 3)))
    found = first_difference(read_run(tmp_path))
    assert found is not None
    assert (found.group, found.kind, found.step, found.ranks) == ("second", "weight", 2, [3])


def test_files_of_a_run_that_was_interrupted(tmp_path: Path) -> None:
    def write(rank: int, size: int, *lines: str) -> None:
        with open(tmp_path / f"rank-{rank}-of-{size}.jsonl", "a") as file:
            file.write("\n".join([json.dumps({"groups": [["root", rank, 0]]}), *lines]) + "\n")

    write(0, 1, '{"step":1,"weight":[5]}', '{"step":2,"weight":[7]}', '{"step":3,"wei')
    assert {step: found["weight", "root"][0].digest for step, found in read_run(tmp_path).items()} == {1: 5, 2: 7}
    write(0, 1, '{"step":2,"weight":[8]}')
    assert read_run(tmp_path)[2]["weight", "root"][0].digest == 8
    for rank in range(2):
        write(rank, 2, '{"step":2,"weight":[4]}')
    found = read_run(tmp_path)
    assert [part.digest for part in found[2]["weight", "root"].values()] == [4, 4], "on two ranks, later"
    assert len(found[1]["weight", "root"]) == 1


def test_replicas_are_compared_when_checks_are_due() -> None:
    def flipped(find: Callable[[Any, Any], Tensor], how: str) -> str:
        model = shard((2, 2)) if how == "" else shard((4,), how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(1, 30):
            try:
                model(torch.randn(2, 5)).sum().backward()
            except RuntimeError as error:
                return f"step {step}: {error}"
            optimizer.step()
            if step == 5 and dist.get_rank() == 3:
                flip(find(model, optimizer))
            optimizer.zero_grad()
        return ""

    def texts(_: int, __: int) -> list[str]:
        return [
            flipped(lambda model, _: torch.zeros(1), ""),
            flipped(lambda model, _: model.second.weight, ""),
            flipped(lambda model, optimizer: optimizer.state[model.second.weight]["exp_avg_sq"], ""),
            flipped(lambda model, _: model.second.weight, "replicate"),
        ]

    for rank, (right, weight, moment, replicated) in enumerate(run_ranks(4, texts)):
        assert right == ""
        for text, group, kind in (
            (weight, "second", "weight"),
            (moment, "second", "exp_avg_sq"),
            (replicated, "root", "weight"),
        ):
            assert f"{group}: expected the same bits on ranks that replicate it, got of its {kind}" in text, rank
            assert 6 <= int(text.split()[1][:-1]) <= 9, text


def test_wrong_arguments(tmp_path: Path) -> None:
    def refused(_: int, __: int) -> None:
        model = shard((1,))
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(ValueError, match="every: expected at least 1, got 0"):
            fsdp2.DigestLog(model, optimizer, tmp_path, every=0)
        with pytest.raises(TypeError, match="every: expected an int or None"):
            fsdp2.DigestLog(model, optimizer, tmp_path, every=1.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="step: expected an int"):
            fsdp2.DigestLog(model, optimizer, tmp_path).record(1.0)  # type: ignore[arg-type]
        run(tmp_path, (1,), range(1, 10), every=None)

    run_ranks(1, refused)
    assert [*read_run(tmp_path)] == [1, 2, 4, 8]
