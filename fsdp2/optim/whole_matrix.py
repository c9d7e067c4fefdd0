"""An optimizer that updates whole matrices of sharded parameters, each on one rank."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.compat import local_if_any
from ..dtensor.write_notices import notices
from ..ext.optimizer_in_backward import stepper_of
from .cuts import Cut, Matrix, block_sizes, find_cut, find_matrices
from .exchange import LocalBucket, Presence, TravellingBucket, check_alike
from .plan import Member, Plan, cut_list, make_plan

BUFFER = "momentum_buffer"
BUCKET_BYTES = 64 << 20
_OWN = ("update", "learning_rate", "cost", "wire_dtype", "batched", "bucket_bytes")


def newton_schulz_cost(rows: int, cols: int) -> float:
    """Returns what an update costs: the floating-point operations of one Newton-Schulz iteration, two products of
    s x s x l and one of s x s x s, of a matrix with a short side s and a long side l.
    """
    short, long = sorted((rows, cols))
    return 4.0 * short * short * long + 2.0 * short**3


def plain_learning_rate(group: dict[str, Any], rows: int, cols: int) -> float:
    """Returns the learning rate of a param group, whatever the shape of the matrix."""
    return float(group["lr"])


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
    (B: bytes of an element of `wire_dtype`), and computes each matrix once. Besides, a step takes one all-reduce of one
    byte for each matrix parameter, in which ranks learn who has gradients; only ranks that lack one wait for it. At the
    first step, and when the set of trainable parameters changes, ranks compare their sets.

    A parameter without a gradient on all ranks does not move, nor does its state. Where it lacks one on some ranks
    only, these take it as zeros. With a learning rate of 0 only momentum buffers change, and no matrix travels.

    Every rank must call `step`. The state is `momentum_buffer`, distributed like the parameter, for all trainable
    parameters; torch.distributed.checkpoint saves and loads it like that of torch's optimizers, on any number of ranks.
    There is no state of whole matrices: nothing moves when owners do.

    Args:
        params: parameters, or param groups, of 2 dimensions, or of 3 (a stack of matrices, such as experts): sharded
            by fsdp2 or by torch's FSDP2, DTensors that one axis of a mesh shards, or plain tensors. Take them from
            `split_matrices`. A group may have an entry `blocks`: an int (blocks of rows of equal size) or their sizes;
            each block of its parameters is then a matrix (fused query, key and value; heads).
        update: is called with a tensor [matrices, rows, columns] in `wire_dtype` and the param group, without autograd;
            returns one of that shape. It must not write to what it gets, must treat each matrix for itself, and must
            not communicate: ranks call it different numbers of times. If it raises on one rank, others wait for that
            rank until it ends.
        lr, weight_decay, momentum, nesterov: defaults of param groups, as in the formula.
        learning_rate: (group, rows, columns) -> the step size of a matrix of that shape. None: the group's `lr`.
        cost: (rows, columns) -> a number by which owners are balanced. None: operations of Newton-Schulz iterations.
        wire_dtype: the dtype in which matrices travel and are updated. None: that of the parameter.
        batched: False calls `update` with one matrix at a time. With `muon` on a CPU both have equal bits.
        bucket_bytes: the bytes of matrices that a rank updates at once, if more than one: two buckets exist at a time.
        options: further defaults of param groups, for `update` and `learning_rate`.

    Raises:
        TypeError: `update` is no function.
        ValueError: a parameter that is no real floating-point matrix; `blocks` that do not make up a parameter; in the
            first step: ranks that have other parameters (on all of them).
        NotImplementedError: a matrix that tensor parallelism has cut, too.
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
        learning_rate: Callable[[dict[str, Any], int, int], float] | None = None,
        cost: Callable[[int, int], float] | None = None,
        wire_dtype: torch.dtype | None = None,
        batched: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        if not callable(update):
            raise TypeError(f"update: expected a function of (matrices, group), got {update!r}")
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not value >= 0.0:
                raise ValueError(f"{name}: expected a number of at least 0, got {value}")
        self.update, self.learning_rate = update, learning_rate or plain_learning_rate
        self.cost, self.wire_dtype = cost or newton_schulz_cost, wire_dtype
        self.batched, self.bucket_bytes = batched, bucket_bytes
        self._forget()
        rule = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**rule, **options})

    def _forget(self) -> None:
        """Has the next step plan anew."""
        self._key: Any = None
        self._params: list[Tensor] = []
        self._members: list[Member] = []
        # Process group -> the numbers of parameters of which it exchanges parts.
        self._sharing: dict[Any, list[int]] = {}
        self._plans: dict[frozenset[int], Plan] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OWN}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned; also that of `torch.optim.Muon` on the same parameters."""
        super().load_state_dict(state_dict)
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, see the class. Every rank must add the same."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for i, param in enumerate(group["params"]):
                name = find_cut(param, self._name(len(self.param_groups) - 1, i)).name
                if param.dim() not in (2, 3) or not param.is_floating_point():
                    raise ValueError(
                        f"{name}: expected a matrix, or a stack of matrices, of a real floating-point dtype, got "
                        f"{param.dtype} of shape {tuple(param.shape)}. Leave it to an elementwise optimizer."
                    )
                if group.get("blocks") is not None:
                    block_sizes(group["blocks"], param.shape, name)
        except (NotImplementedError, ValueError):
            self.param_groups.pop()
            raise
        self._forget()

    def _name(self, group: int, index: int) -> str:
        names = self.param_groups[group].get("param_names")
        return names[index] if names else f"parameter {index} of param group {group}"

    # ---- who updates what

    def _look(self) -> None:
        """Finds the trainable parameters, and how they are cut, if they are others than at the last step."""
        key = tuple(
            (i, id(param), repr(group.get("blocks")))
            for i, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.requires_grad
        )
        if key == self._key:
            return
        self._forget()
        for i, group in enumerate(self.param_groups):
            for j, param in enumerate(group["params"]):
                if param.requires_grad:
                    cut = find_cut(param, self._name(i, j))
                    member = Member(cut, i, group.get("blocks"), param.dtype, self.wire_dtype or param.dtype)
                    if not all(each.is_local for each in find_matrices(0, cut, member.blocks)):
                        self._sharing.setdefault(cut.process_group, []).append(len(self._params))
                    self._params.append(param)
                    self._members.append(member)
                    if BUFFER not in self.state[param]:  # also without a gradient: states of all ranks are alike
                        self.state[param][BUFFER] = torch.zeros_like(param)
        for process_group, numbers in self._sharing.items():
            members = [self._members[i] for i in numbers]
            facts = {each.cut.name: repr((each.cut.shape, each.cut.dim, *each[1:])) for each in members}
            check_alike(process_group, members[0].cut.device, facts, zlib.crc32(repr(facts).encode()))
        self._key = key

    def plan(self) -> Plan:
        """Returns who updates what where all trainable parameters have gradients. Every rank must call it."""
        self._look()
        return self._plan(frozenset())

    def _plan(self, absent: frozenset[int]) -> Plan:
        if absent not in self._plans:
            if len(self._plans) > 16:  # sets of parameters that have gradients
                self._plans.clear()
            self._plans[absent] = make_plan(self._members, absent, self.cost, self.bucket_bytes)
        return self._plans[absent]

    # ---- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps once, see the class. Every rank must call it.

        Args:
            closure: computes the gradients; what it returns is returned.

        Raises:
            RuntimeError: a gradient is sparse; or the step is one in backward (`set_optimizer_in_backward`).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look()
        self._refuse()
        notices.tell()  # shards may still be on their way to the device
        missing = {i for i, param in enumerate(self._params) if param.grad is None}
        presences = [
            Presence(group, self._members[numbers[0]].cut.device, [i not in missing for i in numbers])
            for group, numbers in self._sharing.items()
        ]
        absent: set[int] = set()
        for presence, numbers in zip(presences, self._sharing.values(), strict=True):
            missing.difference_update(numbers)
            absent.update(i for i, found in zip(numbers, presence.anywhere(), strict=True) if not found)
        _Step(self, self._params, self._members, absent | missing).run(self._plan(frozenset(absent)))
        for presence in presences:
            presence.end()
        return loss

    def _refuse(self) -> None:
        """
        Raises:
            RuntimeError: it can't step here.
        """
        owners = {id(each.cut.owner): each.cut.owner for each in self._members}
        if any(owner is not None and stepper_of(owner) is not None for owner in owners.values()):
            raise RuntimeError(
                "whole-matrix optimizer: a step communicates, and can't run in backward on some parameters at a time. "
                "Call set_optimizer_in_backward(None), and step after backward."
            )
        for param, member in zip(self._params, self._members, strict=True):
            if param.grad is not None and param.grad.is_sparse:
                raise RuntimeError(f"{member.cut.name}: expected a dense gradient, got a sparse one")


class _Step:
    """Runs one step. `absent`: the numbers of parameters that do not move."""

    def __init__(
        self, optimizer: WholeMatrixOptimizer, params: Sequence[Tensor], members: Sequence[Member], absent: set[int]
    ) -> None:
        self._optimizer, self._params, self._members, self._absent = optimizer, params, members, absent
        self._groups = [optimizer.param_groups[member.group] for member in members]
        # Directions of parameters, and how many of their matrices are still to be sent.
        self._directions: dict[int, Tensor] = {}
        self._unsent: Counter[int] = Counter()

    def run(self, plan: Plan) -> None:
        rates = [group["lr"] for group in self._groups]
        present = {*range(len(self._params))} - self._absent
        moving = {i for i in present if isinstance(rates[i], Tensor) or rates[i] != 0}
        local = [matrix for matrix in plan.local if matrix.param in moving]
        buckets = []
        for bucket in plan.buckets:
            owned = [[each for each in matrices if each.param in moving] for matrices in bucket.owned]
            if any(owned):
                buckets.append(bucket._replace(owned=owned))
        self._unsent.update(matrix.param for matrix in local)
        self._unsent.update(m.param for b in buckets for owned in b.owned for m in owned if b.rank in m.holders)
        for i in sorted(present - {*self._unsent}):
            self._direction(i)
        starts: list[Callable[[], Any]] = [partial(self._start_local, batch) for batch in self._batches(local)]
        starts += [partial(TravellingBucket, bucket, self._cut_of, self._part_of) for bucket in buckets]
        self._run(starts)

    def _run(self, starts: Sequence[Callable[[], Any]]) -> None:
        """Has the next bucket travel, and the one before come back, while one is updated."""
        bucket, returning = starts[0]() if starts else None, None
        for start in (*starts[1:], None) if starts else ():
            ahead = None if start is None else start()
            self._update(bucket)
            if returning is not None:
                self._apply(returning)
            bucket, returning = ahead, bucket
        if returning is not None:
            self._apply(returning)

    def _batches(self, matrices: Sequence[Matrix]) -> list[list[Matrix]]:
        """Returns `matrices` in batches that can be updated together, of no more than a bucket's bytes."""
        alike: dict[Any, list[Matrix]] = {}
        for matrix in matrices:
            member = self._members[matrix.param]
            key = member.group, member.source, member.wire, member.cut.device, matrix.rows, matrix.cols
            alike.setdefault(key, []).append(matrix)
        found: list[list[Matrix]] = []
        for each in alike.values():
            limit = self._optimizer.bucket_bytes // self._members[each[0].param].wire.itemsize
            found.extend(cut_list(each, limit))
        return found

    def _start_local(self, matrices: Sequence[Matrix]) -> LocalBucket:
        return LocalBucket(matrices, [self._part_of(each) for each in matrices], self._members[matrices[0].param])

    def _cut_of(self, matrix: Matrix) -> Cut:
        return self._members[matrix.param].cut

    def _part_of(self, matrix: Matrix) -> Tensor:
        """Returns this rank's part of the direction of a matrix, which is asked for once."""
        number = matrix.param
        if number not in self._directions:
            self._directions[number] = self._direction(number)
        part = matrix.view(self._directions[number], self._cut_of(matrix))
        self._unsent[number] -= 1
        if not self._unsent[number]:
            del self._directions[number]
        return part

    def _direction(self, number: int) -> Tensor:
        """Updates the momentum buffer of a parameter, and returns this rank's part of what `update` is to get."""
        param, group = self._params[number], self._groups[number]
        buffer, grad = local_if_any(self._optimizer.state[param][BUFFER]), param.grad
        if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        grad = torch.zeros_like(buffer) if grad is None else local_if_any(grad).to(buffer.dtype)
        buffer.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _update(self, bucket: Any) -> None:
        bucket.wait()
        alike: dict[Any, list[int]] = {}
        for i, matrix in enumerate(bucket.mine):
            alike.setdefault((self._members[matrix.param].group, matrix.rows, matrix.cols), []).append(i)
        for (number, *_), chosen in alike.items():
            matrices, group = bucket.stack(chosen), self._optimizer.param_groups[number]
            parts = [matrices] if self._optimizer.batched else matrices.split(1)
            updates = [self._optimizer.update(part, group) for part in parts]
            for part, update in zip(parts, updates, strict=True):
                if update.shape != part.shape:
                    raise ValueError(f"update: expected a tensor of shape {tuple(part.shape)}, got {update.shape}")
            bucket.put(chosen, updates[0] if len(updates) == 1 else torch.cat(updates))
        bucket.send_back()

    def _apply(self, bucket: Any) -> None:
        for matrix, update in zip(bucket.parts, bucket.updates(), strict=True):
            group = self._groups[matrix.param]
            shard = matrix.view(local_if_any(self._params[matrix.param]), self._cut_of(matrix))
            shard.mul_(1 - float(group["lr"]) * group["weight_decay"])
            rate = self._optimizer.learning_rate(group, matrix.rows, matrix.cols)
            shard.add_(update.view(shard.shape).to(shard.device), alpha=-rate)
