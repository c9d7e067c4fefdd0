"""Trains a tiny Llama on each rank by the engine that verl's registry returns, and writes what it has shown to a file.

    torchrun ... verl_program.py FOLDER SETTINGS

FOLDER has the model. SETTINGS is JSON: `steps`, `micro` (texts of a micro-batch), and settings of verl's `engine` and
`optimizer`.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss

import fsdp2
import tiny_llama

Settings = dict[str, Any]


def make_engine(folder: Path, settings: Settings) -> Any:
    model = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    options = {"mixed_precision": fp32, "use_torch_compile": False, "use_remove_padding": False} | settings["engine"]
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=model,
        engine_config=FSDPEngineConfig(strategy="fsdp2", **options),
        optimizer_config=FSDPOptimizerConfig(**settings["optimizer"]),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )
    engine.initialize()
    return engine


def batch(step: int, micro: int) -> TensorDict:
    """Returns this rank's texts, as verl's trainers hand them to an engine."""
    rows = tiny_llama.texts(step)[dist.get_rank() :: dist.get_world_size()]
    masks = [torch.ones_like(row) for row in rows]
    for mask in masks:
        mask[0] = 0  # nothing predicts the first token
    nest = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {"input_ids": nest(rows), "position_ids": nest([torch.arange(len(row)) for row in rows])}
    data = tu.get_tensordict(tensors | {"loss_mask": nest(masks)}, {"temperature": 1.0})
    tu.assign_non_tensor(
        data, use_dynamic_bsz=False, micro_batch_size_per_gpu=micro, use_remove_padding=False, use_fused_kernels=False
    )
    return data


def train(engine: Any, steps: range, micro: int, record: dict[str, Any]) -> None:
    for step in steps:
        with engine.train_mode():
            output = engine.train_batch(batch(step, micro), partial(sft_loss, None))
            record[f"lr {step}"] = engine.lr_scheduler_step()
        loss = torch.tensor(sum(output["loss"]))
        dist.all_reduce(loss)
        record[f"loss {step}"] = loss / dist.get_world_size()
        record[f"norm {step}"] = output["metrics"]["grad_norm"]


def weights(engine: Any) -> dict[str, Tensor]:
    pairs, config = engine.get_per_tensor_param()
    assert config is None
    return dict(pairs)


def check_deltas(engine: Any, old: dict[str, Tensor], new: dict[str, Tensor]) -> int:
    """Adds what verl's own export of changed shards finds on each rank to the old weights: that gives the new ones, bit
    by bit. Returns the number of this rank's changes.
    """
    total = 0
    entries, _ = engine.get_per_tensor_param_delta_shard()
    for ((name, shape),), _, counts, indices, values, _ in entries:
        bits = old[name].view(torch.int16).flatten().to(torch.int32)
        moved = torch.zeros_like(bits)
        moved[indices.long()] = values.view(torch.int16).to(torch.int32) - bits[indices.long()]
        dist.all_reduce(moved)  # no element is another rank's, too
        found = (bits + moved).to(torch.int16).view(shape)
        assert torch.equal(found, new[name].view(torch.int16)), name
        total += int(counts.sum())
    return total


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    record: dict[str, Any] = {}
    micro = settings["micro"]
    engine = make_engine(folder, settings)
    record["class"] = f"{type(engine).__module__}.{type(engine).__name__}"
    record["sharded"] = sum(isinstance(each, fsdp2.FSDPModule) for each in engine.module.modules())
    assert all(isinstance(each, DTensor) for each in engine.module.parameters())

    with engine.eval_mode():
        output = engine.infer_batch(batch(0, micro))
        record["log_probs"] = [each.clone() for each in output["model_output"]["log_probs"].unbind()]
    train(engine, range(2), micro, record)
    engine.to("cpu")
    engine.save_checkpoint(str(folder / "step2"), global_step=2)
    engine.prime_delta_snapshots()
    exported = {name: each.bfloat16() for name, each in weights(engine).items()}
    train(engine, range(2, settings["steps"]), micro, record)
    after = weights(engine)
    record["weights"] = {name: each.clone() for name, each in after.items()}
    record["changes"] = check_deltas(engine, exported, {name: each.bfloat16() for name, each in after.items()})

    again = make_engine(folder, settings)
    again.load_checkpoint(str(folder / "step2"))
    resumed: dict[str, Any] = {}
    train(again, range(2, settings["steps"]), micro, resumed)
    for name, each in weights(again).items():
        assert torch.equal(each, after[name]), f"{name} after resuming"
    assert all(torch.equal(torch.as_tensor(record[key]), torch.as_tensor(each)) for key, each in resumed.items())
    torch.save(record, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
