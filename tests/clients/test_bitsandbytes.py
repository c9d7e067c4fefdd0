"""Tests bitsandbytes: 4-bit and 8-bit weights under LoRA of peft (QLoRA), by hand and by accelerate; optimizers."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
import tiny_llama
from client_training import (
    IMPLEMENTATIONS,
    Record,
    assert_sharded,
    mean_of_ranks,
    own_part,
    pretend_accelerator,
    using,
)
from fsdp2 import MixedPrecisionPolicy, full_params, fully_shard
from helpers import alone, assert_same, full, run_checks
from models import mean_loss

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

# Blocks of 64 values have one scale; some CPUs evaluate no other sizes.
SIZES = tiny_llama.SIZES | {"hidden_size": 64, "intermediate_size": 128}
STORAGES = (torch.float32, torch.bfloat16, torch.uint8)


def quantised(folder: Path, storage: torch.dtype = torch.float32, eight_bits: bool = False) -> Any:
    """A Llama on 4-bit weights with adapters, both factors of which are random."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=not eight_bits,
        load_in_8bit=eight_bits,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )
    model = tiny_llama.load(folder, quantization_config=config, dtype=torch.float32)
    torch.manual_seed(2)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, lora).train()


def with_evaluation(record: Record, model: Any, own: Any = lambda batch: batch, mean: Any = Tensor.detach) -> Record:
    """Two evaluations, and one more forward that trains: all see the same weights."""
    for module in model.modules():  # plain ones would lay their weights out anew, and compute in bf16
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    for i, mode in enumerate((False, False, True)):
        model.train(mode)
        with torch.set_grad_enabled(mode):
            tokens = own(tiny_llama.batch(i))
            record.add(f"loss afterwards {i}", mean(model(input_ids=tokens, labels=tokens).loss))
    return record


def trained_plainly(folder: Path, **options: Any) -> dict[str, Tensor]:
    model = quantised(folder, **options)
    return with_evaluation(tiny_llama.train(model), model).values


def layers_of(model: Any) -> Any:
    return model.get_base_model().model.layers


def packed_parameters(model: nn.Module) -> list[Any]:
    return [param for param in model.parameters() if hasattr(param, "quant_state")]


def trains(
    implementation: str,
    expected: dict[str, Tensor],
    folder: Path,
    storage: torch.dtype,
    checkpointed: bool = False,
    mesh: Callable[[], Any] = lambda: None,
    **options: Any,
) -> None:
    with using(implementation):
        from torch.distributed.fsdp import fully_shard

        model = quantised(folder, storage)
        if checkpointed:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh(), **options)
        fully_shard(model, mesh=mesh(), **options)
        assert_sharded(model, implementation, at_least=3)
        record = tiny_llama.train(model, own_part, mean_of_ranks)
        with_evaluation(record, model, own_part, mean_of_ranks).assert_like(expected, **tiny_llama.TOLERANCE)
        if implementation == "fsdp2":
            assert len(packed_parameters(model)) == 14
            assert all(isinstance(param, DTensor) for param in packed_parameters(model))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_qlora_trains_as_plain(implementation: str, tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**SIZES), tmp_path)
    expected = {storage: alone(partial(trained_plainly, folder, storage=storage)) for storage in STORAGES}
    checks: list[tuple[str, Callable[[], None]]] = [
        (f"{storage}", partial(trains, implementation, expected[storage], folder, storage)) for storage in STORAGES
    ]
    of_fp32 = partial(trains, implementation, expected[torch.float32], folder, torch.float32)
    checks.append(("kept", partial(of_fp32, reshard_after_forward=False)))
    checks.append(("checkpointed", partial(of_fp32, checkpointed=True, reshard_after_forward=True)))
    run_checks(2, checks)
    hybrid = partial(init_device_mesh, "cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run_checks(4, [("replicas", partial(of_fp32, mesh=hybrid))])


# ---- what fsdp2 does besides


def sharded(folder: Path, **options: Any) -> Any:
    model = quantised(folder)
    for layer in layers_of(model):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def is_not_cast(folder: Path) -> None:
    """A policy casts the adapters, and leaves packed weights alone."""
    model = sharded(folder, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    plain = quantised(folder)
    seen: dict[str, Any] = {}

    def look(module: Any, *_: Any) -> None:
        weight = module.weight
        assert type(weight) is bnb.nn.Params4bit
        assert weight.quant_state is module.quant_state
        seen[weight.dtype] = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)

    mlp = layers_of(model)[1].mlp
    mlp.up_proj.register_forward_pre_hook(look)
    tokens = tiny_llama.batch(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    weight = layers_of(plain)[1].mlp.up_proj.weight
    assert [*seen] == [torch.float32]
    assert_same(seen[torch.float32], bnb.functional.dequantize_4bit(weight.data, weight.quant_state), 0, 0, "weight")
    assert_same(loss.float(), plain(input_ids=tokens, labels=tokens).loss, 0.02, 0, "loss")


def is_saved_and_loaded(folder: Path, target: Path) -> None:
    """State dicts hold what those of plain models do, and can be loaded, too; adapters are peft's."""
    model, plain = sharded(folder), quantised(folder)
    assert model.state_dict().keys() == plain.state_dict().keys()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        assert_same(state[name], value, 0, 0, name)
    tiny_llama.train(model, own_part, mean_of_ranks)
    trained = tiny_llama.train(plain)
    for load in (
        lambda other: other.load_state_dict(model.state_dict()),
        lambda other: set_model_state_dict(other, get_model_state_dict(model)),
    ):
        other = sharded(folder)
        load(other)
        for (name, param), expected in zip(other.named_parameters(), plain.parameters(), strict=True):
            assert_same(full(param), expected, 1e-4, 1e-6, name)
    fsdp2.hf.save_adapter(model, target)
    again = peft.PeftModel.from_pretrained(
        tiny_llama.load(folder, quantization_config=plain.config.quantization_config, dtype=torch.float32), target
    )
    for name, param in again.named_parameters():
        assert_same(param, trained.values[name], 1e-4, 1e-6, name)


def saves_whole_models_as_advised(folder: Path, target: Path) -> None:
    """The error, and both ways that it names."""
    model = quantised(folder).unload()
    for layer in model.model.layers:
        fully_shard(layer)
    with pytest.raises(NotImplementedError, match=r"weight: its values are packed in torch\.float32") as caught:
        fsdp2.hf.save_model(fully_shard(model), target / "whole")
    advice = "Save the adapters alone (fsdp2.hf.save_adapter), or dequantise the model before fully_shard."
    assert str(caught.value).endswith(advice)
    tokens = tiny_llama.batch(0)
    fsdp2.hf.save_adapter(sharded(folder), target / "adapter")
    plain = quantised(folder)
    loaded = tiny_llama.load(folder, quantization_config=plain.config.quantization_config, dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(loaded, target / "adapter")
    for (name, param), expected in zip(again.named_parameters(), plain.parameters(), strict=True):
        assert_same(param.data, expected.data, 0, 0, name)
    assert_same(again.train()(input_ids=tokens).logits, plain(input_ids=tokens).logits, 1e-4, 1e-5, "the adapters")
    plain, model = (quantised(folder).unload().dequantize() for _ in range(2))
    for layer in model.model.layers:
        fully_shard(layer)
    fsdp2.hf.save_model(fully_shard(model), target / "whole")
    again = tiny_llama.load(target / "whole")
    for (name, param), expected in zip(again.named_parameters(), plain.parameters(), strict=True):
        assert_same(param, expected, 0, 0, name)
    assert_same(model(input_ids=tokens).logits, plain(input_ids=tokens).logits, 1e-4, 1e-5, "the dequantised model")


def is_copied(folder: Path) -> None:
    tokens = tiny_llama.batch(0)
    model, plain = sharded(folder), quantised(folder)
    expected = plain(input_ids=tokens).logits
    assert_same(copy.deepcopy(model)(input_ids=tokens).logits, expected, 1e-4, 1e-5, "deepcopy")
    with full_params(model, offload_to_cpu=True):
        for (name, param), own in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert type(param) is type(own), name
            assert_same(param.data, own.data, 0, 0, name)
    with full_params(model):
        assert all(type(param) is bnb.nn.Params4bit for param in packed_parameters(model))
    assert_same(model(input_ids=tokens).logits, expected, 1e-4, 1e-5, "afterwards")


def keeps_8_bit_weights_whole(folder: Path) -> None:
    """The advice of the error, followed."""
    model, plain = quantised(folder, eight_bits=True), quantised(folder, eight_bits=True)
    with pytest.raises(ValueError, match=r"weight\.CB, an attribute of a Int8Params.* ignored_params of fully_shard"):
        fully_shard(layers_of(model)[0])
    ignored = {param for param in model.parameters() if isinstance(param, bnb.nn.Int8Params)}
    for layer in layers_of(model):
        fully_shard(layer, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    record = tiny_llama.train(model, own_part, mean_of_ranks)
    record.assert_like(tiny_llama.train(plain).values, **tiny_llama.TOLERANCE)


def test_besides_training(tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**SIZES), tmp_path / "model")
    checks = [
        ("cast", partial(is_not_cast, folder)),
        ("saved", partial(is_saved_and_loaded, folder, tmp_path / "adapter")),
        ("whole models", partial(saves_whole_models_as_advised, folder, tmp_path)),
        ("copied", partial(is_copied, folder)),
        ("8 bits", partial(keeps_8_bit_weights_whole, folder)),
    ]
    run_checks(2, checks)


# ---- accelerate


def trains_by_accelerate(
    implementation: str, expected: dict[str, Tensor], folder: Path, storage: torch.dtype, target: Path
) -> None:
    import accelerate

    with using(implementation):
        pretend_accelerator()
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=True,
        )
        accelerator = accelerate.Accelerator(fsdp_plugin=plugin)
        model = quantised(folder, storage)
        trained = [param for param in model.parameters() if param.requires_grad]
        model, optimizer = accelerator.prepare(model, tiny_llama.SGD[0](trained, **tiny_llama.SGD[1]))
        assert_sharded(model, implementation, at_least=3)
        record = Record()
        for step in range(tiny_llama.STEPS):
            tokens = own_part(tiny_llama.batch(step))
            loss = model(input_ids=tokens, labels=tokens).loss
            record.add(f"loss {step}", mean_of_ranks(loss))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and storage is not torch.uint8:
                accelerator.save_state(str(target))
        record.add_params(model.named_parameters())
        plain = {name: value for name, value in expected.items() if "afterwards" not in name}
        record.assert_like(plain, **tiny_llama.TOLERANCE)
        if storage is torch.uint8:
            return  # accelerate ignores these: plain models of bitsandbytes can't load their own state dicts
        accelerator.load_state(str(target))
        for step in range(2, tiny_llama.STEPS):
            tokens = own_part(tiny_llama.batch(step))
            loss = model(input_ids=tokens, labels=tokens).loss
            assert_same(mean_of_ranks(loss), expected[f"loss {step}"], 1e-4, 1e-6, f"loss {step} after load_state")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_accelerate_trains_qlora(implementation: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    folder = tiny_llama.save(transformers.LlamaConfig(**SIZES), tmp_path / "model")
    checks = []
    for storage in STORAGES:
        expected = alone(partial(trained_plainly, folder, storage=storage))
        target = tmp_path / f"{storage}"
        checks.append((f"{storage}", partial(trains_by_accelerate, implementation, expected, folder, storage, target)))
    run_checks(2, checks)


# ---- optimizers

FLAT = ("AdamW", "PagedAdamW32bit", "Lion", "SGD", "Adagrad")
EIGHT_BITS = ("AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdEMAMix8bit")


def plain_layers() -> nn.Sequential:
    """Shards on two ranks that have 4,096 elements or more begin at a multiple of 256 elements."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 3))


def optimizer_of(name: str, params: Any) -> Any:
    return getattr(bnb.optim, name)(params, lr=1e-2, **({"momentum": 0.9} if name.startswith("SGD") else {}))


def same_rows(step: int) -> Tensor:
    """On all ranks, so that their mean gradient has the bits of one process."""
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))


def steps(model: nn.Module, optimizer: Any, before: Any = lambda: None, after: Any = lambda: None) -> dict[str, Tensor]:
    for step in range(4):
        mean_loss(model(same_rows(step))).backward()
        before()
        optimizer.step()
        after()
        model.zero_grad()
    return {name: full(param).detach() for name, param in model.named_parameters()}


def is_flat(name: str) -> None:
    plain, model = plain_layers(), fully_shard(plain_layers())
    expected = steps(plain, optimizer_of(name, plain.parameters()))
    refused = optimizer_of(name, model.parameters())
    with pytest.raises(
        (NotImplementedError, RuntimeError), match=rf"operation of {name} .* fsdp2\.flatten_optimizer\(opt"
    ):
        steps(model, refused)
    model = fully_shard(plain_layers())
    actual = steps(model, fsdp2.flatten_optimizer(optimizer_of(name, model.parameters())))
    for param, value in expected.items():
        assert_same(actual[param], value, 1e-5, 1e-6, param)


def steps_on_shards(name: str, keeps_unsharded: bool) -> None:
    """As the guide does, which the errors name."""
    plain, model = plain_layers(), fully_shard(plain_layers())
    expected = steps(plain, optimizer_of(name, plain.parameters()))
    refused = optimizer_of(name, model.parameters())
    with pytest.raises(
        (NotImplementedError, RuntimeError), match=rf"operation of {name} takes no DTensors.*guides/lora\.md"
    ):
        steps(model, refused)
    with pytest.raises(TypeError, match=rf"{name} can't step on .* on this rank's shards, as .*guides/lora\.md"):
        fsdp2.flatten_optimizer(refused)
    model = fully_shard(plain_layers())
    model.set_reshard_after_backward(not keeps_unsharded)  # type: ignore[attr-defined]
    trained: list[Any] = [param for param in model.parameters() if param.to_local().numel()]  # type: ignore[attr-defined]
    shards = [nn.Parameter(param.detach().to_local()) for param in trained]

    def before() -> None:
        for param, shard in zip(trained, shards, strict=True):
            shard.grad = param.grad.to_local()

    optimizer = optimizer_of(name, shards)
    actual = steps(model, optimizer, before, lambda: torch.autograd.graph.increment_version(trained))
    assert any(
        value.dtype == torch.uint8
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    for param, value in expected.items():
        assert_same(actual[param], value, 0, 0, param)


def test_optimizers() -> None:
    checks = [(name, partial(is_flat, name)) for name in FLAT]
    checks += [(name, partial(steps_on_shards, name, name != "AdamW8bit")) for name in EIGHT_BITS]
    run_checks(2, checks)
