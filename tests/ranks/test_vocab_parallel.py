"""An embedding whose rows are looked up at their owners (`vocab_parallel_embedding`), beside plain training on the
whole batch.
"""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fake_gpu
import fsdp2
from fsdp2 import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    full_params,
    fully_shard,
    vocab_parallel_embedding,
)
from fsdp2.compression import Compression
from fsdp2.shards.find import shards_of
from helpers import end_of_part, full, run_ranks, world_sizes

ROWS, WIDTH, STEPS = 11, 6, 3
LENGTHS = [5, 3, 0, 7]  # how many tokens the ranks have


class Language(nn.Module):
    def __init__(self, padding_idx: int | None = None, checkpoints: bool = False, num: int = 1) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(ROWS + i, WIDTH, padding_idx=padding_idx) for i in range(num))
        self.block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.checkpoints = checkpoints

    def begin(self, ids: Tensor) -> Tensor:
        return sum((embed(ids) for embed in self.embeds), start=torch.zeros((), dtype=self.embeds[0].weight.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = checkpoint(self.begin, ids, use_reentrant=False) if self.checkpoints else self.begin(ids)
        return self.head(self.block(hidden))


def make(dtype: torch.dtype = torch.float64, **options: Any) -> Language:
    torch.manual_seed(3)
    return Language(**options).to(dtype)


def shard(model: Language, mesh: Any = None, **options: Any) -> Language:
    for embed in model.embeds:
        vocab_parallel_embedding(embed, mesh=mesh, **options)
    fully_shard(model.block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(rank: int, step: int) -> Tensor:
    """Returns the ids of a rank, of which some repeat."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(ROWS, (LENGTHS[rank],), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().sum()  # what ranks sum up to


def train(model: nn.Module, optimizer: Any, ranks: list[int], num_ranks: int, micro: int = 1, sync: bool = True) -> Any:
    """Trains on the batches of `ranks`; losses are divided so that the mean over ranks is the loss of the whole."""
    norms = []
    for step in range(STEPS):
        for i in range(micro):
            holds = sync or i == micro - 1 or not isinstance(model, fsdp2.FSDPModule)
            with nullcontext() if holds else model.no_sync():
                loss = sum(loss_of(model, batch(rank, step * micro + i)) for rank in ranks) / micro
                (loss if isinstance(model, fsdp2.FSDPModule) else loss / num_ranks).backward()
        norms.append(float(clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: full(p).clone() for name, p in model.named_parameters()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", world_sizes(1, 2, 3, 4))
def test_trains_as_plain_on_the_whole_batch(size: int) -> None:
    def body(rank: int, size: int) -> None:
        ways: list[dict[str, Any]] = [
            {},
            {"padding_idx": 2},
            {"checkpoints": True},
            {"num": 2},
            {"micro": 3},
            {"micro": 3, "sync": False},
        ]
        for way in ways:
            steps = {name: way[name] for name in ("micro", "sync") if name in way}
            options = {name: value for name, value in way.items() if name not in steps}
            plain, model = make(**options), shard(make(**options))
            expected = train(plain, adamw(plain), [*range(size)], size, **steps)
            found = train(model, adamw(model), [rank], size, **steps)
            for (norm, values), (other, others) in [(found, expected)]:
                same(norm, other)
                same({name: values[name] for name in others}, others)
            end_of_part()

    run_ranks(size, body)


def test_rounds_as_said() -> None:
    """In bf16 over fp32: rows are rounded once, their gradients once, and the owner sums in fp32 (or reduce_dtype)."""

    def body(rank: int, size: int) -> None:
        for reduce_dtype, grad_dtype in ((torch.float32, None), (None, None), (torch.bfloat16, None)):
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, grad_dtype=grad_dtype)
            table, gathered = make(torch.float32).embeds[0], make(torch.float32).embeds[0]
            whole = table.weight.detach().clone()
            vocab_parallel_embedding(table, mp_policy=policy)
            fully_shard(gathered, mp_policy=policy)
            expected = torch.zeros_like(whole, dtype=reduce_dtype or torch.float32)
            for each in range(size):
                coefficients = torch.randn(LENGTHS[each], WIDTH, generator=torch.Generator().manual_seed(each))
                if each == rank:
                    rows = table(batch(rank, 0))
                    assert rows.dtype == torch.bfloat16
                    assert torch.equal(rows, whole.to(torch.bfloat16)[batch(rank, 0)])
                    assert torch.equal(rows, gathered(batch(rank, 0)))
                    (rows.float() * coefficients).sum().backward()
                sent = coefficients.to(torch.bfloat16).to(expected.dtype)
                expected.index_add_(0, batch(each, 0), sent)
            found = full(table.weight.grad)
            assert table.weight.grad.dtype == torch.float32
            same(found, (expected / size).float(), 1e-6 if reduce_dtype is not torch.bfloat16 else 2e-2)
            end_of_part()
        half = fsdp2.vocab_parallel_embedding(
            make(torch.float32).embeds[0], mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64)
        )
        assert half(batch(rank, 0)).dtype == torch.float64

    run_ranks(4, body)


def test_replicas_train_as_plain() -> None:
    def body(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        plain, model = make(padding_idx=1), shard(make(padding_idx=1), mesh)
        expected = train(plain, adamw(plain), [*range(size)], size, 2)
        found = train(model, adamw(model), [rank], size, 2, sync=False)
        same(found, expected)
        with pytest.raises(IndexError, match=r"embeds\.0\.weight: expected ids from 0 to 10"):
            model(torch.tensor([ROWS] if rank == 3 else [0, 1]))

    run_ranks(4, body)


def test_trains_as_plain_on_meshes_of_two_axes_that_all_shard() -> None:
    """With replicas that share one set of shards: all ranks share the table."""

    def body(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        dims = DataParallelMeshDims(shard="shards", outer_shard="replicas")
        plain, model = make(padding_idx=1), shard(make(padding_idx=1), mesh, dp_mesh_dims=dims)
        assert model.embeds[0].weight.to_local().shape[0] in (3, 2)
        assert model.embeds[0].weight.device_mesh == model.head.weight.device_mesh
        expected = train(plain, adamw(plain), [*range(size)], size, 2)
        same(train(model, adamw(model), [rank], size, 2), expected)
        with pytest.raises(IndexError, match=r"embeds\.0\.weight: expected ids from 0 to 10"):
            model(torch.tensor([ROWS] if rank == 3 else [0, 1]))
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        with pytest.raises(NotImplementedError, match=r"further axes, \('data', 'model'\), is not supported"):
            vocab_parallel_embedding(nn.Embedding(4, 2), mesh=whole, dp_mesh_dims=DataParallelMeshDims(shard="data"))

    run_ranks(4, body)


def test_errors_are_raised_on_every_rank() -> None:
    def body(rank: int, size: int) -> None:
        model = shard(make())
        for wrong in (-1, ROWS):
            with pytest.raises(IndexError, match=r"embeds\.0\.weight: expected ids from 0 to 10, got others on rank 1"):
                model(torch.tensor([wrong, 3] if rank == 1 else [0]))
        with pytest.raises(TypeError, match="ids of dtype"):
            model(torch.tensor([0.5]))
        same(model(torch.tensor([[1, 2], [2, 0]], dtype=torch.int32)).shape, (2, 2, 3))  # it goes on

        for options in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
            with pytest.raises(NotImplementedError, match=next(iter(options))):
                vocab_parallel_embedding(nn.Embedding(4, 2, **options))
        with pytest.raises(TypeError, match=r"expected an nn\.Embedding, got EmbeddingBag"):
            vocab_parallel_embedding(nn.EmbeddingBag(4, 2))  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match="expected no compression"):
            vocab_parallel_embedding(
                nn.Embedding(4, 2),
                mp_policy=MixedPrecisionPolicy(compression=Compression(reduce_scatter=torch.bfloat16)),
            )
        with pytest.raises(TypeError, match=r"expected an nn\.Embedding, got FSDPVocabParallelEmbedding"):
            vocab_parallel_embedding(model.embeds[0])

    run_ranks(2, body)


class Skips(Language):
    """Leaves the embedding out of a forward, or only of its backward, when it is told to."""

    skipped = ""

    def begin(self, ids: Tensor) -> Tensor:
        if self.skipped == "forward":
            return torch.zeros(*ids.shape, WIDTH, dtype=torch.float64)
        hidden = super().begin(ids)
        return hidden.detach() if self.skipped == "backward" else hidden


def accumulate_twice(model: nn.Module, ids: Tensor) -> None:
    for _ in range(2):
        loss_of(model, ids).backward()


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_that_are_out_of_step_raise(replicas: int) -> None:
    """One leaves a lookup out: the others do not wait for its rows. The next step is exact."""

    def body(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (size,) if replicas == 1 else (replicas, size // replicas))
        torch.manual_seed(3)
        plain = Skips().double()
        model: Any = shard(copy.deepcopy(plain), mesh)
        for skipped, text in (("forward", "looking rows up in embeds.0"), ("backward", "sending gradients of rows to")):
            model.skipped = skipped if rank == size - 1 else ""
            with pytest.raises(RuntimeError, match="out of step") as caught:
                accumulate_twice(model, batch(rank, 0))
            told: list[Any] = [None] * size
            dist.all_gather_object(told, str(caught.value))
            assert any(text in each for each in told), told
            model.skipped = ""
            model.zero_grad()
        loss_of(model, batch(rank, 1)).backward()
        (sum(loss_of(plain, batch(each, 1)) for each in range(size)) / size).backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            same(full(param.grad), expected.grad)

    run_ranks(4, body)


def test_refuses_what_it_does_not_follow() -> None:
    def body(rank: int, size: int) -> None:
        tied = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
        tied[1].weight = tied[0].weight
        vocab_parallel_embedding(tied[0])
        with pytest.raises(NotImplementedError, match=r"1\.weight: it is the same parameter"):
            fully_shard(tied)

        outer = make()
        vocab_parallel_embedding(outer.embeds[0])
        fully_shard(outer.block, conditional=True)
        with pytest.raises(NotImplementedError, match="conditional"):
            fully_shard(outer)

        model = shard(make())
        optimizer = adamw(model)
        for refused in (
            lambda: fsdp2.accumulate(model).__enter__(),
            lambda: fsdp2.skip_step_on_error(model).__enter__(),
            lambda: model.set_optimizer_in_backward(optimizer),
        ):
            with pytest.raises(NotImplementedError, match=r"embeds\.0\.weight is vocabulary-parallel"):
                refused()
        with full_params(model, writeback=True), pytest.raises(RuntimeError, match="full_params"):
            model.embeds[0](batch(rank, 0))
        model.embeds[0].set_all_reduce_hook(lambda gradient: None)
        with pytest.raises(NotImplementedError, match=r"embeds\.0\.weight: .* a hook for reductions"):
            model(batch(rank, 0))

    run_ranks(2, body)


def test_sends_ids_and_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with T ids sends T int64 and the counts, and as many rows as others have asked it for; the table stays."""

    def body(rank: int, size: int) -> None:
        table = nn.Embedding(ROWS, WIDTH)
        sent: list[int] = []
        exchange = dist.all_to_all_single

        def counted(output: Tensor, source: Tensor, *args: Any, **options: Any) -> Any:
            sent.append(source.nbytes)
            return exchange(output, source, *args, **options)

        vocab_parallel_embedding(table, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        monkeypatch.setattr(dist, "all_to_all_single", counted)
        (group,) = (each.engine_group for each in shards_of(table).groups)
        chunk, row = -(-ROWS // size), WIDTH * 2
        output = table(batch(rank, 0))
        asked = sum(int((batch(each, 0) // chunk == rank).sum()) for each in range(size))
        assert sent == [8 * size, 8 * LENGTHS[rank], row * asked]
        output.float().sum().backward()
        assert sent[3:] == [row * LENGTHS[rank]]
        with torch.no_grad():
            table(batch(rank, 0))
        assert len(sent) == 7
        table.weight.requires_grad_(False)
        table(batch(rank, 0))
        assert len(sent) == 10
        assert not group.unsharded.is_allocated

    run_ranks(4, body)


def test_is_a_parameter_like_any_other() -> None:
    """Tools, copies, frozen tables, evaluation, replaced weights, meta."""

    def body(rank: int, size: int) -> None:
        model, plain = shard(make()), make()
        weight = model.embeds[0].weight
        assert isinstance(weight, DTensor)
        assert (weight.placements, weight.shape) == ((Shard(0),), (ROWS, WIDTH))
        assert "rows are looked up" in str(fsdp2.describe(model))
        assert not fsdp2.check(model)
        assert "embeds.0.weight" in shards_of(model).names()
        with full_params(model):
            same(model.embeds[0](torch.tensor([1, 7])), plain.embeds[0](torch.tensor([1, 7])))
            same(model.embeds[0].weight.detach(), plain.embeds[0].weight.detach())
        ids = batch(rank, 0)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                same(model(ids), plain(ids))
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert shards_of(copied).names().keys() == shards_of(model).names().keys()
            loss_of(copied, ids).backward()
            loss_of(model, ids).backward()
            same(copied.embeds[0].weight.grad.full_tensor(), weight.grad.full_tensor())
            model.zero_grad()
            end_of_part()

        model.requires_grad_(True)
        weight.requires_grad_(False)
        loss_of(model, ids).backward()  # no rank communicates for the table in backward
        assert weight.grad is None
        assert model.head.weight.grad is not None
        weight.requires_grad_(True)

        torch.manual_seed(9)
        other = make()
        with torch.no_grad():
            for p in other.parameters():
                p.add_(0.5)
        model.load_state_dict(shard(copy.deepcopy(other)).state_dict())
        with torch.no_grad():
            same(model(ids), other(ids))

        late, gathered = (_initialised_late(vocab_parallel) for vocab_parallel in (True, False))
        with torch.no_grad():
            same(late(ids), gathered(ids))

    run_ranks(3, body)


def _initialised_late(vocab_parallel: bool) -> Language:
    with torch.device("meta"):
        model = Language(padding_idx=1)
        if vocab_parallel:
            shard(model)
        else:
            fully_shard(model)
    with pytest.raises(RuntimeError, match="to_empty"):
        model(torch.tensor([1]))
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks
def test_at_the_debug_level_in_other_ways() -> None:
    """Compiled, under autocast, with gradients of some parameters only, and where unused groups reduce zeros."""

    def body(rank: int, size: int) -> None:
        fsdp2.set_checks("debug")
        ids = batch(rank, 0)
        plain, model = make(), shard(make())
        for module in (model, *model.embeds):
            module.set_reduce_scatter_unused_params(True)
        same(train(model, adamw(model), [rank], size), train(plain, adamw(plain), [*range(size)], size))
        same(torch.compile(model, backend="eager")(ids), make_like(model)(ids))
        with torch.autocast("cpu", torch.bfloat16):
            same(shard(make(torch.float32))(ids), make(torch.float32)(ids), 1e-2)
        for _ in range(2):
            loss_of(model, ids).backward(inputs=[model.embeds[0].weight])
            loss = sum(loss_of(plain, batch(each, 0)) for each in range(size)) / size
            loss.backward(inputs=[plain.embeds[0].weight])
            same(full(model.embeds[0].weight.grad), plain.embeds[0].weight.grad)

    run_ranks(2, body)


def make_like(model: Language) -> Language:
    plain = make()
    plain.load_state_dict({name: full(p) for name, p in model.state_dict().items()})
    return plain


def test_trains_on_a_device() -> None:
    def body(rank: int, size: int) -> None:
        plain, model = make(padding_idx=1), make(padding_idx=1).to(fake_gpu.KIND)
        model.begin = lambda ids: model.embeds[0](ids)  # type: ignore[method-assign]
        shard(model)
        optimizers = adamw(plain), adamw(model)
        for step in range(STEPS):
            loss_of(model, batch(rank, step).to(fake_gpu.KIND)).backward()
            (sum(loss_of(plain, batch(each, step)) for each in range(size)) / size).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            same(full(param).cpu(), expected.detach())

    run_ranks(2, body, device=fake_gpu.KIND)


@pytest.mark.parametrize("beside", [False, True])
def test_steps_with_flat_optimizers(beside: bool) -> None:
    def body(rank: int, size: int) -> None:
        plain, model = make(), shard(make())
        expected = train(plain, adamw(plain), [*range(size)], size)
        found = train(model, fsdp2.flatten_optimizer(adamw(model), overlap_with_forward=beside), [rank], size)
        same(found, expected)

    run_ranks(2, body)


def test_checkpoint_goes_to_other_numbers_of_ranks(tmp_path: Any) -> None:
    def run(ranks: int, first: int, last: int, save: bool) -> Callable[[int, int], Any]:
        def body(rank: int, size: int) -> Any:
            model = shard(make(torch.float64))
            optimizer = adamw(model)
            if not save:
                state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
                dcp.load(state, checkpoint_id=tmp_path)
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            for step in range(first, last):
                loss = sum(loss_of(model, batch(each, step)) for each in range(4)) if size == 1 else None
                if loss is None:
                    own = torch.cat([batch(each, step) for each in range(4) if each % size == rank])
                    loss = loss_of(model, own) * size
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if save:
                state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
                dcp.save(state, checkpoint_id=tmp_path)
            return {name: full(p).clone() for name, p in model.named_parameters()}

        return body

    run_ranks(3, run(3, 0, 2, True))
    (found, _) = run_ranks(2, run(2, 2, 4, False))

    def alone(rank: int, size: int) -> Any:
        plain = make()
        optimizer = adamw(plain)
        for step in range(4):
            sum(loss_of(plain, batch(each, step)) for each in range(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(plain.named_parameters())

    same(found, run_ranks(1, alone)[0])
