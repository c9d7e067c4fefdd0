"""Draws pictures of one step, where matplotlib is installed. Nothing here measures."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = {"gather": "tab:blue", "reduce": "tab:red", "sum": "tab:orange", "forward": "0.75", "backward": "0.45"}


@dataclass
class Lanes:
    """Holds one step: its length, and (kind, begin, end) of the events of link and compute, in milliseconds."""

    length: float
    link: list[tuple[str, float, float]]
    compute: list[tuple[str, float, float]]


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw_lanes(path: str, steps: dict[str, Lanes], title: str) -> None:
    """Draws steps one above the other, on one scale of time."""
    from matplotlib.patches import Patch

    figure, axes = _figure(len(steps))
    for axis, (name, lanes) in zip(axes, steps.items(), strict=True):
        for row, spans in enumerate((lanes.compute, lanes.link)):
            bars = [(begin, end - begin) for _, begin, end in spans]
            colours = [COLOURS[kind] for kind, _, _ in spans]
            axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.5)
        axis.axvline(lanes.length, color="black", linewidth=1)
        axis.set_yticks([0, 1], ["compute", "link"])
        axis.set_title(f"{name}: {lanes.length:.0f} ms", loc="left", fontsize="medium")
    axes[-1].set_xlabel("ms")
    kinds = list(dict.fromkeys(kind for lanes in steps.values() for kind, _, _ in lanes.link + lanes.compute))
    handles = [Patch(color=COLOURS[kind]) for kind in kinds]
    figure.legend(handles, kinds, loc="upper right", ncols=len(kinds), fontsize="small")
    _save(figure, path, title)


def draw_curves(path: str, curves: dict[str, list[tuple[float, float]]], title: str) -> None:
    figure, (axis,) = _figure(1)
    for name, curve in curves.items():
        axis.step(*zip(*curve, strict=True), where="post", label=name, linewidth=1)
    axis.set_xlabel("share of the step")
    axis.set_ylabel("unsharded blocks above resting")
    axis.legend()
    _save(figure, path, title)


def _figure(num_rows: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2 + 1.5 * num_rows), layout="constrained")
    return figure, figure.subplots(num_rows, sharex=True, squeeze=False)[:, 0]


def _save(figure: Any, path: str, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=100)
