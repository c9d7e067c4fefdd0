"""Tests the Python of README.md and of the guides in examples/guides, which is run as it is written.

Each snippet of a guide runs after the lines that all share, in its own folder, on ranks that have different
seeds. A check here then compares its result with plain training on the whole batch. A snippet without a check, and a
check without a snippet, fail. Snippets that need Transformers and similar libraries run in
tests/clients/test_client_guides.py.
"""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from documents import ROOT, Code, clients_of, code_blocks, shared_lines, snippets
from fsdp2.checks.digest_files import main, read_run
from fsdp2.compression import Compression
from fsdp2.hf.files import read_checkpoint
from helpers import NIGHTLY, alone, assert_same, full, run_checks
from programs import run_forked

GROUND, SNIPPETS = shared_lines(), snippets()
Names = dict[str, Any]
CHECKS: dict[str, tuple[int, Callable[[Names], None]]] = {}
BY_CLIENTS = {block.heading for block in SNIPPETS if clients_of(block)}


def guide(heading: str, ranks: int = 2) -> Callable[[Callable[[Names], None]], Callable[[Names], None]]:
    """The check is called with the names that the snippets under `heading` have defined, on each rank."""

    def add(check: Callable[[Names], None]) -> Callable[[Names], None]:
        CHECKS[heading] = (ranks, check)
        return check

    return add


def run_guide(heading: str, folder: Path) -> Names:
    os.chdir(folder)  # snippets write to folders of their own
    names: Names = {"__name__": heading}
    exec(GROUND.compiled(), names)
    torch.manual_seed(dist.get_rank())  # what a snippet doesn't seed differs between ranks
    for block in (block for block in SNIPPETS if block.heading == heading):
        exec(block.compiled(), names)
    return names


# ---- plain training ------------------------------------------------------------------------------------------------


def whole(step: int, ranks: int) -> Tensor:
    """The rows of all ranks, as `batch` of the shared lines gives each its own."""
    parts = [torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1000 * step + r)) for r in range(ranks)]
    return torch.cat(parts)


def plain_model(names: Names, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return names["Model"]()


def trained(names: Names, steps: int, accumulated: int = 1, clip: float | None = None) -> Any:
    """The model of the shared lines after `steps` of AdamW on the batches of all ranks. With `clip` it has the last
    norm of its gradients as `norm`.
    """
    model: Any = plain_model(names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10) if clip else None
    for step in range(steps):
        for i in range(accumulated):
            tokens = whole(accumulated * step + i, dist.get_world_size())
            (names["loss_of"](model, tokens) / accumulated).backward()
        if schedule:
            model.norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()
    return model


def assert_equal(model: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, param), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert isinstance(param, DTensor), f"{name} is not sharded"
        assert_same(param, other, tolerance, tolerance, name)


# ---- what the snippets have made -----------------------------------------------------------------------------------


@guide("Plan memory and time before training")
def planned(names: Names) -> None:
    assert names["plan"].fits
    assert {row.setting.ranks for row in names["plan"].rows} == {8, 16}


@guide("What gets groups of its own")
def wrapped(names: Names) -> None:
    groups = fsdp2.describe(names["model"]).groups
    settings = ("reshard_after_forward=False",)
    assert [(each.name, each.settings) for each in groups[1:]] == [("blocks.0", settings), ("blocks.1", settings)]


@guide("Adapters without peft")
def adapters(names: Names) -> None:
    """The file has the adapters, and nothing of the tied embedding; with the base they make the trained model."""
    assert ("head.weight" in names["state"]) == (dist.get_rank() == 0), "the sentence about torch is true"
    plain: Any = plain_model(names)
    plain.head.weight = plain.embed.weight
    plain.requires_grad_(False)
    for block in plain.blocks:
        block.adapter = nn.Parameter(torch.zeros(16))
        block.register_forward_hook(lambda block, args, output: output * (1 + block.adapter))
    optimizer = torch.optim.AdamW([block.adapter for block in plain.blocks], lr=1e-2)
    for step in range(3):
        names["loss_of"](plain, whole(step, dist.get_world_size())).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = torch.load("adapters.pt")
    assert {*saved} == {"blocks.0.adapter", "blocks.1.adapter"}
    for name, value in saved.items():
        assert_same(value, plain.get_parameter(name), 1e-5, 1e-6, name)


@guide("Start from the same weights")
def starts(names: Names) -> None:
    """From the first rank's weights, which it drew from the seed 0."""
    assert_equal(names["model"], trained(names, steps=3))


@guide("Feed batches and accumulate gradients")
def batches(names: Names) -> None:
    ranks, per_epoch = dist.get_world_size(), 20 // 4 // dist.get_world_size()
    seen: list[Any] = [None] * ranks
    dist.all_gather_object(seen, [rows.tolist() for rows in names["seen"]])
    assert [len(of_rank) for of_rank in seen] == [2 * per_epoch] * ranks
    for epoch in range(2):
        parts = [of_rank[epoch * per_epoch : (epoch + 1) * per_epoch] for of_rank in seen]
        rows = [tuple(row) for of_rank in parts for batch in of_rank for row in batch]
        assert len(rows) == 4 * per_epoch * ranks
    assert seen[0][:per_epoch] != seen[0][per_epoch:], "each epoch has the same order"
    model = plain_model(names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for at, logged in enumerate(names["losses"]):
        loss = names["loss_of"](model, torch.cat([torch.tensor(of_rank[at]) for of_rank in seen]))
        assert logged == pytest.approx(loss.item(), abs=1e-4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@guide("Skip a bad step")
def a_step_is_skipped(names: Names) -> None:
    ((step, reasons),) = names["skipped"].items()
    assert (step, [*reasons]) == (1, [0])
    assert "allocate memory" in reasons[0], "the first rank has really run out of it"
    model = plain_model(names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in (0, 2, 3):
        names["loss_of"](model, whole(step, dist.get_world_size())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(names["model"], model)


def on_batches(names: Names, counts: tuple[int, int], clip: float | None, by_rows: bool) -> Any:
    """Trains on the batches that are there. `counts`: of each rank; `by_rows`: divides by the number of real rows."""
    model: Any = plain_model(names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(max(counts)):
        rows = whole(step, len(counts)).chunk(len(counts))
        present = [part for part, count in zip(rows, counts, strict=True) if step < count]
        divisor = len(present) if by_rows else len(counts)
        (sum(names["loss_of"](model, part) for part in present) / divisor).backward()
        if clip is not None:
            model.norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


@guide("Train on different numbers of batches")
def different_numbers_of_batches(names: Names) -> None:
    expected = on_batches(names, (3, 1), 1.0, False)
    assert abs(float(names["norm"]) - float(expected.norm)) < 1e-4
    assert_equal(names["model"], expected)
    assert_equal(names["weighted"], on_batches(names, (3, 1), None, True))


@guide("Accumulate, clip and schedule")
def accumulation(names: Names) -> None:
    expected = trained(names, steps=2, accumulated=4, clip=0.1)
    assert type(names["norm"]) is Tensor
    assert names["norm"] > 0.1, "nothing was clipped"
    assert_same(names["norm"], expected.norm, 1e-4, 0, "norm")
    assert_equal(names["model"], expected)


@guide("Move from FSDP1")
def from_fsdp1(names: Names) -> None:
    model = plain_model(names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for i in range(4):
            (names["loss_of"](model, whole(4 * step + i, dist.get_world_size())) / 4).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(names["norm"], norm, 1e-4, 0, "norm")
    assert_equal(names["model"], model)
    weights = {name: full(param) for name, param in names["model"].named_parameters()}
    assert names["state"].keys() == (weights.keys() if dist.get_rank() == 0 else set())
    for name, value in names["state"].items():
        assert_same(value, weights[name], 0, 0, name)


@guide("Average over all tokens")
def means_over_tokens(names: Names) -> None:
    """Each step is one on all rows of all micro-batches, of which each has another number."""
    model, ranks = plain_model(names), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        parts = [(i, rank) for i in range(3) for rank in range(ranks)]
        rows = torch.cat([whole(3 * step + i, ranks)[4 * r :][: 1 + (i + r) % 4] for i, r in parts])
        loss = names["loss_of"](model, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert names["acc"].mean_loss == pytest.approx(loss.item(), abs=1e-4)
    assert names["acc"].total_weight == rows.numel()
    assert_equal(names["model"], model)


@guide("Overlap the optimizer with the next forward")
def overlaps_forward(names: Names) -> None:
    assert_equal(names["model"], trained(names, steps=3))


@guide("Test code that uses process groups")
def simulated_ranks(names: Names) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(8, 2)
    plain(torch.stack([torch.full((8,), float(rank)) for rank in range(4)])).sum().div(4).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for weight in names["testing"].run(names["one_step"], 4):
        torch.testing.assert_close(weight, plain.weight.detach())


@guide("Look up rows of a vocabulary-parallel embedding")
def vocab_parallel_lookups(names: Names) -> None:
    assert_equal(names["model"], trained(names, steps=3))
    assert "rows are looked up" in str(fsdp2.describe(names["model"]))


@guide("Speed up the optimizer")
def flat_steps(names: Names) -> None:
    assert_equal(names["model"], trained(names, steps=3))
    weights = [dict(trained(names, steps=1 + step).named_parameters()) for step in range(3)]
    for name, average in names["average"].module.named_parameters():
        expected = weights[0][name]
        for later in weights[1:]:
            expected = expected.lerp(later[name], 0.1)
        assert_same(average, expected, 1e-5, 1e-5, name)


@guide("Train in bf16 or fp16")
def mixed_precision(names: Names) -> None:
    """Steps of AdamW turn rounding errors of tiny gradients into whole steps: losses tell more than weights."""
    expected = names["loss_of"](trained(names, steps=3), whole(3, 1))
    start = names["loss_of"](plain_model(names), whole(3, 1))
    for name in ("bf16", "fp16"):
        loss = names["loss_of"](names[name], whole(3, 1))
        assert abs(loss - expected) < 0.1 * abs(start - expected), name
        assert {param.dtype for param in names[name].parameters()} == {torch.float32}


def assert_trains_nearly(names: Names, model: nn.Module) -> None:
    """After three steps with rounded gradients or weights, by the loss."""
    expected = names["loss_of"](trained(names, steps=3), whole(3, 1))
    start = names["loss_of"](plain_model(names), whole(3, 1))
    loss = names["loss_of"](model, whole(3, 1))
    assert 0 < abs(loss - expected) < 0.1 * abs(start - expected)


def gradients(names: Names, passes: int = 1, reduce_scatter: Any = None) -> Any:
    """Returns a sharded model of the shared lines with the gradients of `passes` backward passes."""
    compression = Compression(reduce_scatter=reduce_scatter)
    model = names["make_sharded"](mp_policy=fsdp2.MixedPrecisionPolicy(compression=compression))
    for _ in range(passes):
        names["loss_of"](model, names["batch"](0)).backward()
    return model


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([full(param.grad).view(-1) for param in model.parameters()])


@guide("Compress gradients")
def compressed_gradients(names: Names) -> None:
    assert_trains_nearly(names, names["compressed"])


@guide("Compress weights")
def compressed_weights(names: Names) -> None:
    exact, rounded = flat_gradient(gradients(names)), flat_gradient(names["narrow"])
    assert 0 < (exact - rounded).norm() < 0.1 * exact.norm()


@guide("Compress sums between replicas")
def sums_between_replicas(names: Names) -> None:
    assert_trains_nearly(names, names["replicas"])
    names["loss_of"](names["low_rank"], names["batch"](0)).backward()
    exact = gradients(names)
    for (name, got), want in zip(names["low_rank"].named_parameters(), exact.parameters(), strict=True):
        assert_same(full(got.grad), full(want.grad), 5e-3, 1e-5, name)


@guide("Reduce by a hook")
def reduced_by_a_hook(names: Names) -> None:
    """Each rank's gradient is rounded once."""
    expected = gradients(names)
    for model, tolerance in ((names["replicated"], 2**-10), (names["hooked"], 2**-7)):
        for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            found, exact = full(param.grad), full(other.grad)
            assert (found - exact).abs().max() <= exact.abs().max() * tolerance, name
            assert not torch.equal(found, exact), name


@guide("Save what codecs keep")
def resumed_with_codecs(names: Names) -> None:
    for model, optimizer in ((names["model"], names["optimizer"]), (names["resumed"], names["other"])):
        for step in range(3, 5):
            names["loss_of"](model, names["batch"](step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(names["resumed"], names["model"], 0)


@guide("Write a codec")
def own_codec(names: Names) -> None:
    """Rounds as bf16 on the wire. With the flag for feedback, what was lost comes with the next gradient."""
    encoded, plain = gradients(names, reduce_scatter=torch.bfloat16), gradients(names)
    for (name, got), rounded, exact in zip(
        names["own"].named_parameters(), encoded.parameters(), plain.parameters(), strict=True
    ):
        assert_same(full(got.grad), full((rounded if got.dim() > 1 else exact).grad), 0, 0, name)
    with_feedback = type("HighBytesWithFeedback", (names["HighBytes"],), {"feedback": True})
    exact, without_it, with_it = (
        flat_gradient(gradients(names, passes=16, reduce_scatter=codec))
        for codec in (None, names["HighBytes"](), with_feedback())
    )
    assert (with_it - exact).norm() < 0.2 * (without_it - exact).norm()


@guide("Choose the dtype of gradients")
def dtype_of_gradients(names: Names) -> None:
    """The snippet asserts it: a weight in bf16 has a gradient in fp32, which is more exact than bf16."""
    assert any(not torch.equal(grad, grad.bfloat16()) for grad in (full(p.grad) for p in names["model"].parameters()))


@guide("Train with Muon")
def muon(names: Names) -> None:
    """Muon rounds to bf16, in which gradients that were summed in another order differ visibly, times the rate."""
    model, ranks = plain_model(names), dist.get_world_size()
    matrices = [param for name, param in model.named_parameters() if "blocks" in name and param.dim() == 2]
    rest = [param for param in model.parameters() if all(param is not each for each in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]
    for step in range(3):
        names["loss_of"](model, whole(step, ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    before = [param.detach().clone() for param in matrices]
    names["loss_of"](model, whole(3, ranks)).backward()
    for param, value in zip(matrices, before, strict=True):
        assert param.grad is not None
        u, _, vh = torch.linalg.svd(param.grad, full_matrices=False)
        with torch.no_grad():
            param.copy_((1 - 0.02 * 0.1) * value - 0.02 * u @ vh)
    assert_equal(names["model"], model, 2e-3)
    printed = [block.source for block in snippets("") if block.heading == "Train with Muon"]
    assert printed == [f"{names['split']}\n"]


@guide("Combine sharding with replicas, tensor and context parallelism, and pipelines", ranks=4)
def replicas(names: Names) -> None:
    plain, rows = plain_model(names), (torch.arange(36) ** 2 % 32).reshape(4, 9)
    F.cross_entropy(plain(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
    for (name, param), expected in zip(names["sequences"].named_parameters(), plain.parameters(), strict=True):
        assert_same(param.grad, expected.grad, 1e-5, 1e-6, name)
    assert_equal(names["model"], trained(names, steps=2, accumulated=2))
    assert_equal(names["shared"], trained(names, steps=3))


@guide("Resume a training")
def checkpoints(names: Names) -> None:
    assert names["first"] == 2
    assert names["schedule"].last_epoch == 3
    assert_equal(names["again"], trained(names, steps=3, clip=math.inf))


@guide("Load weights that one rank can read")
def pretrained(names: Names) -> None:
    """Also what no state dict holds."""
    expected = plain_model(names, seed=1)
    assert_equal(names["model"], expected, 0)
    tokens = whole(0, 1)
    assert_same(names["model"](tokens), expected(tokens), 1e-5, 1e-6, "output")


@guide("Export one file")
def export(names: Names) -> None:
    for name, param in plain_model(names).named_parameters():
        assert_same(names["plain"].get_parameter(name), param, 0, 0, name)
    assert bool(names["state"]) == (dist.get_rank() == 0)


@guide("Load and save safetensors files")
def hugging_face_files(names: Names) -> None:
    expected = plain_model(names)
    for name, param in expected.named_parameters():
        assert_same(names["again"].get_parameter(name), param.bfloat16().float(), 0, 0, name)
    assert_same(names["again"].angles, expected.angles, 0, 0, "angles")
    assert names["report"].initialised == ["angles"]
    assert os.listdir("weights") == ["model.safetensors"]


@guide("Merge a checkpoint into safetensors files")
def merged(names: Names) -> None:
    if dist.get_rank() == 0:
        found = read_checkpoint(Path("merged")).tensors
        assert {*found} == {*names["model"].state_dict()}
        assert all(each.dtype == torch.bfloat16 for each in found.values())


@guide("Evaluate and generate")
def generation(names: Names) -> None:
    model, tokens = plain_model(names).eval(), names["batch"](0)
    with torch.no_grad():
        assert_same(names["features"], model.features(tokens), 1e-5, 1e-6, "features")
        assert_same(names["loss"], names["loss_of"](model, tokens), 1e-5, 1e-6, "loss")
        assert torch.equal(names["text"], model.generate(tokens[:, :2], count=4))


@guide("Alternate generation and training")
def phases(names: Names) -> None:
    """Each rank's rows are the continuation of its own; plain training has all of them."""
    ranks, model, reference = dist.get_world_size(), plain_model(names), plain_model(names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        with torch.no_grad():
            tokens = model.generate(whole(step, ranks)[:, :2], count=6)
            expected = reference(tokens).log_softmax(-1)
        penalty = F.kl_div(model(tokens).log_softmax(-1), expected, log_target=True, reduction="batchmean")
        (names["loss_of"](model, tokens) + 0.1 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(names["model"], model, 1e-4)
    assert names["engine"].keys() == dict(model.named_parameters()).keys()
    for name, weight in names["engine"].items():
        assert_same(weight, full(names["model"].get_parameter(name)).bfloat16(), 0, 0, name)
    assert_equal(names["reference"], reference, 0)


@guide("Stream buckets to any engine")
def streams(names: Names) -> None:
    """The engine follows to the bit, and gets a part of what it got first."""
    for name, param in names["engine"].named_parameters():
        assert_same(param, full(names["model"].get_parameter(name)).bfloat16(), 0, 0, name)
    first, second = names["sent"]
    assert first == 2 * sum(param.numel() for param in names["engine"].parameters())
    assert 0 < second < first / 4


@guide("Profile a step")
def profile_a_step(names: Names) -> None:
    assert [group.name for group in fsdp2.describe(names["model"]).groups] == ["root", "blocks.0", "blocks.1"]
    if dist.get_rank() == 0:
        shown = {event["name"] for event in json.loads(Path("step.json").read_text())["traceEvents"]}
        launched = ("fsdp2.all_gather blocks.0", "fsdp2.wait_all_gather blocks.1", "fsdp2.reduce_scatter root")
        assert all(any(name.startswith(each) for name in shown) for each in launched)
    assert_equal(names["model"], trained(names, steps=5))


@guide("Use the tools without moving")
def tools_on_torchs_own(names: Names) -> None:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 5))
    rows = [torch.randn(4, 16, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    model(torch.cat(rows)).square().mean().backward()
    torch.testing.assert_close(names["norm"], torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert names["shapes"] == {name: param.shape for name, param in model.named_parameters()}


@guide("Read or change full weights")
def whole_weights(names: Names) -> None:
    """What was written is in the shards; the loss that reads the head's weight gives it a gradient of the batch."""
    model, ranks = plain_model(names), dist.get_world_size()
    with torch.no_grad():
        model.embed.weight[0] = 0.0
    assert_equal(names["model"], model, 0)
    tokens = whole(0, ranks)
    hidden = model.blocks[1](model.blocks[0](F.embedding(tokens, torch.ones(32, 16))))
    F.cross_entropy((hidden @ model.head.weight.T).flatten(0, 1), tokens.flatten()).backward()
    assert_same(names["model"].head.weight.grad, model.head.weight.grad, 1e-5, 1e-6, "head.weight")
    assert_same(names["model"].blocks[0].up.weight.grad, model.blocks[0].up.weight.grad, 1e-5, 1e-6, "up.weight")


@guide("Tie weights")
def tied_weights(names: Names) -> None:
    assert_equal(names["model"], trained({**names, "Model": names["Tied"]}, steps=3))
    groups = {group.name: group.parameters for group in fsdp2.describe(names["model"]).groups}
    assert groups["embed"] == ("embed.weight",), "the group of the first call owns it"
    assert not any("head.weight" in parameters for parameters in groups.values())


@guide("Write the program")
def one_machine(names: Names) -> None:
    """In bf16, as in the guide of mixed precision, by losses. Its last checkpoint has what training has left."""
    expected = plain_model(names)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    for step in range(1, 5):
        names["loss_of"](expected, whole(step, dist.get_world_size())).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses = [names["loss_of"](model, whole(9, 1)) for model in (names["model"], expected, plain_model(names))]
    assert abs(losses[0] - losses[1]) < 0.1 * abs(losses[2] - losses[1])
    assert not (Path("checkpoint") / "3").exists()
    state = {"model": names["make_sharded"]().state_dict(), "step": 0}
    names["dcp"].load(state, checkpoint_id="checkpoint/4")
    assert state["step"] == 4
    for name, param in names["model"].named_parameters():
        assert_same(full(state["model"][name]), full(param), 0, 0, name)


@guide("Offload to the CPU")
def offload(names: Names) -> None:
    assert_equal(names["model"], trained(names, steps=3))
    numel = sum(param.to_local().numel() for param in names["partly"].parameters())
    assert (8 << 30) - 4 * 1.2 * numel <= names["budget"].left <= (8 << 30) - 4 * numel


@guide("Offload optimizer states")
def states_offloaded(names: Names) -> None:
    """Optimizers whose states rest on the CPU have the bits of those whose states do not."""
    model = names["make_sharded"]()
    split = fsdp2.split_matrices(model, exclude=("embed", "head"))
    optimizers = fsdp2.muon(split.matrices, lr=0.02), torch.optim.AdamW(split.others, lr=1e-2)
    for step in range(3):
        names["loss_of"](model, names["batch"](step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(names["resting"], model, 0)


@guide("Run modules on some ranks only")
def conditional(names: Names) -> None:
    """As if the rank without images had run the tower to a gradient of zero."""
    torch.manual_seed(0)
    both = names["WithTower"]()
    optimizer = torch.optim.AdamW(both.parameters(), lr=1e-2)
    for step in range(3):
        for rank, rows in enumerate(whole(step, dist.get_world_size()).chunk(dist.get_world_size())):
            logits = both(rows, torch.ones(3) * step if rank == 1 else None)
            loss = F.cross_entropy(logits.flatten(0, 1), (rows.flatten() + 1) % 32)
            (loss / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(names["both"], both)


@guide("Find what is wrong")
def check_and_compare(names: Names) -> None:
    assert names["findings"] == []
    assert names["comparison"], str(names["comparison"])


@guide("Get the same bits on any number of ranks")
def same_bits(names: Names) -> None:
    """As if one process had trained on all micro-batches; test_same_bits.py compares the bits."""
    plain = plain_model(names)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        seeds = range(8 * step, 8 * step + 8)
        rows = [torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        names["loss_of"](plain, torch.cat(rows)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(names["model"], plain)


@guide("Find where two runs differ first")
def divergence(names: Names) -> None:
    dist.barrier()  # both have written
    assert len(read_run("run1")) == 3
    assert main(["run1", "run2"]) == 0


def test_every_snippet_has_a_check() -> None:
    """Here, or in another test that names the file of the guide."""
    without = {block.file for block in SNIPPETS if block.heading not in BY_CLIENTS | CHECKS.keys()}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert {file for file in without if not re.search(rf'{file.removesuffix(".md")}(\.md)?"', tests)} == set()
    assert CHECKS.keys() <= {block.heading for block in SNIPPETS}


@pytest.mark.parametrize("ranks", sorted({ranks for ranks, _ in CHECKS.values()}))
def test_snippets_train_like_a_plain_model(ranks: int, tmp_path: Path) -> None:
    def check(heading: str, judge: Callable[[Names], None]) -> Callable[[], None]:
        def run() -> None:
            folder = tmp_path / heading
            folder.mkdir(exist_ok=True)
            judge(run_guide(heading, folder))

        return run

    run_checks(ranks, [(name, check(name, judge)) for name, (size, judge) in CHECKS.items() if size == ranks])


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    """As a file of its own, started like any program, for fewer steps by day. Its first rank prints the loss of its
    rows.
    """
    (example,) = code_blocks(ROOT / "README.md")
    program, steps = tmp_path / "train.py", 20 if NIGHTLY else 6
    assert "range(1, 21)" in example.source
    program.write_text(example.source.replace("range(1, 21)", f"range(1, {steps + 1})"))
    output = run_forked(str(program), 2, before=lambda rank: torch.manual_seed(10 + rank))
    printed = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", output, re.M)]
    expected = alone(lambda: plain_losses_of_the_readme(steps))
    assert len(printed) == steps
    assert printed[-1] < printed[0] - 0.015 * steps
    assert printed == pytest.approx(expected, rel=5e-3)


def plain_losses_of_the_readme(steps: int) -> list[float]:
    """Its model on the rows of both ranks, in fp32: the losses on the first rank's."""
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, 64), *blocks, nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    of_first = []
    for _ in range(steps):
        losses = []
        for generator in generators:
            tokens = torch.randint(256, (8, 32), generator=generator)
            losses.append(F.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 256))
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        of_first.append(losses[0].item())
    return of_first


def test_shell_scripts_can_be_read() -> None:
    scripts: list[Code] = snippets("bash")
    assert scripts
    for script in scripts:
        assert os.system(f"bash -n <<'EOF_OF_SCRIPT'\n{script.source}\nEOF_OF_SCRIPT") == 0
