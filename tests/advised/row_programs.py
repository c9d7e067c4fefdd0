"""Follows the advice of `vocab_parallel_embedding`."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from advised.registry import follows, refused, same
from helpers import full


def trains_as(model: Any, plain: Any, ids: Tensor) -> None:
    """Compares one step on the ids of all ranks, of which each has a half."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    model(ids.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    plain(ids).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        same(full(param), expected)


def embedding(cls: Any = nn.Embedding, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(6, 4, **options)


@follows("Shard that embedding with fully_shard instead of vocab_parallel_embedding")
def a_tied_table() -> None:
    model = nn.Sequential(embedding(), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    plain, vocab_parallel = copy.deepcopy(model), copy.deepcopy(model)
    fsdp2.vocab_parallel_embedding(vocab_parallel[0])
    text = refused(lambda: fsdp2.fully_shard(vocab_parallel), NotImplementedError)
    assert "1.weight: it is the same parameter as 0.weight" in text
    text = refused(lambda: fsdp2.fully_shard(vocab_parallel[1]), NotImplementedError)
    assert "it is the same parameter as Embedding's weight" in text, text
    fsdp2.fully_shard(model[0])
    trains_as(fsdp2.fully_shard(model), plain, torch.tensor([[1, 2], [2, 5]]))


@follows("Shard others with fully_shard")
def a_bag() -> None:
    bag, plain = embedding(nn.EmbeddingBag), embedding(nn.EmbeddingBag)
    refused(lambda: fsdp2.vocab_parallel_embedding(bag), TypeError)
    trains_as(fsdp2.fully_shard(bag), plain, torch.tensor([[1, 2], [2, 5]]))


@follows("Build the embedding without it")
def a_table_with_an_option() -> None:
    refused(lambda: fsdp2.vocab_parallel_embedding(embedding(sparse=True)), NotImplementedError)
    trains_as(fsdp2.vocab_parallel_embedding(embedding()), embedding(), torch.tensor([[1, 2], [2, 5]]))
