"""Tests that ranks notice, before they compute anything together, that their models are not alike, and say in what.

The kind: what must be the same on all ranks is not, and nothing fails: a gather goes by position, a buffer is nobody's
to synchronise, and an optimizer of a plain module steps on each rank by itself. Each error must come on all ranks, in
the same words. What may differ must be left alone.
"""

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fsdp2 import check, fully_shard, replicate, sync_module_states
from fsdp2.ranks import compare_ranks
from helpers import full, run_checks

WIDTH = 6


def rank_of() -> int:
    return dist.get_rank()


def rows(seed: int, rank: int | None = None) -> Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x if rank is None else x.chunk(dist.get_world_size())[rank]


def error_of(program: Callable[[], object]) -> str:
    """Returns the error of `program`, which must be the same on all ranks."""
    text = ""
    try:
        program()
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition(" (while")[0]
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len({*texts}) == 1, "\n".join(texts)
    return text


def train(model: Any, steps: int = 1, start: int = 0, params: Any = None) -> None:
    optimizer = torch.optim.SGD(params or model.parameters(), lr=0.1)
    for step in range(start, start + steps):
        model(rows(step, rank_of())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_plain(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(rows(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_trained_alike(model: nn.Module, plain: nn.Module) -> None:
    for (name, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(got.detach()), expected.detach(), rtol=1e-5, atol=1e-6, msg=name)


def assert_same_everywhere(tensor: Tensor) -> None:
    of_ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, tensor.detach())
    assert all(torch.equal(each, of_ranks[0]) for each in of_ranks)


# ---- structure -------------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Layers by name, of which forward uses some."""

    def __init__(self, names: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = {name: nn.Linear(WIDTH, WIDTH) for name in "abc"}
        self.heads = nn.ModuleDict({name: made[name] for name in names})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["c"](self.heads["b"](self.heads["a"](x)))


def blocks(model: Heads) -> Heads:
    """The root has no parameters of its own, and its first group is another one on each rank."""
    for block in model.heads.values():
        fully_shard(block)
    return fully_shard(model)


def first_block(model: Heads) -> Heads:
    if rank_of() == 0:
        fully_shard(model.heads["a"])
    return fully_shard(model)


def in_another_order(shard: Callable[[Any], Any], evaluates: bool) -> None:
    model = shard(Heads("abc" if rank_of() == 0 else "cba"))
    whole = Heads("abc").state_dict()
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    with torch.set_grad_enabled(not evaluates):
        text = error_of(lambda: model(rows(0)))
    assert re.search(r"heads\.a\.weight: ranks register their modules in another order: parameter 0 is ", text), text
    found = check(model)
    assert any(each.kind == "layouts differ" and "heads.a" in each.names[0] for each in found), found


def sorted_instead() -> None:
    """What the error says."""
    names = {"abc"[i] for i in (range(3) if rank_of() == 0 else (2, 1, 0))}
    model, plain = fully_shard(Heads(sorted(names))), Heads("abc")
    train(model, 3)
    train_plain(plain, 3)
    assert_trained_alike(model, plain)


def structure(build: Callable[[int], Any], *expected: str) -> None:
    model = build(rank_of())
    text = error_of(lambda: train(model))
    assert all(each in text for each in expected), text
    assert "seed" not in text


def one_head_less(rank: int) -> Any:
    model = Heads("abc")
    if rank == 1:
        model.heads["spare"] = nn.Linear(2, 2)
    return fully_shard(model)


def frozen_on_one(rank: int) -> Any:
    model = fully_shard(Heads("abc"))
    model.heads["b"].requires_grad_(rank == 0)
    return model


def wide(rank: int) -> Heads:
    model = Heads("abc")
    model.heads["b"] = nn.Linear(WIDTH, WIDTH + rank)
    return model


def in_bf16(rank: int) -> Heads:
    model = Heads("abc")
    if rank == 1:
        model.heads["c"].bfloat16()
    return model


FLAGS_DIFFER = "requires_grad differs between ranks: it is True on rank 0 and False on rank 1"

STRUCTURES: list[tuple[str, Callable[[], None]]] = [
    *(
        (f"order, {shard.__name__}, evaluates={evaluates}", partial(in_another_order, shard, evaluates))
        for shard in (fully_shard, blocks, replicate)
        for evaluates in (False, True)
    ),
    ("sorted instead", sorted_instead),
    ("shape", partial(structure, lambda rank: fully_shard(wide(rank)), "heads.b.weight", "(6, 6)", "(7, 6)")),
    ("dtype", partial(structure, lambda rank: fully_shard(in_bf16(rank)), "torch.float32", "torch.bfloat16")),
    ("missing", partial(structure, one_head_less, "heads.spare.weight", "rank 1 shards", "rank 0 does not")),
    ("group", partial(structure, lambda _: first_block(Heads("abc")), "heads.a.weight", "group heads.a", "group root")),
    (
        "frozen",
        partial(
            structure,
            frozen_on_one,
            "heads.b.weight, heads.b.bias: " + FLAGS_DIFFER,
        ),
    ),
]


def evaluated_with_other_flags() -> None:
    """Where nothing is reduced, `requires_grad` may differ."""
    model = frozen_on_one(rank_of())
    with torch.no_grad():
        torch.testing.assert_close(model(rows(0)), Heads("abc")(rows(0)))


def unfrozen_later(at: int, says: str, others: bool = False) -> None:
    """In a step in which ranks compare, and in one in which they do not; then as the error says."""
    plain, model = Heads("abc"), Heads("abc")
    for each in (plain, model):
        each.heads["b"].requires_grad_(False)
    fully_shard(model.heads["b"])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        model(rows(number, rank_of())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(at):
        step(number)
    model.heads["b"].requires_grad_(rank_of() == 0)
    if others:
        model.heads["c"].requires_grad_(rank_of() != 0)
    # The graph of a backward that has failed may live on, and with it memory.
    text = error_of(lambda: step(at))
    assert says in text, text
    assert "fsdp2.check(model)" in text
    (found,) = [each for each in check(model) if "heads.b.weight" in each.names[0]]
    model.heads["c"].requires_grad_(True)
    assert "requires_grad=True" in found.detail
    assert "requires_grad=False" in found.detail
    model.zero_grad()
    model.heads["b"].requires_grad_(True)
    for number in range(at, at + 2):
        step(number)
    train_plain(plain, at)
    plain.heads["b"].requires_grad_(True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(at, at + 2):
        plain(rows(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_trained_alike(model, plain)


def sizes_of_one_rank() -> None:
    """What the error says: a size that each rank has found in its data is taken from one of them."""
    sizes = [WIDTH + rank_of()]
    dist.broadcast_object_list(sizes)
    torch.manual_seed(0)
    train(fully_shard(nn.Linear(WIDTH, sizes[0])), 3)


def fsdp1_inside(wrapped: str) -> None:
    model = Heads("abc")
    model.heads[wrapped] = FullyShardedDataParallel(model.heads[wrapped], device_id=torch.device("cpu"))
    text = error_of(lambda: fully_shard(model))
    assert "NotImplementedError: heads." + wrapped in text
    assert "FullyShardedDataParallel wraps the module that has it" in text
    outer = nn.Sequential(model)
    assert "FullyShardedDataParallel wraps" in error_of(lambda: fully_shard(outer))


def fsdp1_that_stays() -> None:
    """What the error says: its parameters are ignored."""
    plain = Heads("abc")
    plain.heads["b"].requires_grad_(False)
    model = copy.deepcopy(plain)
    stays = FullyShardedDataParallel(model.heads["b"], device_id=torch.device("cpu"), use_orig_params=True)
    model.heads["b"] = stays
    fully_shard(model, ignored_params={*stays.parameters()})
    train(model, 3, params=[parameter for parameter in model.parameters() if parameter.requires_grad])
    train_plain(plain, 3)
    for name in "ac":
        torch.testing.assert_close(full(model.heads[name].weight), plain.heads[name].weight)


STRUCTURES += [
    ("sizes of one rank", sizes_of_one_rank),
    *((f"FSDP1 around {wrapped}", partial(fsdp1_inside, wrapped)) for wrapped in "abc"),
    ("FSDP1 that stays", fsdp1_that_stays),
    ("evaluated with other flags", evaluated_with_other_flags),
    (
        "unfrozen before the 4th forward",
        partial(unfrozen_later, 3, FLAGS_DIFFER),
    ),
    ("as many, but others", partial(unfrozen_later, 4, "4 of 6 on rank 1, other ones. Set", others=True)),
    (
        "unfrozen before the 5th",
        partial(unfrozen_later, 4, "6 of 6 parameters are trainable on rank 0, and 4 of 6 on rank 1"),
    ),
]


def test_structure() -> None:
    run_checks(2, STRUCTURES)


# ---- buffers ---------------------------------------------------------------------------------------------------------


class WithBuffer(nn.Module):
    """Computes with a buffer. `use`: (buffer, input, module) -> what the layer gets, or None: the input."""

    def __init__(self, value: Tensor, use: Callable[..., Any], persistent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", value, persistent=persistent)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        used = self.use(self.kept, x, self)
        return self.layer(x if used is None else used)


def with_buffer(value: Tensor, use: Callable[..., Any], persistent: bool = True) -> nn.Sequential:
    return nn.Sequential(WithBuffer(value, use, persistent), nn.Linear(WIDTH, 3))


def seeded() -> torch.Generator:
    """A generator of the rank's own."""
    return torch.Generator().manual_seed(100 + rank_of())


def shard(model: Any, **options: Any) -> Any:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def times(kept: Tensor, x: Tensor, _: Any) -> Tensor:
    return x @ kept


def permuted(kept: Tensor, x: Tensor, _: Any) -> Tensor:
    return x[:, kept]


def masked(kept: Tensor, x: Tensor, _: Any) -> Tensor:
    return x * kept


def rotated(kept: Tensor, x: Tensor, _: Any) -> Tensor:
    return (x * kept).real


OWN: dict[str, tuple[Callable[[], Tensor], Callable[..., Any]]] = {
    "projection": (lambda: torch.randn(WIDTH, WIDTH, generator=seeded()), times),
    "projection in bf16": (
        lambda: torch.randn(WIDTH, WIDTH, generator=seeded()).bfloat16(),
        lambda k, x, _: x @ k.float(),
    ),
    "permutation": (lambda: torch.randperm(WIDTH, generator=seeded()), permuted),
    "mask": (lambda: torch.arange(WIDTH) % 2 == rank_of() % 2, masked),
    "phases": (lambda: torch.randn(WIDTH, generator=seeded()) * 1j, rotated),
}
FIRST = "0.kept holds other values on rank 1 than on rank 0: a buffer that ranks have built, or loaded, differently"


def drawn_on_each_rank(name: str, evaluates: bool, **options: Any) -> None:
    """Named before the first step; then as the error says: exact."""
    value, use = OWN[name]
    model = shard(with_buffer(value(), use), **options)
    before = [full(p.detach()).clone() for p in model.parameters()]
    with torch.set_grad_enabled(not evaluates):
        text = error_of(lambda: model(rows(0)) if evaluates else train(model))
    assert FIRST in text, text
    assert "register it with persistent=False" in text
    for kept, now in zip(before, model.parameters(), strict=True):
        assert torch.equal(kept, full(now.detach())), "nothing was trained"
    sync_module_states(model)
    synchronised_buffer_trains(model, use)


def synchronised_buffer_trains(model: Any, use: Callable[..., Any]) -> None:
    plain = with_buffer(model[0].kept.clone(), use)
    train(model, 3)
    train_plain(plain, 3)
    assert_trained_alike(model, plain)


def drawn_and_synchronised(when: str) -> None:
    """Before `fully_shard`, behind it, and behind loading."""
    value, use = OWN["projection"]
    model = with_buffer(value(), use)
    if when == "before":
        sync_module_states(model)
    shard(model)
    if when == "loaded":
        state = {"0.kept": value(), **model.state_dict()}
        model.load_state_dict({**state, "0.kept": value() * 0.5}, assign=True)
    if when != "before":
        sync_module_states(model)
    synchronised_buffer_trains(model, use)


def drawn_from_one_seed() -> None:
    value = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(100))
    model = shard(with_buffer(value, times))
    synchronised_buffer_trains(model, times)


def loaded_on_each_rank(assign: bool, steps: int) -> None:
    """Behind steps, before the next: at once if tensors are assigned, else in the next step in which ranks compare."""
    value, use = OWN["projection"]
    model = shard(with_buffer(torch.eye(WIDTH), use))
    train(model, steps)
    model.load_state_dict({**model.state_dict(), "0.kept": value()}, assign=assign)
    text = error_of(lambda: train(model, 2 if assign else 4))
    assert "0.kept holds other values on rank 1 than on rank 0" in text, text


def not_persistent_and_read() -> None:
    """It may be scratch memory, so there is a warning only."""
    value, use = OWN["projection"]
    model = shard(with_buffer(value(), use, persistent=False))
    assert_warned(lambda: train(model, 2), AT_FIRST)
    sync_module_states(model)
    train(model, 3)


def of_another_shape() -> None:
    model = shard(with_buffer(torch.ones(WIDTH + rank_of()), lambda k, x, _: None))
    assert "0.kept has the shape (6,) of torch.float32 on rank 0, and (7,) of torch.float32 on" in error_of(
        lambda: train(model)
    )


def on_one_rank_only() -> None:
    model = shard(with_buffer(torch.ones(WIDTH), lambda k, x, _: None))
    if rank_of() == 1:
        model[1].register_buffer("extra", torch.ones(2))
    assert "1.extra is not there on all ranks" in error_of(lambda: train(model))


def statistics_that_are_evaluated() -> None:
    """Of a BatchNorm that trains, ranks average them."""
    model = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)))
    with torch.no_grad():
        model[1].running_mean.fill_(rank_of())
    train(model)
    assert_same_everywhere(model[1].running_mean)
    model = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))).eval()
    with torch.no_grad():
        model[1].running_mean.fill_(rank_of())
    assert "1.running_mean holds other values" in error_of(lambda: model(rows(0)))


BUFFERS: list[tuple[str, Callable[[], None]]] = [
    *((f"{name}, {e=}", partial(drawn_on_each_rank, name, e)) for name in OWN for e in (False, True)),
    *((f"synchronised {when}", partial(drawn_and_synchronised, when)) for when in ("before", "after", "loaded")),
    *(
        (f"loaded, {assign=}, {steps=}", partial(loaded_on_each_rank, assign, steps))
        for assign in (False, True)
        for steps in (1, 4)
    ),
    *(
        (each.__name__, each)
        for each in (drawn_from_one_seed, not_persistent_and_read, of_another_shape, on_one_rank_only)
    ),
    ("statistics", statistics_that_are_evaluated),
]


def test_buffers() -> None:
    run_checks(2, BUFFERS)


# ---- buffers that each rank computes of its own rows -----------------------------------------------------------------


def averages(reduces: bool) -> Callable[..., Any]:
    """A mean of inputs, which evaluation subtracts."""

    def use(kept: Tensor, x: Tensor, module: nn.Module) -> Tensor | None:
        if not module.training:
            return x - kept
        mean = x.mean(0)
        if reduces:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        kept.lerp_(mean, 0.5)
        return None

    return use


def learns_codes(reduces: bool) -> Callable[..., Any]:
    """A codebook, each entry of which moves to the inputs that are next to it."""

    def use(kept: Tensor, x: Tensor, module: nn.Module) -> Tensor:
        codes = F.one_hot(torch.cdist(x, kept).argmin(1), len(kept)).to(x)
        if module.training:
            sums, counts = codes.T @ x, codes.sum(0)[:, None]
            if reduces:
                dist.all_reduce(sums)
                dist.all_reduce(counts)
            kept.lerp_(torch.where(counts > 0, sums / counts.clamp(min=1), kept), 0.5)
        return x + (codes @ kept).detach()

    return use


def largest(reduces: bool) -> Callable[..., Any]:
    """The range of an observer of quantization."""

    def use(kept: Tensor, x: Tensor, module: nn.Module) -> Tensor:
        if module.training:
            most = x.abs().amax()
            if reduces:
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
            torch.maximum(kept, most, out=kept)
        return x / kept

    return use


def queue(reduces: bool) -> Callable[..., Any]:
    """A memory of the last rows."""

    def use(kept: Tensor, x: Tensor, module: nn.Module) -> Tensor:
        if module.training:
            new = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            if reduces:
                dist.all_gather(new, x)
            kept.copy_(torch.cat(new) if reduces else torch.cat([x, x]))
        return x + kept.mean(0)

    return use


CODES = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
OF_ROWS: dict[str, tuple[Tensor, Callable[[bool], Callable[..., Any]]]] = {
    "mean": (torch.zeros(WIDTH), averages),
    "mean in double": (torch.zeros(WIDTH, dtype=torch.float64), lambda reduces: in_double(averages(reduces))),
    "codebook": (CODES, learns_codes),
    "largest": (torch.zeros(()), largest),
    "queue": (torch.zeros(8, WIDTH), queue),
}
HOLDS = "0.kept holds other values on rank 1 than on rank 0"
AT_FIRST = f"{HOLDS}: a buffer that ranks have built differently."
SINCE = f"{HOLDS}: a buffer that was the same on all ranks,"


def in_double(use: Callable[..., Any]) -> Callable[..., Any]:
    def used(kept: Tensor, x: Tensor, module: nn.Module) -> Any:
        found = use(kept, x.double(), module)
        return None if found is None else found.float()

    return used


def assert_warned(run: Callable[[], object], text: str) -> None:
    """Asserts that `run` warns once, by a message that begins with `text`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert [str(each.message)[: len(text)] for each in caught] == [text]


def computed_of_own_rows(name: str, steps: int) -> None:
    """Named by the time of an evaluation, whichever step it follows: then the output depends on each. In training the
    mean only makes a warning, once: no output depends on it.
    """
    value, use = OF_ROWS[name]
    model = shard(with_buffer(value.clone(), use(False)))

    def run() -> None:
        train(model, steps)
        with torch.no_grad():
            model.eval()(rows(9))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert SINCE in error_of(run)
    said = [str(each.message) for each in caught]
    assert len(said) == int(name.startswith("mean") and steps > 1), said
    assert all("0.kept" in each and "Training is right" in each for each in said)


def reduced_as_advised(name: str) -> None:
    """The error says: all-reduce what the module writes to it."""
    value, use = OF_ROWS[name]
    model = shard(with_buffer(value.clone(), use(True)))
    for _ in range(2):
        train(model.train(), 9)
        with torch.no_grad():
            model.eval()(rows(9))


def compares_rarely() -> None:
    """Ranks compare in some steps, and in some evaluations if a forward may change buffers, in one all-reduce."""
    with_one = shard(with_buffer(torch.zeros(WIDTH), averages(True)))
    without = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)))
    for model, expected in ((with_one, [1, 2, 3, 4, 6, 8, 12, 16, 24]), (without, [1, 2, 4, 8, 16])):
        found = []
        for number in range(1, 28):
            with mock.patch.object(compare_ranks, "all_reduce_over", wraps=compare_ranks.all_reduce_over) as spy:
                if number % 3:
                    train(model.train())
                else:
                    with torch.no_grad():
                        model.eval()(rows(9))
            found += [number] * spy.call_count
        assert found == expected, found


DRIFT: list[tuple[str, Callable[[], None]]] = [
    *(
        (f"{name} behind {steps}", partial(computed_of_own_rows, name, steps))
        for name in OF_ROWS
        for steps in (1, 2, 3)
    ),
    *((f"{name}, 6 steps", partial(computed_of_own_rows, name, 6)) for name in ("mean", "codebook")),
    *((f"{name}, reduced", partial(reduced_as_advised, name)) for name in OF_ROWS),
    ("rarely", compares_rarely),
]


def test_buffers_of_each_ranks_own_rows() -> None:
    run_checks(2, DRIFT)


# ---- buffers that may differ -----------------------------------------------------------------------------------------


def goes_on(model: Any, steps: int = 9) -> None:
    """Trains, evaluates, and trains again, without an error."""
    for _ in range(2):
        train(model.train(), steps)
        with torch.no_grad():
            model.eval()(rows(9, rank_of()))


def scratch(kept: Tensor, x: Tensor, _: nn.Module) -> Tensor:
    torch.mul(x, 2, out=kept)
    return x + kept


def own_random_state() -> None:
    def draws(kept: Tensor, x: Tensor, _: nn.Module) -> Tensor:
        generator = torch.Generator()
        generator.set_state(kept)
        noise = torch.randn(x.shape, generator=generator)
        kept.copy_(generator.get_state())
        return x + 0.01 * noise

    goes_on(shard(with_buffer(seeded().get_state(), draws)))


def scratch_memory() -> None:
    """Nobody can know at first that each forward fills it: there is a warning, and no error."""
    model = shard(with_buffer(torch.full((4, WIDTH), float(rank_of())), scratch, persistent=False))
    assert_warned(lambda: goes_on(model), AT_FIRST)


def averaged_without_being_persistent() -> None:
    """What the error says of buffers that each rank is to have for itself."""
    goes_on(shard(with_buffer(torch.zeros(WIDTH), averages(False), persistent=False)))


def number_of_the_rank() -> None:
    goes_on(shard(with_buffer(torch.tensor(rank_of()), lambda kept, x, _: x * (1 + 0 * kept), persistent=False)))


def counter_of_rows() -> None:
    def count(kept: Tensor, x: Tensor, _: nn.Module) -> None:
        kept.add_(int((x > 0).sum()))

    goes_on(shard(with_buffer(torch.tensor(0), count)))


class Teacher(nn.Module):
    """A module whose parameters are the user's own, and whose buffers are, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.part = nn.Module()
        self.part.register_buffer("own", torch.randn(WIDTH, generator=seeded()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.part.own


def ignored_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Teacher(), nn.Linear(WIDTH, 3))
    fully_shard(model[0])
    fully_shard(model, ignored_params={*model[1].parameters()})
    goes_on(model)


def normalised(norm: Callable[[], nn.Module], average: bool = True) -> None:
    torch.manual_seed(0)
    model: Any = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, 3)))
    model.set_running_stats_averaging(average)
    goes_on(model)


def spectral_norm() -> None:
    """Its vectors are computed of the weight, the same on all ranks."""
    torch.manual_seed(0)
    goes_on(shard(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 3))))


def rounded_on_each_rank() -> None:
    """By an operation of which each rank may round the result in its own way."""

    def use(kept: Tensor, x: Tensor, _: nn.Module) -> None:
        kept.mul_(1 + 1e-7 * rank_of())

    goes_on(shard(with_buffer(torch.rand(WIDTH), use)))


class Switched(nn.Module):
    """Runs a tower, whose buffer counts with what it sees, on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.tower = WithBuffer(torch.zeros(WIDTH), averages(False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.tower(x) if rank_of() == 0 else x


def conditional_module() -> None:
    model = Switched()
    fully_shard(model.tower, conditional=True)
    goes_on(fully_shard(model))


MAY_DIFFER: list[tuple[str, Callable[[], None]]] = [
    *(
        (each.__name__, each)
        for each in (
            own_random_state,
            scratch_memory,
            averaged_without_being_persistent,
            number_of_the_rank,
            counter_of_rows,
            ignored_module,
            spectral_norm,
            rounded_on_each_rank,
            conditional_module,
        )
    ),
    ("batch norm", partial(normalised, lambda: nn.BatchNorm1d(WIDTH))),
    ("batch norm of each rank", partial(normalised, lambda: nn.BatchNorm1d(WIDTH), average=False)),
    ("batch norm without momentum", partial(normalised, lambda: nn.BatchNorm1d(WIDTH, momentum=None))),
]


def test_buffers_that_may_differ() -> None:
    run_checks(2, MAY_DIFFER)


def of_experts() -> None:
    """Experts of their own on every other rank, with buffers of their own; the same among those that share them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    number = mesh["expert"].get_local_rank()
    model = nn.Sequential(WithBuffer(torch.full((WIDTH,), float(number)), masked), nn.Linear(WIDTH, 3))
    fully_shard(model[0], mesh=mesh["shard"])
    goes_on(fully_shard(model))
    model = nn.Sequential(WithBuffer(torch.full((WIDTH,), float(rank_of())), masked), nn.Linear(WIDTH, 3))
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"0\.kept holds other values on rank [23] than on rank [01]") as caught:
        train(model)
    assert "Call fsdp2.sync_module_states(model.get_submodule('0')), after fully_shard" in str(caught.value)
    sync_module_states(model.get_submodule("0"))
    assert model[0].kept[0] == number, "of the first rank that has this expert"
    goes_on(model)
    if number == 0:
        model[0].kept.fill_(rank_of())
    model = nn.Sequential(model)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"0\.kept holds other values on rank 2 than on rank 0"):
        train(model)  # on the ranks of the other expert, too


def of_replicas() -> None:
    """HSDP: each replica, or each shard, has another one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for number in (rank_of() // 2, rank_of() % 2):
        model = shard(with_buffer(torch.full((WIDTH,), float(number)), masked), mesh=mesh)
        text = error_of(lambda model=model: train(model))
        assert "0.kept holds other values on rank" in text, text
        sync_module_states(model)
        goes_on(model)


def test_buffers_on_four_ranks() -> None:
    run_checks(4, [(each.__name__, each) for each in (of_experts, of_replicas)])


# ---- optimizers of plain modules -------------------------------------------------------------------------------------


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def averaged(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def beside(
    place: str,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    prepare: Callable[[nn.Module], Any] = lambda plain: plain,
    before_step: Callable[[nn.Module], object] = lambda plain: None,
    steps: int = 9,
) -> nn.Module:
    """Trains a sharded model together with a plain one in front of it or behind it, by an optimizer of its own."""
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    plain = prepare(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)))
    optimizers = [make(each) for each in (plain, model)]
    for step in range(steps):
        x = rows(step, rank_of())
        output = plain(model(x)) if place == "behind" else model(plain[0](x))
        output.square().mean().backward()
        before_step(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return plain


TRAINED_APART = "no fully_shard call manages it. It was the same on all ranks, and is not any more"


def trained_apart(*arguments: Any, **options: Any) -> None:
    text = error_of(lambda: beside(*arguments, **options))
    assert TRAINED_APART in text, text
    assert "Apply fully_shard to the module around it" in text


def trained_together(*arguments: Any, **options: Any) -> None:
    for parameter in beside(*arguments, **options).parameters():
        assert_same_everywhere(full(parameter))


def trained_for_itself() -> None:
    """Each rank trains a small model of its own, which the sharded one knows nothing of."""
    torch.manual_seed(0)
    model, probe = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))), nn.Linear(WIDTH, 3)
    optimizers = [sgd(model), sgd(probe)]
    for step in range(9):
        x = rows(step, rank_of())
        features = model(x)
        (features - probe(x)).square().mean().detach()
        for loss in (features.square().mean(), (probe(x) - features.detach()).square().mean()):
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def adversaries(prepare: Callable[[nn.Module], Any]) -> None:
    """A generator that is sharded, and a plain discriminator, through which the generator's loss goes."""
    torch.manual_seed(0)
    generator = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    discriminator = prepare(nn.Linear(WIDTH, 1))
    optimizers = [sgd(discriminator), sgd(generator)]
    for step in range(9):
        x = rows(step, rank_of())
        (discriminator(generator(x).detach()) - discriminator(x)).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        discriminator(generator(x)).square().mean().backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for parameter in discriminator.parameters():
        assert_same_everywhere(parameter)


def adversaries_apart() -> None:
    assert TRAINED_APART in error_of(lambda: adversaries(lambda plain: plain))


def teachers_apart() -> None:
    """Two sharded models: the one that trains with the plain module finds it."""
    torch.manual_seed(0)
    teacher = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))

    def with_teacher(plain: nn.Module) -> nn.Module:
        train(teacher, 2)
        return plain

    trained_apart("behind", prepare=with_teacher)


PLAIN: list[tuple[str, Callable[[], None]]] = [
    ("behind", partial(trained_apart, "behind")),
    ("behind, 4 steps", partial(trained_apart, "behind", steps=4)),
    ("in front", partial(trained_apart, "in front")),
    ("Adam", partial(trained_apart, "behind", lambda module: torch.optim.AdamW(module.parameters(), lr=0.01))),
    ("averaged", partial(trained_together, "behind", before_step=averaged)),
    ("sharded", partial(trained_together, "behind", prepare=fully_shard)),
    (
        "frozen",
        partial(
            trained_together,
            "behind",
            lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.zeros(2))]),
            prepare=lambda plain: plain.requires_grad_(False),
        ),
    ),
    ("DDP", partial(trained_together, "behind", prepare=DistributedDataParallel)),
    ("for itself", trained_for_itself),
    ("adversaries", partial(adversaries, DistributedDataParallel)),
    ("adversaries apart", adversaries_apart),
    ("teachers apart", teachers_apart),
]


def test_optimizers_of_plain_modules() -> None:
    run_checks(2, PLAIN)


# ---- frozen parameters -----------------------------------------------------------------------------------------------


def half_frozen() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    model[1].requires_grad_(False)
    fully_shard(model[1])
    return fully_shard(model)


WRITTEN = r"1\.weight.*: only rank 0 has written to this frozen parameter since ranks last compared it"


@torch.no_grad()
def decay(model: Any) -> None:
    model[1].weight.mul_(0.99)


@torch.no_grad()
def decay_local(model: Any) -> None:
    model[1].weight.to_local().mul_(0.99)


def decay_data(model: Any) -> None:
    model[1].weight.data.mul_(0.99)


@torch.no_grad()
def fill_a_row(model: Any) -> None:
    model[1].weight[0] = 0


def written_on_one_rank(write: Callable[[Any], None], written: int) -> None:
    """Found by `check` at once, and in the next step in which ranks compare; then as the error says."""
    model = half_frozen()
    train(model, written)
    before = copy.deepcopy(model.state_dict())
    if rank_of() == 0:
        write(model)
    found = check(model)
    assert [(each.kind, each.names, each.ranks) for each in found] == [("written on some ranks", ("1.weight",), (0,))]
    text = error_of(lambda: train(model, 8))
    assert re.search(WRITTEN, text), text
    write(model)  # on all ranks alike,
    model.load_state_dict(before)  # from a checkpoint of before
    assert check(model) == []
    train(model, 8)


def written_on_all_ranks() -> None:
    model = half_frozen()
    for _ in range(9):
        train(model)
        for write in (decay, decay_local, decay_data, fill_a_row):
            write(model)
        assert check(model) == []


def written_where_there_are_rows() -> None:
    """A parameter of one row, of which one rank holds nothing."""
    model = nn.Sequential(nn.Linear(WIDTH, 1).requires_grad_(False), nn.Linear(1, WIDTH))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    fully_shard(model[0])
    fully_shard(model)
    for _ in range(9):
        train(model)
        with torch.no_grad():
            if model[0].weight.to_local().numel():
                model[0].weight.to_local().mul_(0.5)


FROZEN: list[tuple[str, Callable[[], None]]] = [
    *(
        (f"{write.__name__} behind {steps}", partial(written_on_one_rank, write, steps))
        for write in (decay, decay_local, decay_data)
        for steps in (1, 4)
    ),
    ("on all ranks", written_on_all_ranks),
    ("where there are rows", written_where_there_are_rows),
]


def test_frozen_parameters() -> None:
    run_checks(2, FROZEN)
