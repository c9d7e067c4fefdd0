"""Generation with a sharded model, token by token with a KV cache, in each of the ways that the guides name.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/generate.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/generate.py --checkpoint checkpoints

The model is one that train_gpt.py has saved, or a small one that learns the Zen of Python here, in seconds. The prompts
are dealt to the ranks. They have different lengths, and so have the texts: each ends with its line, or after a number
of tokens. Where every forward gathers, a rank whose text has ended goes on with dummy forwards until all have ended.
Where no forward gathers after the first, it stops. Each way generates all texts three times: first, next, and after a
write to all weights. They must be the same each time, which this program checks.
"""

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cached_gpt import SMALL, CachedGPT, find_checkpoint, load, train_quickly
from tiny_text import join_ranks, say
from torch import Tensor

import fsdp2
from fsdp2.engine import Observer, extend

END = b"\n"  # a token is a byte
PROMPTS, NEW_TOKENS = ["Beautiful", "Explicit is", "Now", "If the implementation"], [12, 32, 40]


# ---- Command line ----


def parse_arguments() -> argparse.Namespace:
    """Returns the options, and the arguments of CachedGPT as `shape`. Wrong ones end all ranks, before they meet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="one of train_gpt.py, of any rank count, or a folder of them")
    add("--heads", type=int, default=6, metavar="N", help="heads of its model, which it does not say (default: 6)")
    add("--prompts", nargs="+", default=PROMPTS, metavar="TEXT", help=f"(default: {PROMPTS})")
    add("--new-tokens", type=int, nargs="+", default=NEW_TOKENS, metavar="N", help="at most, for the prompts in turn")
    args = parser.parse_args()
    args.shape = SMALL
    try:
        if args.checkpoint:
            args.checkpoint, args.shape = find_checkpoint(args.checkpoint, args.heads)
        for i, prompt in enumerate(args.prompts):
            length, count = len(prompt.encode()), args.new_tokens[i % len(args.new_tokens)]
            if length < 1 or count < 1 or length + count > args.shape["context"]:
                limits = f"at least 1 token, and at least 1 new one, together at most {args.shape['context']}"
                raise ValueError(f"--prompts {prompt!r}: expected {limits}, got {length} and {count}")
    except ValueError as problem:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            parser.error(str(problem))
        raise SystemExit(2) from None  # said once on each machine
    return args


# ---- Generation ----


class GeneratingGPT(CachedGPT):
    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int, waits: bool) -> tuple[bytes, int]:
        """Returns the likeliest tokens that follow `prompt`, at most `count`, and the number of dummy forwards.

        `waits`: every forward gathers, so that each rank must run as many as the rank whose text is longest.
        """
        text, dummies, goes_on = b"", 0, count > 0
        tokens, caches = prompt, [[] for _ in self.blocks]
        while True:
            if goes_on:
                tokens = self(tokens, caches)[:, -1:].argmax(-1)
                text += bytes([int(tokens)])
            else:
                self(prompt[:, :1])
                dummies += 1
            goes_on = len(text) < count and END not in text
            if not (is_so_on_any_rank(goes_on, prompt.device) if waits else goes_on):
                return text, dummies


def is_so_on_any_rank(flag: bool, device: torch.device) -> bool:
    """Every rank must call it for each token: none knows where a line ends. If counts alone ended texts, one maximum of
    all counts would do.
    """
    number = torch.tensor(int(flag), device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number)


# ---- Ways to generate ----


def register(model: Any) -> None:
    fsdp2.register_fsdp_forward_method(model, "generate")


def unshard(model: Any) -> None:
    for module in (*model.blocks, model):
        module.unshard()


def back_to_default(model: Any) -> None:
    model.__dict__.pop("generate", None)  # what has been registered; the method of the class is left
    model.set_reshard_after_forward(True)
    for module in (*model.blocks, model):
        module.reshard()


class Way(NamedTuple):
    name: str
    begin: Any  # called once with the model
    around: Any  # makes the context of each time that texts are generated
    waits: bool  # every forward gathers


WAYS = [
    Way("nothing set", lambda model: None, nullcontext, True),
    Way("register_fsdp_forward_method", register, nullcontext, True),
    Way("set_reshard_after_forward(False)", lambda model: model.set_reshard_after_forward(False), nullcontext, False),
    Way("unshard() of each sharded module", unshard, nullcontext, False),
    Way("with full_params(model)", lambda model: None, fsdp2.full_params, False),
]


class Gathers(Observer):
    """Counts all-gathers, and the bytes of unsharded parameters that are held at once."""

    def __init__(self) -> None:
        self.count, self.peak, self.held = 0, 0, {}

    def before_gather(self, group: Any) -> None:
        self.held[group] = group.nbytes
        self.count, self.peak = self.count + 1, max(self.peak, sum(self.held.values()))

    def before_free(self, group: Any) -> None:
        self.held.pop(group, None)


def measure(way: Way, model: Any, mine: list[tuple[Tensor, int]], gathers: Gathers) -> list[Any]:
    """Generates three times in one way, prints what that costs, and returns the texts of each time and rank."""
    shards, per_token, all_texts, seconds = [*model.parameters()], [], [], 0.0
    gathers.count = gathers.peak = 0
    way.begin(model)
    for is_changed in (False, False, True):
        if is_changed:
            with torch.no_grad():
                for shard in shards:
                    shard.mul_(1.0)  # every write counts as a change; this one leaves the texts as they are
        dist.barrier()
        seconds -= time.perf_counter()
        with way.around(model):
            results = [model.generate(*each, waits=way.waits) for each in mine]
        dist.barrier()
        seconds += time.perf_counter()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, results)
        texts = [[text for text, _ in of_rank] for of_rank in everyone]
        per_token.append(gathers.count / sum(max(map(len, together)) for together in zip(*texts, strict=True)))
        all_texts.append(texts)
        gathers.count = 0
    back_to_default(model)
    num_tokens = sum(len(text) for texts in all_texts for of_rank in texts for text in of_rank)
    dummies = sum(count for of_rank in everyone for _, count in of_rank)
    columns = f"{per_token[0]:8.2f}{per_token[1]:8.2f}{per_token[2]:8.2f}{num_tokens / seconds:10,.0f}"
    say(f"{way.name:34}{columns}{gathers.peak:18,}{dummies:9}")
    return all_texts


def main() -> None:
    args = parse_arguments()
    device, gathers = join_ranks(), Gathers()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > 1:  # a single rank holds all parameters, and gathers nothing
        extend(observers=(lambda root: gathers,))  # before fully_shard

    torch.manual_seed(0)  # the same weights on every rank
    model = GeneratingGPT(**args.shape).to(device)
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    if args.checkpoint:
        load(model, args.checkpoint)
    else:
        train_quickly(model, device)
    model.eval()

    # As many requests on each rank: the last may ask for no token, and take dummy forwards only.
    requests = [(text.encode(), args.new_tokens[i % len(args.new_tokens)]) for i, text in enumerate(args.prompts)]
    requests += [(b" ", 0)] * (-len(requests) % ranks)
    mine = [(torch.tensor([list(prompt)], device=device), count) for prompt, count in requests[rank::ranks]]
    model.generate(*mine[0], waits=True)  # what runs for the first time takes longer

    say(f"{'way':34}{'gathers per token':>24}{'tokens/s':>10}{'bytes unsharded':>18}{'dummies':>9}")
    texts, *others = [texts for way in WAYS for texts in measure(way, model, mine, gathers)]
    assert all(each == texts for each in others), f"expected the same texts each time, got {[texts, *others]}"
    for i, prompt in enumerate(args.prompts):
        text = texts[i % ranks][i // ranks]
        say(f"rank {i % ranks}, {len(text):2} tokens: {prompt!r} + {text.decode(errors='replace')!r}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
