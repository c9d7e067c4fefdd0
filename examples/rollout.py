"""Shows the four phases of a step of reinforcement learning: train, offload, stream to an engine, restore.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/rollout.py

The engine, which generates, is a plain copy of the model in bfloat16. The ranks of a real program send buckets to a
server such as vLLM instead. The policy learns to write as many letters as it can. Where few weights have changed
in bfloat16, only those are sent.
"""

import torch
import torch.distributed as dist
from tiny_text import CONTEXT, GPT, VOCABULARY, join_ranks, say
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from fsdp2 import StreamVersion, describe, fully_shard, stream_full_params
from fsdp2.tools.stream import ParamBucket

STEPS, ROWS, LENGTH = 8, 24, 24
LEARNING_RATE, DECAY = 4e-2, 0.25  # small steps change few weights in bfloat16
LETTERS = torch.tensor([chr(token).isalpha() and token < 128 for token in range(VOCABULARY)])


class Policy(GPT):
    """Returns logits of the byte that follows each byte."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        stream = self.byte_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))


def make_policy(device: torch.device) -> Policy:
    torch.manual_seed(0)  # the same weights on every rank
    return Policy().to(device)


class Engine:
    """Generates with a plain copy of the model. It is in this process; a server would be in another."""

    def __init__(self, device: torch.device) -> None:
        self.model = make_policy(device).to(torch.bfloat16).requires_grad_(False)
        self.weights = dict(self.model.named_parameters())

    def load(self, bucket: ParamBucket) -> None:
        """Takes whole parameters, or the elements that have changed."""
        bucket.write_to(self.weights)

    def generate(self, rows: int, generator: torch.Generator) -> Tensor:
        tokens = torch.full((rows, 1), ord(" "), device=self.weights["head.weight"].device)
        for _ in range(LENGTH):
            chances = self.model(tokens)[:, -1].float().softmax(-1).cpu()
            drawn = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)], dim=1)
        return tokens


def train(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> float:
    """Makes what earned more than the mean more likely. Returns the mean reward over all ranks."""
    rewards = LETTERS.to(tokens.device)[tokens[:, 1:]].float()  # of each byte
    mean = rewards.mean() / dist.get_world_size()
    dist.all_reduce(mean)
    chances = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    (-(rewards - mean) * chances).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return mean.item()


def move(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Moves shards and optimizer state. The device's memory is free for the engine when they have left."""
    model.to(device)
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to(device) if torch.is_tensor(value) and value.dim() else value


def is_equal(model: nn.Module, engine: Engine) -> bool:
    """Compares each weight of the engine with the trained one in bfloat16. Every rank must call it."""
    wholes = [(name, param.detach().full_tensor().bfloat16()) for name, param in model.named_parameters()]
    return all(torch.equal(whole, engine.weights[name]) for name, whole in wholes)


def main() -> None:
    assert LENGTH < CONTEXT
    device = join_ranks()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))

    model, engine = make_policy(device), Engine(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    say(str(describe(model)))
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = ExponentialLR(optimizer, DECAY)
    generator, sent = torch.Generator().manual_seed(rank), StreamVersion()

    for step in range(1, STEPS + 1):
        tokens = engine.generate(ROWS // world_size, generator)  # each rank has its own rows
        reward = train(model, optimizer, tokens)
        schedule.step()
        move(model, optimizer, torch.device("cpu"))  # without GPUs nothing moves
        nbytes = 0
        for bucket in stream_full_params(model, dtype=torch.bfloat16, bucket_bytes=64 * 1024, since=sent):
            engine.load(bucket)
            nbytes += sum(each.nbytes for each in (bucket.flat, bucket.indices) if each is not None)
        move(model, optimizer, device)
        say(f"step {step}: reward {reward:.3f}, {nbytes:,} bytes sent, equal to the bit: {is_equal(model, engine)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
