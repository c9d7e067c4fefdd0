"""Tests that the header of a collective is the same on all ranks for one collective of one group, and for no other."""

import weakref

import pytest
import torch
from torch import Tensor

from fsdp2.checks.conversation import tell_out_of_step
from fsdp2.checks.headers import (
    HEADER_NBYTES,
    Header,
    Headers,
    differ,
    out_of_step,
    placed_header,
    text_of,
    trainable_remark,
)
from fsdp2.engine.comm import CommLabel


class Pass:
    """What runs groups."""

    def __init__(self, phase: str, step: int) -> None:
        self._where = phase, step

    def where(self) -> tuple[str, int]:
        return self._where


def header(
    name: str = "layers.3", kind: str = "gathering", numel: int = 8, dtype: torch.dtype = torch.float32
) -> Header:
    return Headers(CommLabel(name)).of(kind, [torch.zeros(2), torch.zeros(numel, dtype=dtype)])


def message(header: Header) -> Tensor:
    """As it arrives: with something behind."""
    return torch.cat([header.data, torch.ones(3, dtype=torch.uint8)])


@pytest.mark.parametrize(
    "other",
    [{"name": "layers.4"}, {"kind": "reducing"}, {"numel": 9}, {"dtype": torch.int32}, {"name": "x" * 300}],
    ids=str,
)
def test_differences_are_found(other: dict) -> None:
    assert not differ(message(header()), header())
    assert differ(message(header(**other)), header())


def test_a_header_is_built_once() -> None:
    comm_label, tensors = CommLabel("a"), [torch.zeros(3)]
    headers = Headers(comm_label)
    assert headers.of("gathering", tensors) is headers.of("gathering", [torch.ones(3)])
    comm_label.name = comm_label.label = "b"
    assert text_of(headers.of("gathering", tensors).data).startswith("gathering b")


def test_long_names_keep_their_end() -> None:
    long = header("model." * 60 + "layers.3")
    assert long.data.numel() == HEADER_NBYTES
    assert text_of(long.data).partition("\t")[0].endswith("layers.3")
    assert differ(message(header("other." * 60 + "layers.3")), long), "the whole name counts"


def test_a_long_text_is_cut_on_the_rank_itself_too() -> None:
    header = Header.of("reducing root", "", [(torch.float32, 8)], ", of " + ", ".join(f"layer.{i}" for i in range(99)))
    assert header.text == text_of(header.data)
    assert header.text.endswith("...")
    assert len(header.data) == HEADER_NBYTES


def test_the_phase_is_compared_and_the_step_is_not() -> None:
    passes = [Pass("forward", 3), Pass("forward", 4), Pass("backward", 3)]
    headers = []
    for each in passes:
        comm_label = CommLabel("a")
        comm_label.root = weakref.ref(each)
        headers.append(placed_header(comm_label, "gathering", [torch.zeros(2)]))
    assert not differ(message(headers[1]), headers[0])
    assert differ(message(headers[2]), headers[0])
    assert text_of(headers[1].data).startswith("gathering a (forward, step 4)")


def test_a_purpose_does_not_keep_its_group_alive() -> None:
    comm_label = CommLabel("a")
    comm_label.root = weakref.ref(Pass("forward", 3))
    assert placed_header(comm_label, "gathering", []).text.startswith("gathering a (by hand, step 0)")
    tell_out_of_step([comm_label])


def test_the_message_names_all_ranks() -> None:
    texts = {0: "gathering a\t8 float32", 1: "gathering b\t8 float32", 2: "gathering a\t8 float32"}
    assert "ranks 0, 2: gathering a; rank 1: gathering b. " in out_of_step(texts)
    texts[1] = "gathering a\t9 float32"
    assert "ranks 0, 2: gathering a, tensors of 8 float32; rank 1: gathering a, tensors of 9" in out_of_step(texts)


def test_the_message_says_that_ranks_train_different_parameters() -> None:
    """Whatever they are about to do, for that is the reason."""
    purposes = [CommLabel("a"), CommLabel("b")]
    for comm_label, flags in zip(purposes, ([True, True], [True, False]), strict=True):
        comm_label.remark = trainable_remark(flags)
    one, two = (Headers(comm_label).of("reducing", [torch.zeros(2)]).text for comm_label in purposes)
    text = out_of_step({0: one, 1: two})
    assert "rank 0: reducing a; rank 1: reducing b. requires_grad differs between ranks: 2 of 2 parameters are" in text
    assert "trainable on rank 0, and 1 of 2 on rank 1. Set" in text
    assert "set_reduce_scatter_unused_params" not in text
    assert "set_reduce_scatter_unused_params(True); if requires_grad differs" in out_of_step(
        {0: one, 1: "reducing b\t3"}
    )
    same = Headers(CommLabel("a")).of("reducing", [torch.zeros(2)])
    assert not differ(message(Headers(purposes[0]).of("reducing", [torch.zeros(2)])), same), "it is not compared"
