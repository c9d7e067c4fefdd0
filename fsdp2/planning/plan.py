"""Predicts what training a model takes with each of several settings, and chooses one (`plan`)."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..engine.offload import is_policy
from ..engine.policy import MixedPrecisionPolicy
from ..tools.describe import size_text
from ..tools.padding import gather_cost
from . import apply, arguments, saved, table
from .advice import Adviser, large_tables, line_of_optimizer
from .check import PlanCheck, SecondStep
from .clocks import Machine
from .outline import Outline, RememberedChoice
from .policies import WrapGroup, join_blocks, look_up_by_rows, wrap_groups
from .prediction import Prediction, ShardedCopy, key_of
from .recording import Recording, record, without_activations
from .settings import Setting, read_bytes, read_optimizer
from .structure import PlannedGroup, find_groups

__all__ = ["Plan", "PlanRow", "plan"]

# Its messages say how far a plan is: stages as INFO, settings as DEBUG. The command line shows them.
_progress = logging.getLogger("fsdp2.planning")


@dataclass(frozen=True)
class PlanRow:
    """Holds one setting, and what it takes on each rank. Sizes are bytes.

    Args:
        setting: what the row chooses.
        prediction: shards, peaks, bytes moved, order, and time of a step.
        optimizer_nbytes: optimizer states, on the device and on the CPU.
        memory: what the device has; None: nobody has said.
        has_activations: False if the forward could not be recorded: peaks are those of parameters and gradients alone.
        host_nbytes: bytes of the CPU's memory in which shards, gradients and optimizer states rest with CPU offload.
        headroom: bytes of the device that are kept for what the plan does not count.
        host_memory: bytes of the CPU's memory for each rank; None: nobody has said.
    """

    setting: Setting
    prediction: Prediction
    optimizer_nbytes: int
    memory: float | None
    has_activations: bool
    host_nbytes: int = 0
    headroom: float = 0.0
    host_memory: float | None = None

    @property
    def resting(self) -> int:
        """Bytes on the device between steps: shards, optimizer states and buffers; without offloaded ones."""
        return self.prediction.resting + self.prediction.states

    @property
    def total(self) -> int:
        """Most bytes on the device in a step. The context of the device and fragmentation come on top."""
        return self.resting + self.prediction.peak

    @property
    def missing(self) -> int:
        """Bytes by which the total and the headroom exceed the memory; 0 if it fits."""
        return max(0, self.total - int(self.memory - self.headroom)) if self.memory is not None else 0

    @property
    def host_missing(self) -> int:
        """Bytes by which what rests in the CPU's memory exceeds it; 0 if it fits."""
        return max(0, self.host_nbytes - int(self.host_memory)) if self.host_memory is not None else 0

    @property
    def fits(self) -> bool:
        return not self.missing and not self.host_missing


@dataclass(frozen=True)
class _Wrapping:
    """Holds one wrap policy's calls, the groups that they make, and the recordings of a step with them: plain, and with
    checkpointing. `has_activations`: the forward could be recorded.
    """

    calls: list[WrapGroup]
    outline: Outline
    groups: list[PlannedGroup]
    plain: Recording
    checkpointed: Recording | None
    has_activations: bool


# The share of all gathers that other dims than dim 0 must save to be chosen.
_NOTICEABLE = 0.05
# The name of a wrap policy, how many blocks are in one call, and the FQNs of embeddings by rows.
_Key = tuple[str, int, tuple[str, ...]]


class Plan:
    """Holds the predictions of `plan`, and shards the model as one of them says.

    It prints as tables: the groups of the best setting, their order, where the peak is, and all settings.

    `rows`: one PlanRow for each setting, the best first. `best`: the first row. `fits`: True if that fits. `notes`:
    what the predictions leave out, and why.
    """

    def __init__(
        self,
        model: nn.Module,
        wrappings: Mapping[_Key, _Wrapping],
        rows: Sequence[PlanRow],
        notes: Iterable[str],
        machine: Machine,
        optimizer: str | float | None = None,
        beside_price: float = 1.0,
    ) -> None:
        self._model, self._wrappings, self._machine = model, dict(wrappings), machine
        self._optimizer, self._beside_price = optimizer, beside_price
        self.rows, self.notes = tuple(rows), tuple(notes)
        self._meter: SecondStep | None = None
        self._applied: tuple[PlanRow, Prediction] | None = None

    @property
    def best(self) -> PlanRow:
        return self.rows[0]

    @property
    def fits(self) -> bool:
        return self.best.fits

    def groups(self, row: PlanRow | None = None) -> list[PlannedGroup]:
        """Returns the groups that `apply` would make, the outermost first."""
        return [*self._wrapping_of(row or self.best).groups]

    def _wrapping_of(self, row: PlanRow) -> _Wrapping:
        return self._wrappings[_key_of(row.setting)]

    def __str__(self) -> str:
        return table.plan_text(self)

    __repr__ = __str__

    def apply(self, mesh: DeviceMesh, row: PlanRow | None = None) -> Any:
        """Shards the model as a row says, and returns it. Every rank of the mesh must call it.

        With checkpointing, the `forward` of each wrapped module that has submodules, but none that is checkpointed, is
        replaced by one that runs it in `torch.utils.checkpoint.checkpoint`; FQNs stay as they are.

        What concerns the optimizer alone (`offload_states`, `beside_forward`) it can't do: it logs the line to write,
        as a warning, on rank 0.

        The second step after this is measured for `check`: on CUDA by torch's memory statistics, whose peaks are reset
        for it; elsewhere by torch's profiler, which makes that step slower.

        Args:
            mesh: a DeviceMesh of as many ranks as the row; of two axes, (replicas, ranks that shard), if it replicates.
                If replicas share what rests, its axes have names.
            row: one of `rows`. None: the best.

        Raises:
            TypeError: `mesh` is no DeviceMesh, or `row` no PlanRow.
            ValueError: the mesh has other sizes, or the row is one of another plan.
            RuntimeError: the plan was applied already.
        """
        row = self.best if row is None else row
        if not isinstance(row, PlanRow):
            raise TypeError(f"row: expected one of plan.rows, got {type(row).__name__}")
        if not any(each is row for each in self.rows):
            raise ValueError("row: expected one of plan.rows of this plan, got one of another")
        if self._applied is not None:
            raise RuntimeError(
                "plan.apply was called already: its model is sharded. Make another plan for another model."
            )
        apply.check_mesh(mesh, row.setting)
        wrapping = self._wrapping_of(row)
        machine = apply.machine_of(mesh, self._machine)
        # What runs may differ from what was planned for: by its device, or its process group.
        predictor = _Predictor(self._model, machine, self._optimizer, self._beside_price)
        prediction = predictor.predict(row.setting, wrapping)
        model = apply.shard(self._model, wrapping.calls, self.groups(row)[0].policy, row.setting, mesh)
        self._applied = row, prediction
        self._meter = SecondStep(model)
        line = line_of_optimizer(row.setting)
        if line is not None and mesh.get_rank() == 0:
            logging.getLogger("fsdp2").warning(f"plan.apply: the plan also says how the optimizer steps. Write {line}")
        return model

    def to_dict(self, row: PlanRow | None = None) -> dict[str, Any]:
        """Returns how a row shards the model, as values of JSON, for `fsdp2.apply_plan`.

        Args:
            row: one of `rows`. None: the best.

        Raises:
            ValueError: a policy has a function or a codec, which no file holds.
        """
        row = row or self.best
        taken = row.prediction
        predicted = {
            "total": row.total,
            "resting": row.resting,
            "step_peak": taken.step_peak,
            "time": taken.time,
            "host": row.host_nbytes,
        }
        wrapping = self._wrapping_of(row)
        return saved.to_dict(self._model, wrapping.calls, wrapping.groups[0].policy, row.setting, predicted)

    def save(self, path: str | os.PathLike[str], row: PlanRow | None = None) -> None:
        """Writes what `to_dict` returns to a file: of YAML if its name ends so (`.yaml`, `.yml`), else of JSON.

        Raises:
            ModuleNotFoundError: it is to be YAML, and the package PyYAML is not installed (`fsdp2[yaml]`).
        """
        saved.save(self.to_dict(row), path)

    def check(self, optimizer: torch.optim.Optimizer | None = None) -> PlanCheck:
        """Returns what was predicted beside what was measured in the second step after `apply`, as a table that prints.

        It predicts for the device and the process group of the mesh. Peaks are above what rests. It does not
        communicate: each rank may call it, and sees its own numbers. Ranks with fewer rows of a parameter rest on less.

        Args:
            optimizer: also compares the bytes of its states, and looks whether it steps as the plan says
                (`offload_states`, `beside_forward`).

        Raises:
            RuntimeError: the plan was not applied, or fewer than two steps have run since.
            TypeError: `optimizer` is no torch.optim.Optimizer.
            ValueError: `optimizer` lacks a setting that the plan has.
        """
        if self._meter is None or self._applied is None:
            raise RuntimeError("plan.check: expected plan.apply(mesh) and two steps before it")
        row, prediction = self._applied
        found = self._meter.compare(self._model, row, prediction, optimizer)
        trains_on = self._meter.device_type
        if row.has_activations and (trains_on == "cpu") == self._machine.can_offload:
            note = f"Activations were planned for {self._machine.device}. Kernels of {trains_on} keep other ones."
            found = replace(found, notes=(*found.notes, note))
        return found


def plan(
    model: nn.Module,
    *,
    ranks: int | Sequence[int],
    batch: Callable[[], Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    policy: Any = None,
    memory: str | float | None = None,
    param_dtype: torch.dtype | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    optimizer: str | float | None = "adamw",
    settings: Sequence[Setting | Mapping[str, Any]] | None = None,
    device: str = "cuda",
    backend: str | None = None,
    link: str | float | None = None,
    flops: float | None = None,
    host_link: str | float = 25e9,
    machine_link: str | float | None = None,
    ranks_per_machine: int = 8,
    cards_per_machine: int | None = None,
    latency: float | str | Sequence[float | str] | None = None,
    memory_link: str | float | None = None,
    headroom: str | float | None = None,
    host_memory: str | float | None = None,
    host_memory_link: str | float = 100e9,
    beside_price: float | None = None,
) -> Plan:
    """Predicts memory, communication and time of training `model` with several settings, and chooses one.

    It needs no process group and no device, and changes neither the model nor a process group that exists. The forward
    and the backward of the plain model run once without values (FakeTensorMode), and once more with checkpointing. For
    each setting the engine itself then runs around that, on tensors without memory: it decides which groups are
    unsharded when, and in which buckets gradients are reduced. `tests/trace/test_plan.py` and `test_plan_time.py`
    compare that with real steps.

    Bytes: shards are parameters / ranks, each parameter padded to whole rows for each rank; optimizer states as
    `optimizer` says, for trainable ones. Peaks are computed for the second step, in which the order of groups is known,
    with gradients freed before each forward, and the model's output alive until backward ends. They contain what
    kernels return, but not their scratch memory, nor the temporary tensors of an optimizer's step. A tensor that gets
    three or more gradients may count once too often. Peaks of a Llama of 1 B and of 8 B parameters, in six cases, are
    within 1 % of those that an H200 has measured (`tests/unit/test_plan_kernels.py`): RMSNorm, dropout and attention
    keep what their kernels on CUDA keep, and cuBLAS has its workspaces. Convolutions, recurrent layers and kernels of
    other packages were not compared with a device.

    Time: operations in matrix products, convolutions and attention divided by `flops`; the latency of each collective,
    which grows with the ranks, and its bytes over the links that it uses; the bytes of the device's memory that the
    optimizer's step reads and writes (AdamW in fp32: 28 for each parameter of a shard). The collectives of one
    communicator run one after the other, beside computation, which waits for what it needs; those of several
    communicators share the links. With CPU offload the optimizer's step reads and writes the CPU's memory, which the
    ranks of a machine share (`host_memory_link`); states that rest on the CPU alone come and go by `host_link`. All of
    it is a model. Other operations count as nothing.

    The best row is the fastest that fits, with the headroom. Without `link` and `flops` it is the one that moves the
    fewest bytes, then the one that computes least, then the one with the smallest peak. Rows with CPU offload come
    behind all others that fit: what they take depends most on what a plan knows least, the CPU. If none fits, it is the
    one that misses least.

    If it chooses the settings itself, it shards along the dims that are cheapest to gather (`cheapest_dims`) where that
    saves 5 % of all gathers: where parameters, of experts, have few rows for so many ranks. And it adds some to the
    table: lookups by rows of large embeddings that are not tied, if the best row is faster with them by more than the
    host waits for them; HSDP whose replicas share what rests, where HSDP does not fit; optimizer states on the CPU, and
    an `OffloadBudget`, where nothing else fits. The text says what they gain and cost.

    Args:
        model: a plain module, on meta or any other device. Parameters may be frozen and tied.
        ranks: how many ranks train; a list compares several numbers.
        batch: returns the arguments of one rank's forward: a tensor, a tuple or list of arguments, or a dict of named
            ones. Tensors may be on meta. None: peaks are those of parameters and gradients alone.
        loss: computes a scalar of the model's output. None: its attribute `loss`, or the sum of its
            `logits`, or of all its floating-point tensors.
        policy: what gets groups of its own, see `wrap_groups`. A dict from names (without such a class in the model) to
            policies compares several.
        memory: bytes of a device, as a number or as text: "24GB" is 24 * 10**9, "24GiB" is 24 * 2**30.
        param_dtype: the dtype of compute; short for `mp_policy=MixedPrecisionPolicy(param_dtype=...)`.
        mp_policy: dtypes of compute and reduction, and codecs, as for `fully_shard`. Rows without replicas leave its
            `replica_codec` out.
        optimizer: "adamw", "adam" (two states in the parameter's dtype for each element), "muon", "lion", "momentum"
            (one), "sgd" or None (none), or a number of bytes for each element.
        settings: what to compare: Settings, or dicts of their fields, in which `ranks` may be missing. None: all of
            `reshard_after_forward` None and False, each with and without checkpointing, and on accelerators with and
            without offload; for several machines also HSDP with a replica on each, `reshard_after_forward` of the
            ranks of a machine, and, if times are predicted, two and four blocks in one call.
        device: type of the device that will train. "cpu" has no offload.
        backend: "nccl" (all that coalesce collectives), "gloo" or "other". None: gloo on CPUs, else nccl.
        link: bytes per second that one network card sends to other machines, as a number or as text: "50GB/s". A gather
            or a reduction among all ranks of whole machines is a ring that uses all their cards. An all-to-all, which
            `wire_dtype` takes, and an all-reduce between replicas on several machines use a card for each rank. On m
            machines a card reaches 1 - 0.05 log2(m) of this.
        flops: floating-point operations per second that a rank reaches. As all other operations count as nothing, this
            is best what the plain model reaches in a whole step without communication: `Prediction.flops` by its time.
        host_link: bytes per second between the CPU's memory and a device, for offload; on an H200, 55e9 were measured.
        machine_link: bytes per second that a rank can send to ranks of its own machine (NVLink: "370GB/s"), which
            also bounds a ring over several machines. None: as `link`, so that a rank never sends more than that.
        ranks_per_machine: how many neighbouring ranks are on one machine.
        cards_per_machine: how many network cards they share. None: one for each rank.
        latency: seconds of a collective besides those of its bytes, as a number or as text: "20us"; or three: a base,
            and what each hop of a ring adds inside a machine and between two. None: on devices over NCCL (11e-6,
            2.6e-6, 7.5e-6), by NCCL's own table (29 us on 8 ranks, 209 us on 64, 1.65 ms on 512); elsewhere 0.
        memory_link: bytes per second between a device and its memory, for the optimizer's step. None: on devices
            "2.68TB/s", 80 % of an H100's; on CPUs the step takes no time.
        headroom: bytes of the memory to keep for what is not counted (the context of the device, buffers of NCCL,
            fragmentation, scratch memory of kernels and temporary tensors of the optimizer), as a number, as text, or
            as a share: "5%". None: 10 % on accelerators, on CPUs none.
        host_memory: bytes of a machine's CPU memory, which its ranks share, for offload. None: rows are not tested.
        host_memory_link: bytes per second between the CPUs of a machine and their memory, in the optimizer's step. The
            default is 3.6 billion parameters per second of AdamW, about what ZeRO-Offload (Ren et al. 2021) reports of
            DeepSpeed's CPU Adam on a machine with two sockets. Pass what yours reaches: two sockets with 16 channels of
            DDR5-4800 have 614 GB/s at most.
        beside_price: what a second of the optimizer's step beside the next forward costs what is computed meanwhile, in
            seconds: 1 if they take turns, 0 if AdamW hides. On an H200 it was 0.9 beside matrix products and 0.5 beside
            attention. A number lets the plan advise such steps (`beside_forward`), for which the program needs another
            line. None: it does not, and predicts named ones at 1.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a wrong value; the policy names classes that the model does not have; the model is sharded already.
        NotImplementedError: a parameter is a DTensor; a codec reads values, which tensors of a plan do not have.

    Example:
        ```python
        plan = fsdp2.plan(model_on_meta, ranks=8, batch=lambda: (ids,), memory="24GB", link="50GB/s", flops=4e14)
        print(plan)
        ```
    """
    worlds = arguments.read_ranks(ranks)
    budget, precision = read_bytes("memory", memory), arguments.read_precision(param_dtype, mp_policy)
    speeds = {
        "link": link,
        "flops": flops,
        "host_link": host_link,
        "machine_link": machine_link,
        "memory_link": memory_link,
        "host_memory_link": host_memory_link,
    }
    machine = arguments.read_machine(device, backend, speeds, latency, ranks_per_machine, cards_per_machine)
    policies = arguments.read_policies(model, policy)
    for each in (batch, loss):
        if each is not None and not callable(each):
            raise TypeError(f"expected functions for batch and loss, got {type(each).__name__}")
    chosen = arguments.read_settings(settings, worlds, [*policies], machine)
    read_optimizer(optimizer, 1)
    price = arguments.read_price(beside_price)
    notes: list[str] = []
    numbers = count(1)
    with _without_collections():
        checkpoints = any(setting.checkpointing for setting in chosen)
        recorder = _Recorder(model, policies, precision, batch, loss, checkpoints, device, notes)
        for name in policies:
            recorder.wrapping((name, 1, ()))
        predictor = _Predictor(model, machine, optimizer, 1.0 if price is None else price)
        kept = arguments.read_headroom(headroom, budget, machine)
        on_host = read_bytes("host_memory", host_memory)

        def row(setting: Setting) -> PlanRow:
            _progress.debug("setting %d: %s", next(numbers), table.setting_text(setting))
            return predictor.row(setting, recorder.wrapping_of(setting), budget, kept, on_host)

        possible = [*_possible(chosen, recorder, are_users=settings is not None)]
        if settings is None:
            possible = [replace(each, cheapest_dims=recorder.pads(each)) for each in possible]
        _progress.info("predicting %d settings, and more that may pay", len(possible))
        rows = [row(each) for each in possible]
        if settings is None:
            adviser = Adviser(row, _cost, large_tables(model), price is not None and machine.can_offload)
            alike = dict.fromkeys((each.setting.ranks, each.setting.policy) for each in rows)
            for key in alike:
                rows += adviser.more([each for each in rows if (each.setting.ranks, each.setting.policy) == key])
    if any(row.setting.offload for row in rows):
        notes.append(
            "CPU offload: such a setting is the best only if nothing else fits. In its time the optimizer's steps of "
            f"a machine's ranks read and write {size_text(machine.host_memory_link)} of the CPU's memory per second. "
            "What rests there is for each rank."
        )
    if not rows:
        why = " ".join(notes) or "Each wrapped module is a single layer."
        raise ValueError(f"settings: expected one without checkpointing, which nothing can have here. {why}")
    return Plan(model, recorder.wrappings, sorted(rows, key=_cost), notes, machine, optimizer, predictor.beside_price)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Context: nothing is searched for garbage, which takes an eighth of a plan: copies of the model are many objects,
    which stay until the plan is made.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _key_of(setting: Setting) -> _Key:
    return setting.policy, setting.blocks_per_call, setting.by_rows


def _possible(chosen: Sequence[Setting], recorder: _Recorder, are_users: bool) -> Iterator[Setting]:
    """Yields the settings that the model can have. `are_users`: the user has named them.

    Raises:
        ValueError: the user has named several blocks in one call, and there are none side by side.
    """
    for setting in chosen:
        wrapping = recorder.wrapping(_key_of(setting))
        if wrapping is None:
            if are_users:
                raise ValueError(
                    f"settings: blocks_per_call={setting.blocks_per_call}: expected blocks of one class side by side "
                    "in a ModuleList or a Sequential, which the policy wraps one by one; found none"
                )
            continue
        can_checkpoint = wrapping.checkpointed is not None or (are_users and not wrapping.has_activations)
        if can_checkpoint or not setting.checkpointing:
            yield setting


# ---- recordings


class _Recorder:
    """Records the step of a model under wrap policies.

    Args:
        model: the plain module.
        policies: the wrap policies, by their names.
        precision: dtypes, for calls whose options have none.
        batch, loss: as for `plan`.
        checkpoints: also record a step with checkpointing.
        device: the type of device that will train.
        notes: gets what could not be recorded, and why.
    """

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[str, Any],
        precision: MixedPrecisionPolicy,
        batch: Callable[[], Any] | None,
        loss: Callable[[Any], Tensor] | None,
        checkpoints: bool,
        device: str,
        notes: list[str],
    ) -> None:
        self._model, self._policies, self._precision, self._batch = model, policies, precision, batch
        self._device = device
        self._loss, self._checkpoints, self._notes = loss or arguments.default_loss, checkpoints, notes
        self._found: dict[_Key, _Wrapping | None] = {}

    @property
    def wrappings(self) -> dict[_Key, _Wrapping]:
        """Those that were asked for."""
        return {key: wrapping for key, wrapping in self._found.items() if wrapping is not None}

    def wrapping(self, key: _Key) -> _Wrapping | None:
        """Returns the wrapping under a key. None: the model has no blocks that could be in one call."""
        if key not in self._found:
            name, count, by_rows = key
            if count == 1 and not by_rows:
                self._found[key] = self._record_with(self._calls_of(self._policies[name]), self._notes)
            else:
                self._found[key] = self._change(name, count, by_rows)
        return self._found[key]

    def wrapping_of(self, setting: Setting) -> _Wrapping:
        """Returns the wrapping of a setting that the model can have."""
        wrapping = self.wrapping(_key_of(setting))
        assert wrapping is not None, "it is possible"
        return wrapping

    def pads(self, setting: Setting) -> bool:
        """Returns True if gathers cost noticeably less along the cheapest dims: parameters have few rows for so many
        ranks. 64 experts among 512 ranks would be padded eightfold.
        """
        wrapping, ranks = self.wrapping_of(setting), setting.num_at_rest

        def cost(cheapest_dims: bool) -> float:
            return sum(gather_cost(spec) for group in wrapping.groups for spec in group.specs(ranks, cheapest_dims))

        return cost(cheapest_dims=True) < (1 - _NOTICEABLE) * cost(cheapest_dims=False)

    def _calls_of(self, policy: Any) -> list[WrapGroup]:
        """Returns the calls of a policy."""
        calls = wrap_groups(self._model, policy)
        for call in calls:
            offload = call.options.get("offload_policy")
            if callable(offload) and not is_policy(offload):
                call.options["offload_policy"] = RememberedChoice(offload)
        if not calls:
            why = "it repeats no block. Pass a policy" if policy is None else "the policy matches nothing. Pass another"
            self._notes.append(f"Nothing but the model itself is wrapped: {why}.")
        if self._batch is None:
            self._notes.append("No batch was given: peaks are those of parameters and gradients, without activations.")
        return calls

    def _change(self, name: str, count: int, by_rows: tuple[str, ...]) -> _Wrapping | None:
        """Returns the wrapping of a policy in which up to `count` blocks are in one call, and embeddings by rows."""
        before = self.wrapping((name, 1, by_rows if count > 1 else ()))
        assert before is not None, "there are calls"
        if count == 1:
            return self._record_with(look_up_by_rows(self._model, before.calls, by_rows), [])
        calls = join_blocks(self._model, before.calls, count)
        return self._record_with(calls, [], before) if len(calls) < len(before.calls) else None

    def _record_with(self, calls: list[WrapGroup], notes: list[str], like: _Wrapping | None = None) -> _Wrapping:
        """Records a step with these calls. `notes`: gets what could not be recorded. `like`: of other calls, whose
        recordings hold if these mark the same modules, or fewer: large submodules depend on the groups beside.
        """
        outline, groups = find_groups(self._model, calls, self._precision)
        light = [group.on_meta() for group in groups]
        modules = _modules_in(groups)
        if like is not None and modules <= _modules_in(like.groups):
            fewer = like.checkpointed.of(modules) if like.checkpointed is not None else None
            return _Wrapping(calls, outline, light, like.plain.of(modules), fewer, like.has_activations)
        plain = again = None
        if self._batch is not None:
            blocks = apply.blocks(calls)
            plain = self._record(self._batch, groups, (), notes)
            again = self._record(self._batch, groups, blocks, notes) if self._checkpoints and blocks and plain else None
        recording = plain or without_activations(self._model, groups)
        return _Wrapping(calls, outline, light, recording, again, plain is not None)

    def _record(
        self, batch: Callable[[], Any], groups: Sequence[PlannedGroup], blocks: Sequence[nn.Module], notes: list[str]
    ) -> Recording | None:
        """Records a step, in which `blocks` run again in backward. Returns None if it can't run without values."""
        _progress.info("recording a step without values%s", ", with checkpointing" if blocks else "")
        try:
            return record(self._model, groups, batch, self._loss, blocks, self._device)
        except Exception as error:  # whatever the user's forward raises without values
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            left_out = "Peaks are those of parameters and gradients alone: the"
            what = "Checkpointing is left out: its" if blocks else left_out
            notes.append(f"{what} step could not run without values ({text[:200]}).")
            return None


def _modules_in(groups: Sequence[PlannedGroup]) -> set[int]:
    return {i for group in groups for i in group.indices[0]}


# ---- predictions


class _Predictor:
    """Predicts steps of a model on one machine. Settings share copies of the model that are sharded alike.

    Args:
        model: the plain module.
        machine: what each rank computes and communicates with.
        optimizer: its name, or bytes for each element, as for `plan`.
        beside_price: of a step beside the next forward, as for `plan`.
    """

    def __init__(self, model: nn.Module, machine: Machine, optimizer: str | float | None, beside_price: float) -> None:
        self._machine, self._optimizer, self.beside_price = machine, optimizer, beside_price
        self._buffers = sum(buffer.nbytes for buffer in model.buffers())
        self._copies: dict[Setting, ShardedCopy] = {}

    def row(
        self, setting: Setting, wrapping: _Wrapping, memory: float | None, headroom: float, host_memory: float | None
    ) -> PlanRow:
        """Returns what a setting takes, beside what there is: the `memory` of a device, of which `headroom` is kept,
        and the CPU's memory of a machine.
        """
        taken = self.predict(setting, wrapping)
        on_host = taken.on_host + taken.states_on_host
        states = taken.states + taken.states_on_host
        sharing = min(setting.ranks, self._machine.ranks_per_machine)
        of_rank = None if host_memory is None else host_memory / sharing
        return PlanRow(setting, taken, states, memory, wrapping.has_activations, on_host, headroom, of_rank)

    def predict(self, setting: Setting, wrapping: _Wrapping) -> Prediction:
        """Returns what a step takes."""
        recording = (wrapping.checkpointed if setting.checkpointing else None) or wrapping.plain
        key = key_of(setting)
        if key not in self._copies:
            self._copies[key] = ShardedCopy(wrapping.outline, setting, self._machine)
        return self._copies[key].predict(setting, recording, self._buffers, self._optimizer, self.beside_price)


def _cost(row: PlanRow) -> tuple[float, ...]:
    """Returns by what rows are sorted. What rests on the CPU comes behind all that fits without: states first."""
    taken, setting = row.prediction, row.setting
    first = sum(taken.moved.values()) if taken.time is None else taken.time
    on_host = 2 if setting.offload else int(setting.offload_states)
    return row.missing + row.host_missing, on_host, first, taken.flops, row.total
