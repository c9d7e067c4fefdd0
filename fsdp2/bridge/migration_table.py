"""Lists what programs for FSDP1, DDP, DeepSpeed and torch's FSDP2 have, and what to write instead.

The guides show the same rows, and a test compares them. `python -m fsdp2 migrate` finds them in programs.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Says what to write in place of something of another library.

    `library`: whose. `was`, `write`: the two cells of the guides' tables, without links. `finds`: what a program has
    where this row helps:

    - "Name": a name of the library, by the end of its dotted name;
    - "Name(key)": a call of it with that keyword; "Name(key=value)": and that value;
    - ".name": an attribute of that name, of any object; "~name": one of an object that the library has made;
    - "'key'": a key of a dict, or of a JSON file; "'key'=value": and that value.
    """

    library: str
    was: str
    write: str
    finds: tuple[str, ...]


ROWS = (
    Row(
        "FSDP1",
        "`auto_wrap_policy=policy`",
        (
            "`for group in wrap_groups(model, policy): fully_shard(group.module, **group.options)`, then "
            "`fully_shard(model)`. A policy that matches nothing warns, and the model is one group"
        ),
        ("FullyShardedDataParallel(auto_wrap_policy)",),
    ),
    Row(
        "FSDP1",
        "`FULL_SHARD`; `SHARD_GRAD_OP`",
        "the default; `reshard_after_forward=False`",
        ("ShardingStrategy.FULL_SHARD", "ShardingStrategy.SHARD_GRAD_OP"),
    ),
    Row(
        "FSDP1",
        "`HYBRID_SHARD`; `_HYBRID_SHARD_ZERO2`",
        "a mesh of two axes, `mesh=hsdp_mesh()`; and `reshard_after_forward=False`",
        ("ShardingStrategy.HYBRID_SHARD", "ShardingStrategy._HYBRID_SHARD_ZERO2"),
    ),
    Row(
        "FSDP1",
        "`NO_SHARD`",
        "`replicate(model)`",
        ("ShardingStrategy.NO_SHARD",),
    ),
    Row(
        "FSDP1",
        "`MixedPrecision(param_dtype, reduce_dtype)`",
        "`MixedPrecisionPolicy(param_dtype, reduce_dtype)`",
        ("MixedPrecision(param_dtype)", "MixedPrecision(reduce_dtype)"),
    ),
    Row(
        "FSDP1",
        "`MixedPrecision(buffer_dtype)`",
        "`MixedPrecisionPolicy(buffer_dtype=dtype)`: floating-point buffers are cast, and saved exactly",
        ("MixedPrecision(buffer_dtype)",),
    ),
    Row(
        "FSDP1",
        "`MixedPrecision(keep_low_precision_grads=True)`",
        "`MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, grad_dtype=torch.bfloat16)`: `.grad` is not cast back",
        ("MixedPrecision(keep_low_precision_grads)",),
    ),
    Row(
        "FSDP1",
        "`MixedPrecision(cast_forward_inputs, cast_root_forward_inputs)`",
        (
            "`MixedPrecisionPolicy(cast_forward_inputs=...)`, in each call: only the root's casts the inputs of "
            "the model"
        ),
        ("MixedPrecision(cast_forward_inputs)", "MixedPrecision(cast_root_forward_inputs)"),
    ),
    Row(
        "FSDP1",
        "`MixedPrecision(_module_classes_to_ignore)`",
        (
            'a group with a policy of its own: `wrap_groups(model, {BatchNorm1d: {"mp_policy": '
            "MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16)}})`"
        ),
        ("MixedPrecision(_module_classes_to_ignore)",),
    ),
    Row(
        "FSDP1",
        "`CPUOffload(offload_params=True)`",
        "`CPUOffloadPolicy()`",
        ("CPUOffload(offload_params)",),
    ),
    Row(
        "FSDP1",
        "`ignored_states`, `ignored_modules`",
        "`ignored_params=`: parameters, modules, or both",
        ("FullyShardedDataParallel(ignored_states)", "FullyShardedDataParallel(ignored_modules)"),
    ),
    Row(
        "FSDP1",
        "`process_group`, `device_mesh`",
        '`mesh=DeviceMesh.from_group(process_group, "cuda")`; `mesh=device_mesh`',
        ("FullyShardedDataParallel(process_group)", "FullyShardedDataParallel(device_mesh)"),
    ),
    Row(
        "FSDP1",
        "`use_orig_params=True`, `limit_all_gathers=True`, `forward_prefetch=True`, `BACKWARD_PRE`",
        "nothing: always so",
        (
            "FullyShardedDataParallel(use_orig_params)",
            "FullyShardedDataParallel(limit_all_gathers)",
            "FullyShardedDataParallel(forward_prefetch=True)",
            "BackwardPrefetch.BACKWARD_PRE",
        ),
    ),
    Row(
        "FSDP1",
        "`BACKWARD_POST`",
        (
            '`model.set_backward_prefetch("post")`: backward gathers the next group when one is freed, so '
            "that one is unsharded at a time"
        ),
        ("BackwardPrefetch.BACKWARD_POST",),
    ),
    Row(
        "FSDP1",
        "`backward_prefetch=None`; `forward_prefetch=False`",
        (
            "`set_modules_to_backward_prefetch([])`; `set_modules_to_forward_prefetch([])`, on each sharded "
            "module. `set_prefetch_budget(0)` is both"
        ),
        ("FullyShardedDataParallel(backward_prefetch=None)", "FullyShardedDataParallel(forward_prefetch=False)"),
    ),
    Row(
        "FSDP1",
        "`sync_module_states=True`",
        (
            "`sync_module_states(model)` before `fully_shard`; or `set_model_state_dict(..., "
            "broadcast_from_rank0=True)` afterwards"
        ),
        ("FullyShardedDataParallel(sync_module_states)",),
    ),
    Row(
        "FSDP1",
        "`param_init_fn`",
        "build on meta, `to_empty`, initialise",
        ("FullyShardedDataParallel(param_init_fn)",),
    ),
    Row(
        "FSDP1",
        "`device_id`",
        "nothing: the mesh's device type, and the current device",
        ("FullyShardedDataParallel(device_id)",),
    ),
    Row(
        "FSDP1",
        "`no_sync()`",
        (
            "the same: `with model.no_sync():`; or `set_requires_gradient_sync(False)`, and `True` before the "
            "last backward"
        ),
        (".no_sync",),
    ),
    Row(
        "FSDP1",
        "`model.clip_grad_norm_(...)`",
        "`torch.nn.utils.clip_grad_norm_`, or `fsdp2.clip_grad_norm_` over several meshes",
        ("~clip_grad_norm_",),
    ),
    Row(
        "FSDP1",
        "`FullyShardedDataParallel.summon_full_params(m)` in code that you do not edit",
        (
            "nothing, after `fsdp2.patch_torch()` or under `python -m fsdp2`: it gathers; with `writeback=True` "
            "written out, what is written in it is kept, else refused"
        ),
        (),
    ),
    Row(
        "FSDP1",
        "`summon_full_params(m, recurse, writeback, rank0_only, offload_to_cpu)`",
        (
            "`with full_params(m, writeback=True):` to edit; `full_params(m, rank0_only=True, "
            "offload_to_cpu=True)` to export. `writeback` is False by default"
        ),
        ("FullyShardedDataParallel.summon_full_params",),
    ),
    Row(
        "FSDP1",
        "`summon_full_params(with_grads=True)`",
        (
            "`full_params(m, with_grads=True)`: copies with whole gradients, to read; or `p.grad.full_tensor()`, "
            "on every rank"
        ),
        ("FullyShardedDataParallel.summon_full_params(with_grads)",),
    ),
    Row(
        "FSDP1",
        "`state_dict_type(FULL_STATE_DICT)`",
        "`get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))`",
        ("StateDictType.FULL_STATE_DICT", "FullStateDictConfig"),
    ),
    Row(
        "FSDP1",
        "`SHARDED_STATE_DICT`; `LOCAL_STATE_DICT`",
        "`model.state_dict()`: DTensors, for `torch.distributed.checkpoint.save`; `.to_local()` of them",
        ("StateDictType.SHARDED_STATE_DICT", "StateDictType.LOCAL_STATE_DICT", "ShardedStateDictConfig"),
    ),
    Row(
        "FSDP1",
        "`if rank == 0: torch.save(model.state_dict(), file)`",
        (
            "the file would hold the shards of one rank, which is warned of, and others refuse it: call "
            "`get_model_state_dict` on every rank, and save what the first one gets"
        ),
        (),
    ),
    Row(
        "FSDP1",
        "`optim_state_dict`, `optim_state_dict_to_load`",
        "`get_optimizer_state_dict`, `set_optimizer_state_dict`",
        ("FullyShardedDataParallel.optim_state_dict", "FullyShardedDataParallel.optim_state_dict_to_load"),
    ),
    Row(
        "FSDP1",
        (
            "`full_optim_state_dict`, `scatter_full_optim_state_dict`, `shard_full_optim_state_dict`, "
            "`sharded_optim_state_dict`, `flatten_sharded_optim_state_dict`"
        ),
        "the same two, with `full_state_dict=True` for full states",
        (
            "FullyShardedDataParallel.full_optim_state_dict",
            "FullyShardedDataParallel.scatter_full_optim_state_dict",
            "FullyShardedDataParallel.shard_full_optim_state_dict",
            "FullyShardedDataParallel.sharded_optim_state_dict",
            "FullyShardedDataParallel.flatten_sharded_optim_state_dict",
        ),
    ),
    Row(
        "FSDP1",
        "`rekey_optim_state_dict`",
        (
            "nothing: states have names. `set_optimizer_state_dict` takes those that an optimizer of a plain "
            "model has numbered after `get_optimizer_state_dict(plain, optimizer)`"
        ),
        ("FullyShardedDataParallel.rekey_optim_state_dict",),
    ),
    Row(
        "FSDP1",
        "`fsdp_modules(model)`; `check_is_root()`",
        (
            "`[m for m in model.modules() if isinstance(m, FSDPModule)]`; `shards_of(model).groups` have "
            "`modules` and `is_root`"
        ),
        ("FullyShardedDataParallel.fsdp_modules", ".check_is_root"),
    ),
    Row(
        "FSDP1",
        "`model.apply(init)`",
        "`with full_params(model, writeback=True): model.apply(init)`",
        ("~apply",),
    ),
    Row(
        "FSDP1",
        "`ShardedGradScaler`",
        "`torch.amp.GradScaler`",
        ("ShardedGradScaler",),
    ),
    Row(
        "FSDP1",
        "`register_comm_hook(state, hook)`",
        "the same, with the same hooks; `NO_SHARD`'s `hook(state, gradient)` is torch's own, or one in DDP's shape",
        ("~register_comm_hook",),
    ),
    Row(
        "FSDP1",
        "a hook that looks at gradients, or changes them",
        "`set_all_reduce_hook(hook, recurse=True)`: without `recurse` it reaches one group",
        ("~register_comm_hook",),
    ),
    Row(
        "DDP",
        "`DistributedDataParallel(model)`",
        (
            "to shard the parameters, `fully_shard` on each block, and on the model; `replicate(model)` only replaces "
            "DDP: each rank keeps all parameters"
        ),
        ("DistributedDataParallel",),
    ),
    Row(
        "DDP",
        "`if rank == 0: torch.save(model.state_dict(), file)`",
        (
            "on every rank, `state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True))`, see exporting; then `if rank == 0: torch.save(state, file)`. To resume, checkpoints"
        ),
        (),
    ),
    Row(
        "DDP",
        "`model.load_state_dict(torch.load(file))`",
        (
            "the same before `fully_shard`; after it, on every rank, `set_model_state_dict(model, torch.load(file), "
            "options=StateDictOptions(full_state_dict=True))`"
        ),
        (),
    ),
    Row(
        "DDP",
        "`if rank == 0:` around an evaluation, or `generate`",
        (
            "on every rank, with as many forwards, since each forward gathers: evaluation and generation. The first "
            "rank alone waits for the others until the timeout"
        ),
        (),
    ),
    Row(
        "DDP",
        "`model.module`, names that begin with `module.`",
        "the model itself, under its own names",
        ("~module",),
    ),
    Row(
        "DDP",
        "ranks that start from the first one's weights",
        "`sync_module_states(model)` before, unless all ranks build the same",
        (),
    ),
    Row(
        "DDP",
        "`no_sync()`",
        (
            "the same: `with model.no_sync():`; or `set_requires_gradient_sync(False)`, and `True` before the "
            "last backward"
        ),
        (".no_sync",),
    ),
    Row(
        "DDP",
        "`find_unused_parameters=True`",
        "nothing; `set_reduce_scatter_unused_params(True)` where ranks use different parameters",
        ("DistributedDataParallel(find_unused_parameters)",),
    ),
    Row(
        "DDP",
        "`broadcast_buffers=True`",
        (
            "running statistics are averaged after each forward; other buffers are compared, see Buffers, and "
            "`sync_module_states(model)` copies those of the first rank"
        ),
        ("DistributedDataParallel(broadcast_buffers)",),
    ),
    Row(
        "DDP",
        "`broadcast_buffers=True`, bit for bit",
        (
            "`model.set_running_stats_averaging(False)`, and a forward pre-hook of the model that calls "
            "`dist.broadcast(buffer, 0)` for each of its buffers"
        ),
        (),
    ),
    Row(
        "DDP",
        "`register_comm_hook(state, hook)`, `powerSGD_hook`",
        (
            "the same method of a model under `replicate`; faster, `replica_codec`; with `fully_shard`, "
            "`wire_dtype=torch.float16` or a codec"
        ),
        ("~register_comm_hook",),
    ),
    Row(
        "DDP",
        "`device_ids`, `output_device`, `dim`",
        "nothing: the device of the mesh. `torch.cuda.set_device(local_rank)` before",
        (
            "DistributedDataParallel(device_ids)",
            "DistributedDataParallel(output_device)",
            "DistributedDataParallel(dim)",
        ),
    ),
    Row(
        "DDP",
        "`ignored_modules`",
        "`ignored_params=ignored_modules`",
        ("DistributedDataParallel(ignored_modules)",),
    ),
    Row(
        "DDP",
        "`process_group`, `device_mesh`",
        '`mesh=DeviceMesh.from_group(process_group, "cuda")`; `mesh=device_mesh`',
        ("DistributedDataParallel(process_group)", "DistributedDataParallel(device_mesh)"),
    ),
    Row(
        "DDP",
        "`mixed_precision`",
        "`mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype, buffer_dtype=...)`",
        ("DistributedDataParallel(mixed_precision)",),
    ),
    Row(
        "DDP",
        "`init_sync=False`, `forward_sync_buffers`",
        ("nothing: ranks compare their first weights. To copy those of the first rank, `sync_module_states(model)`"),
        ("DistributedDataParallel(init_sync)", "DistributedDataParallel(forward_sync_buffers)"),
    ),
    Row(
        "DDP",
        "`bucket_cap_mb`, `bucket_cap_mb_list`",
        "nothing: chosen for the device; or `set_gradient_buckets(nbytes)`",
        ("DistributedDataParallel(bucket_cap_mb)", "DistributedDataParallel(bucket_cap_mb_list)"),
    ),
    Row(
        "DDP",
        (
            "`gradient_as_bucket_view`, `static_graph`, `batched_grad_copy`, `check_reduction`, "
            "`delay_all_reduce_named_params`, `param_to_hook_all_reduce`, `skip_all_reduce_unused_params`"
        ),
        "nothing: chosen for you",
        (
            "DistributedDataParallel(gradient_as_bucket_view)",
            "DistributedDataParallel(static_graph)",
            "DistributedDataParallel(batched_grad_copy)",
            "DistributedDataParallel(check_reduction)",
            "DistributedDataParallel(delay_all_reduce_named_params)",
            "DistributedDataParallel(param_to_hook_all_reduce)",
            "DistributedDataParallel(skip_all_reduce_unused_params)",
        ),
    ),
    Row(
        "DDP",
        "`join()`, `Join([model])`, for ranks with different numbers of batches",
        "`fsdp2.join(model)` or the same `Join([model])`; clip and schedule in the function that it gets",
        ("~join", "Join"),
    ),
    Row(
        "DeepSpeed",
        "stage 3",
        "the default",
        ("'stage'=3",),
    ),
    Row(
        "DeepSpeed",
        "stage 2",
        (
            "`reshard_after_forward=False`; `set_reshard_after_backward(False)` for all micro-batches but the "
            "last: a step gathers once, and reduces each micro-batch"
        ),
        ("'stage'=2",),
    ),
    Row(
        "DeepSpeed",
        "stage 1",
        (
            "`reshard_after_forward=False`; for all micro-batches but the last "
            "`set_requires_gradient_sync(False)`, and `set_reshard_after_backward(False)`: a step gathers and "
            "reduces once"
        ),
        ("'stage'=1",),
    ),
    Row(
        "DeepSpeed",
        "`bf16.enabled`",
        "fp32 parameters and `MixedPrecisionPolicy(torch.bfloat16, torch.float32)`",
        ("'bf16'", "'bfloat16'"),
    ),
    Row(
        "DeepSpeed",
        "`fp16`, `loss_scale`",
        "`MixedPrecisionPolicy(torch.float16, torch.float32)` and `torch.amp.GradScaler`",
        ("'fp16'", "'loss_scale'"),
    ),
    Row(
        "DeepSpeed",
        "`gradient_accumulation_steps`",
        "`set_requires_gradient_sync`, or `accumulate` for means over tokens",
        ("'gradient_accumulation_steps'",),
    ),
    Row(
        "DeepSpeed",
        "`gradient_clipping`",
        "`clip_grad_norm_`",
        ("'gradient_clipping'",),
    ),
    Row(
        "DeepSpeed",
        "`offload_param`, `offload_optimizer`",
        "`CPUOffloadPolicy()`: both; there is no NVMe; `set_optimizer_in_backward` overlaps the step",
        ("'offload_param'", "'offload_optimizer'"),
    ),
    Row(
        "DeepSpeed",
        "`zero_hpz_partition_size`",
        "`reshard_after_forward=k`",
        ("'zero_hpz_partition_size'",),
    ),
    Row(
        "DeepSpeed",
        "`mics_shard_size`",
        "a mesh of two axes",
        ("'mics_shard_size'", "zero.MiCS_Init"),
    ),
    Row(
        "DeepSpeed",
        "`zero_quantized_weights`",
        "`MixedPrecisionPolicy(gather_codec=Int8())`, or `Float8()`",
        ("'zero_quantized_weights'",),
    ),
    Row(
        "DeepSpeed",
        "`zero_quantized_gradients`",
        "`MixedPrecisionPolicy(gradient_codec=Int8())`; between replicas `replica_codec=Int8()`",
        ("'zero_quantized_gradients'",),
    ),
    Row(
        "DeepSpeed",
        "`communication_data_type`",
        "`MixedPrecisionPolicy(reduce_dtype=dtype)`: sums, too, are in it; or `wire_dtype=dtype`: only what travels",
        ("'communication_data_type'",),
    ),
    Row(
        "DeepSpeed",
        "`zero.Init()`",
        '`with torch.device("meta")`, `fully_shard`, `to_empty`, initialise',
        ("zero.Init",),
    ),
    Row(
        "DeepSpeed",
        "`GatheredParameters(params)`",
        ("`with full_params(params, writeback=True)`; in place of `modifier_rank`, make the change on every rank"),
        ("zero.GatheredParameters",),
    ),
    Row(
        "DeepSpeed",
        "`stage3_gather_16bit_weights_on_model_save`",
        "`get_model_state_dict` with `full_state_dict=True`",
        ("'stage3_gather_16bit_weights_on_model_save'",),
    ),
    Row(
        "DeepSpeed",
        "`zero_to_fp32.py`",
        "without ranks: `torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, file)`",
        (
            "zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict",
            "zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
        ),
    ),
    Row(
        "DeepSpeed",
        "`stage3_prefetch_bucket_size`, `stage3_max_live_parameters`",
        "`set_prefetch_budget(nbytes)`, `set_modules_to_forward_prefetch`; one group ahead by default",
        ("'stage3_prefetch_bucket_size'", "'stage3_max_live_parameters'"),
    ),
    Row(
        "DeepSpeed",
        "`reduce_bucket_size`, `overlap_comm`, `contiguous_gradients`",
        (
            "nothing: one bucket per group of up to 1 GiB on devices, four to eight on CPU, always asynchronous; "
            "or `set_gradient_buckets(nbytes)`"
        ),
        ("'reduce_bucket_size'", "'overlap_comm'", "'contiguous_gradients'"),
    ),
    Row(
        "DeepSpeed",
        "`stage3_param_persistence_threshold`",
        ("`reshard_after_forward=False` on the modules that hold small parameters: they stay from forward to backward"),
        ("'stage3_param_persistence_threshold'",),
    ),
    Row(
        "FSDP1",
        "`with enable_wrap(wrapper_cls=FullyShardedDataParallel): wrap(module)`",
        "`fully_shard(module)` where the module has been built",
        ("wrap.enable_wrap", "wrap.wrap"),
    ),
    Row(
        "torch's FSDP2",
        "`set_symm_mem_for_comm()` where collectives do not run on NCCL",
        "leave it out there",
        (".set_symm_mem_for_comm",),
    ),
    Row(
        "DeepSpeed",
        "`deepspeed.initialize(model=, optimizer=, config=)`",
        "`fully_shard` on each block, then on the model; then the optimizer of its parameters",
        ("deepspeed.initialize",),
    ),
    Row(
        "DeepSpeed",
        "`deepspeed.init_distributed()`",
        '`torch.distributed.init_process_group("cpu:gloo,cuda:nccl")`, and `torch.cuda.set_device(local_rank)`',
        ("deepspeed.init_distributed",),
    ),
    Row("DeepSpeed", "`engine.backward(loss)`", "`loss.backward()`", ("~backward",)),
    Row(
        "DeepSpeed",
        "`engine.step()`",
        "`optimizer.step()`, then `optimizer.zero_grad()`, and the scheduler's step",
        ("~step",),
    ),
    Row(
        "DeepSpeed",
        "`engine.save_checkpoint(folder)`, `engine.load_checkpoint(folder)`",
        "`torch.distributed.checkpoint.save` and `load` of what `get_state_dict(model, optimizer)` returns",
        ("~save_checkpoint", "~load_checkpoint"),
    ),
    Row(
        "DeepSpeed",
        "`engine.module`, `engine.local_rank`, `engine.device`",
        '`model`, `int(os.environ["LOCAL_RANK"])`, and the device of the mesh',
        ("~module", "~local_rank", "~device"),
    ),
)
