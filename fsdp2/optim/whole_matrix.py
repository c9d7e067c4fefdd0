"""An optimizer that updates whole matrices of sharded parameters, each on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..shards.find import before_write
from ..shards.runs import in_runs
from ..shards.tensors import check_bool, dtensor, local_if_any, spec_of
from .cuts import Cut, Matrix, block_sizes, find_cut, find_matrices
from .exchange import Exchange, check_alike, find_present
from .plan import Member, Plan, make_plan
from .resting import StateStream, check_bucket_bytes, load_to_rest, rests_apart, to_rest

BUFFER = "momentum_buffer"
BUCKET_BYTES = 64 << 20
_OWN = ("update", "learning_rate", "cost", "compute_dtype", "batched", "bucket_bytes", "offload_states")


def newton_schulz_cost(rows: int, cols: int) -> float:
    """Returns what an update costs: the floating-point operations of one Newton-Schulz iteration, two products of
    s x s x l and one of s x s x s, of a matrix with a short side s and a long side l.
    """
    short, long = sorted((rows, cols))
    return 4.0 * short * short * long + 2.0 * short**3


def plain_learning_rate(group: dict[str, Any], rows: int, cols: int) -> float:
    """Returns the learning rate of a param group, whatever the shape of the matrix."""
    return float(group["lr"])


def check_number(name: str, value: Any) -> None:
    """Raises TypeError or ValueError if `value` is no number of at least 0, or a tensor of one."""
    is_tensor = isinstance(value, Tensor) and value.numel() == 1
    if not is_tensor and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not value >= 0.0:
        raise ValueError(f"{name}: expected a number of at least 0, got {value}")


class WholeMatrixOptimizer(Optimizer):
    """Steps by a function of whole matrices on parameters that are sharded. `fsdp2.muon` makes one that is Muon.

    For each matrix, with momentum buffer `b`, gradient `g`, learning rate `lr` and `m = momentum`:

        b = b + (1 - m) (g - b)
        d = g + m (b - g) if nesterov, else b
        p = (1 - lr weight_decay) p - learning_rate(group, rows, columns) update(d)

    `b` and `p` stay sharded; each rank computes its own elements. `update` needs `d` as a whole: each matrix belongs to
    one of the ranks that hold a part of it, the costliest first to the least loaded rank. Its owner gets the parts by
    all-to-all, updates matrices of equal shape together, and sends the parts of the results back; the next bucket of
    matrices travels meanwhile. Matrices that one rank has as a whole are updated there and do not travel: experts
    sharded by expert, replicated parameters, plain tensors, a single rank. Replicas of shards (HSDP) compute the same
    updates each, so that none crosses the network between them.

    With P elements of matrices over N ranks, a step sends 2 B (P/N) (N-1)/N bytes from each rank, averaged over ranks
    (B: bytes of an element of `compute_dtype`), and computes each matrix once. Besides, a step takes one all-reduce of
    one byte for each matrix parameter, in which ranks learn who has gradients; on a device, only the host of a rank
    that lacks one waits for it. At the first step, and when trainable parameters become others, ranks compare theirs.

    A parameter without a gradient on all ranks does not move, nor does its state. Where it lacks one on some ranks
    only, these take it as zeros. With a learning rate of 0 only momentum buffers change, and no matrix travels.

    Every rank must call `step`. The state is `momentum_buffer`, distributed like the parameter, for all trainable
    parameters; torch.distributed.checkpoint saves and loads it like that of torch's optimizers, on any number of ranks.
    There is no state of whole matrices: nothing moves when owners do.

    With `offload_states=True` the momentum buffers of parameters on a device rest in page-locked memory of the CPU, as
    `flatten_optimizer` says it: a step brings them in buckets of `bucket_bytes`, of which two are on the device at
    most, and the host waits at its end until they have returned. The bits stay the same.

    Args:
        params: parameters, or param groups, of 2 dimensions, or of 3 (a stack of matrices, such as experts): sharded
            by fsdp2 or by torch's FSDP2, DTensors that one axis of a mesh shards, or plain tensors. Take them from
            `split_matrices`. A group may have an entry `blocks`: an int (blocks of rows of equal size) or their sizes;
            each block of its parameters is then a matrix (fused query, key and value; heads).
        update: is called with a tensor [matrices, rows, columns] in `compute_dtype` and the param group, without
            autograd; returns one of that shape. It must treat each matrix for itself, and must not communicate: ranks
            call it different numbers of times. If it raises on one rank, others wait until that rank ends.
        lr, weight_decay, momentum, nesterov: defaults of param groups, as in the formula.
        learning_rate: (group, rows, columns) -> the step size of a matrix of that shape; by default the group's `lr`.
        cost: (rows, columns) -> a number by which owners are balanced; by default the operations of a Newton-Schulz
            iteration.
        compute_dtype: the dtype in which matrices travel and are updated. None: that of the parameter.
        batched: call `update` with all matrices of a bucket that have one shape, not with one at a time. None: except
            on a CPU, where nothing is gained, and the bits of batches may differ from those of single matrices.
        offload_states: momentum buffers rest on the CPU.
        bucket_bytes: the bytes of the matrices that a rank gets at once, if more than one. At most three buckets exist
            at a time, one arriving, one being updated, one returning; each takes about twice these bytes.
        options: further defaults of param groups, for `update` and `learning_rate`.

    Raises:
        TypeError: an argument: `update` is no function, for example.
        ValueError: a parameter that is no real floating-point matrix; `blocks` that do not make up a parameter; in the
            first step: ranks that have other parameters (on all of them).
        NotImplementedError: a matrix that tensor parallelism has cut, too; a parameter whose `grad_dtype` is None.
    """

    def __init__(
        self,
        params: Any,
        update: Callable[[Tensor, dict[str, Any]], Tensor],
        *,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        learning_rate: Callable[[dict[str, Any], int, int], float] = plain_learning_rate,
        cost: Callable[[int, int], float] = newton_schulz_cost,
        compute_dtype: torch.dtype | None = None,
        batched: bool | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        offload_states: bool = False,
        **options: Any,
    ) -> None:
        if not callable(update):
            raise TypeError(f"update: expected a function of (matrices, group), got {update!r}")
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            check_number(name, value)
        for name, flag in (("nesterov", nesterov), ("offload_states", offload_states)):
            check_bool(name, flag)
        for name, function in (("learning_rate", learning_rate), ("cost", cost)):
            if not callable(function):
                raise TypeError(f"{name}: expected a function, got {function!r}")
        if compute_dtype is not None and not (
            isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point
        ):
            raise TypeError(f"compute_dtype: expected a floating-point torch.dtype or None, got {compute_dtype!r}")
        if batched is not None and not isinstance(batched, bool):
            raise TypeError(f"batched: expected a bool or None, got {batched!r}")
        check_bucket_bytes("bucket_bytes", bucket_bytes)
        self.offload_states = offload_states
        self.update, self.learning_rate, self.cost = update, learning_rate, cost
        self.compute_dtype, self.batched, self.bucket_bytes = compute_dtype, batched, bucket_bytes
        self._forget()
        rule = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**rule, **options})

    def _forget(self) -> None:
        """Has the next step look at the parameters anew."""
        self._key: Any = None
        self._params: list[Tensor] = []
        self._members: list[Member] = []
        # Process group -> the numbers of parameters of which it exchanges parts.
        self._sharing: dict[Any, list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OWN}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, see the class. Every rank must add the same."""
        super().add_param_group(param_group)
        number, group = len(self.param_groups) - 1, self.param_groups[-1]
        for i, param in enumerate(group["params"]):
            cut = self._cut(number, i)
            if param.dim() not in (2, 3) or not param.is_floating_point():
                got = f"{param.dtype} of shape {tuple(param.shape)}"
                raise ValueError(f"{cut.name}: expected a matrix, or a stack of matrices, of real numbers, got {got}")
            if group.get("blocks") is not None:
                block_sizes(group["blocks"], param.shape, cut.name)

    def _cut(self, number: int, index: int) -> Cut:
        """Returns how a parameter of a param group is cut."""
        group = self.param_groups[number]
        names = group.get("param_names")
        name = names[index] if names else f"parameter {index} of param group {number}"
        return find_cut(group["params"][index], name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict, as torch's optimizers do; sharded momentum buffers that rest on the CPU stay there."""
        if self.offload_states:
            load_to_rest(self, super().load_state_dict, state_dict)
        else:
            super().load_state_dict(state_dict)

    # ---- who updates what

    def _follow(self) -> None:
        """Finds the trainable parameters, and how they are cut, if they are others than at the last step."""
        groups = enumerate(self.param_groups)
        places = [(i, j, p) for i, group in groups for j, p in enumerate(group["params"]) if p.requires_grad]
        key = [(i, id(param), self.param_groups[i].get("blocks")) for i, _, param in places]
        if key == self._key:
            return
        self._forget()
        for number, (i, j, param) in enumerate(places):
            cut, blocks = self._cut(i, j), self.param_groups[i].get("blocks")
            if not all(each.is_local for each in find_matrices(0, cut, blocks)):
                self._sharing.setdefault(cut.process_group, []).append(number)
            self._params.append(param)
            source = _gradient_dtype(cut.name, param)
            self._members.append(Member(cut, i, blocks, source, self.compute_dtype or param.dtype))
            if BUFFER not in self.state[param]:  # also without a gradient: states of all ranks are alike
                self.state[param][BUFFER] = torch.zeros_like(param, dtype=source)
                self._put_to_rest([param])
        for process_group, numbers in self._sharing.items():
            members = [self._members[i] for i in numbers]
            facts = {each.cut.name: repr((each.cut.shape, each.cut.dim, *each[1:])) for each in members}
            check_alike(process_group, members[0].cut.device, facts)
        self._planned = lru_cache(16)(lambda absent: make_plan(self._members, absent, self.cost, self.bucket_bytes))
        self._key = key

    def _rests(self, param: Tensor) -> bool:
        """Returns True if the momentum buffer of a parameter rests on the CPU between steps."""
        return self.offload_states and rests_apart(local_if_any(param).device)

    def _put_to_rest(self, params: Iterable[Tensor]) -> None:
        """Moves momentum buffers that are new, or were loaded to the device, to the CPU."""
        for param in filter(self._rests, params):
            buffer = self.state[param][BUFFER]
            local = local_if_any(buffer)
            resting = to_rest(local)
            if resting is not local:
                self.state[param][BUFFER] = (
                    dtensor(resting, spec_of(buffer)) if isinstance(buffer, DTensor) else resting
                )

    def plan(self, absent: Collection[int] = ()) -> Plan:
        """Returns who updates what. `absent`: the numbers of trainable parameters that no rank has a gradient of. Every
        rank must call it.
        """
        self._follow()
        return self._planned(frozenset(absent))

    # ---- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps once, see the class. Every rank must call it.

        Args:
            closure: computes the gradients; what it returns is returned.

        Raises:
            RuntimeError: the step is one in backward (`set_optimizer_in_backward`).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        self._put_to_rest(self._params)
        if any(each.cut.owner is not None and each.cut.owner.is_stepped_in_backward for each in self._members):
            raise RuntimeError(
                "whole-matrix optimizer: a step communicates, and can't run in backward on some parameters at a time. "
                "Call set_optimizer_in_backward(None), and step after backward."
            )
        before_write()  # shards may still be on their way to the device
        missing, absent = {i for i, param in enumerate(self._params) if param.grad is None}, set[int]()
        for process_group, numbers in self._sharing.items():
            own = [i not in missing for i in numbers]
            present = find_present(process_group, self._members[numbers[0]].cut.device, own)
            absent.update(i for i, found in zip(numbers, present, strict=True) if not found)
            missing.difference_update(numbers)
        step = _Step(self, absent | missing)
        try:
            step.run(self.plan(absent))
        finally:
            step.close()
        return loss


@dataclass
class _Step:
    """Runs one step. `absent`: the numbers of parameters that do not move."""

    optimizer: WholeMatrixOptimizer
    absent: Collection[int]
    # The directions of parameters, and how many of their matrices are still to be sent.
    _directions: dict[int, Tensor] = field(default_factory=dict)
    _unsent: Counter[int] = field(default_factory=Counter)
    # Number of a parameter whose momentum buffer rests -> its stream, bucket, and place in that.
    _resting: dict[int, tuple[StateStream, int, int]] = field(default_factory=dict)

    def group(self, number: int) -> dict[str, Any]:
        """Returns the param group of a parameter."""
        return self.optimizer.param_groups[self.optimizer._members[number].group]

    def cut(self, matrix: Matrix) -> Cut:
        """Returns how the parameter of a matrix is cut."""
        return self.optimizer._members[matrix.param].cut

    def run(self, plan: Plan) -> None:
        """Updates all parameters that move. Every rank must call it, with the same plan."""
        present = {*range(len(self.optimizer._params))} - {*self.absent}
        moving = {i for i in present if isinstance(self.group(i)["lr"], Tensor) or self.group(i)["lr"] != 0}
        buckets = [
            each._replace(owned=[[m for m in ms if m.param in moving] for ms in each.owned]) for each in plan.buckets
        ]
        buckets = [each for each in buckets if any(each.owned)]
        self._unsent.update(m.param for each in buckets for ms in each.owned for m in ms if each.rank in m.holders)
        at_once = sorted(present - {*self._unsent})
        self._begin_to_stream([*at_once, *self._unsent])
        for i in at_once:
            self._direction(i)
        # The next bucket travels, and the one before comes back, while one is updated.
        exchange, returning = None, None
        for bucket in (*buckets, None, None):
            ahead = None if bucket is None else Exchange(bucket, self.cut, self._part)
            if exchange is not None:
                self._update(exchange)
            if returning is not None:
                self._apply(returning)
            exchange, returning = ahead, exchange

    def _begin_to_stream(self, order: Sequence[int]) -> None:
        """Prepares to bring the momentum buffers of these parameters, in this order."""
        of_device: dict[torch.device, list[int]] = {}
        for i in order:
            if self.optimizer._rests(self.optimizer._params[i]):
                of_device.setdefault(local_if_any(self.optimizer._params[i]).device, []).append(i)
        for device, numbers in of_device.items():
            tensors = [local_if_any(self.optimizer.state[self.optimizer._params[i]][BUFFER]) for i in numbers]
            sized = [((i, each), each.nbytes) for i, each in zip(numbers, tensors, strict=True)]
            buckets = in_runs(sized, self.optimizer.bucket_bytes)
            stream = StateStream(device, [[each for _, each in bucket] for bucket in buckets])
            for number, bucket in enumerate(buckets):
                self._resting.update((i, (stream, number, place)) for place, (i, _) in enumerate(bucket))

    def close(self) -> None:
        """Sends momentum buffers back that are on the device, also after an error."""
        for stream in dict.fromkeys(stream for stream, _, _ in self._resting.values()):
            stream.close()

    def _buffer(self, number: int) -> Tensor:
        """Returns the momentum buffer of a parameter on its device. One that rests is there until the next is asked
        for.
        """
        if number in self._resting:
            stream, bucket, place = self._resting[number]
            return stream.use(bucket)[place]
        return local_if_any(self.optimizer.state[self.optimizer._params[number]][BUFFER])

    def _part(self, matrix: Matrix) -> Tensor:
        """Returns this rank's part of the direction of a matrix, which is asked for once."""
        number = matrix.param
        direction = self._directions.pop(number, None)
        direction = self._direction(number) if direction is None else direction
        self._unsent[number] -= 1
        if self._unsent[number]:
            self._directions[number] = direction
        return matrix.view(direction, self.cut(matrix))

    def _direction(self, number: int) -> Tensor:
        """Updates the momentum buffer of a parameter, and returns this rank's part of what `update` is to get."""
        param, group = self.optimizer._params[number], self.group(number)
        buffer, grad = self._buffer(number), param.grad
        if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        grad = torch.zeros_like(buffer) if grad is None else local_if_any(grad).to(buffer.dtype)
        buffer.lerp_(grad, 1 - group["momentum"])
        if group["nesterov"]:
            return grad.lerp(buffer, group["momentum"])
        return buffer.clone() if number in self._resting else buffer

    def _update(self, exchange: Exchange) -> None:
        """Updates the matrices that this rank owns, and sends them back."""
        exchange.wait()
        alike: dict[Any, list[int]] = {}
        for i, matrix in enumerate(exchange.mine):
            alike.setdefault((self.optimizer._members[matrix.param].group, matrix.rows, matrix.cols), []).append(i)
        for (number, *_), chosen in alike.items():
            matrices, group = exchange.stack(chosen), self.optimizer.param_groups[number]
            batched = matrices.device.type != "cpu" if self.optimizer.batched is None else self.optimizer.batched
            parts = [matrices] if batched else matrices.split(1)
            updates = [self.optimizer.update(part, group) for part in parts]
            for part, update in zip(parts, updates, strict=True):
                if update.shape != part.shape:
                    raise ValueError(f"update: expected a tensor of shape {tuple(part.shape)}, got {update.shape}")
            exchange.put(chosen, updates[0] if len(updates) == 1 else torch.cat(updates))
        exchange.send_back()

    def _apply(self, exchange: Exchange) -> None:
        """Changes this rank's parts of the parameters."""
        exchange.wait()
        for matrix, update in zip(exchange.parts, exchange.part_values, strict=True):
            group = self.group(matrix.param)
            shard = matrix.view(local_if_any(self.optimizer._params[matrix.param]), self.cut(matrix))
            shard.mul_(1 - float(group["lr"]) * group["weight_decay"])
            rate = self.optimizer.learning_rate(group, matrix.rows, matrix.cols)
            shard.add_(update.to(shard.device), alpha=-rate)


def _gradient_dtype(name: str, param: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's gradient, of which its momentum buffer is a sum."""
    dtype: torch.dtype | None = param.grad_dtype
    if dtype is None:
        raise NotImplementedError(
            f"{name}: its grad_dtype is None, and ranks must know the dtype of its momentum buffer before the first "
            "gradient. Set grad_dtype, to torch.float32 for example, before fully_shard."
        )
    return dtype
