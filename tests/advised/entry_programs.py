"""Follows the advice of errors of ways into a model other than its forward."""

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import fsdp2
from advised.registry import (
    ELSEWHERE,
    Net,
    batch,
    build,
    follows,
    own,
    refused,
    same,
    shard,
    train,
)
from fsdp2 import fully_shard

FULL = StateDictOptions(full_state_dict=True)

# What can be part of a CUDA graph shows where there is one: without these settings all ways to train are captured.
_CAPTURED = "benchmarks/phantom/test_phantom.py::test_whole_steps_are_captured_or_refused_with_a_reason"
ELSEWHERE.update(
    {
        "Leave offload_policy out": _CAPTURED,
        "On every rank, call torch.distributed.checkpoint.state_dict.{} instead, for full states with "
        "StateDictOptions(full_state_dict=True, cpu_offload=True)": "tests/ranks/test_migration.py::states_by_fsdp1",
        "Leave conditional=True out": _CAPTURED,
        "Call set_reshard_after_backward(True) and set_unsharded_budget(None)": _CAPTURED,
        "Pass an option for copies without gradients": "tests/ranks/test_shards.py::check_full_params",
        "Build another one, shard it alike, and pass it": "tests/ranks/test_shards.py::check_averaged_model",
        "Give a group that ranks join and leave to the axis that replicates": (
            "tests/ranks/test_any_process_group.py::test_replicas_join_and_leave"
        ),
        "if ranks are threads, broadcast the weights before fully_shard": (
            "tests/ranks/test_any_process_group.py::test_threads_train_exactly"
        ),
        "Save them by fsdp2.hf.save_adapter(model, folder)": "tests/clients/test_hf_models.py::adapter",
        # Of files of Transformers, peft and bitsandbytes.
        "On every rank, write `with fsdp2.full_params(model, offload_to_cpu=True):`, and in": (
            "tests/clients/test_hf_advice.py::computed_prompts"
        ),
        "Build the model with memory, not on meta": "tests/clients/test_hf_advice.py::adapters_on_meta",
        "Build the model from the configuration of the files": (
            "tests/clients/test_hf_advice.py::files_of_another_configuration"
        ),
        "Pass convert=False, and names= where files call tensors": (
            "tests/clients/test_hf_advice.py::files_of_another_configuration"
        ),
        "Load the model by from_pretrained, and shard it then": ("tests/clients/test_hf_advice.py::computed_values"),
        "Pass convert=False to save it under the model's own names": (
            "tests/clients/test_hf_advice.py::computed_values"
        ),
        "Dequantise the files before": "tests/clients/test_hf_advice.py::quantised_files",
        "Save the adapters alone (fsdp2.hf.save_adapter), or dequantise the model": (
            "tests/clients/test_bitsandbytes.py::saves_whole_models_as_advised"
        ),
        # Which backends a group needs for a device. Ranks of these start as the texts say, with the device's own.
        "Initialise it with the device's own backend too: init_process_group('cpu:gloo,cuda:nccl')": (
            "tests/cuda/ranks_program.py::main"
        ),
        "Initialise it with one for each device: init_process_group('cpu:gloo,cuda:nccl')": (
            "tests/cuda/ranks_program.py::main"
        ),
        'Initialise it with a backend for the CPU, too: init_process_group("cpu:gloo,{}:{}")': (
            "tests/trace/test_consensus.py::test_the_cost_of_a_consensus_on_a_device_is_logged_once"
        ),
    }
)


@follows("Set __class__ before fully_shard")
def classes_replaced() -> None:
    class Doubled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model = shard(build())
    model.__class__ = Doubled
    refused(lambda: model(own(batch())))
    model, plain = build(), build()
    for each in (model, plain):
        each.__class__ = Doubled
    train(shard(model), plain)


@follows("On every rank, use the parametrized weight inside `with fsdp2.full_params(module):`")
def parametrized_weights() -> None:
    for parametrized in (nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal):
        torch.manual_seed(0)
        models = [parametrized(nn.Linear(5, 5)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        model, plain = (each.eval() for each in models)
        fully_shard(model)
        refused(lambda model=model: model.weight.norm())
        with fsdp2.full_params(model):
            norm = model.weight.norm()
        same(norm, plain.weight.norm(), "norm")
