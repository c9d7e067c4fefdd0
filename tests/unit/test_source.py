"""Tests, by reading the source, what linters can't say.

The contracts of importlinter in pyproject.toml say which module may import which, and ruff's banned-api what none may.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fsdp2"
PATHS = sorted(PACKAGE.rglob("*.py"))
# Where collectives are called; internals.py chooses between two names of one.
COMMS = {
    "collectives/coalesced.py",
    "collectives/any_group.py",
    "collectives/gloo.py",
    "simulate/group.py",
    "ranks/rank_facts.py",
    "checks/named_comm.py",
    "features/vocab_parallel.py",
    "optim/exchange.py",
    "checkpoint/ranks.py",
}
CHOOSES = {"torch_private/internals.py"}
# Where private names of torch stand: in files for that, and in what stands in for torch's FSDP, or refuses it.
MAY_BE_PRIVATE = re.compile(
    r"torch_private/\w+\.py|bridge/(patch|torch_interface|fsdp1_states|startup/sitecustomize)\.py"
)
# Packages that users may not have: a folder may import them inside functions.
OPTIONAL = {"hf": {"peft", "tqdm", "transformers"}, "planning": {"transformers"}}
# They run before a program that may have to set environment variables before it imports torch.
STARTUP = {"torch_private/when_imported.py", "bridge/startup/sitecustomize.py"}
COLLECTIVES = re.compile(
    r"_?(all_?gather|all_?reduce|all_?to_?all|reduce_scatter|monitored_barrier|batch_isend_irecv)\w*"
    # Words with other meanings too: a collective only when they are torch.distributed's or a process group's.
    r"|(?P<plain>barrier|(broadcast|gather|scatter|reduce)\w*|i?send|i?recv|(send|recv)_object_list)"
)
GROUP = re.compile(r"(?i)(\w*_)?(pg|group|process_?group)")
COMM = re.compile(r"(?i)(\w*_)?comm")
PRIVATE = re.compile(r"torch(\.\w+)*?\._(?!_)\w*")
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(home|root|tmp|work|opt|usr|var|etc|mnt|data|Users)/|\b[A-Z]:\\\w")

Problems = Iterator[tuple[int, str]]


class Source:
    """Holds one module's tree, and what each imported name stands for.

    `imports`: line, dotted name, whether it is imported when the module is, and whether it is at run time.
    """

    def __init__(self, text: str, place: str) -> None:
        self.place, self.text, self.tree = place, text, ast.parse(text)
        self.aliases: dict[str, str] = {}
        self.imports: list[tuple[int, str, bool, bool]] = []
        typing_only = {
            id(child)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for child in ast.walk(node)
        }
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            base = ""
            if isinstance(node, ast.ImportFrom):
                parents = ["fsdp2", *place.split("/")[:-1]][
                    : len(place.split("/")) + 1 - node.level if node.level else 0
                ]
                base = ".".join([*parents, *filter(None, [node.module])]) + "."
            for alias in node.names:
                name = alias.asname or alias.name if base else alias.asname or alias.name.partition(".")[0]
                self.aliases[name] = base + alias.name if base or alias.asname else name
                is_first = node in self.tree.body
                self.imports.append((node.lineno, base + alias.name, is_first, id(node) not in typing_only))

    def resolve(self, node: ast.expr) -> str:
        """Returns the dotted name that an expression stands for, or an empty one: `dist.barrier` is that of torch."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, "")
        if isinstance(node, ast.Attribute) and (base := self.resolve(node.value)):
            return f"{base}.{node.attr}"
        return ""

    def nodes(self, *kinds: type) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    @cached_property
    def names(self) -> list[tuple[int, str]]:
        """Each dotted name from outside that is imported, or used through an import, with its line."""
        used = [(node.lineno, self.resolve(node)) for node in self.nodes(ast.Attribute, ast.Name)]
        return [(line, dotted) for line, dotted, *_ in self.imports] + [each for each in used if each[1]]

    def strings(self) -> Problems:
        docstrings = {id(node.value) for node in self.nodes(ast.Expr)}
        for node in self.nodes(ast.Constant):
            if isinstance(node.value, str) and id(node) not in docstrings:
                yield node.lineno, node.value


@cache
def read(path: Path) -> Source:
    return Source(path.read_text(), path.relative_to(PACKAGE).as_posix())


def only_comms_call_collectives(source: Source) -> Problems:
    if source.place in COMMS:
        return
    for line, dotted in source.names:
        parent, _, name = dotted.rpartition(".")
        if (
            COLLECTIVES.fullmatch(name)
            and parent.startswith(("torch.distributed", "torch.cuda"))
            and source.place not in CHOOSES
        ):
            yield line, f"{dotted} is a collective: only {', '.join(sorted(COMMS))} may use it"
    for node in source.nodes(ast.Call):
        if not isinstance(node.func, ast.Attribute) or not (found := COLLECTIVES.fullmatch(node.func.attr)):
            continue
        owner = ast.unparse(node.func.value).rpartition(".")[2].removesuffix("()")
        is_of_group = GROUP.fullmatch(owner) or source.resolve(node.func.value).startswith("torch.distributed")
        if not COMM.fullmatch(owner) and (is_of_group or not found["plain"]):
            yield node.lineno, f"{ast.unparse(node.func)}() is a collective: only {', '.join(sorted(COMMS))} may use it"


def private_names_of_torch_stand_in_compat(source: Source) -> Problems:
    if MAY_BE_PRIVATE.fullmatch(source.place):
        return
    looked_up = [
        (node.lineno, f"{source.resolve(node.args[0])}.{node.args[1].value}")
        for node in source.nodes(ast.Call)
        if ast.unparse(node.func) in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant)
    ]
    for line, dotted in (*source.names, *source.strings(), *looked_up):
        if found := PRIVATE.match(dotted):
            yield line, f"{found[0]} is private to torch: it belongs in torch_private/"


def only_torch_is_needed(source: Source) -> Problems:
    optional = OPTIONAL.get(source.place.partition("/")[0], set())
    known = sys.stdlib_module_names | (set() if source.place in STARTUP else {"fsdp2", "torch"})
    for line, dotted, is_first, _ in source.imports:
        root = dotted.partition(".")[0]
        if root not in known and (is_first or root not in optional):
            yield line, f"{dotted} may not be there, or not yet"


def no_path_of_one_machine(source: Source) -> Problems:
    for line, text in enumerate(source.text.splitlines(), start=1):
        if found := ABSOLUTE_PATH.search(text):
            yield line, f"{found[0]}... is an absolute path"


RULES = (
    only_comms_call_collectives,
    private_names_of_torch_stand_in_compat,
    only_torch_is_needed,
    no_path_of_one_machine,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Callable[[Source], Problems]) -> None:
    found = sorted(
        {f"fsdp2/{source.place}:{line}: {what}" for source in map(read, PATHS) for line, what in rule(source)}
    )
    assert not found, "\n".join(found)


def test_no_module_imports_itself_through_others() -> None:
    """Neither when it is imported nor when a function runs; import-linter sees circles of whole folders only."""
    modules = {
        path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", "."): read(path) for path in PATHS
    }
    graph = {name: set[str]() for name in modules}
    for name, source in modules.items():
        for _, dotted, _, is_at_run_time in source.imports:
            imported = dotted if dotted in modules else dotted.rpartition(".")[0]
            if is_at_run_time and imported in modules and imported != name:
                graph[name].add(imported)
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("rule", "place", "line"),
    [
        (
            only_comms_call_collectives,
            "engine/hooks.py",
            "import torch.distributed as d; d.all_gather_into_tensor(a, b)",
        ),
        (
            only_comms_call_collectives,
            "engine/hooks.py",
            "from torch import distributed as d; f = d.reduce_scatter_tensor",
        ),
        (only_comms_call_collectives, "engine/hooks.py", "import torch.distributed; torch.distributed.barrier()"),
        (only_comms_call_collectives, "engine/hooks.py", "mesh.get_group().allreduce([a])"),
        (only_comms_call_collectives, "engine/hooks.py", "replicate_group.broadcast(a)"),
        (only_comms_call_collectives, "checks/due.py", "from torch.distributed import all_reduce"),
        (private_names_of_torch_stand_in_compat, "engine/hooks.py", "import torch._dynamo"),
        (private_names_of_torch_stand_in_compat, "engine/hooks.py", "import torch; torch._foreach_copy_(a, b)"),
        (private_names_of_torch_stand_in_compat, "dtensor/views.py", "from torch.distributed._tensor import DTensor"),
        (private_names_of_torch_stand_in_compat, "engine/hooks.py", "import torch; getattr(torch, '_C')"),
        (private_names_of_torch_stand_in_compat, "module.py", "d = sys.modules.get('torch._dynamo')"),
        (only_torch_is_needed, "engine/gather.py", "def f(): import tqdm"),
        (only_torch_is_needed, "hf/save.py", "import tqdm"),
        (only_torch_is_needed, "hf/save.py", "def f(): import safetensors"),
        (only_torch_is_needed, "torch_private/when_imported.py", "def f(): import torch"),
        (no_path_of_one_machine, "engine/gather.py", "x = 1  # see /home/me/notes"),
    ],
)
def test_rule_finds_a_planted_violation(rule: Callable[[Source], Problems], place: str, line: str) -> None:
    assert [*rule(Source(line, place))]


def test_rules_allow_what_the_design_needs() -> None:
    line = (
        '"""See torch._dynamo and torch.distributed.fsdp: a docstring may name them."""\n'
        "import functools, torch\nimport torch.distributed as dist\n"
        "from . import comm\nfrom .internals import _Strided\n"
        "comm.all_gather(x); self.comm.reduce_scatter(y); functools.reduce(f, z); index.scatter(0, a, b)\n"
        "self._private; torch.__version__; dist.get_rank(); path.split('/'); torch.gather(a, 0, b)\n"
    )
    assert [problem for rule in RULES for problem in rule(Source(line, "engine/hooks.py"))] == []
