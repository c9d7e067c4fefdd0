"""The architecture, held by reading the source: who may import whom, and who may touch what.

Nothing of fsdp2 is imported here; each rule walks the syntax trees and reports `file:line: what is wrong`.
"""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fsdp2"

# From the surface down. A module may import only modules that come later.
ORDER = (
    "__main__",
    "__init__",
    "bridge.patch",
    "tools.clip",
    "tools.sync",
    "tools.full_params",
    "tools.full_copies",
    "tools.compare",
    "tools.side_by_side",
    "tools.difference",
    "tools.audit",
    "tools.finding",
    "fully_shard",
    "sharding_plan",
    "padding",
    "checks",
    "sharded_class",
    "module",
    "root_methods",
    "handles",
    "forward_method",
    "units",
    "hooks",
    "corrections.table",
    "context",
    "prefetch",
    "guards.rank_guard",
    "guards.common_start",
    "guards.questions",
    "guards.step_history",
    "guards.running_stats",
    "guards.rounding",
    "corrections.addresses",
    "corrections.mixed_operands",
    "corrections.plain_operands",
    "corrections.autograd_inputs",
    "corrections.full_tensor",
    "corrections.own_numbers",
    "corrections.data_attribute",
    "corrections.copies",
    "corrections.optimizer_states",
    "corrections.optimizer_steps",
    "corrections.ddp_around",
    "corrections.parallelize_after",
    "corrections.reparametrize_after",
    "corrections.mixed_norms",
    "corrections.initialisers",
    "bridge.pipelining",
    "corrections.switches",
    "guards.entry_points",
    "guards.partial_settings",
    "owners",
    "state",
    "bridge.torch_interface",
    "saved_tensors",
    "order",
    "param_group",
    "adopted_params",
    "gradients",
    "bucket",
    "registered_faces",
    "replacements",
    "corrections.own_collectives",
    "agreement",
    "stepper",
    "reduction_queue",
    "waiting_gradients",
    "unsynced_grad",
    "extension",
    "guards.full_content",
    "guards.reads",
    "guards.starting_weights",
    "guards.empty_memory",
    "versions",
    "buffers",
    "full_places",
    "param",
    "gather",
    "reduce",
    "reduce_plan",
    "transfers",
    "segments",
    "pack",
    "custom_comm",
    "small_collectives",
    "checked_comm",
    "corrections.draws",
    "corrections.dtensor_operations",
    "corrections.partial_results",
    "corrections.foreach_operations",
    "comm",
    "any_comm",
    "gloo_threads",
    "headers",
    "work",
    "streams",
    "guards.checksum",
    "guards.looks",
    "layout",
    "mesh",
    "policy",
    "corrections.parts",
    "corrections.local_copies",
    "sharded_dtensor",
    "graph_hooks",
    "transforms",
    "tree",
    "modes",
    "torch_compat",
    "group_compat",
    "dtensor_compat",
    "write_notices",
    "once",
    "when_imported",
)
# Where collectives are called.
COMMS = ("comm", "any_comm")
REFUSED = "only comm.py and any_comm.py may use it"
# Where private names of torch stand.
COMPAT = ("modes", "torch_compat", "dtensor_compat", "group_compat", "sharded_dtensor")
WHERE = "it belongs in torch_compat.py, dtensor_compat.py or group_compat.py"
# The bridge for programs that were written for torch's FSDP2: its names stand here, private ones too.
BRIDGE = ("bridge.patch",)
# What torch's other composable APIs look up on a module; neither an implementation of FSDP nor imported with fsdp2.
CONTRACT = "torch.distributed._composable.contract"
# Python finds this one in a folder of its own.
STARTUP = "bridge/startup/sitecustomize.py"
# Each holds its docstring only: what is in it is imported from where it stands.
FOLDERS = ("bridge", "corrections", "guards", "tools")
# Plain descriptions: they, and what they import at run time, know nothing of torch.distributed.
PURE = ("layout", "order", "policy", "tools.difference", "tools.finding")
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

    `name`: `comm`, or `guards.looks`.
    """

    def __init__(self, path: Path, package: Path) -> None:
        self.package, self.path = package, path.relative_to(package)
        self.name = ".".join(self.path.with_suffix("").parts)
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
        """The modules of the package that this one imports; a name of the package itself counts as `__init__`."""
        for line, dotted, typing_only in self.imports:
            first, *rest = dotted.split(".")
            if first == "fsdp2" and not (run_time_only and typing_only):
                parts = rest[: 2 if rest[:1] and rest[0] in FOLDERS else 1]
                module = ".".join(parts)
                is_module = module in ORDER or self.package.joinpath(*parts).with_suffix(".py").is_file()
                yield line, module if is_module else "__init__"


Problems = Iterator[tuple[Source, int, str]]


def under(dotted: str, package: str) -> bool:
    return f"{dotted}.".startswith(f"{package}.")


def every_module_is_listed(sources: dict[str, Source]) -> Problems:
    for source in sources.values():
        if source.name not in ORDER:
            yield source, 1, "is not in ORDER: give it its place there"


def imports_go_downward(sources: dict[str, Source]) -> Problems:
    for source in sources.values():
        for line, imported in source.siblings():
            listed = {source.name, imported} <= set(ORDER)
            if listed and ORDER.index(imported) <= ORDER.index(source.name):
                yield source, line, f"{source.name} may not import {imported}: imports go downward only"


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
        if source.name != "group_compat":  # it may choose between two names of one collective, not call it
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
        if source.name in BRIDGE:
            continue
        for line, dotted in (*source.names(), *source.strings):
            if source.name == "torch_compat" and under(dotted, CONTRACT):
                continue
            if under(dotted, "torch.distributed.fsdp") or under(dotted, "torch.distributed._composable"):
                yield source, line, f"{dotted} is torch's own FSDP: fsdp2 stands without it"


def private_torch_names_stand_in_torch_compat(sources: dict[str, Source]) -> Problems:
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
            if root not in {"fsdp2", "torch"} | sys.stdlib_module_names:
                yield source, line, f"{dotted} is neither torch nor the standard library"


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
    every_module_is_listed,
    imports_go_downward,
    pure_modules_know_no_process_group,
    only_comm_calls_collectives,
    nothing_touches_torch_fsdp,
    private_torch_names_stand_in_torch_compat,
    only_torch_is_needed,
    no_tests_and_no_paths,
)

source_of = functools.cache(Source)  # of the package as it is, which all rules read


def problems(rule: Rule, package: Path) -> list[str]:
    make = source_of if package == PACKAGE else Source
    found = [make(path, package) for path in sorted(package.rglob("*.py")) if not is_apart(path, package)]
    sources = {source.name: source for source in found}
    return sorted({f"{package.name}/{source.path}:{line}: {what}" for source, line, what in rule(sources)})


def is_apart(path: Path, package: Path) -> bool:
    """Whether no rule but those below is about it: what Python starts with, and what a folder is in a word."""
    place = path.relative_to(package)
    return place.as_posix() == STARTUP or (place.name == "__init__.py" and place.parent.name in FOLDERS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    found = problems(rule, PACKAGE)
    assert not found, "\n" + "\n".join(found)


def test_folders_are_known_and_hold_no_code_of_their_own() -> None:
    """A module in another folder would escape the rules."""
    places = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    assert {place.parts[0] for place in places if len(place.parts) == 2} == set(FOLDERS)
    assert [place.as_posix() for place in places if len(place.parts) > 2] == [STARTUP]
    for folder in FOLDERS:
        tree = ast.parse((PACKAGE / folder / "__init__.py").read_text())
        assert [type(node) for node in tree.body] == [ast.Expr]
        assert ast.get_docstring(tree)


@pytest.mark.parametrize("path", [PACKAGE / "when_imported.py", PACKAGE / STARTUP], ids=lambda path: path.stem)
def test_what_runs_before_every_program_imports_the_standard_library_alone(path: Path) -> None:
    """Torch takes seconds to import; and a program may have to set environment variables before."""
    imported = {dotted.partition(".")[0] for _, dotted, _ in Source(path, PACKAGE).imports}
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("rule", "module", "line"),
    [
        (every_module_is_listed, "helpers", "x = 1"),
        (imports_go_downward, "comm", "from .gather import start"),
        (imports_go_downward, "comm", "from . import gather"),
        (imports_go_downward, "comm", "from fsdp2 import fully_shard"),
        (imports_go_downward, "comm", "import fsdp2.hooks as h"),
        (imports_go_downward, "comm", "from . import FSDPModule"),
        (imports_go_downward, "comm", "def f(): from .param import FSDPParam"),
        (imports_go_downward, "comm", "from .guards.rank_guard import RankGuard"),
        (imports_go_downward, "comm", "from .guards import rank_guard"),
        (imports_go_downward, "guards/looks", "from ..comm import Comm"),
        (imports_go_downward, "guards/looks", "from .. import comm"),
        (imports_go_downward, "guards/looks", "from .rank_guard import RankGuard"),
        (imports_go_downward, "guards/looks", "from ..tools import clip"),
        (pure_modules_know_no_process_group, "layout", "import torch.distributed as dist"),
        (pure_modules_know_no_process_group, "order", "import torch; torch.distributed.get_rank()"),
        (pure_modules_know_no_process_group, "policy", "from torch import distributed"),
        (pure_modules_know_no_process_group, "order", "from .comm import Comm"),
        (pure_modules_know_no_process_group, "order", "from . import pack"),
        (only_comm_calls_collectives, "gather", "import torch.distributed as d; d.all_gather_into_tensor(a, b)"),
        (only_comm_calls_collectives, "gather", "from torch import distributed as d; f = d.reduce_scatter_tensor"),
        (only_comm_calls_collectives, "gather", "from torch.distributed import broadcast as b"),
        (only_comm_calls_collectives, "gather", "import torch.distributed; torch.distributed.barrier()"),
        (only_comm_calls_collectives, "gather", "self.group._allgather_base(a, b)"),
        (only_comm_calls_collectives, "gather", "mesh.get_group().allreduce([a])"),
        (only_comm_calls_collectives, "gather", "pg.alltoall_base(a, b, [], [])"),
        (only_comm_calls_collectives, "gather", "replicate_group.broadcast(a)"),
        (only_comm_calls_collectives, "group_compat", "import torch.distributed as d; d.all_to_all_single(a, b)"),
        (nothing_touches_torch_fsdp, "module", "from torch.distributed.fsdp import MixedPrecisionPolicy"),
        (nothing_touches_torch_fsdp, "module", "from torch.distributed import fsdp"),
        (nothing_touches_torch_fsdp, "module", "import torch; torch.distributed.fsdp.FSDPModule"),
        (nothing_touches_torch_fsdp, "torch_compat", "m = __import__('torch.distributed.fsdp._fully_shard')"),
        (private_torch_names_stand_in_torch_compat, "param", "import torch._dynamo"),
        (private_torch_names_stand_in_torch_compat, "param", "import torch; torch._foreach_copy_(a, b)"),
        (private_torch_names_stand_in_torch_compat, "param", "from torch.distributed.tensor import _StridedShard"),
        (private_torch_names_stand_in_torch_compat, "param", "from torch.distributed._tensor import DTensor"),
        (private_torch_names_stand_in_torch_compat, "param", "from torch import nn as n; n.modules._functions.x"),
        (private_torch_names_stand_in_torch_compat, "param", "import torch; getattr(torch, '_C')"),
        (private_torch_names_stand_in_torch_compat, "param", "d = sys.modules.get('torch._dynamo')"),
        (only_torch_is_needed, "pack", "import numpy as np"),
        (only_comm_calls_collectives, "guards/looks", "from torch.distributed import all_reduce"),
        (every_module_is_listed, "guards/helpers", "x = 1"),
        (no_tests_and_no_paths, "pack", "from torch.testing import assert_close"),
        (no_tests_and_no_paths, "pack", "import sys; quiet = 'pytest' in sys.modules"),
        (no_tests_and_no_paths, "pack", "cache = '/tmp/fsdp2'"),
        (no_tests_and_no_paths, "pack", "x = 1  # see /home/me/notes"),
    ],
)
def test_rule_finds_a_planted_violation(rule: Rule, module: str, line: str, tmp_path: Path) -> None:
    package = tmp_path / "fsdp2"
    package.mkdir()
    (package / "pack.py").write_text("from .comm import Comm\n")
    (package / "comm.py").write_text("import torch.distributed\n")
    (package / module).parent.mkdir(exist_ok=True)
    (package / f"{module}.py").write_text(f"{line}\n")
    found = problems(rule, package)
    assert found
    assert all(problem.startswith(f"fsdp2/{module}.py:1: ") for problem in found)


def test_rules_allow_what_the_design_needs(tmp_path: Path) -> None:
    package = tmp_path / "fsdp2"
    package.mkdir()
    (package / "__init__.py").write_text("from .module import FSDPModule\nfrom fsdp2.policy import OffloadPolicy\n")
    (package / "gather.py").write_text(
        '"""See torch._dynamo and torch.distributed.fsdp: a docstring may name them."""\n'
        "import functools, torch\nimport torch.distributed as dist\n"
        "from . import comm\nfrom .torch_compat import _Strided\n"
        "comm.all_gather(x); self.comm.reduce_scatter(y); functools.reduce(f, z); index.scatter(0, a, b)\n"
        "self._private; torch.__version__; dist.get_rank(); path.split('/'); torch.gather(a, 0, b)\n"
    )
    (package / "comm.py").write_text("import torch.distributed as dist\ndist.all_gather_into_tensor(a, b)\n")
    (package / "order.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    from .mesh import Mesh\n")
    (package / "mesh.py").write_text("from torch.distributed.device_mesh import DeviceMesh\n")
    (package / "torch_compat.py").write_text(
        "import torch._C\nfrom torch.distributed.tensor.placement_types import _StridedShard\n"
    )
    (package / "group_compat.py").write_text(
        "import torch.distributed as dist\n"
        "all_gather_single = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor\n"
    )
    assert [problem for rule in RULES for problem in problems(rule, package)] == []
