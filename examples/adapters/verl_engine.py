"""Trains with fsdp2 inside verl, as an engine of verl's registry. torch's names are left alone.

verl asks its registry for the engine of a model and a strategy. This file registers two, for language models and for
value models, under the vendor "fsdp2". verl imports it in each worker, and looks there first, where the environment
says so:

    VERL_USE_EXTERNAL_MODULES=verl_engine VERL_ENGINE_VENDOR=fsdp2 python -m verl.trainer.main_ppo \
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2 critic.strategy=fsdp2 ...

The engines inherit from verl's own FSDP engines what has nothing to do with sharding: the model, micro-batches, losses,
learning rates, Ulysses. They replace what talks to the sharded model:

- The model is sharded by `fsdp2.fully_shard`, by the classes of its blocks, and gets the first rank's weights.
- The norm of the gradients is `fsdp2.clip_grad_norm_`'s. A step whose norm is not finite is left out on all ranks.
- Checkpoints are written by `torch.distributed.checkpoint`: any number of ranks loads them.
- `get_per_tensor_param` streams whole weights to the inference engine, bucket by bucket. verl's own export of changed
  shards (`delta_sharded`) works as it is: sharded parameters are DTensors.

Settings of verl that an engine here does not follow raise an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from verl.utils.device import get_device_name
from verl.utils.model import convert_weight_keys
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    EngineEvalModeCtx,
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)
from verl.workers.engine.fsdp.utils import unfuse_moe_params

import fsdp2

BUCKET_BYTES = 512 * 2**20


class ShardedByFsdp2:
    """Replaces in verl's FSDP engines what depends on how the model is sharded."""

    # ---- the model

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        self._refuse_settings()
        config = self.engine_config
        param_dtype, reduce_dtype = self._dtypes()
        self._autocast_dtype, self.scaler = param_dtype, None
        options: dict[str, Any] = {
            "mesh": self.device_mesh,
            "reshard_after_forward": config.reshard_after_forward,
            "mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        }
        if config.offload_policy or config.forward_only:  # shards rest on the CPU: nothing is left to move
            options["offload_policy"] = fsdp2.CPUOffloadPolicy()
            self._is_offload_param = self._is_offload_optimizer = False
            self._uses_fsdp2_cpu_offload_policy = True
        weights = module.state_dict() if dist.get_rank() == 0 else {}  # verl builds the others' on meta
        blocks = self._classes_of_blocks(module)
        for part in list(module.modules()):
            if type(part).__name__ in blocks:
                fsdp2.fully_shard(part, **options)
        fsdp2.fully_shard(module, **options)
        self._load_from_first_rank(module, weights)
        return module

    def _refuse_settings(self) -> None:
        config, model = self.engine_config, self.model_config
        refused = {
            "mixed_precision.param_dtype=fp16": self._dtypes()[0] == torch.float16,
            "qat.enable": self._qat_enabled,
            "model.lora_rank": self._is_lora,
            "model.enable_activation_offload": model.enable_activation_offload,
            "forward_prefetch": config.forward_prefetch,  # fsdp2 gathers ahead anyway
        }
        found = [name for name, is_set in refused.items() if is_set]
        if found:
            raise NotImplementedError(
                f"{', '.join(found)}: fsdp2's engine for verl does not have it. Unset VERL_ENGINE_VENDOR, and use "
                "verl's own engine under fsdp2.patch_torch()."
            )

    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtypes in which the model computes and in which gradients are reduced."""
        given = {"param_dtype": "bf16", "reduce_dtype": "fp32"} | dict(self.engine_config.mixed_precision or {})
        return PrecisionType.to_dtype(given["param_dtype"]), PrecisionType.to_dtype(given["reduce_dtype"])

    def _classes_of_blocks(self, module: nn.Module) -> set[str]:
        given = self.engine_config.wrap_policy.get("transformer_layer_cls_to_wrap")
        names = {given} if isinstance(given, str) else set(given or getattr(module, "_no_split_modules", None) or ())
        found = names & {type(part).__name__ for part in module.modules()}
        if not found:
            raise ValueError(
                f"wrap_policy.transformer_layer_cls_to_wrap: expected classes of modules of {type(module).__name__}, "
                f"got {sorted(names)}"
            )
        return found

    def _load_from_first_rank(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        """Gives all ranks the weights and buffers of the first."""
        rests_on_cpu = self._uses_fsdp2_cpu_offload_policy
        kept = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
        module.to_empty(device="cpu" if rests_on_cpu else get_device_name())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=rests_on_cpu)
        set_model_state_dict(module, weights, options=options)
        for name, buffer in module.named_buffers():
            buffer.data = buffer.data.to(get_device_name())  # the model computes there
            if name in kept:
                buffer.copy_(kept[name])
        fsdp2.sync_module_states(module)

    # ---- a step

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        defers = self.engine_config.use_no_sync_for_gradient_accumulation
        self.module.set_requires_gradient_sync(is_last_micro_batch or not defers)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def optimizer_step(self) -> float:
        """Clips the gradients and steps, unless their norm is not finite. Returns the norm."""
        norm = fsdp2.clip_grad_norm_(self.module.parameters(), self.optimizer_config.clip_grad)
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            print(f"The norm of the gradients is {norm.item()}: this step is left out.")
            self.optimizer.zero_grad()
        return norm.item()

    def eval_mode(self, **options: Any) -> EngineEvalModeCtx:
        return EvaluatesSharded(self, **options)

    # ---- checkpoints

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **options: Any,
    ) -> None:
        """Writes what `checkpoint.save_contents` names. Every rank must call it, with one folder that all see."""
        if hdfs_path is not None:
            raise NotImplementedError(f"hdfs_path: expected None, got {hdfs_path!r}; copy the folder afterwards")
        manager, folder = self.checkpoint_manager, Path(local_path)
        if self.rank == 0:
            manager.ensure_checkpoint_capacity(max_ckpt_to_keep)
        dcp.save(self._state(manager.checkpoint_save_contents), checkpoint_id=folder)
        if manager.should_save_extra:
            torch.save(manager.get_rng_state(), folder / f"random_state_of_rank_{self.rank}.pt")
        if manager.should_save_hf_model:
            fsdp2.hf.save_model(self.module, folder / "huggingface")
        dist.barrier()
        if self.rank == 0:
            manager.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **options: Any
    ) -> None:
        """Reads what `checkpoint.load_contents` names, on any number of ranks. The folder stays."""
        if local_path is None:
            return
        manager, folder = self.checkpoint_manager, Path(local_path)
        state = self._state(manager.checkpoint_load_contents)
        dcp.load(state, checkpoint_id=folder)
        if "model" in state:
            set_model_state_dict(self.module, state["model"])
        if "optimizer" in state:
            set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"])
        if "schedule" in state:
            self.lr_scheduler.load_state_dict(state["schedule"])
        random_state = folder / f"random_state_of_rank_{self.rank}.pt"
        if manager.should_load_extra and random_state.exists():  # of a run on more ranks there may be none
            manager.load_rng_state(torch.load(random_state, weights_only=False))
        dist.barrier()
        if self._is_offload_param or self._is_offload_optimizer:
            self.to("cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer, grad=False)

    def _state(self, contents: list[str]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if "model" in contents:
            state["model"] = get_model_state_dict(self.module)
        if "optimizer" in contents and self.optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(self.module, self.optimizer)
        if "extra" in contents and self.lr_scheduler is not None:
            state["schedule"] = self.lr_scheduler.state_dict()
        return state

    # ---- weights for the inference engine

    def get_per_tensor_param(self, **options: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Returns pairs of a name of Transformers' files and a whole tensor. Every rank must iterate to the end."""
        return unfuse_moe_params(self._whole_tensors(), self.model_config.hf_config.model_type), None

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        left = set(self.module.state_dict())
        for bucket in fsdp2.stream_full_params(self.module, bucket_bytes=BUCKET_BYTES):
            weights = {name: tensor for name, tensor in bucket.tensors.items() if name in left}
            left -= weights.keys()
            for name, tensor in convert_weight_keys(weights, self.module).items():
                yield name, tensor.clone()  # a sender may keep it beyond the bucket
        for name, tensor in self.module.state_dict().items():
            if name in left:  # buffers
                yield name, tensor.detach().clone()


class EvaluatesSharded(EngineEvalModeCtx):
    """Frees the root's unsharded parameters behind an evaluation."""

    def __exit__(self, *error: Any) -> None:
        self.engine.module.reshard()
        super().__exit__(*error)


DEVICES = ["cuda", "npu", "cpu"]


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device=DEVICES, vendor="fsdp2")
class LanguageModelEngine(ShardedByFsdp2, FSDPEngineWithLMHead):
    """Trains actors and scores with reference models."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device=DEVICES, vendor="fsdp2")
class ValueModelEngine(ShardedByFsdp2, FSDPEngineWithValueHead):
    """Trains critics."""
