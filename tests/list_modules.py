"""Writes fsdp2/MODULES.md, the list of all modules, from the first sentences of their docstrings.

`python tests/list_modules.py` after a file was added, removed or described otherwise; a test compares.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, LIST = ROOT / "fsdp2", ROOT / "fsdp2" / "MODULES.md"
# In the order in which a reader needs them.
ROOMS = ("collectives", "codecs", "devices", "parameters", "calls", "ranks")
"""The folders around the engine that its files may import."""
FOLDERS = (
    *("engine", *ROOMS, "torch_private"),
    *(
        "features",
        "checks",
        "dtensor",
        "shards",
        "tools",
        "optim",
        "checkpoint",
        "hf",
        "planning",
        "bridge",
        "simulate",
    ),
)
HEAD = """# Modules

`python tests/list_modules.py` makes this list of the docstrings. [ARCHITECTURE.md](ARCHITECTURE.md) comes first.
"""


def list_modules() -> str:
    """Returns the text of the list."""
    return "\n".join([HEAD, *_table("", PACKAGE), *(line for each in FOLDERS for line in _table(each, PACKAGE / each))])


def _table(name: str, folder: Path) -> Iterator[str]:
    """Yields the part of one folder; that of the package itself, whose `name` is empty, has no folders in it."""
    yield f"## {name or 'fsdp2'}/\n"
    if name:
        yield f"{_first_sentence(folder / '__init__.py')}\n"
    yield "| file | what it does |\n|---|---|"
    for path in sorted(folder.rglob("*.py") if name else folder.glob("*.py")):
        if path.name != "__init__.py" or not name:
            yield f"| `{path.relative_to(folder).as_posix()}` | {_first_sentence(path)} |"
    yield ""


def _first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    found = re.match(r"(.+?[.:])(?= [A-Z`]|$)", text)
    assert found, f"{path.relative_to(ROOT)}: its docstring begins with a sentence"
    return found.group(1).removesuffix(":").rstrip(".") + "."


if __name__ == "__main__":
    LIST.write_text(list_modules())
