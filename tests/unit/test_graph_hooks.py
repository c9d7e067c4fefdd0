"""Tests the callbacks at nodes of the autograd graph."""

import torch

from fsdp2.engine.autograd import after_tensors


def test_the_hook_runs_after_all_gradients_in_each_backward() -> None:
    """Also behind a backward that reached some of the tensors only."""
    leaf = torch.ones(1, requires_grad=True)
    one, other = leaf * 2, leaf * 3
    events = []
    after_tensors([one, other], lambda: events.append("both"))
    first, second = one * 1, other * 1
    one.register_hook(lambda _: events.append("one"))  # behind the hooks above
    other.register_hook(lambda _: events.append("other"))
    first.backward(retain_graph=True)
    assert events == ["one"]
    events.clear()
    for _ in range(2):
        (first + second).backward(retain_graph=True)
    assert [event for event in events if event != "both"] == ["other", "one"] * 2
    assert events.index("both") == 1, "with the second gradient"
    assert events == ["other", "both", "one"] * 2
