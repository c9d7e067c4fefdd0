"""Saves a checkpoint: each rank writes one file from its shards, and the first rank commits them all in one step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..shards.tensors import check_bool
from .content import Content, check_values
from .folders import check_path
from .ranks import attempt
from .session import Choices, Save, Session, session_of
from .snapshot import Snapshot
from .state import Optimizers, check_arguments


class Saving:
    """A save, which `save` returns.

    Attributes:
        path: the folder of the checkpoint, a `pathlib.Path`; of one in memory, its place there when it is complete.
        nbytes: bytes that this rank has written; 0 before the end.
        step_waited_s: seconds for which `optimizer.step` waited for the snapshot of `wait=False`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes, self.step_waited_s = path, 0, 0.0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_told = False
        self._is_copied = threading.Event()
        self._hook: Any = None

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "running"
        return f"Saving({str(self.path)!r}, {state})"

    def done(self) -> bool:
        """Returns True if the save has ended, also if it has failed. It does not wait."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is complete and on the disk. It does not communicate: ranks may call it or not.

        Raises:
            Exception: the save has failed; on all ranks, see `save`.
        """
        if (error := self._join()) is not None:
            self._is_told = True
            raise error

    def _join(self) -> BaseException | None:
        """Waits for the end, and returns what the save has met."""
        if self._thread is not None:
            self._thread.join()
            self._hook.remove()
        return self._error

    def _run(self, session: Session, save: Save, snapshot: Snapshot | None, failed: Exception | None) -> None:
        try:
            if snapshot is not None:
                _, failed = attempt(snapshot.finish)
            self._is_copied.set()
            self.nbytes = session.finish(save, save.content.state.local if snapshot is None else snapshot.value, failed)
        except BaseException as error:
            self._error = error
        finally:
            self._is_copied.set()

    def _watch_steps(self, model: nn.Module) -> None:
        """Has each step of an optimizer on parameters of the model wait until the snapshot has what it will change.

        The hook is one of all optimizers: those of libraries that wrap one, such as accelerate's, call no hooks.
        """
        params = {id(param) for param in model.parameters()}

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            if not self._is_copied.is_set() and any(
                id(param) in params for group in optimizer.param_groups for param in group["params"]
            ):
                began = time.perf_counter()
                self._is_copied.wait()
                self.step_waited_s += time.perf_counter() - began

        self._hook = register_optimizer_step_pre_hook(before_step)


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    wait: bool = True,
    keep_last: int | None = None,
    trainable_only: bool = False,
    in_memory: bool = False,
    flat_keys: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Saves a checkpoint that any number of ranks can load, with `load` or with torch.distributed.checkpoint.

    Every rank must call it, between steps. Each writes one file, in order, from its own shards; replicas share the
    work. A save begins and ends with a round of 64 bytes for each rank: in the first, ranks compare what they save. The
    checkpoint takes the place of `folder` in one step when all files are on the disk: a kill at any moment leaves the
    previous checkpoints whole. What the kill has left behind, the next job removes.

    With `wait=False` it returns when it knows what to write. A thread copies this rank's shards into host memory while
    the next forward and backward run, and writes them from there. An `optimizer.step()` that comes before the copy has
    ended waits for it. The copy is kept for the next save: it takes as much memory as the shards and the states of the
    optimizer. Another save waits until this one has ended, and raises what it has met unless `wait()` has done so on
    all ranks. Before the program ends or destroys its process groups, call `wait()` of what is returned.

    Example:
        ```python
        fsdp2.checkpoint.save(f"runs/step-{step:06}", model, optimizer, extra={"schedule": schedule, "step": step})
        ```

    Args:
        folder: the folder of this checkpoint, on a disk that all ranks share. A checkpoint of this name is replaced.
        model: the model. Its parts are saved under "model" and their FQNs.
        optimizer: one optimizer, several, or None. Saved under "optimizer".
        extra: name -> a value that all ranks have alike: one with `state_dict()`, such as a scheduler, or numbers,
            texts, tensors, lists and dicts. Names in the flat state dict begin with it.
        per_rank: name -> a value of each rank, such as `RandomStates()` or a data loader with `state_dict()`. What
            codecs keep between steps is among them. It is loaded on as many ranks only.
        wait: return when the checkpoint is complete.
        keep_last: remove all checkpoints of fsdp2 beside it but the last `keep_last`, this one included, when it is
            complete. None: remove none.
        trainable_only: leave out frozen parameters: of LoRA, the adapters remain.
        in_memory: save into the memory of this machine (`/dev/shm`) instead of the disk. The checkpoint stays there
            when ranks are killed, until the machine ends, and `latest` of the folder around `folder` finds it. The next
            save into that folder, to memory or the disk, replaces it. It takes as much memory as the shards and the
            states, and twice as much during a save. All ranks must be on one machine.
        flat_keys: name everything by FQNs: the model's keys without "model", and the optimizer's options as
            `optimizer.param_groups.<FQN>.lr`, so that pipeline stages with an optimizer each do not share names.
            torchtitan loads such checkpoints, and `load` knows them. Tensors in `extra` must be inside dicts.
        process_group: the ranks that save together. None: all.

    Returns:
        A `Saving`.

    Raises:
        ValueError: ranks differ in an argument, or share a tensor in different ways, or some ranks of its mesh lack it:
            states of an optimizer that has stepped on other ranks only; a name in `extra` is taken; plain tensors of
            the optimizer differ between ranks; an optimizer has a parameter that the model lacks.
        TypeError: an argument; a value that can't be loaded without running code.
        NotImplementedError: a tensor is of a subclass, or is distributed in another way than by chunks; the model is
            one of torch's FullyShardedDataParallel; `in_memory` on several machines.
        FileExistsError: `folder` is there, and is no checkpoint.
        OSError: the disk is full, read-only or not there. The error names the file.
        RuntimeError: another job saves into the folder around `folder`; an earlier save has failed.
        All errors are raised on all ranks, and leave earlier checkpoints as they are.
    """

    def check() -> tuple[tuple[Optimizer, ...], Choices]:
        check_path("folder", folder)
        optimizers = check_arguments("save", model, optimizer, process_group)
        check_values("extra", extra)
        check_values("per_rank", per_rank)
        choices = {"in_memory": in_memory, "trainable_only": trainable_only, "flat_keys": flat_keys}
        for name, value in {"wait": wait, **choices}.items():
            check_bool(name, value)
        for name, value in (extra or {}).items():
            if flat_keys and isinstance(value, Tensor):
                raise ValueError(
                    f"extra: {name}: expected no tensor with flat_keys=True, where tensors without a dict are the "
                    f"model's. Pass it inside a dict."
                )
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ValueError(f"keep_last: expected a number from 1 on, or None, got {keep_last!r}")
        return optimizers, Choices(Path(folder).absolute(), keep_last, **choices)

    checked, failed = attempt(check)
    session = session_of("save", process_group, failed)
    session.end_previous()
    optimizers, choices = checked or ((), None)
    content = None
    if failed is None:
        content, failed = attempt(
            lambda: Content(model, optimizers, extra or {}, per_rank or {}, trainable_only, flat_keys)
        )
    made = session.agree(content, choices, failed)
    saving = Saving(made.final)
    if wait:
        saving.nbytes = session.finish(made, made.content.state.local, None)
        return saving
    snapshot, failed = attempt(lambda: session.take_snapshot(made))
    session.running = saving
    saving._watch_steps(model)
    saving._thread = threading.Thread(
        target=saving._run, args=(session, made, snapshot, failed), name="fsdp2.checkpoint"
    )
    saving._thread.start()
    return saving
