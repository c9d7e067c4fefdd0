"""Tests that a release of torch without one of the private names in torch_private/ is refused at once, or costs one
ability and nothing else.

The names are found in the source. Each is hidden in turn from a copy of the package, and all that training does not
need are hidden at once from processes that train, whose parameters must have the same bits.

    python tests/unit/test_missing_names.py RANK STORE [hidden]    # one of the two ranks of that training
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

FOLDER = Path(__file__).resolve().parents[2] / "fsdp2" / "torch_private"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "lookup", "when_imported"))
COPY = "copy_of_torch_private"


class Name(NamedTuple):
    """A name that is looked up. `kind`: required, optional, load; `at_import`: when its file is imported."""

    kind: str
    path: str
    has_substitute: bool
    at_import: bool
    file: str


def _found() -> Iterator[Name]:
    for file in FILES:
        tree = ast.parse(file.read_text())
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for node in ast.walk(function)
        }
        # A process that trains must not import the package before names are hidden.
        flags = {
            ast.unparse(each.targets[0]): eval(ast.unparse(each.value), {"torch": torch})
            for each in tree.body
            if isinstance(each, ast.Assign) and ast.unparse(each.value).startswith("torch.__version__")
        }
        inside |= {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, ast.IfExp) and flags.get(ast.unparse(node.test)) is False
            for child in ast.walk(node.body)
        }
        for node in ast.walk(tree):
            kind = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if kind in ("required", "optional", "load"):
                assert isinstance(node, ast.Call)
                path = ast.literal_eval(node.args[0])
                has_substitute = len(node.args) + len(node.keywords) == 3
                yield Name(kind, path, has_substitute, id(node) not in inside, file.name)


NAMES = [*_found()]
# Those of older releases of torch alone stand in an expression with a condition.
REQUIRED = sorted({each.path for each in NAMES if each.kind == "required" and each.at_import})
OTHERS = sorted({each.path for each in NAMES if each.kind != "required"} - {*REQUIRED})


def hide(lookup: Any, paths: list[str]) -> None:
    """Has the module `lookup` find none of `paths`."""
    found: dict[tuple[int, str], Any] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        found[id(lookup._find(parent)), name] = path

    def get(owner: Any, name: str) -> Any:
        if (id(owner), name) in found:
            raise AttributeError(name)
        return builtins.getattr(owner, name)

    def module(name: str) -> ModuleType:
        if name in paths:
            raise ModuleNotFoundError(name)
        return importlib.import_module(name)

    lookup.getattr, lookup.import_module = get, module
    lookup.sys = SimpleNamespace(modules={name: each for name, each in sys.modules.items() if name not in paths})


@contextmanager
def copied(paths: list[str]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Context: yields a function that imports a copy of the package, from which `paths` are hidden."""

    def load(name: str, path: Path, **options: Any) -> Any:
        spec = importlib.util.spec_from_file_location(name, path, **options)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def load_all() -> dict[str, Any]:
        load(COPY, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])
        return {path.stem: importlib.import_module(f"{COPY}.{path.stem}") for path in FILES} | {"lookup": lookup}

    lookup = load(f"{COPY}.lookup", FOLDER / "lookup.py")
    hide(lookup, paths)
    try:
        yield load_all
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == COPY]:
            del sys.modules[name]


# ---- by the source


def _private(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields private names of torch that a file uses itself, with their lines."""
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in [each for statement in node.body for each in ast.walk(statement)]
    }
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if id(node) in typing_only or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
        if isinstance(node, ast.ImportFrom) and node.level:
            continue
        for alias in node.names:
            aliases[alias.asname or alias.name.partition(".")[0]] = base + alias.name
            yield node.lineno, base + alias.name

    def resolve(node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return aliases.get(node.id, "")
        base = resolve(node.value) if isinstance(node, ast.Attribute) else ""
        return base and f"{base}.{node.attr}"  # type: ignore[attr-defined]

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.lineno, resolve(node)


def is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    return parts[0] == "torch" and any(each.startswith("_") and not each.endswith("__") for each in parts)


def test_no_private_name_is_used_but_by_a_lookup() -> None:
    found = [
        f"{path.name}:{line}: {dotted}"
        for path in FILES
        for line, dotted in _private(ast.parse(path.read_text()))
        if is_private(dotted)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch._C._x",
        "from torch._guards import TracingContext",
        "from torch import distributed as d\nd._x()",
        "def f():\n    import torch._dynamo",
    ],
)
def test_a_planted_name_is_found(text: str) -> None:
    assert any(is_private(dotted) for _, dotted in _private(ast.parse(text)))


def test_names_are_of_both_kinds() -> None:
    assert len(REQUIRED) > 30
    assert len(OTHERS) > 30
    assert all(each.at_import or each.kind != "required" or "simple_registry" in each.path for each in NAMES)


# ---- one name, and all of a kind


@pytest.mark.parametrize("path", REQUIRED)
def test_without_a_name_that_training_needs_the_import_says_so(path: str) -> None:
    with copied([path]) as load_all, pytest.raises(ImportError) as raised:
        load_all()
    named = str(raised.value).split("training needs: ")[1].split(". ")[0].split(", ")
    assert named == [each for each in REQUIRED if each == path or each.startswith(f"{path}.")]
    assert torch.__version__ in str(raised.value)


def test_one_error_lists_all() -> None:
    with copied(REQUIRED) as load_all, pytest.raises(ImportError) as raised:
        load_all()
    assert all(path in str(raised.value) for path in REQUIRED)


@pytest.mark.parametrize("path", OTHERS)
def test_without_another_name_one_ability_is_refused_or_off(path: str) -> None:
    with copied([path]) as load_all, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        modules = load_all()
        lookup = modules["lookup"]
        stand_ins = {
            id(value): value
            for module in modules.values()
            for value in vars(module).values()
            if isinstance(value, lookup.Missing)
        }
        assert {each.path for each in stand_ins.values()} <= {path}
        said = [str(each.message) for each in caught if path in str(each.message)]
        uses = [each for each in NAMES if each.path == path]
        for each in uses:
            if each.at_import and each.kind == "optional":
                assert said if each.has_substitute else stand_ins
        raising = [*stand_ins.values(), lambda: lookup.load(path, "an ability")]
        for each in raising:
            with pytest.raises(NotImplementedError, match="install one of these") as raised:
                each()
            assert path in str(raised.value)
            assert torch.__version__ in str(raised.value)


@pytest.mark.parametrize("path", [*REQUIRED, *OTHERS])
def test_the_torch_that_is_installed_has_the_name(path: str) -> None:
    """A misspelt name would be missing in all releases."""
    from fsdp2.torch_private import lookup

    lookup.load(path, "this test")


def test_another_file_reads_them_where_torch_has_no_names_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here torch itself lacks the name, which hides nothing from the test alone."""
    from fsdp2.torch_private.rare_internals import name_of_new_group

    monkeypatch.delattr(dist.distributed_c10d, "_hash_ranks_to_str")
    refused = "process groups of neighbouring ranks: expected torch to have"
    with pytest.raises(NotImplementedError, match=refused), name_of_new_group("a name"):
        pass


def test_the_watch_is_off_without_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp2.checks import watch
    from fsdp2.torch_private import checks
    from fsdp2.torch_private.lookup import Missing

    class World:
        def size(self) -> int:
            return 2

    world = World()
    monkeypatch.setattr(watch, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))
    monkeypatch.setattr(checks, "default_store", Missing("torch.distributed._store", "the watch"))
    before = {*watch._running}
    with pytest.warns(UserWarning, match="the watch: off, because torch .* lacks torch.distributed._store"):
        watch.start()
    assert {*watch._running} == before


# ---- a training without any of those that it does not need


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Checkpoints each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


def train(rank: int) -> str:
    """Trains in bf16, with checkpointing, two micro-batches, clipping, AdamW, and a state dict that is loaded. Returns
    a digest of all losses and full parameters.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
    )

    from fsdp2 import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model: Any = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest = hashlib.sha256()
    for step in range(4):
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            torch.manual_seed(100 * step + 10 * rank + is_last)
            loss = model(torch.randn(4, 8)).float().square().mean()
            loss.backward()
            digest.update(loss.detach().numpy().tobytes())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            set_model_state_dict(model, get_model_state_dict(model))
    options = StateDictOptions(full_state_dict=True)
    states = get_model_state_dict(model, options=options)
    assert get_optimizer_state_dict(model, optimizer, options=options) or rank
    for name, value in sorted(states.items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Trains as one of two ranks, and prints the digest."""
    rank, store, *hidden = sys.argv[1:]
    assert "fsdp2" not in sys.modules, "it is imported before the names are hidden"
    if hidden:
        hide_from_import(OTHERS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    print("digest", train(int(rank)))
    if hidden:
        refuse_a_mode()
    dist.destroy_process_group()


def hide_from_import(paths: list[str]) -> None:
    """Hides `paths` from the package itself, which is imported next: its lookups are those that look."""
    usual_get, usual_import = builtins.getattr, importlib.import_module
    parents = {path: path.rpartition(".") for path in paths}

    def looks() -> bool:
        return sys._getframe(2).f_globals.get("__name__") == "fsdp2.torch_private.lookup"

    def prefix() -> str:
        return str(sys._getframe(2).f_locals.get("prefix", ""))

    def get(owner: Any, name: str, *default: Any) -> Any:
        if looks() and prefix() in parents:
            raise AttributeError(name)
        return usual_get(owner, name, *default)

    def module(name: str, package: str | None = None) -> ModuleType:
        if looks() and name in parents:
            raise ModuleNotFoundError(name)
        return usual_import(name, package)

    builtins.getattr, importlib.import_module = get, module  # type: ignore[assignment]


def refuse_a_mode() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from fsdp2 import fully_shard

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(NotImplementedError, match="TorchDispatchMode and TorchFunctionMode"), Mode():
        model(torch.ones(2, 4))
    print("refused")


def test_training_without_the_others_is_the_same(tmp_path: Path) -> None:
    digests = {}
    for hidden in ([], ["hidden"]):
        store = tmp_path / f"store{len(hidden)}"
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(store), *hidden],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [rank.communicate(timeout=300) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
        digests[bool(hidden)] = [out.split("digest ")[1].split()[0] for out, _ in outputs]
        if hidden:
            assert all("refused" in out for out, _ in outputs)
            assert all("off, because torch" in error for _, error in outputs)
    assert digests[True] == digests[False]


if __name__ == "__main__":
    main()
