"""Settings of the documentation site, which Sphinx makes of the Markdown files of this repository.

Run `python -m sphinx -E -W --keep-going -c examples/site . docs` from the root. The pages are the files as they stand.
Their order comes from the links of examples/README.md for the guides, with `AFTER_START` behind their first section,
and `AFTER_GUIDES` at the end.
"""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import fsdp2

if TYPE_CHECKING:  # tests read `RESULTS` without Sphinx
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]

project = "fsdp2"
copyright = "the fsdp2 authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "*.md",
    "fsdp2/*.md",
    "examples/**.md",
    "examples/site/reference/*.rst",
    "benchmarks/**.md",
    "tests/**.md",
]
exclude_patterns = [".*", "**/.*", "docs", "build", "dist"]
highlight_language = "text"
myst_heading_anchors = 4
myst_links_external_new_tab = False
html_theme = "furo"
html_title = "fsdp2"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["."]
html_css_files = ["site.css"]
copybutton_prompt_text = "$ "
templates_path: list[str] = []
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False

# Page of the reference -> the modules whose public names it has. The last page has those of all other modules.
REFERENCE: dict[str, tuple[str, ...]] = {
    "sharding": ("api", "bridge", "engine", "checks", "dtensor", "tools.padding"),
    "module": ("module",),
    "training": ("features", "tools.clip"),
    "optimizers": ("optim",),
    "weights": ("tools.full_params", "tools.stream", "tools.stream_buckets", "tools.sync"),
    "checkpoint": (),
    "hugging_face": (),
    "compression": (),
    "testing": (),
    "planning": ("planning",),
    "tools": (),
}
# Function -> the classes of its results, in the package. Programs use what they have, and seldom name them. The
# reference shows them behind the function.
RESULTS = {
    "accumulate": ("features.accumulate.Accumulation",),
    "check": ("tools.finding.Finding",),
    "compare": ("tools.difference.Comparison", "tools.difference.Difference"),
    "describe": ("tools.describe.ModelDescription", "tools.describe.GroupDescription"),
    "patch_torch": ("bridge.patch.Patch",),
    "plan": (
        "planning.plan.Plan",
        "planning.prediction.PlanRow",
        "planning.settings.Setting",
    ),
    "skip_step_on_error": ("features.skip.SkippableStep",),
    "split_matrices": ("optim.split.MatrixSplit",),
    "stream_full_params": ("tools.stream.ParamStream", "tools.stream.ParamBucket"),
    "wrap_groups": ("planning.policies.WrapGroup",),
    "checkpoint.save": ("checkpoint.saving.Saving",),
    "hf.cat": ("hf.views.View",),
    "hf.load_model": ("hf.load.LoadReport",),
    "hf.merge_checkpoint": ("hf.merge.MergeReport",),
}
# What most readers look up comes first on its page.
FIRST = ("fully_shard", "replicate")
AFTER_START = {"Reference": [f"examples/site/reference/{page}" for page in REFERENCE]}
AFTER_GUIDES = {
    "Engine": ["fsdp2/ARCHITECTURE", "fsdp2/README", "fsdp2/MODULES"],
    "Numbers": ["benchmarks/README", "benchmarks/PROTOCOL"],
    "Project": [
        *("CHANGELOG", "STABILITY", "SECURITY", "tests/README", "tests/BEHAVIOURS", "tests/clients/README"),
        *("benchmarks/phantom/README", "tests/fake_gpu/README"),
    ],
}
REPORTS = sorted(
    (f"benchmarks/results/{path.stem}" for path in (ROOT / "benchmarks/results").glob("*.md")), reverse=True
)


def sections_of_guides() -> dict[str, list[str]]:
    """Returns heading -> pages, from the links of examples/README.md."""
    found: dict[str, list[str]] = {"Start": ["examples/README"]}
    for part in re.split(r"^## ", (ROOT / "examples/README.md").read_text(), flags=re.M)[1:]:
        pages = re.findall(r"^- \[[^\]]+\]\((guides/[\w-]+)\.md\)", part, re.M)
        if pages:
            found.setdefault(part.partition("\n")[0], []).extend(f"examples/{page}" for page in pages)
    return found


def names_of(page: str) -> list[str]:
    """Returns the public names that a page of the reference shows: `FIRST`, then in the order of its modules, functions
    before classes.
    """
    found: list[tuple[bool, int, bool, str]] = []
    for name in fsdp2.__all__:
        module = getattr(fsdp2, name).__module__.removeprefix("fsdp2.")
        places = {part: (of, modules.index(part)) for of, modules in REFERENCE.items() for part in modules}
        of, place = places.get(module) or places.get(module.partition(".")[0]) or ([*REFERENCE][-1], 0)
        if of == page:
            found.append((name not in FIRST, place, name[0].isupper(), name))
    return [name for *_, name in sorted(found)]


def directive(path: str) -> str:
    """Returns Sphinx's directive for a function or a class, by its path in the package."""
    module, _, name = path.rpartition(".")
    is_class = isinstance(getattr(importlib.import_module(f"fsdp2.{module}".rstrip(".")), name), type)
    return f"\n.. auto{'class' if is_class else 'function'}:: fsdp2.{path}\n" + "   :members:\n" * is_class


def add_to_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Adds what no reader of a file sees: the tree of pages below the front page, and the names of the reference."""
    trees: dict[str, list[str]] = {}
    if page == root_doc:
        (start, pages), *others = sections_of_guides().items()
        trees = {start: pages, **AFTER_START, **dict(others), **AFTER_GUIDES}
    elif page == "benchmarks/README":
        trees = {"Reports": REPORTS}
    for heading, pages in trees.items():
        listed = "\n".join(f"/{each}" for each in pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{listed}\n```\n"
    if page.startswith("examples/site/reference/"):
        for name in names_of(Path(page).name):
            source[0] += directive(name)
            source[0] += "".join(map(directive, RESULTS.get(name, ())))
        for file, module in (("hugging_face", "hf"), ("checkpoint", "checkpoint")):
            names = getattr(fsdp2, module).__all__ if page.endswith(f"/{file}") else ()
            source[0] += "".join(directive(each) for name in names for each in RESULTS.get(f"{module}.{name}", ()))


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Servers show index.html."""
    if error is None:
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def convert_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are Markdown: fenced code, and lists without an empty line before them."""
    converted: list[str] = []
    fenced = False
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip().startswith("```"):
            fenced = not fenced
            converted += ["", f"{indent}.. code-block:: {line.strip('` ') or 'text'}", ""] if fenced else [""]
        elif fenced:
            converted.append(f"    {line}" if line else "")
        else:
            before = converted[-1] if converted else ""
            if line.strip().startswith("- ") and before.strip() and not before.strip().startswith("- "):
                converted.append("")
            converted.append(line)
    lines[:] = converted


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_to_pages)
    app.connect("autodoc-process-docstring", convert_docstring, priority=100)  # before napoleon
    app.connect("build-finished", add_index)
