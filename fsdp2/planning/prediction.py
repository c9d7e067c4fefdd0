"""Predicts what a step takes with one setting: the engine itself runs it, on tensors without memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..engine.root import Root
from .device import DeviceOfSizes
from .outline import Outline
from .playback import Playback
from .recording import Recording
from .settings import Setting, read_optimizer
from .times import HOST_MEMORY, MEMORY, Machine, Times


@dataclass(frozen=True)
class PlanRow:
    """One setting, and what a step takes with it on each rank. Sizes are bytes.

    Args:
        setting: what the row chooses.
        machine: what it is for.
        shards: bytes of the parameters' shards, on the device or on the CPU.
        states: bytes of optimizer states, on the device or on the CPU.
        resting: bytes on the device between steps: shards, optimizer states, buffers, what codecs with feedback keep,
            and on CUDA the workspaces of cuBLAS.
        on_host: bytes of shards, gradients and optimizer states in the CPU's memory, with CPU offload.
        forward_peak: most bytes above resting until the model's forward has returned.
        step_peak: most bytes above resting until backward ends, all sharded gradients included.
        peak_at: what ran when the step had its peak.
        moved: bytes of one step's collectives, in the tensors of all ranks, by kind; and under "transfer" bytes copied
            between this rank's device and the CPU.
        launched: how many collectives a step launches, by kind.
        sent: bytes that this rank sends in a step.
        order: names of the groups in the order of the forward.
        flops: floating-point operations of a step in matrix products, convolutions and attention.
        times: the addends of the step's time; None without speeds, or without activations.
        has_activations: False if the forward was not recorded: peaks are those of parameters and gradients alone.
    """

    setting: Setting
    machine: Machine
    shards: int
    states: int
    resting: int
    on_host: int
    forward_peak: int
    step_peak: int
    peak_at: str
    moved: Mapping[str, int]
    launched: Mapping[str, int]
    sent: float
    order: tuple[str, ...]
    flops: int
    times: Times | None
    has_activations: bool

    @property
    def total(self) -> int:
        """Most bytes on the device in a step."""
        return self.resting + self.step_peak

    @property
    def missing(self) -> int:
        """Bytes by which the total exceeds the memory without the headroom; 0 if it fits, or no memory was given."""
        room = self.machine.room
        return 0 if room is None else max(0, self.total - int(room))

    @property
    def host_missing(self) -> int:
        """Bytes by which a rank exceeds its part of the CPU's memory; 0 if it fits, or no memory was given."""
        memory = self.machine.host_memory
        if memory is None:
            return 0
        return max(0, self.on_host - int(float(memory) / min(self.setting.ranks, self.machine.ranks_per_machine)))

    @property
    def fits(self) -> bool:
        return not self.missing and not self.host_missing

    @property
    def time(self) -> float | None:
        """Seconds of a step with the optimizer's."""
        return None if self.times is None else self.times.total


class _Stepped(NamedTuple):
    """Bytes of what an optimizer's step uses in one place: parameters, gradients and states of trainable shards."""

    shards: int = 0
    gradients: int = 0
    states: int = 0

    def plus(self, shards: int, gradients: int, states: int) -> _Stepped:
        return _Stepped(self.shards + shards, self.gradients + gradients, self.states + states)

    @property
    def traffic(self) -> int:
        """Bytes that a fused step reads and writes. AdamW in fp32: 28 for each element."""
        return 2 * self.shards + self.gradients + 2 * self.states


def _stepped(root: Root, optimizer: str | float | None) -> tuple[_Stepped, _Stepped]:
    """Returns what the optimizer's step uses on the device, and on the CPU."""
    found = {False: _Stepped(), True: _Stepped()}
    for group in root.groups:
        for param in group.params:
            spec = param.spec(group.settings.policy)
            if param.sharded.requires_grad:
                item, numel, is_on_host = spec.storage_dtype.itemsize, spec.shard_numel, group.transfers is not None
                states = int(numel * read_optimizer(optimizer, item))
                gradients = numel * param.delivered_dtype.itemsize
                found[is_on_host] = found[is_on_host].plus(numel * item, gradients, states)
    return found[False], found[True]


class ShardedCopy:
    """A copy of a model that the engine has sharded, on a device without memory. It predicts steps.

    Settings that differ in checkpointing, or in whether groups are resharded after forward, share one: see `key_of`.

    Args:
        outline: the model, and the `fully_shard` calls on it.
        setting: how parameters are sharded.
        machine: what each rank computes and communicates with.
    """

    def __init__(self, outline: Outline, setting: Setting, machine: Machine) -> None:
        self._machine, self._device, self._outline = machine, DeviceOfSizes(machine), outline
        with self._device.runs():
            mesh = self._device.mesh(setting)
            self._root, options = outline.shard(mesh, key_of(setting), machine.can_offload)
        # Those for which the policy has not chosen it.
        states = [state for state in self._root.states if "reshard_after_forward" not in options[state]]
        self._groups = [group for state in states for group in state.groups]
        self._knows_order = False

    def predict(
        self,
        setting: Setting,
        recording: Recording,
        buffers: int,
        optimizer: str | float | None,
        has_activations: bool,
    ) -> PlanRow:
        """Returns what a step in steady state takes: the second one, or a later one, in which the order is known.

        Args:
            setting: one with the key of this copy.
            recording: a step of the plain model.
            buffers: bytes of the model's buffers, which are on the device.
            optimizer: its name, or bytes for each element, as for `plan`.
            has_activations: the recording has the forward of the model.
        """
        traffic, meter, root, machine = self._device.traffic, self._device.meter, self._root, self._machine
        kept = setting.reshard_after_forward
        with self._device.runs():
            for group in self._groups if kept is None or isinstance(kept, bool) else ():
                group.set(reshard_after_forward=kept)
            playback = Playback(root, self._outline, recording, self._device)
            for _ in range(1 if self._knows_order else 2):
                playback.end_step()
                traffic.begin_step()
                meter.begin()
                resting = meter.live
                playback.run()
            playback.end_step()
        self._knows_order = True
        flat = [(group.parameters.buffers, group.transfers) for group in root.groups if group.params]
        shards = [(each.shards.nbytes, transfers) for each, transfers in flat if each is not None]
        kept_shards = sum(nbytes for nbytes, transfers in shards if transfers is None)
        feedback = sum(group.gradients.codecs.nbytes for group in root.groups)
        own, on_host = _stepped(root, optimizer)
        sharing = min(setting.ranks, machine.ranks_per_machine)
        step_seconds = own.traffic / MEMORY + on_host.traffic * sharing / HOST_MEMORY if machine.can_offload else 0.0
        rests = kept_shards + buffers + feedback + (machine.workspace_nbytes if traffic.flops else 0)
        return PlanRow(
            setting=setting,
            machine=machine,
            shards=sum(nbytes for nbytes, _ in shards),
            states=own.states + on_host.states,
            resting=rests + own.states,
            on_host=_host_nbytes(root) + on_host.gradients + on_host.states,
            forward_peak=playback.forward_peak - resting,
            step_peak=meter.peak - resting,
            peak_at=meter.peak_at,
            moved=dict(traffic.moved),
            launched=dict(traffic.launched),
            sent=traffic.sent,
            order=tuple(dict.fromkeys(playback.order)),
            flops=traffic.flops,
            times=traffic.times(step_seconds) if has_activations else None,
            has_activations=has_activations,
        )


def _host_nbytes(root: Root) -> int:
    """Returns the bytes of shards that are on the CPU."""
    groups = [group for group in root.groups if group.transfers is not None]
    return sum(param.spec(group.settings.policy).storage_nbytes for group in groups for param in group.params)


def key_of(setting: Setting) -> Setting:
    """Returns what settings that share a ShardedCopy have in common, as a setting."""
    kept = setting.reshard_after_forward
    return replace(setting, checkpointing=False, reshard_after_forward=None if isinstance(kept, bool) else kept)
