"""Predicts what a step takes with one setting: the engine itself runs it, on tensors without memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .clocks import Machine
from .device import DeviceOfSizes
from .outline import Outline
from .playback import Playback
from .recording import Recording
from .settings import Setting


@dataclass(frozen=True)
class Prediction:
    """Holds what one step takes on each rank, in bytes and seconds.

    Args:
        shards: bytes of the parameters' shards, on whichever device they rest.
        buffers: bytes of the model's buffers, which rest on the device.
        resting: bytes on the device between steps: shards that are not offloaded, buffers, and what codecs with
            feedback keep; no optimizer states.
        forward_peak: most bytes above resting until the model's forward has returned.
        step_peak: most bytes above resting until backward ends, which includes all sharded gradients.
        peak_at: what ran when the step had its peak.
        moved: bytes of all ranks in the tensors of one step's collectives, by their kind, and under "transfer" those
            that offload copies between this rank's device and the CPU.
        sent: bytes that this rank sends in one step.
        order: names of the groups in the order of the forward.
        flops: floating-point operations of one step in matrix products, convolutions and attention.
        compute_time, time: seconds of computation alone, and of the step with the optimizer's; None without speeds.
        launched: how many collectives a step launches, by their kind.
        optimizer_time: seconds of the optimizer's step; None without speeds.
        feedback: bytes that codecs with feedback keep between steps.
    """

    shards: int
    buffers: int
    resting: int
    forward_peak: int
    step_peak: int
    peak_at: str
    moved: dict[str, int]
    sent: float
    order: tuple[str, ...]
    flops: int
    compute_time: float | None = None
    time: float | None = None
    launched: dict[str, int] = field(default_factory=dict)
    optimizer_time: float | None = None
    feedback: int = 0

    @property
    def exposed_time(self) -> float | None:
        """Seconds by which communication makes the step longer; None without speeds."""
        if self.time is None or self.compute_time is None:
            return None
        return self.time - self.compute_time - (self.optimizer_time or 0.0)

    @property
    def total(self) -> int:
        """Most bytes on the device in a step, without optimizer states."""
        return self.resting + self.step_peak


class ShardedCopy:
    """Holds a copy of a model that the engine has sharded, on a device without memory, and predicts steps of it.

    Settings that differ in checkpointing, or in whether groups are resharded after forward, share one: see `key_of`.

    Args:
        outline: the model, and the `fully_shard` calls on it.
        setting: how parameters are sharded.
        machine: what each rank computes and communicates with.
    """

    def __init__(self, outline: Outline, setting: Setting, machine: Machine) -> None:
        self._machine, self._device = machine, DeviceOfSizes(machine)
        with self._device.runs():
            mesh = self._device.mesh(setting)
            self._root, options = outline.shard(mesh, key_of(setting), machine.can_offload)
        # Those for which the policy has not chosen it.
        states = [state for state in self._root.states if _KEPT not in options[state]]
        self._groups = [group for state in states for group in state.groups]
        self._knows_order = False

    def predict(self, setting: Setting, recording: Recording, buffers: int, optimizer_traffic: float) -> Prediction:
        """Returns what a step in steady state takes: the second one, or a later one, in which the order is known.

        Args:
            setting: one with the key of this copy.
            recording: a step of the plain model, of which marks number the modules and parameters of the groups.
            buffers: bytes of the model's buffers, which rest on the device.
            optimizer_traffic: bytes of memory that the optimizer's step reads and writes: the device's, or with offload
                the CPU's.
        """
        clocks, meter, root = self._device.clocks, self._device.meter, self._root
        kept = setting.reshard_after_forward
        with self._device.runs():
            for group in self._groups if kept is None or isinstance(kept, bool) else ():
                group.set(reshard_after_forward=kept)
            playback = Playback(root, recording, self._device)
            for _ in range(1 if self._knows_order else 2):
                playback.drop_gradients()
                clocks.begin_step()
                meter.begin()
                resting = meter.live
                playback.run()
                if setting.offload:
                    optimizer_time = clocks.touch_host(optimizer_traffic, setting.ranks)
                else:
                    optimizer_time = clocks.touch(optimizer_traffic)
            playback.drop_gradients()
        self._knows_order = True
        has_speeds = self._machine.has_speeds
        buffers_of = [(group.parameters.buffers, group.transfers) for group in root.groups if group.params]
        feedback = sum(group.gradients.kept_nbytes for group in root.groups)
        shards = [(each.shards.nbytes, transfers) for each, transfers in buffers_of if each is not None]
        return Prediction(
            shards=sum(nbytes for nbytes, _ in shards),
            buffers=buffers,
            resting=sum(nbytes for nbytes, transfers in shards if transfers is None) + buffers + feedback,
            forward_peak=playback.forward_peak - resting,
            step_peak=meter.peak - resting,
            peak_at=meter.peak_at,
            moved=dict(clocks.moved),
            sent=clocks.sent,
            order=tuple(dict.fromkeys(playback.order)),
            flops=clocks.flops,
            compute_time=clocks.computed if has_speeds else None,
            time=clocks.seconds if has_speeds else None,
            launched=dict(clocks.launched),
            optimizer_time=optimizer_time if has_speeds else None,
            feedback=feedback,
        )


_KEPT = "reshard_after_forward"


def key_of(setting: Setting) -> Setting:
    """Returns what settings that share a ShardedCopy have in common, as a setting."""
    kept = setting.reshard_after_forward
    return replace(
        setting, checkpointing=False, reshard_after_forward=None if kept is None or isinstance(kept, bool) else kept
    )
