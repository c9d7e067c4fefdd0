"""Tests verl: its FSDP2 helpers on a Llama: wrap, load from rank 0, clip, collect merged adapters, keep a copy."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
import tiny_llama
from client_training import IMPLEMENTATIONS, Record, assert_sharded, mean_of_ranks, own_part, using
from helpers import alone, full, run_checks

verl = pytest.importorskip("verl.utils.fsdp_utils")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

PREFETCH = {"forward_prefetch": True, "wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def adapted(folder: Path) -> Any:
    torch.manual_seed(2)
    return peft.get_peft_model(
        tiny_llama.load(folder), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )


def sharded(model: Any, **options: Any) -> Any:
    """As verl's workers do: sharded, emptied on all ranks but the first, filled from there. verl knows no CPUs."""
    verl.get_device_id = lambda: torch.device("cpu")
    verl.get_torch_device = lambda: SimpleNamespace(empty_cache=lambda: None)
    if torch.distributed.fsdp.FSDPModule is not fsdp2.FSDPModule:
        # Once Lightning is imported, every module passes for an ABC; what verl then does breaks torch's FSDP2.
        verl.maybe_patch_fsdp_module = contextlib.nullcontext
    state = model.state_dict()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    options |= {"mesh": mesh, "mp_policy": verl.MixedPrecisionPolicy(), "reshard_after_forward": True}
    verl.apply_fsdp2(model, options, PREFETCH)
    verl.fsdp2_load_full_state_dict(model, state if dist.get_rank() == 0 else {}, mesh, None)
    return model


def train(
    model: Any, own: Callable[[Tensor], Tensor], mean: Callable[[Tensor], Tensor], clip: Callable[..., Tensor]
) -> Record:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.25)
    record = Record()
    for step in range(tiny_llama.STEPS):
        tokens = own(tiny_llama.batch(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        record.add(f"loss {step}", mean(loss))
        loss.backward()
        record.add(f"norm {step}", clip(model.parameters(), tiny_llama.MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    record.add_params(model.named_parameters())
    return record


def trained_plainly(folder: Path) -> dict[str, Tensor]:
    clip = torch.nn.utils.clip_grad_norm_
    return train(tiny_llama.load(folder), lambda batch: batch, Tensor.detach, clip).values


def trains(implementation: str, expected: dict[str, Tensor], folder: Path, **options: Any) -> None:
    with using(implementation):
        model = sharded(tiny_llama.load(folder), **options)
        assert_sharded(model, implementation, at_least=4)
        verl.offload_fsdp2_model_to_cpu(model)
        verl.load_fsdp2_model_to_gpu(model)
        train(model, own_part, mean_of_ranks, verl.fsdp2_clip_grad_norm_).assert_like(expected, **tiny_llama.TOLERANCE)


def merged_plainly(folder: Path) -> dict[str, Tensor]:
    model = adapted(folder)
    tiny_llama.train(model)
    return model.merge_and_unload().state_dict()


def merges(implementation: str, expected: dict[str, Tensor], folder: Path) -> None:
    """For a rollout, in place and back: the next step trains as if nothing had been."""
    with using(implementation):
        model = sharded(adapted(folder))
        tiny_llama.train(model, own_part, mean_of_ranks)
        before = {fqn: full(param).clone() for fqn, param in model.named_parameters()}
        record = Record()
        record.add_params(verl.collect_merged_lora_params(model).items())
        record.assert_like(expected, **tiny_llama.TOLERANCE)
        record = Record()
        record.add_params(model.named_parameters())
        record.assert_like(before, rtol=0, atol=0)


def restores(implementation: str, folder: Path) -> None:
    """A copy of the shards, aside and back."""
    with using(implementation):
        model = sharded(tiny_llama.load(folder))
        before = {fqn: full(param).clone() for fqn, param in model.named_parameters()}
        saved, spec = verl.fsdp2_sharded_save_to_cpu(model)
        saved = {fqn: (shard.clone(), its) for fqn, (shard, its) in saved.items()}  # here it is on the CPU already
        tiny_llama.train(model, own_part, mean_of_ranks)
        verl.fsdp2_sharded_load_from_cpu(model, saved, spec)
        record = Record()
        record.add_params(model.named_parameters())
        record.assert_like(before, rtol=0, atol=0)
        tokens = own_part(tiny_llama.batch(0))
        loss = mean_of_ranks(model(input_ids=tokens, labels=tokens).loss)
        expected = tiny_llama.load(folder)(input_ids=tiny_llama.batch(0), labels=tiny_llama.batch(0)).loss
        torch.testing.assert_close(loss, expected.detach(), **tiny_llama.TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_helpers(implementation: str, tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**tiny_llama.SIZES), tmp_path)
    expected = alone(partial(trained_plainly, folder))
    checks: list[tuple[str, Callable[[], None]]] = []
    checks.append(("trains", partial(trains, implementation, expected, folder)))
    by_dims = {"shard_placement_fn": verl.get_shard_placement_fn(2)}
    checks.append(("trains by dims", partial(trains, implementation, expected, folder, **by_dims)))
    checks.append(("merges", partial(merges, implementation, alone(partial(merged_plainly, folder)), folder)))
    checks.append(("restores", partial(restores, implementation, folder)))
    run_checks(2, checks)
