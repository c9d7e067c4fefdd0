"""Tests torchtitan: its `parallelize` functions, for a dense model and for one with experts, on several meshes.

They ask for sums of gradients (`set_gradient_divide_factor(1)`): its trainer divides losses by the number of tokens.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from client_training import IMPLEMENTATIONS, Record, assert_sharded, using
from helpers import alone, run_checks, shard_batch

llama3 = pytest.importorskip("torchtitan.models.llama3")
qwen3 = pytest.importorskip("torchtitan.models.qwen3")
pytest.importorskip("torchtitan.components.quantization")  # imports torchao: here once, rather than in every rank
attention = pytest.importorskip("torchtitan.models.common.attention")
titan = pytest.importorskip("torchtitan.config")
titan_utils = pytest.importorskip("torchtitan.distributed.utils")
full_dtensor = pytest.importorskip("torchtitan.distributed.full_dtensor")
parallel_dims = pytest.importorskip("torchtitan.distributed.parallel_dims")
FullAC = pytest.importorskip("torchtitan.distributed.activation_checkpoint").FullAC
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

VOCAB, DIM, STEPS, ROWS, LENGTH = 19, 32, 3, 4, 6
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # the models are fp32


def dense(tied: bool = False) -> Any:
    """A smaller debug model."""
    spec = llama3.model_registry("debugmodel")
    sizes = {"n_layers": 2, "dim": DIM, "n_heads": 4, "hidden_dim": 48, "rope": rope_of(spec)}
    spec.model.layers = llama3._build_llama3_layers(**sizes, attn_backend="flex")
    spec.model.enable_weight_tying = tied
    return shrunk(spec)


def experts() -> Any:
    """A smaller debug model with experts."""
    spec = qwen3.model_registry("debugmodel_moe")
    sizes = {"n_layers": 2, "dim": DIM, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "rope": rope_of(spec)}
    moe = {"moe_hidden_dim": 16, "num_experts": 4, "top_k": 2, "moe_comm_backend": "standard"}
    spec.model.layers = qwen3._build_qwen3_moe_layers(**sizes, **moe, attn_backend="flex")
    return shrunk(spec)


def rope_of(spec: Any) -> Any:
    return replace(spec.model.layers[0].attention.rope, dim=8, max_seq_len=LENGTH)


def shrunk(spec: Any) -> Any:
    """With the attention that needs no compiler: torchtitan keeps it for vision models."""
    model = spec.model
    model.dim, model.vocab_size = DIM, VOCAB
    model.tok_embeddings = replace(model.tok_embeddings, num_embeddings=VOCAB, embedding_dim=DIM)
    model.norm = replace(model.norm, normalized_shape=DIM)
    model.lm_head = replace(model.lm_head, in_features=DIM, out_features=VOCAB)
    for layer in model.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    return spec


def fresh(spec: Any) -> nn.Module:
    torch.manual_seed(1)
    model = spec.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def train(model: nn.Module, own: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> Record:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    record = Record()
    for step in range(STEPS):
        batch = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        tokens = own(batch)
        logits, tokens = local(model(tokens)), local(tokens)
        summed = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        loss = summed / (ROWS * (LENGTH - 1))
        record.add(f"loss {step}", total(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    record.add_params(model.named_parameters(), lambda fqn: fqn.replace("_checkpoint_wrapped_module.", ""))
    return record


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of what torchtitan keeps as a DTensor, with every column."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor() if tensor.device_mesh.mesh_dim_names == ("tp",) else tensor.to_local()


def trained_plainly(spec: Any) -> dict[str, Tensor]:
    return train(fresh(spec), lambda batch: batch, lambda loss: loss).values


def trains(
    implementation: str,
    expected: dict[str, Tensor],
    spec: Any,
    degrees: dict[str, int],
    ac_config: Any = None,
    compiled: bool = False,
    offload: bool = False,
    **parallelism: Any,
) -> None:
    with using(implementation):
        dims = build_mesh(degrees, parallelism.setdefault("spmd_backend", "partial_dtensor"))
        model = spec.parallelize_fn(
            fresh(for_degrees(spec, degrees, parallelism)),
            parallel_dims=dims,
            training=titan.TrainingConfig(mixed_precision_param="float32", enable_cpu_offload=offload),
            parallelism=titan.ParallelismConfig(**parallelism),
            compile_config=titan.CompileConfig(enable=compiled, backend="aot_eager"),
            ac_config=ac_config,
            dump_folder="",
        )
        assert_sharded(model, implementation, at_least=4)
        if implementation == "torch":
            sum_before_dividing(model)
        batch = dims.get_mesh("batch")

        def own(tokens: Tensor) -> Tensor:
            rows = shard_batch(tokens, batch.get_local_rank(), batch.size())
            if parallelism["spmd_backend"] == "full_dtensor":
                rows, *_ = full_dtensor.parallelize_inputs(dims, rows, rows, {})
            return rows

        train(model, own, partial(total_over, batch)).assert_like(expected, **TOLERANCE)


def build_mesh(degrees: dict[str, int], backend: str) -> Any:
    titan_utils.set_spmd_backend(backend)
    parallel_dims.device_type = "cpu"  # it says "cuda" where there is no accelerator
    sizes = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "pp": 1, "ep": 1} | degrees
    dims = parallel_dims.ParallelDims(**sizes, world_size=dist.get_world_size(), spmd_backend=backend)
    dims.build_mesh()
    return dims


def for_degrees(spec: Any, degrees: dict[str, int], parallelism: dict[str, Any]) -> Any:
    """With the shardings that the model's own configuration derives from the degrees of parallelism."""
    names = {"tp": "tensor_parallel_degree", "ep": "expert_parallel_degree"}
    degrees = {names[axis]: degree for axis, degree in degrees.items() if axis in names}
    spec = copy.deepcopy(spec)
    spec.model.update_from_config(config=SimpleNamespace(parallelism=titan.ParallelismConfig(**parallelism, **degrees)))
    return spec


def sum_before_dividing(model: nn.Module) -> None:
    """For torch's FSDP2, which multiplies inside the collective, as gloo cannot."""
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


def total_over(mesh: Any, value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total


CASES: dict[str, dict[str, Any]] = {
    "shards": {"degrees": {}},
    "replicas": {"degrees": {"dp_replicate": 2, "dp_shard": 2}},
    "never reshards": {"degrees": {}, "fsdp_reshard_after_forward": "never"},
    "always reshards": {"degrees": {}, "fsdp_reshard_after_forward": "always"},
    "checkpoints activations": {"degrees": {}, "ac_config": FullAC.Config()},
    "compiles": {"degrees": {}, "compiled": True},
    "offloads": {"degrees": {}, "offload": True},
    "tensor parallel": {"degrees": {"tp": 2}},
    "named axes": {"degrees": {}, "spmd_backend": "full_dtensor"},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dense_model_trains_as_plain(implementation: str) -> None:
    spec, tied = dense(), dense(tied=True)
    expected = alone(partial(trained_plainly, spec))
    checks: list[tuple[str, Callable[[], None]]] = []
    for name, options in CASES.items():
        if implementation == "fsdp2" or name != "offloads" or torch.accelerator.is_available():  # pins memory
            checks.append((name, partial(trains, implementation, expected, spec, **options)))
    expected = alone(partial(trained_plainly, tied))
    checks.append(("tied", partial(trains, implementation, expected, tied, {})))
    run_checks(4, checks, timeout=120)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_model_with_experts_trains_as_plain(implementation: str) -> None:
    """With expert parallelism, experts and the rest of a block are sharded over different ranks, in one call."""
    spec = experts()
    expected = alone(partial(trained_plainly, spec))
    checks: list[tuple[str, Callable[[], None]]] = []
    for degrees in {}, {"ep": 2}, {"ep": 4}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}:
        checks.append((f"degrees {degrees}", partial(trains, implementation, expected, spec, degrees)))
    run_checks(4, checks, timeout=120)
