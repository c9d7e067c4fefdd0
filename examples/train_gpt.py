"""Train a byte-level GPT of about 10 million parameters on the documentation that ships with Python.

    export OMP_NUM_THREADS=1
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --save-every 40      # two CPU ranks, two minutes
    torchrun --standalone --nproc-per-node 3 examples/train_gpt.py --resume checkpoints # from the last one in it
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --optimizer muon     # orthogonal updates of matrices
    python examples/train_gpt.py --impl none                                     # plain training, to compare with
    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --device cuda --bf16

Batches depend on the seed and the step alone, and each rank takes its slice of the global batch. So the losses are the
same for every --impl and every number of ranks, also if a run continues from a checkpoint of another number of ranks.
At SIGTERM, to any of its processes, a run finishes its step, saves a checkpoint and ends; after the last step, it ends
at once.
"""

import argparse
import importlib.util
import json
import math
import os
import resource
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics  # what help("for") prints: half a megabyte of English

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpointing import StopSignal, find_last, name_of, resume, save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

try:
    from tqdm import tqdm
except ModuleNotFoundError:
    sys.exit("train_gpt.py draws its progress bar with tqdm: pip install 'fsdp2[examples]'")

VOCABULARY = 256  # one token per byte
TINY = dict(width=64, layers=2, heads=2, context=32, steps=12, warmup=4, eval_every=6, sample_bytes=16)


# ---- Command line ----


def parse_arguments() -> argparse.Namespace:
    """Parses the arguments. It ends the program if they are wrong, on all ranks alike, before any rank communicates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--impl", choices=("fsdp2", "torch", "ddp", "none"), default="fsdp2", help="who shards (default: fsdp2)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU per rank, over NCCL (default: cpu)")
    add(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon: for the blocks' matrices, AdamW beside it",
    )
    add("--bf16", action="store_true", help="compute in bfloat16, reduce gradients and update in float32")
    add("--tiny", action="store_true", help="a model and a run of a few seconds; other options still override it")
    for name, default, meaning in (
        ("width", 384, "features per token"),
        ("layers", 6, "number of blocks"),
        ("heads", 6, "attention heads per block"),
        ("context", 128, "bytes per sequence"),
        ("batch", 12, "sequences per step, over all ranks together"),
        ("steps", 80, "optimizer steps of the whole schedule"),
        ("warmup", 20, "steps until the learning rate is reached"),
        ("eval-every", 20, "steps between two validations"),
        ("eval-batches", 2, "batches of held-out text per validation"),
        ("save-every", 0, "steps between two checkpoints; 0: only at the end"),
        ("sample-bytes", 100, "length of the text generated at the end; 0: none"),
        ("seed", 0, "of weights, batches and sample"),
    ):
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
    add("--lr", type=float, default=1e-3, metavar="RATE", help="peak learning rate of AdamW (default: %(default)s)")
    add("--muon-lr", type=float, default=0.05, metavar="RATE", help="the same of Muon (default: %(default)s)")
    add("--save", default="checkpoints", metavar="DIR", help="where checkpoints go; '': nowhere (default: %(default)s)")
    add("--resume", type=Path, metavar="DIR", help="a checkpoint, of any rank count, or a folder of them: the last")
    # Not --log: torchrun takes that for a prefix of its own options, even behind the name of the script.
    add("--plot", type=Path, metavar="FILE", help="draw the losses there, as PNG or PDF; needs the extra fsdp2[viz]")
    add("--log-file", type=Path, metavar="FILE", help="write losses and speed there, one JSON object per line")
    if parser.parse_args().tiny:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    if problem := find_problem(args, world_size=int(os.environ.get("WORLD_SIZE", 1))):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            sys.exit(2)  # said once on each machine
        parser.error(problem)
    return args


def find_problem(args: argparse.Namespace, world_size: int) -> str | None:
    """Returns why this run cannot start, or None."""
    for name in ("width", "layers", "heads", "context", "batch", "steps", "eval_every", "eval_batches"):
        if getattr(args, name) < 1:
            return f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1"
    if args.context > 10_000:
        return f"--context {args.context}: the held-out text is short, expected at most 10000"
    if args.batch % world_size:
        return f"--batch {args.batch} is not divisible by the number of ranks, {world_size}"
    if args.width % args.heads:
        return f"--width {args.width} is not divisible by --heads {args.heads}"
    if args.impl == "none" and world_size > 1:
        return f"--impl none is training on one process, but there are {world_size} ranks"
    if args.bf16 and args.impl not in ("fsdp2", "torch"):
        return f"--bf16 is a policy of fully_shard, which --impl {args.impl} does not use"
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        return "--plot draws with matplotlib: pip install 'fsdp2[viz]'"
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and torch.cuda.device_count() < local_ranks:
        return f"--device cuda: {local_ranks} rank(s) need a GPU each, torch finds {torch.cuda.device_count()}"
    if args.resume and not find_last(args.resume):
        return f"--resume {args.resume}: no checkpoint there (expected a file .metadata, or folders named step-*)"
    return None


# ---- Model ----


class Block(nn.Module):
    """Is attention and an MLP, each with a norm before it and added to the stream: one group of `fully_shard`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attend(self.attention_norm(stream))
        return stream + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(stream))))

    def attend(self, stream: Tensor) -> Tensor:
        heads = self.query_key_value(stream).unflatten(-1, (3, self.heads, -1))  # batch, time, 3, head, feature
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(-2))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # 2 * layers branches add up in the stream: smaller ones keep its size independent of the depth.
                branch_end = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if branch_end else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.byte_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))


def shard(model: GPT, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Shards `model` by the chosen implementation. All ranks hold the same weights at this point."""
    if args.impl == "none":
        return model
    if args.impl == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device])
    if args.impl == "fsdp2":
        from fsdp2 import MixedPrecisionPolicy, fully_shard
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


# ---- Data ----


class Text:
    """Holds the text as bytes, its last tenth for validation, and makes batches of which each rank takes its slice."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.train, self.held_out = data.tensor_split([len(data) * 9 // 10])
        self.seed, self.batch, self.context, self.device = args.seed, args.batch, args.context, device

    def train_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of this rank: random windows, chosen by seed and step and not by the number of
        ranks.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_000 + step)
        starts = torch.randint(len(self.train) - self.context, (self.batch,), generator=generator)
        return self.windows(self.train, starts)

    def held_out_batch(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns batch `index` of `count`: windows spread evenly over the held-out text, the same in each
        validation.
        """
        starts = torch.arange(index, count * self.batch, count) * (len(self.held_out) - self.context)
        return self.windows(self.held_out, starts // (count * self.batch))

    def windows(self, data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        starts = starts.chunk(dist.get_world_size())[dist.get_rank()]
        window = data[starts[:, None] + torch.arange(self.context + 1)].to(self.device, torch.long)
        return window[:, :-1], window[:, 1:]


# ---- Training ----


def compute_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def mean_over_ranks(loss: Tensor) -> float:
    """Returns the loss of the global batch, whose slices all have the same size. Every rank must call it."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def schedule(step: int, args: argparse.Namespace) -> float:
    """Returns the factor of the peak learning rate: linear warmup, then half a cosine down to a tenth. It needs no
    state, so a resumed run needs none.
    """
    if step <= args.warmup:
        return step / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * progress)


def make_optimizers(model: GPT, args: argparse.Namespace) -> dict[torch.optim.Optimizer, float]:
    """Returns optimizers with their peak learning rates: AdamW, or Muon and AdamW for the parameters that Muon does not
    take. Call it after `shard`, which replaces parameters.
    """
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if args.optimizer == "adamw":
        return {adamw(model.parameters()): args.lr}
    import fsdp2

    lookups = ("byte_embedding", "position_embedding", "head")
    split = fsdp2.split_matrices(model, exclude=lookups, blocks={"blocks.*.query_key_value": 3})
    if dist.get_rank() == 0:
        print(split)
    muon, rest = fsdp2.muon(split.matrices, weight_decay=0.1), adamw(split.others)
    split.check(muon, rest)
    return {muon: args.muon_lr, rest: args.lr}


def train_step(
    model: nn.Module, peaks: dict[torch.optim.Optimizer, float], text: Text, factor: float, step: int
) -> float:
    loss = compute_loss(model, *text.train_batch(step))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, peak in peaks.items():
        for group in optimizer.param_groups:
            group["lr"] = factor * peak
        optimizer.step()
        optimizer.zero_grad()
    return mean_over_ranks(loss)


@torch.no_grad()
def validate(model: nn.Module, text: Text, batches: int) -> float:
    """Returns the bits per byte on held-out text."""
    losses = [compute_loss(model, *text.held_out_batch(index, batches)) for index in range(batches)]
    return mean_over_ranks(torch.stack(losses).mean()) / math.log(2)


@torch.no_grad()
def generate(model: nn.Module, args: argparse.Namespace, device: torch.device) -> str:
    """Continues a prompt byte by byte. Every rank must call it: each forward gathers the weights from all of them."""
    tokens = torch.tensor([list(b"The ")], device=device)
    generator = torch.Generator(device).manual_seed(args.seed)
    for _ in range(args.sample_bytes):
        logits = model(tokens[:, -args.context :])[:, -1].float()
        next_byte = torch.multinomial(F.softmax(logits / 0.7, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, next_byte], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def peak_memory(device: torch.device) -> float:
    """Returns the most gigabytes that this rank has held: tensors on a GPU; on CPU, memory of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Reporter:
    """Prints the progress bar and lines, and writes the log file, on the first rank only."""

    def __init__(self, args: argparse.Namespace, first_step: int, device: torch.device) -> None:
        self.silent, self.device = dist.get_rank() != 0, device
        self.tokens_per_step = args.batch * args.context
        self.losses: dict[int, float] = {}  # in bits per byte, by step
        self.log = None
        if args.log_file and not self.silent:
            args.log_file.parent.mkdir(parents=True, exist_ok=True)
            self.log = args.log_file.open("w", buffering=1)
        self.bar = tqdm(total=args.steps, initial=first_step, unit="step", disable=self.silent)

    def train(self, step: int, loss: float, seconds: float) -> None:
        speed, peak = self.tokens_per_step / seconds, peak_memory(self.device)
        self.losses[step] = loss / math.log(2)
        now = f"{self.losses[step]:.3f} bits per byte, {speed:,.0f} tokens/s, peak {peak:.2f} GB"
        self.bar.set_postfix_str(now, refresh=False)
        self.bar.update()
        self.record(step=step, loss=loss, tokens_per_second=speed, peak_memory_gb=peak)

    def validation(self, step: int, bits_per_byte: float) -> None:
        self.say(f"step {step}: {bits_per_byte:.3f} bits per byte on held-out text")
        self.record(step=step, val_bits_per_byte=bits_per_byte)

    def saved(self, checkpoint: Path) -> None:
        if not self.silent:
            nbytes = sum(path.stat().st_size for path in checkpoint.rglob("*"))
            self.say(f"Saved {checkpoint} ({nbytes / 1e6:.0f} MB).")

    def say(self, line: str) -> None:
        if not self.silent:
            self.bar.write(line)

    def record(self, **values: float) -> None:
        if self.log:
            self.log.write(json.dumps(values) + "\n")


def curve(losses: dict[int, float], columns: int = 60) -> str:
    """Returns the losses as a line of bars, of which each is the mean of as many steps."""
    values = [*losses.values()]
    size = math.ceil(len(values) / columns)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    bars = "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / (high - low or 1))] for mean in means)
    return f"{means[0]:.2f} {bars} {means[-1]:.2f}"


def plot(losses: dict[int, float], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([*losses], [*losses.values()])
    axes.set(xlabel="step", ylabel="training loss, bits per byte", title="train_gpt.py")
    figure.savefig(file)


def how_to_go_on(args: argparse.Namespace, checkpoint: Path, steps: int) -> str:
    """Returns the command that continues from `checkpoint` to step `steps`, on as many ranks, with the same options."""
    given, ranks = iter(sys.argv[1:]), dist.get_world_size()
    kept = []
    for each in given:
        if each in ("--steps", "--resume"):
            next(given)
        elif not each.startswith(("--steps=", "--resume=")):
            kept.append(each)
    start = f"torchrun --standalone --nproc-per-node {ranks}" if "RANK" in os.environ else "python"
    options = [*kept, "--steps", str(steps), "--resume", str(checkpoint)]
    return f"OMP_NUM_THREADS=1 {start} examples/train_gpt.py {shlex.join(options)}"


def local_part(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def train(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(args.seed)  # the same weights on every rank
    gpt = GPT(args.width, args.layers, args.heads, args.context).to(device)
    model = shard(gpt, args, device)
    peaks = make_optimizers(gpt, args)
    optimizers = [*peaks]
    text = Text(args, device)
    first_step = resume(find_last(args.resume), model, optimizers) if args.resume else 0
    stop_signal = StopSignal()
    report = Reporter(args, first_step, device)
    size = sum(parameter.numel() for parameter in model.parameters())
    held = sum(local_part(parameter).numel() * parameter.element_size() for parameter in model.parameters())
    report.say(f"{size / 1e6:.1f} M parameters, {dist.get_world_size()} rank(s), {args.impl} on {device.type}")
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    states = "twice as much for AdamW" if args.optimizer == "adamw" else "as much for Muon, or twice as much for AdamW"
    report.say(f"This rank holds {held / 1e6:.1f} MB of parameters, as much of gradients, and {states}.")
    if held < whole:
        report.say(f"Without sharding (--impl none or ddp) it would hold {whole / held:.1f}x as much of each.")
    if args.resume:
        report.say(f"Resumed from {find_last(args.resume)}: training continues with step {first_step + 1}.")
    report.validation(first_step, validate(model, text, args.eval_batches))

    speed_seconds = 0.0
    for step in range(first_step + 1, args.steps + 1):
        start = time.perf_counter()
        loss = train_step(model, peaks, text, schedule(step, args), step)
        seconds = time.perf_counter() - start
        speed_seconds += seconds if step > first_step + 1 else 0  # the first step also builds buffers and streams
        report.train(step, loss, seconds)
        if step == first_step + 3 < args.steps:
            report.say(f"All {args.steps} steps take about {seconds * (args.steps - first_step) / 60:.1f} minutes.")
        stops = stop_signal.agreed(device)
        if args.save and (stops or step == args.steps or (args.save_every and step % args.save_every == 0)):
            save(Path(args.save), step, model, optimizers)
            report.saved(name_of(Path(args.save), step))
        if stops:
            report.bar.close()
            how = how_to_go_on(args, name_of(Path(args.save), step), args.steps) if args.save else "nothing was saved"
            report.say(f"Stopped by SIGTERM after step {step}. To continue: {how}")
            return
        if step == args.steps:
            stop_signal.end_at_once()  # while it validates and samples, too
        if step % args.eval_every == 0 or step == args.steps:
            report.validation(step, validate(model, text, args.eval_batches))
    report.bar.close()
    if speed_seconds:
        tokens = args.batch * args.context * (args.steps - first_step - 1)
        rate, peak = tokens / speed_seconds, peak_memory(device)
        report.say(f"{rate:,.0f} tokens per second on all ranks together; at most {peak:.2f} GB on this rank")
    if report.losses:
        report.say(f"Training, in bits per byte: {curve(report.losses)}")
        if args.plot and not report.silent:
            plot(report.losses, args.plot)
    if args.sample_bytes:
        report.say(f"Sample: {generate(model, args, device)!r}")
        report.say("(Some 100 steps teach letters and spaces; words take thousands.)")
    if args.save and report.losses:
        more = args.steps + max(args.steps, 1)
        report.say(f"To go on to step {more}: {how_to_go_on(args, name_of(Path(args.save), args.steps), more)}")
    other = "sharded training (torchrun --standalone --nproc-per-node 2 examples/train_gpt.py)"
    if args.impl != "none":
        other = "plain training (python examples/train_gpt.py --impl none)"
    report.say(f"Next: compare with {other}; --optimizer muon;")
    report.say("or the shorter programs, and the guides, that examples/README.md lists.")


def main() -> None:
    args = parse_arguments()
    device, backend = torch.device("cpu"), "gloo"
    if args.device == "cuda":
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    train(args, device)
    dist.destroy_process_group()  # not after an error: the other ranks may be stuck, and torchrun ends them


if __name__ == "__main__":
    main()
