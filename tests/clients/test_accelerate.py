"""Tests accelerate: `Accelerator.prepare` with `FullyShardedDataParallelPlugin(fsdp_version=2)`."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from client_training import (
    BATCHES,
    IMPLEMENTATIONS,
    MAX_NORM,
    Record,
    assert_sharded,
    batches,
    fresh,
    oracle_of,
    own_part,
    pretend_accelerator,
    second_half,
    sgd,
    trained_plainly,
    using,
)
from documents import tables_of_guides
from fsdp2 import checkpoint
from helpers import alone, run_checks
from models import mean_loss

accelerate = pytest.importorskip("accelerate")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def make_accelerator(
    per_step: int = 1, precision: str = "no", mesh: dict[str, int] | None = None, compiled: bool = False, **plugin: Any
) -> Any:
    pretend_accelerator()
    wrapping = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["CausalBlock"]}
    options = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, **{**wrapping, **plugin})
    dynamo = accelerate.utils.TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    return accelerate.Accelerator(
        fsdp_plugin=options,
        gradient_accumulation_steps=per_step,
        mixed_precision=precision,
        parallelism_config=accelerate.ParallelismConfig(**mesh) if mesh else None,
        dynamo_plugin=dynamo if compiled else None,
    )


def train(accelerator: Any, model: Any, optimizer: Any, batches: list[Tensor], clip: bool = False) -> Record:
    record = Record()
    for i, batch in enumerate(batches):
        with accelerator.accumulate(model):
            loss = mean_loss(model(own_part(batch)))
            record.add(f"loss {i}", accelerator.reduce(loss.detach(), "mean"))
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                record.add(f"norm {i}", accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
    record.add_params(model.named_parameters(), lambda fqn: fqn.replace("_checkpoint_wrapped_module.", ""))
    return record


def trains(implementation: str, expected: dict[str, Tensor], clip: bool = False, **options: Any) -> None:
    with using(implementation):
        accelerator = make_accelerator(**options)
        model, optimizer = accelerator.prepare(*fresh())
        assert_sharded(model, implementation, at_least=3)
        assert all((block._compiled_call_impl is not None) == ("compiled" in options) for block in model.blocks)
        train(accelerator, model, optimizer, batches(), clip).assert_like(expected)


def trains_in_bf16(implementation: str, expected: dict[str, Tensor]) -> None:
    """Computed in bf16, kept in fp32: losses as exact as three digits can be."""
    with using(implementation):
        accelerator = make_accelerator(precision="bf16")
        model, optimizer = accelerator.prepare(*fresh())
        assert_sharded(model, implementation, at_least=3)
        assert model(own_part(batches()[0])).dtype == torch.bfloat16
        record = train(accelerator, model, optimizer, batches())
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        for i in range(BATCHES):
            torch.testing.assert_close(record.values[f"loss {i}"].double(), expected[f"loss {i}"], rtol=0.02, atol=0)


def ignores(implementation: str) -> None:
    """Parameters of an ignored module are not sharded. If they are trainable, each rank trains its own: with fsdp2 that
    is an error.
    """
    for is_trainable in (False, True):
        with using(implementation):
            accelerator = make_accelerator(ignored_modules="norm")
            plain, optimizer = fresh()
            plain.norm.requires_grad_(is_trainable)
            model, optimizer = accelerator.prepare(plain, optimizer)
            ignored = {fqn for fqn, p in model.named_parameters() if not isinstance(p, DTensor)}
            assert ignored == {"norm.weight", "norm.bias"}
            if is_trainable and implementation == "fsdp2":
                with pytest.raises(RuntimeError, match=r"norm\.weight, norm\.bias: no fully_shard call manages"):
                    train(accelerator, model, optimizer, batches())
            else:
                before = model.norm.weight.detach().clone()
                train(accelerator, model, optimizer, batches())
                assert torch.equal(model.norm.weight, before) != is_trainable


def resumes(implementation: str, expected: dict[str, Tensor], folder: Path, state_dict_type: str) -> None:
    """`load_state` undoes what was trained after `save_state`, optimizer state included."""
    with using(implementation):
        accelerator = make_accelerator(state_dict_type=state_dict_type)
        model, optimizer = accelerator.prepare(*fresh())
        train(accelerator, model, optimizer, batches(0, 2))
        accelerator.save_state(str(folder / state_dict_type))
        train(accelerator, model, optimizer, batches(2, 4))
        accelerator.load_state(str(folder / state_dict_type))
        resumed = train(accelerator, model, optimizer, batches(2, 4))
        resumed.assert_like(second_half(expected))


def prepares_what_is_sharded(implementation: str, expected: dict[str, Tensor], how: str) -> None:
    """The model is sharded by hand, or prepared twice, perhaps with an optimizer that has been prepared, too."""
    with using(implementation):
        # It looks for blocks by the names of their classes, which are others once they are sharded.
        unwrapped = {"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": None}
        accelerator = make_accelerator(**(unwrapped if how == "sharded by hand" else {}))
        model, optimizer = fresh()
        if how == "sharded by hand":
            for block in model.blocks:
                torch.distributed.fsdp.fully_shard(block)
            torch.distributed.fsdp.fully_shard(model)
            optimizer = sgd(model)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        if how == "by another accelerator":
            accelerator, optimizer = make_accelerator(**unwrapped), sgd(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert_sharded(model, implementation, at_least=3)
        params = {id(param) for param in model.parameters()}
        assert {id(param) for group in optimizer.param_groups for param in group["params"]} == params
        train(accelerator, model, optimizer, batches()).assert_like(expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prepares_what_is_sharded_already(implementation: str) -> None:
    """accelerate finds the optimizer's parameters by the addresses of the model's."""
    expected = alone(trained_plainly)
    ways = ("sharded by hand", "prepared twice", "by another accelerator")
    run_checks(
        2, [(how, partial(prepares_what_is_sharded, implementation, expected, how)) for how in ways], timeout=120
    )


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "keeps": {"reshard_after_forward": False},
    "clips": {"clip": True},
    "accumulates": {"per_step": 2, "clip": True},
    "checkpoints activations": {"activation_checkpointing": True},
    "offloads": {"cpu_offload": True},
    "loads from rank 0": {"cpu_ram_efficient_loading": True},
    "compiles": {"compiled": True},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_trains_as_plain(implementation: str, tmp_path: Path) -> None:
    checks: list[tuple[str, Callable[[], None]]] = []
    for name, options in CASES.items():
        if name == "offloads" and implementation == "torch" and not torch.accelerator.is_available():
            continue  # accelerate asks for pinned memory, which torch's FSDP2 then cannot give
        expected = alone(partial(trained_plainly, **oracle_of(options)))
        checks.append((name, partial(trains, implementation, expected, **options)))
    expected = alone(trained_plainly)
    checks.append(("bf16", partial(trains_in_bf16, implementation, expected)))
    checks.append(("ignores", partial(ignores, implementation)))
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        checks.append((f"resumes {kind}", partial(resumes, implementation, expected, tmp_path, kind)))
    run_checks(2, checks, timeout=120)
    mesh = {"dp_replicate_size": 2, "dp_shard_size": 2}
    run_checks(4, [("replicates", partial(trains, implementation, expected, mesh=mesh))])


def continues(expected: dict[str, Tensor], is_moved: bool) -> None:
    """Errors say to load what the optimizer had before. `is_moved`: prepare makes other parameters, on meta first."""
    with using("fsdp2"):
        model, optimizer = fresh()
        for batch in batches()[:2]:
            mean_loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = optimizer.state_dict()
        accelerator = make_accelerator(cpu_ram_efficient_loading=is_moved)
        model, optimizer = accelerator.prepare(model, optimizer)
        with pytest.raises(RuntimeError, match=r"would begin anew\. Call states = optimizer\.state_dict"):
            optimizer.step()
        optimizer.load_state_dict(states)
        train(accelerator, model, optimizer, batches()[2:]).assert_like(second_half(expected))


def test_an_optimizer_that_has_stepped_loads_its_states() -> None:
    """With torch's FSDP2 its momenta begin anew."""
    expected = alone(trained_plainly)
    run_checks(2, [(f"{moved=}", partial(continues, expected, moved)) for moved in (False, True)], timeout=120)


def test_keys_of_files_for_fsdp1() -> None:
    """The guide of accelerate says of a key what `accelerate to-fsdp2` makes of it, but for replicas."""
    from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING, convert_config_to_fsdp2

    rows = {cells[0]: cells[1] for cells in tables_of_guides()["accelerate launch"]}
    for strategy, expected in (("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("HYBRID_SHARD", True)):
        config = {"fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": strategy}}
        converted = convert_config_to_fsdp2(config)["fsdp_config"]
        assert converted == {"fsdp_version": 2, "fsdp_reshard_after_forward": expected}
        if strategy != "HYBRID_SHARD":
            key = f"`fsdp_sharding_strategy: {strategy}`"
            assert rows[key] == f"`fsdp_reshard_after_forward: {str(expected).lower()}`"
    for cell, answer in rows.items():
        for key in re.findall(r"`(fsdp_\w+)", cell):
            assert key in ARGUMENT_KEY_MAPPING, key
            if answer == "the same":
                assert ARGUMENT_KEY_MAPPING[key] == key
            elif answer == "leave them out":
                assert not isinstance(ARGUMENT_KEY_MAPPING[key], str), key
    sizes = accelerate.ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (2, 4)


def folders_of_both(folder: Path) -> None:
    """fsdp2.checkpoint loads the folders that accelerate has written, and accelerate those of fsdp2.checkpoint."""
    files, accelerator = accelerate.utils.fsdp_utils, make_accelerator(state_dict_type="SHARDED_STATE_DICT")
    plugin = accelerator.state.fsdp_plugin

    def make(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = fsdp2.fully_shard(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1 / (1 + seed))

    def step(model: Any, optimizer: Any) -> None:
        mean_loss(model(torch.ones(2, 5))).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made = make(0)
    step(*made)
    files.save_fsdp_model(plugin, accelerator, model, str(folder / "theirs"))
    files.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder / "theirs"))
    checkpoint.save(folder / "ours" / "pytorch_model_fsdp_0", model, optimizer)
    if dist.get_rank() == 0:
        (folder / "ours" / "optimizer_0").symlink_to("pytorch_model_fsdp_0")
    dist.barrier()
    theirs, ours = make(3), make(3)
    checkpoint.load(folder / "theirs" / "pytorch_model_fsdp_0", theirs[0])
    checkpoint.load(folder / "theirs" / "optimizer_0", *theirs, weights=False)
    files.load_fsdp_model(plugin, accelerator, ours[0], str(folder / "ours"))
    files.load_fsdp_optimizer(plugin, accelerator, ours[1], ours[0], str(folder / "ours"))
    for each in (made, theirs, ours):
        step(*each)
    for each in (theirs, ours):
        for one, two in zip(each[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(one.to_local(), two.to_local())


def saves_while_it_trains(expected: dict[str, Tensor], folder: Path) -> None:
    """`fsdp2.checkpoint` takes what `prepare` returns; a save goes on while the model trains."""
    with using("fsdp2"):
        accelerator = make_accelerator()
        model, optimizer = accelerator.prepare(*fresh())
        train(accelerator, model, optimizer, batches(0, 2))
        running = checkpoint.save(folder / "a", model, optimizer, wait=False)
        train(accelerator, model, optimizer, batches(2, 4))
        running.wait()
        checkpoint.load(folder / "a", model, optimizer)
        train(accelerator, model, optimizer, batches(2, 4)).assert_like(second_half(expected))
        others = accelerator.prepare(*fresh())
        checkpoint.load(folder / "a", *others)
        train(accelerator, *others, batches(2, 4)).assert_like(second_half(expected))


def test_saves_while_it_trains(tmp_path: Path) -> None:
    expected = alone(trained_plainly)
    run_checks(2, [("saves", partial(saves_while_it_trains, expected, tmp_path))], timeout=120)


def test_folders_of_checkpoints(tmp_path: Path) -> None:
    run_checks(2, [("folders", partial(folders_of_both, tmp_path))])
