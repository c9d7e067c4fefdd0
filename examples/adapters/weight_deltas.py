"""Sends what a training step has changed of a sharded model to an inference engine in another process.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/adapters/weight_deltas.py

`DeltaSender` stands on the training ranks, `DeltaReceiver` beside the engine. What carries the bytes between them must
keep messages apart. The first version has all weights. Each later one has the elements whose bits have changed in the
dtype of the engine, so that the engine's weights equal the trained ones to the bit. Versions are numbered: a receiver
that has missed one refuses what follows, until the sender's `resync` has sent all weights again.

Engines have other names than training. A `Rename` maps names by a regular expression, also into a part of a fused
parameter: queries, keys and values are row ranges of vLLM's `qkv_proj`. The receiver writes into the tensors of an
engine, or keeps a copy of its own and passes what has changed to `load_weights` of the engine.

The program trains a small model with separate queries, keys and values. The engine, which the first rank starts as
another process, has them fused.
"""

import io
import multiprocessing
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2 import StreamVersion, fully_shard, stream_full_params

# ---- names -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rename:
    r"""Maps parameters of the trained model to one of the engine.

    Args:
        pattern: a regular expression that matches the whole name of a trained parameter.
        name: the engine's name for it, in which `\1` stands for the first group of the pattern.
        part: the place among the parameters that the engine has behind one another, along dim 0, in one tensor.
    """

    pattern: str
    name: str
    part: int = 0


LLAMA_IN_VLLM = (
    Rename(r"(.*)\.q_proj\.(\w+)", r"\1.qkv_proj.\2", 0),
    Rename(r"(.*)\.k_proj\.(\w+)", r"\1.qkv_proj.\2", 1),
    Rename(r"(.*)\.v_proj\.(\w+)", r"\1.qkv_proj.\2", 2),
    Rename(r"(.*)\.gate_proj\.(\w+)", r"\1.gate_up_proj.\2", 0),
    Rename(r"(.*)\.up_proj\.(\w+)", r"\1.gate_up_proj.\2", 1),
)
"""The names of the parameters inside vLLM's Llama, on one device. Its `load_weights` takes those of Transformers."""


@dataclass(frozen=True)
class Place:
    """Says where an engine has a trained parameter: in `name`, of `shape`, from the element `start` on."""

    name: str
    shape: tuple[int, ...]
    start: int


def find_places(shapes: Mapping[str, tuple[int, ...]], renames: Sequence[Rename]) -> dict[str, Place]:
    """Returns the place of each trained parameter. The first rename that matches counts; without one a name stays.

    Raises:
        ValueError: a rename matches no parameter, parts of a fused parameter are missing or doubled, or their shapes
            differ in more than the rows.
    """
    used: set[Rename] = set()
    parts: dict[str, dict[int, str]] = {}
    for name in shapes:
        rename = next((each for each in renames if re.fullmatch(each.pattern, name)), None)
        target, part = name, 0
        if rename is not None:
            used.add(rename)
            target, part = re.sub(rename.pattern, rename.name, name, count=1), rename.part
        before = parts.setdefault(target, {}).setdefault(part, name)
        if before != name:
            raise ValueError(f"{name} and {before} both become part {part} of {target}")
    unused = [each.pattern for each in renames if each not in used]
    if unused:
        raise ValueError(f"renames: expected patterns that match parameters, got {unused}, which match none")
    places = {}
    for target, names in parts.items():
        if sorted(names) != [*range(len(names))]:
            raise ValueError(f"{target}: expected parts 0 to {len(names) - 1}, got {sorted(names)} ({names})")
        sizes = [shapes[names[part]] for part in range(len(names))]
        if any(size[1:] != sizes[0][1:] or not size for size in sizes[1:]):
            raise ValueError(f"{target}: expected parts that differ in rows only, got {sizes}")
        whole = (sum(size[0] for size in sizes), *sizes[0][1:]) if len(sizes) > 1 else sizes[0]
        start = 0
        for part, size in enumerate(sizes):
            places[names[part]] = Place(target, whole, start)
            start += torch.Size(size).numel()
    return places


# ---- what travels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """Holds one bucket of a version, on the CPU.

    Args:
        version: the number of the version.
        base: the version that it changes, or None if it has all weights.
        part: the number of the bucket, from 0 to `parts` - 1.
        parts: how many buckets the version has.
        names: the engine's names.
        shapes: the shapes of the engine's tensors, whole.
        starts: where in each flattened tensor the values begin, or the indices count from.
        counts: how many values each has.
        values: the values, one behind the other. None in a version in which nothing has changed.
        indices: None if `values` has whole parameters. Else the place of each value, counted from `starts`.
    """

    version: int
    base: int | None
    part: int
    parts: int
    names: list[str]
    shapes: list[list[int]]
    starts: list[int]
    counts: list[int]
    values: Tensor | None
    indices: Tensor | None

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(asdict(self), buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Message":
        return cls(**torch.load(io.BytesIO(data), weights_only=True))


class DeltaSender:
    """Streams a sharded model to one receiver. Every rank makes one, and calls the same methods.

    Args:
        model: the sharded model.
        send: called with the bytes of each message, on the rank `source` alone.
        dtype: the dtype of the engine's weights.
        renames: how the engine names what is trained.
        source: the global rank that sends.
        bucket_bytes: the greatest size of a message's values; each rank needs memory for two.
    """

    def __init__(
        self,
        model: nn.Module,
        send: Callable[[bytes], object],
        *,
        dtype: torch.dtype = torch.bfloat16,
        renames: Sequence[Rename] = (),
        source: int = 0,
        bucket_bytes: int = 2**28,
    ) -> None:
        self._model, self._send, self._dtype, self._source = model, send, dtype, source
        self._bucket_bytes = bucket_bytes
        self._places = find_places({name: tuple(each.shape) for name, each in model.named_parameters()}, renames)
        self._since, self._is_complete = StreamVersion(), False
        self.version = -1
        self.nbytes = 0
        """The version that was sent last, and its bytes on the rank that sends."""

    def resync(self) -> None:
        """Has the next version contain all weights: a receiver has missed one, or was started anew. One rank's call is
        enough.
        """
        self._is_complete = False

    def send(self) -> int:
        """Sends the next version, and returns its number. Every rank must call it, between steps.

        If it raises, on any rank, the next version has all weights.
        """
        base = self._agree_on_base()
        self.version, self.nbytes, self._is_complete = self.version + 1, 0, False
        is_source = dist.get_rank() == self._source
        stream = stream_full_params(
            self._model, dtype=self._dtype, bucket_bytes=self._bucket_bytes, ranks=[self._source], since=self._since
        )
        total = len(stream)
        for number, bucket in enumerate(stream):
            if is_source:
                assert bucket.flat is not None
                places = [self._places[name] for name in bucket.names]
                self._emit(base, number, total, places, bucket.counts, bucket.flat, bucket.indices)
        if is_source and not total:
            self._emit(base, 0, 1, [], [], None, None)
        self._is_complete = True
        return self.version

    def _agree_on_base(self) -> int | None:
        """Returns the version that the next one changes: None if any rank wants all weights to be sent."""
        device = next(self._model.parameters()).device
        is_whole = torch.tensor([not self._is_complete], dtype=torch.int64, device=device)
        dist.all_reduce(is_whole, op=dist.ReduceOp.MAX)
        if not is_whole.item():
            return self.version
        self._since.clear()
        return None

    def _emit(
        self,
        base: int | None,
        part: int,
        parts: int,
        places: Sequence[Place],
        counts: Sequence[int],
        values: Tensor | None,
        indices: Tensor | None,
    ) -> None:
        message = Message(
            self.version,
            base,
            part,
            parts,
            names=[each.name for each in places],
            shapes=[list(each.shape) for each in places],
            starts=[each.start for each in places],
            counts=list(counts),
            values=None if values is None else values.cpu(),
            indices=None if indices is None else indices.cpu(),
        )
        data = message.to_bytes()
        self.nbytes += len(data)
        self._send(data)


# ---- the receiver ----------------------------------------------------------------------------------------------------


class MissedVersion(RuntimeError):
    """Is raised for a message that does not follow what was received before."""


class DeltaReceiver:
    """Writes versions into the tensors of an engine, bit by bit.

    Args:
        weights: the engine's tensors by name: contiguous, whole, in the dtype that is sent. Do not generate while a
            version arrives. None: the receiver keeps a copy of its own.
        load_weights: the engine's function that takes pairs of a name and a whole tensor, as vLLM and SGLang have it.
            It is called at the end of each version, with the parameters that have changed.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor] | None = None,
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], object] | None = None,
    ) -> None:
        self._is_own = weights is None
        self.weights: dict[str, Tensor] = {} if weights is None else dict(weights)
        self._load_weights = load_weights
        self._coming: tuple[int, int] | None = None  # the version that is arriving, and the part that comes next
        self._changed: dict[str, Tensor] = {}
        self.version: int | None = None
        """The version that the weights are of. None: they are incomplete, and wait for a version with all weights."""

    def receive(self, data: bytes) -> bool:
        """Writes one message. Returns True if its version is complete now.

        Raises:
            MissedVersion: it does not follow what came before. Have the sender `resync`.
            KeyError, ValueError: the engine has no such tensor, or it has another shape or dtype.
        """
        message = Message.from_bytes(data)
        self._expect(message)
        self._coming, self.version = (message.version, message.part + 1), None
        if message.values is not None:
            self._write(message, message.values)
        if message.part + 1 < message.parts:
            return False
        if self._load_weights is not None and self._changed:
            self._load_weights(self._changed.items())
        self.version, self._coming, self._changed = message.version, None, {}
        return True

    def _expect(self, message: Message) -> None:
        """Raises unless the message begins a version that follows, or continues the one that is arriving."""
        if message.part == 0:
            is_next = message.base is None or message.base == self.version
        else:
            is_next = (message.version, message.part) == self._coming
        if is_next:
            if message.part == 0:
                self._changed = {}
            return
        has = f"version {self.version}" if self.version is not None else "no complete version"
        coming, self._coming, self.version = self._coming, None, None
        wanted = f", and expects part {coming[1]} of version {coming[0]}" if coming is not None else ""
        raise MissedVersion(
            f"got part {message.part} of version {message.version}, which changes version {message.base}; this "
            f"receiver has {has}{wanted}. Call `resync` of the sender: its next version has all weights."
        )

    def _write(self, message: Message, values: Tensor) -> None:
        places = [None] * len(message.names) if message.indices is None else message.indices.split(message.counts)
        found = zip(message.names, message.shapes, message.starts, values.split(message.counts), places, strict=True)
        with torch.no_grad():
            for name, shape, start, part, place in found:
                flat = self._target(name, shape, part.dtype).view(-1)
                if place is None:
                    flat[start : start + part.numel()] = part.to(flat.device)
                else:
                    flat[place.to(flat.device, torch.int64) + start] = part.to(flat.device)

    def _target(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._is_own and name not in self.weights:
            self.weights[name] = torch.empty(shape, dtype=dtype)
        if name not in self.weights:
            raise KeyError(f"{name}: the engine has no tensor of that name. Pass `renames=` to the sender.")
        target = self.weights[name]
        if (list(target.shape), target.dtype) != (list(shape), dtype):
            raise ValueError(
                f"{name}: expected {list(shape)} in {dtype}, the engine has {list(target.shape)} in {target.dtype}"
            )
        self._changed[name] = target
        return target


# ---- the program -----------------------------------------------------------------------------------------------------

WIDTH, VOCABULARY, STEPS = 32, 64, 6
RENAMES = LLAMA_IN_VLLM[:3]


class Mixer(nn.Module):
    """Is attention of one head. `is_fused`: queries, keys and values are one parameter, as engines have them."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        if is_fused:
            self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.is_fused = is_fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, -1) if self.is_fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)


def make_model(is_fused: bool) -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    layers = [Mixer(is_fused) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


def serve(pipe: Any) -> None:
    """Runs in the engine's process: receives versions, and answers each with its digest and a token."""
    torch.set_num_threads(1)
    engine = make_model(is_fused=True).to(torch.bfloat16).requires_grad_(False)
    receiver = DeltaReceiver(dict(engine.named_parameters()))
    while data := pipe.recv_bytes():
        if receiver.receive(data):
            token = engine(torch.arange(8)[None])[0, -1].argmax().item()
            pipe.send((receiver.version, digest(receiver.weights), token))


def digest(weights: Mapping[str, Tensor]) -> int:
    """Returns a checksum of the bits of all weights, in the order of their names."""
    found = 0
    for name in sorted(weights):
        found = zlib.crc32(weights[name].detach().cpu().contiguous().view(torch.uint8).numpy(), found)
    return found


def as_engine(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trained weights as an engine has them, gathered whole. Every rank must call it."""
    whole = {name: param.detach().full_tensor().bfloat16().cpu() for name, param in model.named_parameters()}
    places = find_places({name: tuple(each.shape) for name, each in whole.items()}, RENAMES)
    found = {place.name: torch.empty(place.shape, dtype=torch.bfloat16) for place in places.values()}
    for name, place in places.items():
        found[place.name].view(-1)[place.start : place.start + whole[name].numel()] = whole[name].flatten()
    return found


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    pipe = engine = None
    if rank == 0:
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        engine = context.Process(target=serve, args=(theirs,), daemon=True)
        engine.start()
        theirs.close()

    model = make_model(is_fused=False).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # small steps change few weights in bfloat16
    sender = DeltaSender(model, pipe.send_bytes if pipe else print, renames=RENAMES)
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(100 * step + rank))
        logits = model(tokens.to(device))
        F.cross_entropy(logits.flatten(0, 1).float(), (tokens.flatten().to(device) + 1) % VOCABULARY).backward()
        optimizer.step()
        optimizer.zero_grad()
        version = sender.send()
        expected = digest(as_engine(model))
        if pipe is not None:
            received, found, token = pipe.recv()
            same = (received, found) == (version, expected)
            print(f"version {version}: {sender.nbytes:,} bytes sent, equal to the bit: {same}, next token {token}")
    if pipe is not None and engine is not None:
        pipe.send_bytes(b"")
        engine.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
