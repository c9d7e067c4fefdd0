"""Tests what a user gets from `pip install fsdp2` and `import fsdp2`."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import fsdp2

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", fsdp2.__all__)
def test_public_name_is_importable_and_documented(name: str) -> None:
    value = getattr(fsdp2, name)
    if isinstance(value, type) or callable(value):
        doc = vars(value).get("__doc__") if isinstance(value, type) else inspect.getdoc(value)
        assert doc, f"fsdp2.{name} has no docstring"
        assert not doc.startswith(f"{name}("), f"fsdp2.{name} has only the docstring that @dataclass made"


def test_all_names_are_classified() -> None:
    """`__all__` has no duplicates and leaves out no class or function that `fsdp2/__init__.py` brings in."""
    public = {
        name
        for name, value in vars(fsdp2).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("fsdp2.")
    }
    assert len(fsdp2.__all__) == len(set(fsdp2.__all__))
    assert public <= set(fsdp2.__all__)


def test_tools_are_imported_when_they_are_asked_for() -> None:
    """From where type checkers import them; `plan` stays the function, beside a module of that name."""
    tree = ast.parse(Path(fsdp2.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    listed = {
        alias.name: node.module
        for node in typed.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert listed == fsdp2._MODULES
    assert {*listed} < {*fsdp2.__all__}
    importlib.import_module("fsdp2.planning.plan")
    assert callable(fsdp2.plan)
    with pytest.raises(AttributeError, match="has no attribute 'clip_grad'"):
        fsdp2.clip_grad  # noqa: B018


def test_package_docstring() -> None:
    assert fsdp2.__doc__


def test_types_are_shipped() -> None:
    assert resources.files(fsdp2).joinpath("py.typed").is_file()


def test_version_is_the_one_of_pyproject() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert fsdp2.__version__ == version


def test_import_is_quiet() -> None:
    """Importing fsdp2 starts nothing, and loads no compiler and no torch FSDP that torch had not loaded already. It
    loads no tool of fsdp2 either, and knows the name of each; files of Hugging Face need no other library. Nor does
    training load a compiler: to import dynamo takes seconds, and dispatch modes, `torch.compiler.disable` and torch's
    optimizers do it.
    """
    script = """
import sys, warnings
import torch
import torch.distributed.tensor
before = set(sys.modules)
import fsdp2
new = set(sys.modules) - before
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.testing")
assert not (found := sorted(name for name in new if f"{name}.".startswith(tuple(f"{h}." for h in heavy)))), found
tools = ("fsdp2.tools", "fsdp2.optim", "fsdp2.hf", "fsdp2.planning", "fsdp2.bridge.patch")
assert not (found := sorted(name for name in new if name.startswith(tools))), found
assert {*fsdp2.__all__, "hf"} <= {*dir(fsdp2)}
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert callable(fsdp2.hf.load_model)
assert not {"safetensors", "transformers", "peft"} & {*sys.modules}
warnings.simplefilter("ignore")
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
model = fsdp2.fully_shard(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
assert model.weight.grad is not None
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
