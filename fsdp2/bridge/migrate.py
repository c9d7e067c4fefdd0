"""Runs `python -m fsdp2 migrate`: finds FSDP1, DDP, DeepSpeed and torch's FSDP2 in programs, and says what to write.

It reads the syntax tree of a program, runs nothing of it, and changes no file. A file of JSON is read as a
configuration of DeepSpeed. What it knows of keywords, names and keys stands in migration_table.py. For imports, and for
calls that wrap a model, it composes the new lines.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..tools.columns import terminal_width, wrapped
from .migration_table import ROWS, Row

FSDP1, FSDP2, DDP, DEEPSPEED = "FSDP1", "torch's FSDP2", "DDP", "DeepSpeed"
_WRAPPERS = {"FullyShardedDataParallel": FSDP1, "DistributedDataParallel": DDP, "deepspeed.initialize": DEEPSPEED}
# The parameters of the wrappers that programs pass by position.
_POSITIONS = {
    FSDP1: (
        *("module", "process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy", "backward_prefetch"),
        *("mixed_precision", "ignored_modules", "param_init_fn", "device_id", "sync_module_states"),
    ),
    DDP: ("module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync", "process_group"),
    DEEPSPEED: ("args", "model"),
}
# A name that is imported -> the name that is imported from fsdp2 instead. Others have no equivalent of their own.
_NEW_NAMES = {
    "FullyShardedDataParallel": "fully_shard",
    "MixedPrecision": "MixedPrecisionPolicy",
    "CPUOffload": "CPUOffloadPolicy",
    "DistributedDataParallel": "replicate",
}
# What torch.distributed.fsdp has of FSDP2, under the same names here.
_SAME_NAMES = (
    *("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "UnshardHandle"),
    *("register_fsdp_forward_method", "share_comm_ctx", "DataParallelMeshDims", "GradientReductionHandle"),
    "replicate",
)
_STRATEGIES = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"reshard_after_forward": "False"},
    "HYBRID_SHARD": {"mesh": "hsdp_mesh()"},
    "_HYBRID_SHARD_ZERO2": {"mesh": "hsdp_mesh()", "reshard_after_forward": "False"},
}


class Advice(NamedTuple):
    """Says what to write in place of what stands in a line. `was`: which part of the line, or "" for all of it."""

    line: int
    library: str
    was: str
    write: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Prints what to write instead in each file. Returns 1 if a file has something of another library, else 0.

    Raises:
        SystemExit: 2, for wrong arguments, and for files that can't be read; 0, for --help.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 migrate",
        description="Finds what programs have of FSDP1, DDP, DeepSpeed and torch's FSDP2, and prints for each line "
        "what to write instead. It runs and changes nothing. A file of JSON is read as DeepSpeed's configuration. "
        "Exits with 1 if it finds something. A program for torch's FSDP2 also runs unchanged: python -m fsdp2 FILE.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="programs, or configurations in JSON")
    given = parser.parse_args([*arguments])
    found = 0
    for path in given.files:
        try:
            text = path.read_text()
            advice = find(text, is_json=path.suffix == ".json")
        except (OSError, SyntaxError, ValueError) as error:
            parser.error(f"{path}: {error}")
        found += len(advice)
        print(path if advice else f"{path}: nothing to migrate")
        _show(text.splitlines(), advice)
    return int(found > 0)


def _show(lines: Sequence[str], advice: Sequence[Advice]) -> None:
    last = 0
    for each in advice:
        if each.line != last:
            print(f"{each.line:5}  {lines[each.line - 1].strip()}")
            last = each.line
        if each.was:
            text = f"{each.library}: {each.was} -> {' '.join(each.write)}"
            width = terminal_width()
            print(*(f"       {line}" for line in (wrapped(text, width - 7) if width else [text])), sep="\n")
        else:
            print(*(f"     + {line}" for line in each.write), sep="\n")


def find(text: str, is_json: bool = False) -> list[Advice]:
    """Returns what to write instead of what a program has of other libraries, by line.

    Args:
        text: of the program, or of a configuration of DeepSpeed.
        is_json: it is such a configuration.

    Raises:
        SyntaxError: it can't be parsed.
    """
    tree = ast.parse(
        text.lstrip(" \t") if is_json else text
    )  # JSON is an expression of Python, with names such as true
    program = _Program(tree, libraries={DEEPSPEED} if is_json else set())
    found = [*program.advice()]
    return sorted(dict.fromkeys(found), key=lambda each: (each.line, bool(each.was)))


def _library_of(dotted: str) -> str | None:
    """Returns whose a dotted name is."""
    if dotted.partition(".")[0] == "deepspeed":
        return DEEPSPEED
    name = dotted.rpartition(".")[2]
    if dotted.startswith(("torch.distributed.fsdp", "torch.distributed._composable")):
        if dotted.startswith("torch.distributed.fsdp.wrap.") and name not in ("wrap", "enable_wrap"):
            return None  # a policy, which wrap_groups takes
        return FSDP2 if name in _SAME_NAMES else FSDP1
    if dotted.startswith("torch.nn.parallel") and name in ("DistributedDataParallel", "distributed"):
        return DDP
    if dotted.startswith("torch.distributed.algorithms.") and name in ("Join", "join"):
        return DDP
    return None


class _Program:
    """Holds the syntax tree of a program, what its imported names stand for, and which objects wrappers have made."""

    def __init__(self, tree: ast.Module, libraries: set[str]) -> None:
        self.tree, self.libraries = tree, libraries
        self.aliases: dict[str, str] = {}
        self.wrapped: dict[str, str] = {}  # the text of an expression -> the library that has made what it stands for
        self.imports: list[ast.Import | ast.ImportFrom] = []
        self.needed: dict[str, None] = {}  # names that the new lines take from fsdp2
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._note_import(node)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
                library = self._wrapper(node.value)
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if library == DEEPSPEED and isinstance(target, ast.Tuple):
                    target = target.elts[0]
                if library:
                    self.wrapped[ast.unparse(target)] = library

    def _note_import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom) and (node.level or node.module is None):
            return
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        is_ours = False
        for alias in node.names:
            dotted = base + alias.name
            is_whole = bool(base or alias.asname)  # `import a.b` binds a
            self.aliases[alias.asname or (alias.name if base else alias.name.partition(".")[0])] = (
                dotted if is_whole else dotted.partition(".")[0]
            )
            library = _library_of(dotted)
            if library is not None:
                self.libraries.add(library)
                is_ours = True
        if is_ours:
            self.imports.append(node)

    def resolve(self, node: ast.expr) -> str:
        """Returns the dotted name that an expression stands for; an empty one, if it is nothing that was imported."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, "")
        if isinstance(node, ast.Attribute) and (base := self.resolve(node.value)):
            return f"{base}.{node.attr}"
        return ""

    def _wrapper(self, call: ast.Call) -> str | None:
        """Returns the library whose wrapper a call is."""
        dotted = self.resolve(call.func)
        is_theirs = _library_of(dotted) is not None
        return next((lib for name, lib in _WRAPPERS.items() if is_theirs and _ends(dotted, name)), None)

    def advice(self) -> Iterator[Advice]:
        """Yields what to write instead."""
        statements: dict[int, ast.stmt] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)) and node.value is not None:
                statements[id(node.value)] = node
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield from self._of_call(node, statements.get(id(node)))
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
                yield from self._of_name(node)
            elif isinstance(node, ast.Dict):
                yield from self._of_dict(node)
        yield from self._of_imports()

    # ---- rows of the table

    def _rows(self) -> Iterator[tuple[Row, str]]:
        return ((row, pattern) for row in ROWS for pattern in row.finds)

    def _of_name(self, node: ast.Attribute | ast.Name) -> Iterator[Advice]:
        dotted = self.resolve(node)
        for row, pattern in self._rows():
            if dotted:
                is_found = pattern[0] not in ".~'" and "(" not in pattern and _library_of(dotted) == row.library
                if is_found and _ends(dotted, pattern) and pattern not in _WRAPPERS:
                    yield _advice(node, row)
            elif isinstance(node, ast.Attribute) and pattern[0] in ".~" and node.attr == pattern[1:]:
                made_by = self.wrapped.get(ast.unparse(node.value))
                is_any = made_by is None and pattern[0] == "." and row.library in self.libraries
                if made_by == row.library or is_any:
                    yield _advice(node, row)

    def _of_keyword(self, dotted: str, keyword: ast.keyword) -> Iterator[Advice]:
        library = _library_of(dotted)
        for row, pattern in self._rows():
            name, opened, inside = pattern.partition("(")
            key, has_value, value = inside.rstrip(")").partition("=")
            if not opened or row.library != library or not _ends(dotted, name) or keyword.arg != key:
                continue
            if not has_value or ast.unparse(keyword.value) == value:
                yield _advice(keyword, row)

    def _of_dict(self, node: ast.Dict) -> Iterator[Advice]:
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or DEEPSPEED not in self.libraries or _is_disabled(value):
                continue
            for row, pattern in self._rows():
                name, has_value, expected = pattern.partition("=")
                if name == repr(key.value) and (not has_value or ast.unparse(value) == expected):
                    yield _advice(key, row)

    # ---- lines that are composed

    def _of_call(self, call: ast.Call, statement: ast.stmt | None) -> Iterator[Advice]:
        dotted = self.resolve(call.func)
        library = self._wrapper(call)
        keywords = [each for each in call.keywords if each.arg]
        if library is not None:
            given = dict(zip(_POSITIONS[library], call.args, strict=False))
            by_position = [ast.keyword(name, value) for name, value in given.items()]
            for each in by_position:
                ast.copy_location(each, each.value)
            keywords = [*by_position, *keywords]
            lines = self._wrap(library, {each.arg or "": each.value for each in keywords}, statement)
            yield Advice(call.lineno, library, "", tuple(lines))
        for each in keywords:
            yield from self._of_keyword(dotted, each)
        made_by = self.wrapped.get(ast.unparse(call.func.value)) if isinstance(call.func, ast.Attribute) else None
        if isinstance(call.func, ast.Attribute) and made_by is not None:
            line = _method(made_by, ast.unparse(call.func.value), call)
            if line:
                yield Advice(call.lineno, made_by, "", line)

    def _wrap(self, library: str, given: dict[str, ast.expr], statement: ast.stmt | None) -> list[str]:
        """Returns the lines that shard a model as the call of a wrapper with these arguments does."""
        wrapped = given.get("model" if library == DEEPSPEED else "module")
        model = "model" if wrapped is None else ast.unparse(wrapped)
        lines, options, function = [], self._options(given), "fully_shard"
        strategy = ast.unparse(given["sharding_strategy"]) if "sharding_strategy" in given else ""
        if library == DDP or strategy.endswith(".NO_SHARD"):
            function = "replicate"
        if _is_true(given.get("sync_module_states")) or (library == DDP and not _is_false(given.get("init_sync"))):
            lines.append(f"sync_module_states({model})  # unless all ranks build, or load, the same weights")
            self._need("sync_module_states")
        self._need(function)
        arguments = ", ".join(f"{name}={value}" for name, value in options.items())
        if function == "fully_shard":
            policy = given.get("auto_wrap_policy")
            groups = model if policy is None else f"{model}, {ast.unparse(policy)}"
            if policy is not None or library == DEEPSPEED:
                self._need("wrap_groups")
                if options:
                    lines.append(f"options = dict({arguments})")
                both = "**{**options, **group.options}" if options else "**group.options"
                lines += [f"for group in wrap_groups({groups}):", f"    fully_shard(group.module, {both})"]
                arguments = "**options" if options else ""
        call = f"{function}({model}{', ' if arguments else ''}{arguments})"
        target = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else model
        if library == DEEPSPEED or target == model:
            return [*lines, call]
        return [*lines, f"{target} = {call}"]

    def _options(self, given: dict[str, ast.expr]) -> dict[str, str]:
        """Returns arguments of `fully_shard` for those of a wrapper."""
        options: dict[str, str] = {}
        strategy = given.get("sharding_strategy")
        if strategy is not None:
            options |= _STRATEGIES.get(ast.unparse(strategy).rpartition(".")[2], {})
        if options.get("mesh") == "hsdp_mesh()":
            self._need("hsdp_mesh")
        if "device_mesh" in given:
            options["mesh"] = ast.unparse(given["device_mesh"])
        elif "process_group" in given and not _is_none(given["process_group"]):
            options.setdefault("mesh", f'DeviceMesh.from_group({ast.unparse(given["process_group"])}, "cuda")')
        if "mixed_precision" in given and not _is_none(given["mixed_precision"]):
            options["mp_policy"] = self._policy(given["mixed_precision"])
        if "cpu_offload" in given and not _is_none(given["cpu_offload"]):
            options["offload_policy"] = self._offload(given["cpu_offload"])
            if not options["offload_policy"]:
                del options["offload_policy"]
        for name in ("ignored_states", "ignored_modules"):
            if name in given and not _is_none(given[name]):
                options["ignored_params"] = ast.unparse(given[name])
        return options

    def _policy(self, node: ast.expr) -> str:
        if not isinstance(node, ast.Call) or not _ends(self.resolve(node.func), "MixedPrecision"):
            return ast.unparse(node)
        self._need("MixedPrecisionPolicy")
        positions = dict(zip(("param_dtype", "reduce_dtype", "buffer_dtype"), node.args, strict=False))
        given = {**positions, **{each.arg: each.value for each in node.keywords if each.arg}}
        kept = ("param_dtype", "reduce_dtype", "buffer_dtype", "cast_forward_inputs")
        return f"MixedPrecisionPolicy({', '.join(f'{n}={ast.unparse(given[n])}' for n in kept if n in given)})"

    def _offload(self, node: ast.expr) -> str:
        if not isinstance(node, ast.Call) or not _ends(self.resolve(node.func), "CPUOffload"):
            return ast.unparse(node)
        given = [*node.args, *(each.value for each in node.keywords if each.arg == "offload_params")]
        if not given or _is_false(given[0]):
            return ""
        self._need("CPUOffloadPolicy")
        return "CPUOffloadPolicy()"

    def _need(self, name: str) -> None:
        self.needed[name] = None

    def _of_imports(self) -> Iterator[Advice]:
        """Yields the new imports: all that the new lines need, in place of the first one."""
        for number, node in enumerate(self.imports):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names, kept, library = dict[str, None](), [], ""
            for alias in node.names:
                own = _library_of(base + alias.name)
                if own is None:
                    kept.append(f"{alias.name} as {alias.asname}" if alias.asname else alias.name)
                    continue
                library = own
                name = alias.name.rpartition(".")[2]
                new = name if own == FSDP2 and base else _NEW_NAMES.get(name)
                renamed = f" as {alias.asname}" if new == name and alias.asname else ""
                if new is not None and (not base or renamed or new not in self.needed):
                    names[new + renamed] = None
            ours = sorted({**names, **(self.needed if number == 0 else {})})
            lines = [f"from fsdp2 import {', '.join(ours)}"] if ours else []
            if kept:
                origin = f"from {base[:-1]} import" if base else "import"
                lines.append(f"{origin} {', '.join(kept)}")
            yield Advice(node.lineno, library, "", tuple(lines or ["(delete this line)"]))


def _method(library: str, receiver: str, call: ast.Call) -> tuple[str, ...]:
    """Returns what to write in place of a call of a method of what a wrapper has made; nothing, if rows say it."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    arguments = ", ".join(map(ast.unparse, [*call.args, *call.keywords]))
    if library == FSDP1 and name == "clip_grad_norm_":
        return (f"torch.nn.utils.clip_grad_norm_({receiver}.parameters(), {arguments})",)
    if library == DEEPSPEED and name == "backward" and call.args:
        return (f"{ast.unparse(call.args[0])}.backward()",)
    if library == DEEPSPEED and name == "step":
        return ("optimizer.step()", "optimizer.zero_grad()")
    return ()


def _advice(node: ast.expr | ast.keyword, row: Row) -> Advice:
    return Advice(node.lineno, row.library, row.was, (row.write,))


def _ends(dotted: str, name: str) -> bool:
    return dotted == name or dotted.endswith(f".{name}")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _is_disabled(value: ast.expr) -> bool:
    """Returns True for {"enabled": false}."""
    if not isinstance(value, ast.Dict):
        return False
    given = {
        key.value: each for key, each in zip(value.keys, value.values, strict=True) if isinstance(key, ast.Constant)
    }
    return "enabled" in given and ast.unparse(given["enabled"]) in ("False", "false")
