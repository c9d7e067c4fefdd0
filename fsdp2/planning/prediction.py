"""Predicts what a step takes with one setting: the engine itself runs it, on tensors without memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from .clocks import Machine
from .device import DeviceOfSizes
from .outline import Outline
from .playback import Playback
from .recording import Recording
from .settings import Setting
from .stepping import OptimizerStep


@dataclass(frozen=True)
class Prediction:
    """Holds what one step takes on each rank, in bytes and seconds.

    Args:
        shards: bytes of the parameters' shards, on whichever device they rest.
        buffers: bytes of the model's buffers, which rest on the device.
        resting: bytes on the device between steps: shards that are not offloaded, buffers, what codecs with feedback
            keep, secondary shards of replicas that share what rests, and on CUDA the workspaces of cuBLAS; no optimizer
            states.
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
        optimizer_time: seconds by which the optimizer's step makes the step longer; None without speeds.
        feedback: bytes that codecs with feedback keep between steps.
        states, states_on_host: bytes of optimizer states that rest on the device, and on the CPU.
        on_host: bytes of shards and gradients that rest on the CPU.
        optimizer_peak: bytes above resting in an optimizer's step whose states come from the CPU; else 0.
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
    states: int = 0
    states_on_host: int = 0
    on_host: int = 0
    optimizer_peak: int = 0

    @property
    def exposed_time(self) -> float | None:
        """Seconds by which communication makes the step longer; None without speeds."""
        if self.time is None or self.compute_time is None:
            return None
        return self.time - self.compute_time - (self.optimizer_time or 0.0)

    @property
    def total(self) -> int:
        """Most bytes on the device in a step, without optimizer states."""
        return self.resting + self.peak

    @property
    def peak(self) -> int:
        """Most bytes above resting, in a step or the optimizer's."""
        return max(self.step_peak, self.optimizer_peak)


class ShardedCopy:
    """Holds a copy of a model that the engine has sharded, on a device without memory, and predicts steps of it.

    Settings that differ in checkpointing, in whether groups are resharded after forward, or in what an optimizer does,
    share one: see `key_of`.

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
        states = [state for state in self._root.states if _KEPT not in options[state]]
        self._groups = [group for state in states for group in state.groups]
        self._knows_order = False

    def predict(
        self,
        setting: Setting,
        recording: Recording,
        buffers: int,
        optimizer: str | float | None,
        beside_price: float = 1.0,
    ) -> Prediction:
        """Returns what a step in steady state takes: the second one, or a later one, in which the order is known.

        Args:
            setting: one with the key of this copy.
            recording: a step of the plain model.
            buffers: bytes of the model's buffers, which rest on the device.
            optimizer: its name, or bytes for each element, as for `plan`.
            beside_price: what a step beside the next forward costs, see `OptimizerStep`.
        """
        clocks, meter, root = self._device.clocks, self._device.meter, self._root
        kept = setting.reshard_after_forward
        with self._device.runs():
            for group in self._groups if kept is None or isinstance(kept, bool) else ():
                group.set(reshard_after_forward=kept)
            step = OptimizerStep(root, setting, optimizer, clocks, beside_price)
            playback = Playback(root, self._outline, recording, self._device, step)
            for _ in range(1 if self._knows_order and not step.is_beside else 2):
                if step.is_beside:
                    step.hold_gradients()
                playback.end_step()
                clocks.begin_step()
                meter.begin()
                resting = meter.live - step.held_nbytes
                with step.beside() if step.is_beside else nullcontext():
                    playback.run()
                if not step.is_beside:
                    step.run()
            playback.end_step()
        self._knows_order = True
        has_speeds = self._machine.has_speeds
        buffers_of = [(group.parameters.buffers, group.transfers) for group in root.groups if group.params]
        feedback = sum(group.gradients.kept_nbytes for group in root.groups)
        secondary = sum(each.secondary_nbytes for each, _ in buffers_of if each is not None)
        shards = [(each.shards.nbytes, transfers) for each, transfers in buffers_of if each is not None]
        return Prediction(
            shards=sum(nbytes for nbytes, _ in shards),
            buffers=buffers,
            resting=sum(nbytes for nbytes, transfers in shards if transfers is None)
            + (buffers + feedback + secondary + (self._machine.workspace_nbytes if clocks.flops else 0)),
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
            optimizer_time=step.seconds if has_speeds else None,
            feedback=feedback,
            states=step.states,
            states_on_host=step.states_on_host,
            on_host=step.on_host,
            optimizer_peak=step.peak,
        )


_KEPT = "reshard_after_forward"


def key_of(setting: Setting) -> Setting:
    """Returns what settings that share a ShardedCopy have in common, as a setting."""
    kept = setting.reshard_after_forward
    kept = None if isinstance(kept, bool) else kept
    alike = replace(setting, checkpointing=False, reshard_after_forward=kept)
    return replace(alike, offload_states=False, beside_forward=False)
