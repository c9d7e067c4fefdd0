"""Tests OLMo-core: `Transformer.apply_fsdp`, in each of its ways to wrap, with its explicit prefetching."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from client_training import IMPLEMENTATIONS, Record, assert_sharded, mean_of_ranks, own_part, sgd, using
from helpers import alone, run_checks

pipeline = pytest.importorskip("olmo_core.train.train_module.transformer.pipeline.pipeline_stage")
olmo = pytest.importorskip("olmo_core.nn.transformer")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

VOCAB, STEPS, ROWS, LENGTH = 17, 3, 4, 5
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}  # the model is fp32


def config(**options: Any) -> Any:
    return olmo.TransformerConfig.olmo2_1M(VOCAB, n_layers=3, **options)


def fresh(config: Any) -> nn.Module:
    torch.manual_seed(1)
    model = config.build(init_device="cpu")
    model.init_weights(max_seq_len=LENGTH, device=torch.device("cpu"))
    return model


def batch(step: int) -> Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, own: Callable[[Tensor], Tensor], mean: Callable[[Tensor], Tensor]) -> Record:
    optimizer = sgd(model)
    record = Record()
    for step in range(STEPS):
        tokens = own(batch(step))
        loss = loss_of(model, tokens)
        record.add(f"loss {step}", mean(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    record.add_params(model.named_parameters())
    return record


def trained_plainly(config: Any) -> dict[str, Tensor]:
    return train(fresh(config), lambda tokens: tokens, Tensor.detach).values


def trains(
    implementation: str, expected: dict[str, Tensor], config: Any, shape: tuple[int, ...], **options: Any
) -> None:
    with using(implementation):
        names = ("dp_shard",) if len(shape) == 1 else ("dp_replicate", "dp_shard")
        model = fresh(config)
        model.apply_fsdp(init_device_mesh("cpu", shape, mesh_dim_names=names), **options)
        assert_sharded(model, implementation, at_least=4)
        train(model, own_part, mean_of_ranks).assert_like(expected, **TOLERANCE)


def trains_as_stage(implementation: str, expected: dict[str, Tensor], config: Any) -> None:
    """By the backward of OLMo-core's pipeline stage: unsynchronised, then `post_backward` of each group by hand."""
    with using(implementation):
        model = fresh(config)
        model.apply_fsdp(init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)), pp_enabled=True)
        assert_sharded(model, implementation, at_least=4)
        stage = SimpleNamespace(submod=model, is_rddp=False)
        optimizer = sgd(model)
        record = Record()
        for step in range(STEPS):
            losses = [loss_of(model, part) / 2 for part in own_part(batch(step)).chunk(2)]
            record.add(f"loss {step}", mean_of_ranks(sum(losses)))
            for i, loss in enumerate(losses):
                outputs = {"stage_output": loss, "output_grads": None, "input_values": ()}
                pipeline.CustomPipelineStage.backward_maybe_with_nosync(stage, "full", outputs, last_backward=i == 1)
            optimizer.step()
            optimizer.zero_grad()
        record.add_params(model.named_parameters())
        record.assert_like(expected, **TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pipeline_stage_trains_as_plain(implementation: str) -> None:
    expected = alone(partial(trained_plainly, config()))
    run_checks(2, [("stage", partial(trains_as_stage, implementation, expected, config()))])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_trains_as_plain(implementation: str) -> None:
    untied, tied = config(), config(tie_word_embeddings=True)
    expected, expected_tied = alone(partial(trained_plainly, untied)), alone(partial(trained_plainly, tied))
    checks: list[tuple[str, Callable[[], None]]] = []
    for strategy in olmo.TransformerDataParallelWrappingStrategy:
        for prefetch in (0, 2):
            options = {"wrapping_strategy": strategy, "prefetch_factor": prefetch}
            check = partial(trains, implementation, expected, untied, (4,), **options)
            checks.append((f"{strategy} prefetch={prefetch}", check))
    checks.append(("two replicas", partial(trains, implementation, expected, untied, (2, 2))))
    checks.append(("tied", partial(trains, implementation, expected_tied, tied, (4,))))
    run_checks(4, checks)
