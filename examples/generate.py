"""Generation with a sharded model, byte by byte with a KV cache, in each of the ways that the guides name.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/generate.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/generate.py --checkpoint checkpoints

The model is one that train_gpt.py has saved, or a small one that is trained here in seconds. The prompts are dealt to
the ranks. They have different lengths, and so have the texts: each ends with its line, or after some bytes. Where every
forward gathers, a rank whose text has ended goes on with dummy forwards until those of all ranks have; where no forward
gathers after the first, it stops. All ways must generate the same bytes, which this program checks.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from checkpointing import find_last
from tiny_text import CONTEXT, DOCUMENTATION, LEARNING_RATE, Text, join_ranks, report, say
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from train_gpt import GPT, Block

import fsdp2
from fsdp2.core import Observer, extend

STEPS = 40
PROMPTS = ["The", "A class definition", "An expression is", "If the"]
END = ord("\n")


# ---- Command line ----


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments, with the shape of the model. All ranks end alike if something is wrong with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="one of train_gpt.py, of any rank count, or a folder of them")
    add("--heads", type=int, default=6, metavar="N", help="of attention, which no checkpoint says (default: 6)")
    add("--prompts", nargs="+", default=PROMPTS, metavar="TEXT", help=f"(default: {PROMPTS})")
    add("--new-bytes", type=int, nargs="+", default=[24, 40, 32], metavar="N", help="for the prompts in turn")
    args = parser.parse_args()
    try:
        args.checkpoint, args.shape = find_model(args.checkpoint, args.heads)
        args.requests = [
            Request(text.encode(), args.new_bytes[i % len(args.new_bytes)]) for i, text in enumerate(args.prompts)
        ]
        check(args.requests, args.shape["context"])
    except ValueError as problem:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            sys.exit(2)  # said once on each machine
        parser.error(str(problem))
    return args


class Request(NamedTuple):
    prompt: bytes
    count: int


NOTHING = Request(b" ", 0)  # of a rank that has no prompt while others have one


def check(requests: list[Request], context: int) -> None:
    for prompt, count in requests:
        if not prompt:
            raise ValueError("--prompts: expected texts of at least one byte, got an empty one")
        if count < 1:
            raise ValueError(f"--new-bytes {count}: expected at least 1")
        if len(prompt) + count > context:
            sizes = f"{len(prompt)} bytes of the prompt {prompt.decode()!r} and {count} new ones"
            raise ValueError(f"{sizes}: expected no more than the {context} that the model has positions for")


def find_model(folder: Path | None, heads: int) -> tuple[Path | None, dict[str, int]]:
    """Returns the checkpoint to load, if one is wanted, and the shape of the model."""
    if folder is None:
        checkpoint, width, layers, context = None, 96, 4, CONTEXT
    else:
        checkpoint = find_last(folder)
        if checkpoint is None:
            raise ValueError(f"--checkpoint {folder}: no checkpoint there (expected .metadata, or folders step-*)")
        entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        layers = sum(name.startswith("model.blocks.") and name.endswith("query_key_value.weight") for name in entries)
        if not layers:
            raise ValueError(f"--checkpoint {folder}: expected one that train_gpt.py has saved, got another model's")
        context, width = entries["model.position_embedding.weight"].size
    if heads < 1 or width % heads:
        raise ValueError(f"--heads {heads}: expected a divisor of the model's width, {width}")
    return checkpoint, {"width": width, "layers": layers, "heads": heads, "context": context}


# ---- Model ----


class Cache:
    """Holds the keys and values that one block has computed for the bytes so far."""

    def __init__(self) -> None:
        self.keys = self.values = torch.empty(0)
        self.length = 0

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.length:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values, self.length = keys, values, keys.shape[2]
        return keys, values


class CachedBlock(Block):
    """A block of train_gpt.py that computes keys and values of new bytes only."""

    def forward(self, stream: Tensor, cache: Cache) -> Tensor:
        heads = self.query_key_value(self.attention_norm(stream)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        key, value = cache.add(key, value)
        # Either all bytes are new, or there is one, which sees all.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] == key.shape[2])
        stream = stream + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return stream + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(stream))))


class CachedGPT(GPT):
    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__(width, layers, heads, context)
        self.blocks = nn.ModuleList(CachedBlock(width, heads) for _ in range(layers))

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Returns the logits of what follows each of `tokens`, which themselves follow what is in the caches."""
        caches = caches or [Cache() for _ in self.blocks]
        start = caches[0].length
        stream = self.byte_embedding(tokens) + self.position_embedding.weight[start : start + tokens.shape[1]]
        for block, cache in zip(self.blocks, caches, strict=True):
            stream = block(stream, cache)
        return self.head(self.norm(stream))

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int, waits: bool) -> tuple[list[int], int]:
        """Returns up to `count` bytes that follow `prompt`, the likeliest ones, and the number of dummy forwards.

        `waits`: each forward gathers, so that every rank must run as many as the rank whose text is longest.
        """
        made: list[int] = []
        dummies, inputs, caches = 0, prompt, [Cache() for _ in self.blocks]
        unfinished = count > 0
        while True:
            if unfinished:
                inputs = self(inputs, caches)[:, -1:].argmax(-1)
                made.append(int(inputs))
            else:
                self(prompt[:, :1])
                dummies += 1
            unfinished = len(made) < count and END not in made
            if not (is_so_on_any_rank(unfinished, prompt.device) if waits else unfinished):
                return made, dummies


def is_so_on_any_rank(flag: bool, device: torch.device) -> bool:
    """Every rank must call it, once for each byte. Were no text to end early, one maximum of all counts would do."""
    number = torch.tensor(int(flag), device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)


def make_model(args: argparse.Namespace, device: torch.device) -> CachedGPT:
    """Shards a model, and loads or trains its weights."""
    torch.manual_seed(0)  # the same weights on every rank
    model, mesh = CachedGPT(**args.shape).to(device), init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    if args.checkpoint:
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=args.checkpoint)
        set_model_state_dict(model, state["model"])
        say(f"loaded {args.checkpoint}")
        return model.eval()
    optimizer, text = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), Text(DOCUMENTATION, device)
    for step in range(1, STEPS + 1):
        inputs, targets = text.batch(step, dist.get_rank(), dist.get_world_size())
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, STEPS):
            report(step, loss)
    return model.eval()


# ---- Ways to generate ----


def sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, fsdp2.FSDPModule)]


@contextmanager
def registered(model: Any) -> Iterator[None]:
    """The root's own parameters stay while `generate` runs; blocks are gathered in each forward."""
    fsdp2.register_fsdp_forward_method(model, "generate")
    yield
    del model.generate  # the method of the class remains


@contextmanager
def kept_after_forward(model: Any) -> Iterator[None]:
    model.set_reshard_after_forward(False)
    yield
    model.set_reshard_after_forward(True)
    for module in sharded_modules(model):
        module.reshard()


@contextmanager
def unsharded(model: Any) -> Iterator[None]:
    for module in sharded_modules(model):
        module.unshard()
    yield
    for module in sharded_modules(model):
        module.reshard()


# Name; context in which a rank generates all its texts; whether each forward gathers.
WAYS: list[tuple[str, Callable[[Any], AbstractContextManager[Any]], bool]] = [
    ("nothing set", nullcontext, True),
    ('register_fsdp_forward_method(model, "generate")', registered, True),
    ("set_reshard_after_forward(False)", kept_after_forward, False),
    ("unshard() of each sharded module", unsharded, False),
    ("with full_params(model)", fsdp2.full_params, False),
]


class Gathers(Observer):
    """Counts all-gathers, and the bytes of unsharded parameters that are there at once."""

    def __init__(self) -> None:
        self.unsharded: dict[Any, int] = {}
        self.clear()

    def clear(self) -> None:
        self.count = self.peak = 0

    def before_gather(self, group: Any) -> None:
        self.count += 1
        self.unsharded[group] = group.nbytes
        self.peak = max(self.peak, sum(self.unsharded.values()))

    def before_free(self, group: Any) -> None:
        self.unsharded.pop(group, None)


def deal(requests: list[Request], device: torch.device) -> list[tuple[Tensor, int]]:
    """Returns the prompts and counts of this rank: as many on each, so that all ranks generate as often."""
    ranks = dist.get_world_size()
    requests = requests + [NOTHING] * (-len(requests) % ranks)
    return [(torch.tensor([list(prompt)], device=device), count) for prompt, count in requests[dist.get_rank() :: ranks]]


def generate_all(model: CachedGPT, mine: list[tuple[Tensor, int]], waits: bool) -> tuple[list[list[list[int]]], int]:
    """Returns the texts of all ranks, and the number of their dummy forwards."""
    results = [model.generate(prompt, count, waits) for prompt, count in mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    return [[made for made, _ in of_rank] for of_rank in everyone], sum(n for of_rank in everyone for _, n in of_rank)


def compare_ways(model: CachedGPT, mine: list[tuple[Tensor, int]], gathers: Gathers) -> list[list[list[int]]]:
    """Prints a line for each way, and returns the texts of all ranks, which are the same in all ways."""
    expected, _ = generate_all(model, mine, waits=True)  # not measured: what runs for the first time takes longer
    num_bytes = sum(len(text) for of_rank in expected for text in of_rank)
    longest = sum(max(map(len, of_round)) for of_round in zip(*expected, strict=True))
    say(f"{'way':50}{'gathers per byte':>20}{'bytes per second':>20}{'unsharded':>15}{'dummy forwards':>20}")
    for name, way, waits in WAYS:
        gathers.clear()
        dist.barrier()
        start = time.perf_counter()
        with way(model):
            texts, dummies = generate_all(model, mine, waits)
            seconds = time.perf_counter() - start
        assert texts == expected, f"{name}: expected {expected}, got {texts}"
        rate, speed = gathers.count / longest, num_bytes / seconds
        say(f"{name:50}{rate:20.2f}{speed:20,.0f}{gathers.peak / 1e3:12,.0f} kB{dummies:20}")
    return expected


@torch.no_grad()
def check_cache(model: CachedGPT, mine: list[tuple[Tensor, int]], made: list[list[int]]) -> None:
    """Compares the bytes with one forward over each whole text, without a cache. Every rank must call it."""
    distance = torch.zeros((), device=mine[0][0].device)
    for (prompt, _), text in zip(mine, made, strict=True):
        chosen = prompt.new_tensor([text])
        logits = model(torch.cat([prompt, chosen], dim=1))[:, prompt.shape[1] - 1 : -1]
        if text:
            distance = distance.maximum((logits.amax(-1) - logits.gather(-1, chosen[..., None])[..., 0]).max())
    dist.all_reduce(distance, dist.ReduceOp.MAX)
    assert distance < 1e-3, f"expected the likeliest bytes, got one whose logit is {distance} less than another's"
    say("the bytes are those that a forward over the whole text, without a cache, finds likeliest")


def main() -> None:
    args = parse_arguments()
    device = join_ranks()
    gathers = Gathers()
    if dist.get_world_size() > 1:  # one rank has all parameters, and gathers nothing
        extend(observers=(lambda root: gathers,))  # before fully_shard
    model, mine = make_model(args, device), deal(args.requests, device)

    texts = compare_ways(model, mine, gathers)
    check_cache(model, mine, texts[dist.get_rank()])
    for i, (prompt, _) in enumerate(args.requests):
        rank, text = i % len(texts), bytes(texts[i % len(texts)][i // len(texts)])
        say(f"rank {rank}, {len(text)} bytes: {prompt.decode()!r} + {text.decode(errors='replace')!r}")

    with kept_after_forward(model):
        for moment in ("first", "again", "after a change of all weights"):
            if moment.startswith("after"):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.99)
            gathers.clear()
            generate_all(model, mine, waits=False)
            say(f"set_reshard_after_forward(False), {moment}: {gathers.count} gathers for {len(mine)} texts on each rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
