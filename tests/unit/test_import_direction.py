"""Tests the architecture by reading the source: which module may import which, and which may use what.

Nothing of fsdp2 is imported here; each rule walks the syntax trees and reports `file:line: what is wrong`.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fsdp2"

# Folder (the package itself: "") -> the folders that its modules may import besides their own.
MAY_IMPORT = {
    "engine": ("features", "checks", "dtensor"),
    "features": ("engine", "checks", "dtensor"),
    "checks": ("engine", "features", "dtensor"),
    "dtensor": ("engine", "features", "checks"),
    "shards": ("engine", "features", "checks", "dtensor"),
    "optim": ("shards",),
    "tools": ("shards", "optim"),
    "hf": ("shards",),
    "planning": ("engine", "features", "checks", "tools", ""),
    "bridge": ("engine", "features", "checks", "dtensor", ""),
    "": ("engine", "features", "checks", "dtensor", "shards", "optim", "tools", "hf", "planning", "bridge"),
}
# Tools that follow the engine's events, or ask it more than the protocol of `shards/` has.
ON_THE_ENGINE = (
    "tools.audit_at_debug_level",
    "tools.padding_log",
    "tools.profiler_ranges",
    "tools.timeline_of_events",
    "tools.watched_comms",
)
# Packages that a folder may import besides torch, inside functions that need them: users may not have them.
OPTIONAL = {"hf": {"peft", "tqdm", "transformers"}, "planning": {"transformers"}}
# Modules that others may import besides: the first knows the standard library alone.
ALSO = {
    ("*", "bridge.when_imported"),
    ("checks.plan", "module"),
    # Tools that run at events, each imported then.
    ("checks.tools_when_needed", "tools.audit"),
    ("checks.tools_when_needed", "tools.padding_log"),
    ("checks.tools_when_needed", "tools.profiler_ranges"),
    ("dtensor.table", "bridge.pipelining"),
}
# Where collectives are called.
COMMS = ("engine.comm", "engine.any_group", "engine.gloo", "engine.rank_facts", "checks.named_comm", "optim.exchange")
REFUSED = f"only {', '.join(COMMS)} may use it"
# It may choose between two names of one collective, not call it.
CHOOSES = ("engine.compat",)
# Where private names of torch stand.
COMPAT = (
    "engine.compat",
    "engine.torch_names",
    "dtensor.compat",
    "optim.compat",
    "planning.compat",
    "hf.compat",
    "engine.user_code",
)
WHERE = f"it belongs in one of {', '.join(COMPAT)}"
# The bridge for programs that were written for torch's FSDP: its names stand here, private ones too.
BRIDGE = ("bridge.patch", "bridge.fsdp1_methods")
# It finds modules that torch's own FSDP2 has sharded, and does not import it.
KNOWS_TORCH_FSDP = ("shards.torch_fsdp2",)
# What torch's other composable APIs look up on a module; neither an implementation of FSDP nor imported with fsdp2.
CONTRACT = "torch.distributed._composable.contract"
# Python finds this one in a folder of its own.
STARTUP = "bridge/startup/sitecustomize.py"
# The __init__.py of these hold their docstring only: what is in it is imported from where it stands.
PLAIN = ("bridge", "checks", "dtensor", "features", "optim", "planning", "shards", "tools")
# Plain descriptions: they, and what they import at run time, know nothing of torch.distributed.
PURE = ("engine.layout", "engine.policy", "tools.difference", "tools.finding")
COLLECTIVES = re.compile(
    r"_?(all_?gather|all_?reduce|all_?to_?all|reduce_scatter|monitored_barrier|batch_isend_irecv)\w*"
    # Words with other meanings too: a collective only when they are torch.distributed's or a process group's.
    r"|(?P<plain>barrier|(broadcast|gather|scatter|reduce)\w*|i?send|i?recv|(send|recv)_object_list)"
)
GROUP = re.compile(r"(?i)(\w*_)?(pg|group|process_?group)")
COMM = re.compile(r"(?i)(\w*_)?comm")
PRIVATE = re.compile(r"torch(\.\w+)*?\._(?!_)\w*")
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(home|root|tmp|work|opt|usr|var|etc|mnt|data|Users)/|\b[A-Z]:\\\w")
TEST_ONLY = re.compile(r"(torch\.testing|tests?|unittest|doctest|pytest|expecttest|conftest)(\.|$)|PYTEST_")


class Source:
    """One module of the package: its tree, what each imported name stands for, and which names it uses.

    `name`: `api`, or `checks.check_times`. `folder`: "", or `checks`.
    """

    def __init__(self, path: Path, package: Path) -> None:
        self.package, self.path = package, path.relative_to(package)
        self.name = ".".join(self.path.with_suffix("").parts)
        self.folder = folder_of(self.name)
        self.packages = [package.name, *self.path.parts[:-1]]
        self.text = path.read_text()
        self.tree = ast.parse(self.text, str(path))
        self.aliases: dict[str, str] = {}
        self.imports: list[tuple[int, str, bool]] = []  # line, dotted name, only for the type checker
        typing_only = {
            id(child)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for child in ast.walk(statement)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    self.aliases[alias.asname or root] = alias.name if alias.asname else root
                    self.imports.append((node.lineno, alias.name, id(node) in typing_only))
            elif isinstance(node, ast.ImportFrom):
                within = self.packages[: len(self.packages) + 1 - node.level] if node.level else []
                base = ".".join([*within, *filter(None, [node.module])])
                for alias in node.names:
                    self.aliases[alias.asname or alias.name] = f"{base}.{alias.name}"
                    self.imports.append((node.lineno, f"{base}.{alias.name}", id(node) in typing_only))
        docstrings = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Expr)}
        self.strings = [
            (node.lineno, node.value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        ]
        # Each chain of names that starts at an import, spelled out: `dist.barrier` is torch.distributed.barrier.
        self.uses = [
            (node.lineno, dotted)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Attribute | ast.Name) and (dotted := self.resolve(node))
        ]

    def resolve(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Attribute) and (base := self.resolve(node.value)):
            return f"{base}.{node.attr}"
        return None

    def names(self) -> Iterator[tuple[int, str]]:
        """Where a dotted name from outside this module appears: imported, or used through an import."""
        yield from ((line, dotted) for line, dotted, _ in self.imports)
        yield from self.uses

    def siblings(self, run_time_only: bool = False) -> Iterator[tuple[int, str]]:
        """Yields the modules of the package that this one imports; a name of a package counts as its `__init__`."""
        for line, dotted, typing_only in self.imports:
            first, *rest = dotted.split(".")
            if first == self.package.name and not (run_time_only and typing_only):
                while rest and not self.package.joinpath(*rest).with_suffix(".py").is_file():
                    if self.package.joinpath(*rest, "__init__.py").is_file():
                        rest.append("__init__")
                    else:
                        rest.pop()
                yield line, ".".join(rest) or "__init__"


def folder_of(module: str) -> str:
    return module.rpartition(".")[0].partition(".")[0]


Problems = Iterator[tuple[Source, int, str]]


def under(dotted: str, package: str) -> bool:
    return f"{dotted}.".startswith(f"{package}.")


def folders_import_as_listed(sources: dict[str, Source]) -> Problems:
    for source in sources.values():
        if source.folder not in MAY_IMPORT:
            yield source, 1, f"the folder {source.folder} is not in MAY_IMPORT: give it its place there"
            continue
        for line, imported in source.siblings():
            folder = folder_of(imported)
            more = MAY_IMPORT["shards"] if source.name in ON_THE_ENGINE else ()
            if folder == source.folder or folder in (*MAY_IMPORT[source.folder], *more):
                continue
            if not {(source.name, imported), ("*", imported)} & ALSO:
                where = f"{source.folder}/" if source.folder else "a module of the package itself"
                yield source, line, f"{where} may not import {imported}"


def nothing_imports_itself(sources: dict[str, Source]) -> Problems:
    """No module imports, while it is imported, a module that imports it. `from . import x` needs no `__init__`."""
    graph = {
        name: {each for _, each in source.siblings(run_time_only=True) if each != "__init__"} - {name}
        for name, source in sources.items()
        if name != "__init__"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = error.args[1]
        yield sources[cycle[0]], 1, f"modules import each other: {' -> '.join(cycle)}"


def pure_modules_know_no_process_group(sources: dict[str, Source]) -> Problems:
    for start in (sources[name] for name in PURE if name in sources):
        chains = [(line, (start.name, module)) for line, module in start.siblings(run_time_only=True)]
        for line, dotted in start.names():
            if under(dotted, "torch.distributed"):
                yield start, line, f"{start.name} is pure: {dotted} has no place in it"
        seen: set[str] = set()
        for line, chain in chains:  # grows: what a pure module imports must be pure too
            source = sources.get(chain[-1])
            if source is None or source.name in seen:
                continue
            seen.add(source.name)
            if any(under(dotted, "torch.distributed") for _, dotted in source.names()):
                yield start, line, f"{start.name} is pure, but {' -> '.join(chain)} uses torch.distributed"
            else:
                chains.extend((line, (*chain, module)) for _, module in source.siblings(run_time_only=True))


def only_comm_calls_collectives(sources: dict[str, Source]) -> Problems:
    for source in sources.values():
        if source.name in COMMS:
            continue
        if source.name not in CHOOSES:
            for line, dotted in source.names():
                parent, _, name = dotted.rpartition(".")
                if COLLECTIVES.fullmatch(name) and (under(parent, "torch.distributed") or under(parent, "torch.cuda")):
                    yield source, line, f"{dotted} is a collective: {REFUSED}"
        for node in ast.walk(source.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            found = COLLECTIVES.fullmatch(node.func.attr)
            owner = ast.unparse(node.func.value).rpartition(".")[2].removesuffix("()")
            dotted = source.resolve(node.func.value) or ""
            if found is None or COMM.fullmatch(owner):  # gather.py asks comm.all_gather(...)
                continue
            if not found["plain"] or GROUP.fullmatch(owner) or under(dotted, "torch.distributed"):
                yield (
                    source,
                    node.lineno,
                    f"{ast.unparse(node.func)}() is a collective: {REFUSED}",
                )


def nothing_touches_torch_fsdp(sources: dict[str, Source]) -> Problems:
    for source in sources.values():
        if source.name in (*BRIDGE, *KNOWS_TORCH_FSDP):
            continue
        for line, dotted in (*source.names(), *source.strings):
            if source.name == "engine.torch_names" and under(dotted, CONTRACT):
                continue
            if under(dotted, "torch.distributed.fsdp") or under(dotted, "torch.distributed._composable"):
                yield source, line, f"{dotted} is torch's own FSDP: fsdp2 stands without it"


def private_names_of_torch_stand_in_compat(sources: dict[str, Source]) -> Problems:
    for source in sources.values():
        if source.name in (*COMPAT, *BRIDGE):
            continue
        for line, dotted in (*source.names(), *source.strings):
            if found := PRIVATE.match(dotted):
                yield source, line, f"{found[0]} is private to torch: {WHERE}"
        for node in ast.walk(source.tree):
            match node:
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                    if found := PRIVATE.match(f"{source.resolve(owner)}.{name}"):
                        yield source, node.lineno, f"{found[0]} is private to torch: {WHERE}"


def only_torch_is_needed(sources: dict[str, Source]) -> Problems:
    for source in sources.values():
        for line, dotted, _ in source.imports:
            root = dotted.partition(".")[0]
            if root in OPTIONAL.get(source.folder, ()):
                if any(root in map(first_part, names_in_import(node)) for node in source.tree.body):
                    yield source, line, f"{dotted} may not be there: import it inside the function that needs it"
            elif root not in {"fsdp2", "torch"} | sys.stdlib_module_names:
                yield source, line, f"{dotted} is neither torch nor the standard library"


def first_part(dotted: str) -> str:
    return dotted.partition(".")[0]


def names_in_import(node: ast.AST) -> list[str]:
    """Returns what an import statement imports; nothing for any other node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def no_tests_and_no_paths(sources: dict[str, Source]) -> Problems:
    for source in sources.values():
        imports = ((line, dotted) for line, dotted, _ in source.imports)
        for line, dotted in (*imports, *source.uses, *source.strings):
            if TEST_ONLY.match(dotted):
                yield source, line, f"{dotted} is for tests only"
        for line, text in enumerate(source.text.splitlines(), start=1):
            if found := ABSOLUTE_PATH.search(text):
                yield source, line, f"{found[0]}... is an absolute path"


Rule = Callable[[dict[str, Source]], Problems]
RULES: tuple[Rule, ...] = (
    folders_import_as_listed,
    nothing_imports_itself,
    pure_modules_know_no_process_group,
    only_comm_calls_collectives,
    nothing_touches_torch_fsdp,
    private_names_of_torch_stand_in_compat,
    only_torch_is_needed,
    no_tests_and_no_paths,
)


@cache
def read(package: Path) -> dict[str, Source]:
    """Returns the modules of a package by their names."""
    found = [Source(path, package) for path in sorted(package.rglob("*.py")) if not is_apart(path, package)]
    return {source.name: source for source in found}


def problems(rule: Rule, package: Path) -> list[str]:
    found = rule(read(package))
    return sorted({f"{package.name}/{source.path}:{line}: {what}" for source, line, what in found})


def is_apart(path: Path, package: Path) -> bool:
    """Returns True for files that rules further down are about: what Python starts with, and what a folder is in a
    word.
    """
    place = path.relative_to(package)
    return place.as_posix() == STARTUP or (place.name == "__init__.py" and place.parent.name in PLAIN)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    found = problems(rule, PACKAGE)
    assert not found, "\n" + "\n".join(found)


def test_folders_are_known_and_hold_no_code_of_their_own() -> None:
    """A module in another folder would escape the rules."""
    places = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    assert (
        {place.parts[0] for place in places if len(place.parts) == 2}
        == {*MAY_IMPORT} - {""}
        == {*PLAIN, "engine", "hf"}
    )
    assert [place.as_posix() for place in places if len(place.parts) > 2] == [STARTUP]
    for folder in PLAIN:
        tree = ast.parse((PACKAGE / folder / "__init__.py").read_text())
        assert [type(node) for node in tree.body] == [ast.Expr]
        assert ast.get_docstring(tree)


WHEN_IMPORTED = PACKAGE / "bridge" / "when_imported.py"


@pytest.mark.parametrize("path", [WHEN_IMPORTED, PACKAGE / STARTUP], ids=lambda path: path.stem)
def test_code_that_runs_before_every_program_imports_only_the_standard_library(path: Path) -> None:
    """Torch takes seconds to import; and a program may have to set environment variables before."""
    imported = {dotted.partition(".")[0] for _, dotted, _ in Source(path, PACKAGE).imports}
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize("exception", sorted(ALSO), ids=" -> ".join)
def test_each_exception_is_needed(exception: tuple[str, str]) -> None:
    module, imported = exception
    sources = read(PACKAGE)
    users = sources.values() if module == "*" else [sources[module]]
    assert any(imported == each for user in users for _, each in user.siblings())


@pytest.mark.parametrize(
    ("rule", "module", "line"),
    [
        (folders_import_as_listed, "engine/gather", "from ..hf import save"),
        (folders_import_as_listed, "engine/gather", "from fsdp2 import fully_shard"),
        (folders_import_as_listed, "engine/gather", "from .. import FSDPModule"),
        (folders_import_as_listed, "engine/gather", "import fsdp2.tools.clip as clip"),
        (folders_import_as_listed, "engine/gather", "def f(): from ..tools import clip"),
        (folders_import_as_listed, "engine/owners", "from ..tools import clip"),
        (folders_import_as_listed, "engine/owners", "from .. import install"),
        (folders_import_as_listed, "checks/check_times", "from ..bridge.patch import patch_torch"),
        (folders_import_as_listed, "dtensor/views", "from ..tools.clip import clip_grad_norm_"),
        (folders_import_as_listed, "tools/clip", "from ..api import fully_shard"),
        (folders_import_as_listed, "tools/clip", "from ..bridge import patch"),
        (folders_import_as_listed, "tools/clip", "from ..engine.owners import all_groups"),
        (folders_import_as_listed, "optim/steps", "from ..checks.check_times import is_time"),
        (folders_import_as_listed, "more/helpers", "x = 1"),
        (nothing_imports_itself, "engine/comm", "from .gather import start"),
        (nothing_imports_itself, "engine/comm", "def f(): from ..engine import gather"),
        (nothing_imports_itself, "engine/comm", "from fsdp2.engine.owners import all_groups"),
        (pure_modules_know_no_process_group, "engine/layout", "import torch.distributed as dist"),
        (pure_modules_know_no_process_group, "engine/layout", "import torch; torch.distributed.get_rank()"),
        (pure_modules_know_no_process_group, "engine/policy", "from torch import distributed"),
        (pure_modules_know_no_process_group, "engine/policy", "from .comm import Comm"),
        (pure_modules_know_no_process_group, "engine/policy", "from . import gather"),
        (only_comm_calls_collectives, "engine/hooks", "import torch.distributed as d; d.all_gather_into_tensor(a, b)"),
        (
            only_comm_calls_collectives,
            "engine/hooks",
            "from torch import distributed as d; f = d.reduce_scatter_tensor",
        ),
        (only_comm_calls_collectives, "engine/hooks", "from torch.distributed import broadcast as b"),
        (only_comm_calls_collectives, "engine/hooks", "import torch.distributed; torch.distributed.barrier()"),
        (only_comm_calls_collectives, "engine/hooks", "self.group._allgather_base(a, b)"),
        (only_comm_calls_collectives, "engine/hooks", "mesh.get_group().allreduce([a])"),
        (only_comm_calls_collectives, "engine/units", "pg.alltoall_base(a, b, [], [])"),
        (only_comm_calls_collectives, "engine/units", "replicate_group.broadcast(a)"),
        (only_comm_calls_collectives, "checks/check_times", "from torch.distributed import all_reduce"),
        (only_comm_calls_collectives, "engine/compat", "import torch.distributed as d; d.all_to_all_single(a, b)"),
        (nothing_touches_torch_fsdp, "engine/hooks", "from torch.distributed.fsdp import MixedPrecisionPolicy"),
        (nothing_touches_torch_fsdp, "engine/hooks", "from torch.distributed import fsdp"),
        (nothing_touches_torch_fsdp, "module", "import torch; torch.distributed.fsdp.FSDPModule"),
        (nothing_touches_torch_fsdp, "engine/compat", "m = __import__('torch.distributed.fsdp._fully_shard')"),
        (private_names_of_torch_stand_in_compat, "engine/hooks", "import torch._dynamo"),
        (private_names_of_torch_stand_in_compat, "engine/hooks", "import torch; torch._foreach_copy_(a, b)"),
        (private_names_of_torch_stand_in_compat, "engine/hooks", "from torch.distributed.tensor import _StridedShard"),
        (private_names_of_torch_stand_in_compat, "dtensor/views", "from torch.distributed._tensor import DTensor"),
        (private_names_of_torch_stand_in_compat, "engine/units", "from torch import nn as n; n.modules._functions.x"),
        (private_names_of_torch_stand_in_compat, "engine/hooks", "import torch; getattr(torch, '_C')"),
        (private_names_of_torch_stand_in_compat, "module", "d = sys.modules.get('torch._dynamo')"),
        (only_torch_is_needed, "engine/gather", "import numpy as np"),
        (only_torch_is_needed, "engine/gather", "def f(): import tqdm"),
        (only_torch_is_needed, "hf/save", "import tqdm"),
        (only_torch_is_needed, "hf/save", "def f(): import safetensors"),
        (no_tests_and_no_paths, "engine/gather", "from torch.testing import assert_close"),
        (no_tests_and_no_paths, "engine/gather", "import sys; quiet = 'pytest' in sys.modules"),
        (no_tests_and_no_paths, "engine/gather", "cache = '/tmp/fsdp2'"),
        (no_tests_and_no_paths, "engine/gather", "x = 1  # see /home/me/notes"),
    ],
)
def test_rule_finds_a_planted_violation(rule: Rule, module: str, line: str, tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {
            "api": "from .engine.gather import start",
            "engine/gather": "from .comm import Comm",
            "engine/comm": "import torch.distributed",
            "engine/owners": "from .gather import start",
            "checks/check_times": "from ..engine import owners",
            module: line,
        },
    )
    found = problems(rule, package)
    assert found
    assert all(problem.startswith(f"fsdp2/{module}.py:1: ") for problem in found) or rule is nothing_imports_itself


def write_package(folder: Path, texts: dict[str, str]) -> Path:
    """Returns a package fsdp2 in `folder` that has these modules, by their paths, and each a text."""
    package = folder / "fsdp2"
    for name, text in {"__init__": "", "engine/__init__": "", **texts}.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return package


def test_rules_allow_what_the_design_needs(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {
            "__init__": "from .api import fully_shard\nfrom fsdp2.engine.policy import OffloadPolicy",
            "engine/__init__": "from .hooks import run",
            "engine/hooks": '"""See torch._dynamo and torch.distributed.fsdp: a docstring may name them."""\n'
            "import functools, torch\nimport torch.distributed as dist\n"
            "from . import comm\nfrom .compat import _Strided\n"
            "comm.all_gather(x); self.comm.reduce_scatter(y); functools.reduce(f, z); index.scatter(0, a, b)\n"
            "self._private; torch.__version__; dist.get_rank(); path.split('/'); torch.gather(a, 0, b)\n",
            "engine/comm": "import torch.distributed as dist\ndist.all_gather_into_tensor(a, b)\n",
            "engine/policy": "import typing\nif typing.TYPE_CHECKING:\n    from .mesh import Mesh\n",
            "engine/mesh": "from torch.distributed.device_mesh import DeviceMesh\nfrom .policy import OffloadPolicy\n",
            "engine/compat": "import torch._C\nimport torch.distributed as dist\n"
            "from torch.distributed.tensor.placement_types import _StridedShard\n"
            "all_gather_single = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor\n",
            "engine/owners": "from . import hooks\nfrom ..checks.check_times import is_time\n",
            "checks/check_times": "from ..engine import once\nfrom ..bridge.when_imported import when_imported\n",
            "engine/once": "",
            "bridge/when_imported": "import sys",
            "api": "from .tools import clip\nfrom .engine.owners import all_groups\n",
            "tools/clip": "from ..shards.find import shards_of\n",
            "shards/find": "from ..dtensor.compat import local_of\n",
            "dtensor/compat": "from torch.distributed.tensor._api import DTensor\n",
        },
    )
    assert [problem for rule in RULES for problem in problems(rule, package)] == []
