"""Defines fully_shard(), replicate() and vocab_parallel_embedding()."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .bridge.torch_interface import torch_state_of
from .checks.arguments import check_arguments, check_mesh
from .checks.level import level
from .checks.watch import start_early
from .collectives.meshes import DataParallelMeshDims, default_mesh, replicated_data_mesh, shared_data_mesh
from .devices.offload import OffloadChoice
from .engine.build import Arguments, apply
from .engine.codec import Compression
from .engine.mesh import DataMesh
from .engine.policy import MixedPrecisionPolicy, OffloadPolicy, check_bool
from .features.vocab_parallel import VocabParallelEmbedding
from .module import FSDPModule, sharded_class

Ignored = nn.Module | Iterable[nn.Parameter | nn.Module] | None


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadChoice = OffloadPolicy(),
    ignored_params: Ignored = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    conditional: bool = False,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadChoice = OffloadPolicy(),
    ignored_params: Ignored = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    conditional: bool = False,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadChoice = OffloadPolicy(),
    ignored_params: Ignored = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    conditional: bool = False,
) -> Any:
    """Shards the parameters of `module` over the ranks of `mesh`, in place, and returns `module`.

    Every parameter below `module` that no inner `fully_shard` call manages becomes an `nn.Parameter(DTensor)`, sharded
    along dim 0 (scalars are replicated). Together they form one group: it is gathered before forward, freed after it,
    gathered again for backward, and its gradients are averaged over the ranks. Call it bottom-up: on blocks first, then
    on the model. In that last call, submodules as large as blocks (an embedding, a head) get groups of their own. A
    parameter that modules of several calls have (tied weights) is in the group of the first, which the others use.
    Every rank of the mesh must call it, on the same modules in the same order, with the same weights (the same seed).

    Args:
        module: a module, or a list of modules that share one group. Modified in place; its class becomes a subclass of
            its own class and `FSDPModule`. FQNs stay as they are.
        mesh: a DeviceMesh of one axis, or of two, of which the first replicates and the second shards (HSDP): each
            replica gathers and reduces by itself, then gradients are averaged between replicas. None: all ranks, on the
            accelerator if there is one, else on the CPU. Along an axis that shards, ranks must be in the order of their
            process group, which is ascending.
        reshard_after_forward: True frees the unsharded parameters after forward: less memory, one more all-gather in
            backward. False keeps them until backward ends. None, the default: True, except for what backward needs
            first: the root (the outermost sharded module), the group that was last in the forward before, and what
            backward gathers ahead of that (one group, unless `set_unsharded_budget` says otherwise): freed, it would be
            gathered again at once. An int k, a divisor of the number of ranks: each rank keeps 1/k of them, in compute
            dtypes, and backward gathers among k neighbouring ranks only, for example those of one machine. On one rank
            nothing is gathered, whatever the setting; an int is refused on a mesh that only replicates.
        shard_placement_fn: called once with each parameter, returns the Shard(dim) to use, or None for Shard(0). Dims
            need not divide evenly, but gathers and reductions bring padding then: `cheapest_placement` is such a
            function, which keeps padding small; `describe` shows it. Parameters sharded along other dims than 0
            are copied once more per gather. It may return a ShardPlacementResult, for a parameter on a mesh of its own
            (experts, for example): the parameters of each mesh then form a group, and settings and methods of the
            module reach all of them. On a mesh that only replicates it must return None, or such a result.
        mp_policy: dtypes of compute and reduction.
        offload_policy: a CPUOffloadPolicy keeps sharded parameters, gradients and so the optimizer on the CPU, and
            copies the shards to the mesh's device for each gather. On a mesh of CPUs they are there already. An
            `OffloadBudget`, given to all calls, keeps as many bytes on the device as fit.
        ignored_params: parameters to leave as they are: not sharded, moved or reduced. A module among them stands for
            its parameters, and its buffers are not moved either. Any iterable, or one module. Parameters outside of
            `module` may be among them: one set serves all calls.
        dp_mesh_dims: which axes of `mesh` shard and replicate, by their names; also those along which HSDP's replicas
            share one set of shards (`outer_shard`). If `mesh` has further axes, every parameter must be a DTensor on
            it, with Replicate() on these axes; or this rank's part, a plain tensor, with annotations of spmd_types.
        conditional: True allows each rank to leave `module` out of any forward: the image tower for a batch of text, an
            expert, a dropped layer. It trains as if ranks without it had run it to a gradient of zero; parameters that
            no rank has used keep `.grad` None, and nothing is gathered or reduced for them. Sharded modules inside it
            are conditional with it. A module around it must be sharded, and run on all ranks. Its ranks then reach
            consensus before each gather and each group's reduction, in an exchange of three numbers that the host
            waits for: on the CPU, if their process group has a backend for it. Collectives of your own
            inside a forward or backward must take all ranks of the mesh, and be called as `torch.distributed.NAME`:
            they wait for the modules that other ranks run.

    Raises:
        TypeError: an argument of the wrong type; a module with a name of its own that FSDPModule's methods have.
        ValueError: a container without `forward`; a module given twice or sharded already; a mesh in another order than
            its process groups; a parameter that is uninitialised, tied to one that an earlier call shards or reduces
            in another way, or in the same memory as another or as an attribute; a frozen one of a class of your own
            that `mp_policy` would cast, if its values may be packed.
        NotImplementedError: a parameter that is complex, or a tensor subclass that says only in part how it is
            gathered; embeddings with sparse gradients or `max_norm`; a module that FullyShardedDataParallel (FSDP1)
            wraps. The first forward raises it for a subclass around other tensors that does not say how they are
            gathered.

    After any of these errors nothing has been changed.

    Example:
        ```python
        for block in model.blocks:
            fully_shard(block)
        model = fully_shard(model)
        ```
    """
    start_early()
    check_mesh(mesh, dp_mesh_dims)
    given = (reshard_after_forward, shard_placement_fn, mp_policy, offload_policy, ignored_params)
    return _apply(module, lambda: shared_data_mesh(mesh, dp_mesh_dims), given, conditional)


def replicate(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadChoice = OffloadPolicy(),
    ignored_params: Ignored = None,
    conditional: bool = False,
) -> Any:
    """Keeps a whole copy of the parameters of `module` on each rank of `mesh`, and averages their gradients: DDP.

    Parameters become DTensors with Replicate(). Nothing is gathered; without mixed precision the modules compute with
    the very parameters that the optimizer updates. Every rank of the mesh must call it.

    Args:
        module: a module, or a list of modules that share one group, as for `fully_shard`.
        mesh: a DeviceMesh of one axis. None: all ranks.
        mp_policy: dtypes of compute and reduction, as for `fully_shard`.
        offload_policy: where parameters rest, as for `fully_shard`.
        ignored_params: parameters to leave as they are, as for `fully_shard`.
        conditional: allows each rank to leave `module` out, as for `fully_shard`.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `fully_shard`.

    Returns:
        `module`.
    """
    start_early()
    check_mesh(mesh, None)
    given = (None, None, mp_policy, offload_policy, ignored_params)
    return _apply(module, lambda: replicated_data_mesh(mesh or default_mesh()), given, conditional)


def vocab_parallel_embedding(
    module: nn.Embedding,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> FSDPModule:
    """Shards an embedding's table along dim 0, in place, and has each lookup fetch the rows that it needs.

    The weight becomes an `nn.Parameter(DTensor)` with Shard(0), as `fully_shard` makes it. But no forward or backward
    gathers it, or reduces a gradient of its size. Each rank sends its ids to the ranks that own these rows, which send
    them back in the compute dtype. In backward the gradients of the rows go to the owners, which sum them in
    `reduce_dtype` (None: the weight's dtype, at least float32), and divide the sum by the number of ranks. A rank with
    T ids sends about 8 T bytes of ids, and T rows in forward and in backward, whatever the numbers of ranks and of rows
    in the table. It pays where a rank has far fewer tokens than the table has rows. The host waits once each forward:
    for the numbers of ids that ranks send to each other.

    Call it before `fully_shard` of the modules around it. Every rank of the mesh must call it, and later run the module
    together with the others, each with as many ids as it has, also none. The result is that of `fully_shard`, but for
    the rounding of gradients of tokens that a rank has several times: they are summed once, by the owner. Each backward
    communicates, also under `no_sync`.

    Args:
        module: an nn.Embedding, whose weight no other module has. Modified in place.
        mesh: as for `fully_shard`: ranks of one axis share the table; of two, the first replicates it (HSDP).
        mp_policy: as for `fully_shard`: `param_dtype` is that of the rows, in which they and their gradients travel.
        dp_mesh_dims: as for `fully_shard`. With `outer_shard` all ranks share the table: a rank
            sends its ids to the owners directly.

    Raises:
        TypeError: `module` is no nn.Embedding, is of a subclass, or has a `forward` of its own: those may read the
            weight themselves.
        ValueError: it is sharded already, or as for `fully_shard`.
        NotImplementedError: `max_norm`, `sparse` or `scale_grad_by_freq`; a policy with `compression`. Later:
            the weight is tied, ranks may leave modules out (`conditional`), `accumulate`, `skip_step_on_error`,
            `set_optimizer_in_backward`, or hooks and functions of your own for collectives.
        IndexError: in a forward, on all ranks: one has ids that the table has no row for.

    Returns:
        `module`.

    Example:
        ```python
        fsdp2.vocab_parallel_embedding(model.embed)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        ```
    """
    start_early()
    check_mesh(mesh, dp_mesh_dims)
    if type(module) is not nn.Embedding or "forward" in vars(module):
        which = " with a forward of its own" if type(module) is nn.Embedding else ""
        raise TypeError(
            f"vocab_parallel_embedding: expected an nn.Embedding, got {type(module).__name__}{which}. Shard others "
            "with fully_shard."
        )
    for name in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, name):
            raise NotImplementedError(
                f"vocab_parallel_embedding: {name}={getattr(module, name)!r} is not supported. Build the embedding "
                "without it."
            )
    level()
    checked = check_arguments(module, None, None, mp_policy, OffloadPolicy(), None)
    if (compression := checked[2].compression) != Compression():
        raise NotImplementedError(
            f"vocab_parallel_embedding: mp_policy: expected no compression, got {compression!r}: rows and their "
            "gradients travel in param_dtype."
        )
    found = shared_data_mesh(mesh, dp_mesh_dims)
    if found.replicas_may_grow:
        raise NotImplementedError("vocab_parallel_embedding: replicas that come and go are not supported.")
    if found.has_other_axes:
        raise NotImplementedError(
            f"vocab_parallel_embedding: dp_mesh_dims on a mesh with further axes, {found.mesh.mesh_dim_names}, is not "
            "supported: it takes axes of data parallelism only."
        )
    given = Arguments(found, *checked)._replace(vocab_parallel=True)
    sharded: Any = apply(module, given, lambda _: sharded_class(VocabParallelEmbedding))
    return sharded  # type: ignore[no-any-return]


def _apply(module: Any, find_mesh: Callable[[], DataMesh], given: tuple[Any, ...], conditional: bool) -> Any:
    check_bool("conditional", conditional)
    level()
    checked = check_arguments(module, *given)
    return apply(module, Arguments(find_mesh(), *checked)._replace(conditional=conditional), sharded_class)


# torch's functions have this attribute, too. It returns the state that they left on a module, or None.
fully_shard.state = replicate.state = torch_state_of  # type: ignore[attr-defined]
