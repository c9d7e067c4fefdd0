"""Draws the pictures of the guides into examples/pictures: `python examples/site/draw_pictures.py`.

Each has a background of its own and follows the reader's light or dark scheme, so it can be read on any page.
"""

from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"

STYLE = """
.back{fill:#fff;stroke:#d0d7de} text{font:14px system-ui,sans-serif;fill:#1f2328} .dim{fill:#57606a} .b{font-weight:600}
.param{fill:#b6d4fe;stroke:#1f6feb} .grad{fill:#ffd8a8;stroke:#bc4c00} .optim{fill:#b7e4c0;stroke:#1a7f37}
.none{fill:none;stroke:#8c959f;stroke-dasharray:3 3} .box{fill:#f6f8fa;stroke:#8c959f} .line{stroke:#57606a;fill:none}
.tip{fill:#57606a} .meet{fill:#bc4c00}
@media (prefers-color-scheme:dark){
.back{fill:#161b22;stroke:#3d444d} text{fill:#e6edf3} .dim{fill:#9aa5b1}
.param{fill:#1f4b8f;stroke:#79b8ff} .grad{fill:#8a4b12;stroke:#ffb470} .optim{fill:#1f6b38;stroke:#7ee2a0}
.none{stroke:#6e7681} .box{fill:#21262d;stroke:#6e7681} .line{stroke:#9aa5b1} .tip{fill:#9aa5b1} .meet{fill:#ffb470}
}"""


class Picture:
    """Collects the shapes of one SVG. `describes` is what a reader hears who does not see it."""

    def __init__(self, width: int, height: int, describes: str) -> None:
        self.size, self.describes, self.shapes = (width, height), describes, list[str]()

    def rect(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 2) -> None:
        self.shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.shapes.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>')

    def path(self, points: str, kind: str) -> None:
        self.shapes.append(f'<path class="{kind}" d="{points}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through all points, with a tip at the last one, which it reaches along an axis."""
        self.path("M" + " L".join(f"{x:g} {y:g}" for x, y in points), "line")
        (px, py), (x, y) = points[-2:]
        dx, dy = (x > px) - (x < px), (y > py) - (y < py)
        left, right = (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx), (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx)
        self.path(f"M{x:g} {y:g} L{left[0]:g} {left[1]:g} L{right[0]:g} {right[1]:g} Z", "tip")

    def svg(self) -> str:
        width, height = self.size
        back = f'<rect class="back" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        )
        named = f'{head} role="img">\n<title>{self.describes}</title>\n<style>{STYLE}\n</style>'
        return "\n".join([named, back, *self.shapes, "</svg>"]) + "\n"


def ranks_and_shards() -> Picture:
    picture = Picture(
        760,
        270,
        "Four ranks. At rest each has a quarter of each of four blocks. While block 2 runs, each has all of block 2, "
        "and a quarter of the others.",
    )
    for left, title, running in ((20, "Between steps", None), (400, "While block 2 runs", 1)):
        picture.text(left, 30, title, "b")
        for rank in range(4):
            x = left + 88 * rank
            picture.text(x + 38, 56, f"rank {rank}", "dim", "middle")
            for block in range(4):
                y = 66 + 40 * block
                picture.rect(x, y, 76, 30, "none")
                if block == running:
                    picture.rect(x, y, 76, 30, "param")
                    picture.text(x + 38, y + 20, "block 2", "", "middle")
                else:
                    picture.rect(x + 19 * rank, y, 19, 30, "param")
    picture.text(20, 250, "Each row is a block. Each rank stores 1/4 of it.", "dim")
    picture.text(400, 250, "An all-gather has brought the rest of block 2.", "dim")
    return picture


def life_of_a_parameter() -> Picture:
    picture = Picture(
        760,
        330,
        "A parameter rests as a shard. An all-gather makes it whole for forward, it is freed, and gathered again for "
        "backward. A reduce-scatter makes a shard of its gradient, with which the optimizer steps on the shard.",
    )
    picture.text(20, 30, "whole, in the dtype of compute (bf16)", "dim")
    picture.text(20, 320, "this rank's shard, in the stored dtype (fp32)", "dim")
    for x, words in ((130, "forward"), (370, "backward")):
        picture.rect(x, 60, 120, 50, "param")
        picture.text(x + 60, 90, words, "b", "middle")
    picture.rect(530, 60, 210, 50, "grad")
    picture.text(635, 90, "gradient of this rank", "b", "middle")
    picture.rect(20, 220, 470, 50, "param")
    picture.text(255, 250, "shard of the parameter", "b", "middle")
    picture.rect(530, 220, 210, 50, "grad")
    picture.text(635, 250, "shard of the mean: .grad", "b", "middle")
    picture.arrow((150, 220), (150, 110))
    picture.text(142, 170, "all-gather", "", "end")
    picture.arrow((230, 110), (230, 200))
    picture.text(238, 170, "freed")
    picture.arrow((390, 220), (390, 110))
    picture.text(382, 170, "all-gather", "", "end")
    picture.arrow((470, 110), (470, 200))
    picture.text(478, 170, "freed")
    picture.arrow((490, 85), (530, 85))
    picture.arrow((635, 110), (635, 220))
    picture.text(627, 170, "reduce-scatter", "", "end")
    picture.arrow((530, 245), (490, 245))
    picture.text(510, 290, "optimizer", "", "middle")
    return picture


# Recorded memory of the fourth step on rank 0 of 4 over gloo: six blocks and a small head, fp32, the defaults of
# fully_shard. In blocks, after each change: unsharded parameters (from the launch of a gather to the reshard),
# gradients that are being reduced, sharded gradients. Shards take 6 / 4 blocks, the two states of AdamW twice as much.
FORWARD = [(0.01, 0, 0), *[(1.01, 0, 0), (2.01, 0, 0)] * 5]
BACKWARD = [
    *((2, 0, 0), (1, 0, 0), (1, 0.5, 0), (1, 1, 0), (2, 1, 0), (2, 1, 0.13), (2, 0.5, 0.13), (1, 0.5, 0.13)),
    *((1, 1, 0.13), (1, 1, 0.25), (1, 0.5, 0.25), (1, 1, 0.25), (2, 1, 0.25), (2, 1, 0.38), (2, 0.5, 0.38)),
    *((1, 0.5, 0.38), (1, 1, 0.38), (1, 1, 0.5), (1, 0.5, 0.5), (1, 1, 0.5), (2, 1, 0.5), (2, 1, 0.63)),
    *((2, 0.5, 0.63), (1, 0.5, 0.63), (1, 1, 0.63), (1, 1, 0.75), (1, 0.5, 0.75), (1, 1, 0.75), (2, 1, 0.75)),
    *((2, 1, 0.88), (2, 0.5, 0.88), (1, 0.5, 0.88), (1, 1, 0.88), (1, 1, 1), (1, 0.5, 1), (1, 1, 1), (1, 1, 1.13)),
    *((1, 0.5, 1.13), (0, 0.5, 1.13), (0, 1, 1.13), (0, 1, 1.25), (0, 0.5, 1.25), (0, 0.5, 1.38), (0, 0.5, 1.5)),
]
STEP = [(0, 0, 1.5)] * 4
RESTING, STATES = 1.5, 3.0


def memory_over_a_step() -> Picture:
    picture = Picture(
        760,
        400,
        "Memory of one rank of four over a step of six blocks. Shards and optimizer states are constant, 4.5 blocks. "
        "Unsharded parameters take at most two blocks, gradients in reduction one, and sharded gradients grow to 1.5 "
        "blocks in backward. The sum stays below nine blocks; plain training holds 24.",
    )
    left, bottom, unit, width = 60, 340, 30, 660
    samples = [*FORWARD, *BACKWARD, *STEP]
    step = width / len(samples)
    layers = [
        ("optim", [STATES] * len(samples)),
        ("param", [RESTING] * len(samples)),
        ("grad", [gradients for _, _, gradients in samples]),
        ("grad", [reducing for _, reducing, _ in samples]),
        ("param", [unsharded for unsharded, _, _ in samples]),
    ]
    base = [0.0] * len(samples)
    for kind, heights in layers:
        top = [low + height for low, height in zip(base, heights, strict=True)]
        upper = [(left + step * (i + j), bottom - unit * high) for i, high in enumerate(top) for j in (0, 1)]
        lower = [(left + step * (i + j), bottom - unit * low) for i, low in enumerate(base) for j in (0, 1)]
        picture.path("M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in [*upper, *reversed(lower)]) + " Z", kind)
        base = top
    for blocks in range(0, 11, 2):
        picture.text(left - 10, bottom - unit * blocks + 5, f"{blocks}", "dim", "end")
    picture.text(20, 22, "blocks", "dim")
    picture.text(left + 10, bottom - unit * 1.5 + 5, "states of AdamW", "b")
    picture.text(left + 10, bottom - unit * 3.75 + 5, "shards", "b")
    picture.text(left + 10, bottom - unit * 7 + 5, "unsharded parameters", "b")
    picture.arrow((left + 70, bottom - unit * 6.8), (left + 70, bottom - unit * 6.2))
    picture.text(left + 300, bottom - unit * 9.4 + 5, "gradients in reduction", "b", "middle")
    picture.arrow((left + 300, bottom - unit * 9.2), (left + 300, bottom - unit * 5.5))
    picture.text(left + width - 4, bottom - unit * 8.6 + 5, "sharded gradients", "b", "end")
    picture.arrow((left + width - 20, bottom - unit * 8.4), (left + width - 20, bottom - unit * 5.4))
    at = left
    for words, part in (("forward", FORWARD), ("backward", BACKWARD), ("step", STEP)):
        end = at + step * len(part)
        picture.path(f"M{at:.1f} {bottom + 8} L{end - 4:.1f} {bottom + 8}", "line")
        picture.text((at + end) / 2 - 2, bottom + 26, words, "", "middle")
        at = end
    picture.text(
        left, bottom + 50, "Plain training would hold 24 blocks on each rank. Activations are not shown.", "dim"
    )
    return picture


def hsdp() -> Picture:
    picture = Picture(
        760,
        290,
        "Two machines of four GPUs. Each machine holds a whole set of shards: all-gathers and reduce-scatters stay "
        "inside it. Gradients of equal shards are summed by an all-reduce between the machines.",
    )
    for machine in range(2):
        y = 20 + 140 * machine
        picture.rect(20, y, 720, 90, "box", 6)
        picture.text(34, y + 24, f"machine {machine}: a replica", "b")
        picture.text(726, y + 24, "inside: all-gather, reduce-scatter", "dim", "end")
        for gpu in range(4):
            x = 40 + 176 * gpu
            picture.rect(x, y + 38, 150, 38, "none")
            picture.rect(x + 37.5 * gpu, y + 38, 37.5, 38, "param")
            words_at = x + (94, 112, 37, 56)[gpu]
            picture.text(words_at, y + 62, f"rank {4 * machine + gpu}", "", "middle")
    for gpu in range(4):
        x = 40 + 176 * gpu + 37.5 * gpu + 18.75
        picture.arrow((x, 135), (x, 156))
        picture.arrow((x, 135), (x, 114))
    picture.text(
        20,
        276,
        "Between machines: an all-reduce of each shard's gradient. The mesh is (2, 4).",
        "dim",
    )
    return picture


def conditional_modules() -> Picture:
    picture = Picture(
        760,
        300,
        "Two ranks. Rank 1 has an image and runs the tower, rank 0 has none. Before each all-gather the ranks reach "
        "consensus; for the tower, rank 0 takes part in the gather and leaves the tower out.",
    )
    columns = [(170, "block 1"), (372, "tower"), (574, "block 2")]
    for rank, batch in ((0, "text only"), (1, "text and image")):
        y = 60 + 130 * rank
        picture.text(20, y + 22, f"rank {rank}", "b")
        picture.text(20, y + 42, batch, "dim")
        for x, words in columns:
            skipped = rank == 0 and words == "tower"
            picture.rect(x, y, 160, 56, "none" if skipped else "param")
            picture.text(x + 80, y + 25, words if not skipped else "only takes part", "", "middle")
            picture.text(x + 80, y + 44, "runs" if not skipped else "in the all-gather", "dim", "middle")
        for (x, _), (after, _) in pairwise(columns):
            picture.arrow((x + 160, y + 28), (after, y + 28))
    for x, _ in columns:
        picture.path(f"M{x - 20} 44 L{x - 20} 262", "line")
        for y in (88, 218):
            picture.shapes.append(f'<circle class="meet" cx="{x - 20}" cy="{y}" r="6"/>')
    picture.text(170, 30, "Dots: ranks reach consensus on what is gathered next.", "dim")
    picture.text(170, 286, "In backward, rank 0 adds a gradient of zero for the tower.", "dim")
    return picture


PICTURES = {
    "ranks-and-shards": ranks_and_shards,
    "life-of-a-parameter": life_of_a_parameter,
    "memory-over-a-step": memory_over_a_step,
    "hsdp": hsdp,
    "conditional-modules": conditional_modules,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
