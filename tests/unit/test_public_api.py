"""Tests that the public API is the one of public_api.txt: names, arguments, defaults, fields and methods.

A difference is a change of what STABILITY.md promises. If it is meant, write the file anew and say it in CHANGELOG.md:

    FSDP2_WRITE_API=1 python -m pytest tests/unit/test_public_api.py
"""

import inspect
import itertools
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp2
from documents import ROOT, results
from fsdp2 import checkpoint, compression, hf, testing
from fsdp2.module import public_methods

LIST = Path(__file__).with_name("public_api.txt")


def signature(value: Any) -> str:
    """Returns arguments and their defaults, without annotations, which differ from one version of Python to another."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r"<function (\S+) at 0x\w+>", r"\1", text)


def describe(prefix: str, value: Any) -> Iterator[str]:
    is_class = isinstance(value, type)
    yield f"{prefix}{signature(value) if callable(value) else ''}"
    if not is_class:
        return
    names = public_methods() if value is fsdp2.FSDPModule else vars(value)
    for name in sorted(names):
        member = inspect.getattr_static(value, name, None)
        if name.startswith("_") or member is None:
            continue
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        yield f"{prefix}.{name}{signature(member) if inspect.isfunction(member) else ''}"


def public_api() -> list[str]:
    modules = {"fsdp2": fsdp2, "fsdp2.checkpoint": checkpoint, "fsdp2.compression": compression, "fsdp2.hf": hf}
    modules["fsdp2.testing"] = testing
    paths = [f"{path}.{name}" for path, module in modules.items() for name in sorted(module.__all__)]
    paths += sorted(f"fsdp2.{path}" for path in itertools.chain(*results().values()))
    return [line for path in paths for line in describe(path, pkgutil.resolve_name(path))]


def returned_classes(function: Any) -> Iterator[str]:
    """Yields the paths of the classes of fsdp2 in a function's annotation of what it returns, below `fsdp2.`."""
    for word in re.findall(r"\w+", str(inspect.signature(function).return_annotation)):
        value = getattr(inspect.getmodule(inspect.unwrap(function)), word, None)
        if isinstance(value, type) and value.__module__.startswith("fsdp2."):
            yield f"{value.__module__.removeprefix('fsdp2.')}.{word}"


def test_what_public_functions_return_is_documented() -> None:
    """A class of results that is no public name is in the reference, behind a function that returns it."""
    functions = {name: getattr(fsdp2, name) for name in fsdp2.__all__}
    functions |= {f"checkpoint.{name}": getattr(checkpoint, name) for name in checkpoint.__all__}
    functions |= {f"hf.{name}": getattr(hf, name) for name in hf.__all__}
    functions |= {f"FSDPModule.{name}": getattr(fsdp2.FSDPModule, name) for name in public_methods()}
    shown, found = {*itertools.chain(*results().values())}, set[str]()
    for function in functions.values():
        if inspect.isfunction(function):
            found |= {*returned_classes(function)}
    private = {path for path in found if path.rpartition(".")[2] not in fsdp2.__all__}
    assert private <= shown
    assert {*results()} <= {*functions}
    assert "optim.split.MatrixSplit" in private


def test_the_public_api_is_the_one_that_is_promised() -> None:
    found = public_api()
    if os.environ.get("FSDP2_WRITE_API") == "1":
        LIST.write_text("\n".join(found) + "\n")
    promised = LIST.read_text().splitlines()
    gone, new = [each for each in promised if each not in found], [each for each in found if each not in promised]
    assert (gone, new) == ([], []), "see the head of this file"
    assert len(found) > 200


def test_documents_of_the_package_exist() -> None:
    """With the version's heading in the list of changes."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {fsdp2.__version__}\n" in changes
    assert "tests/unit/public_api.txt" in (ROOT / "STABILITY.md").read_text()
    assert (ROOT / "SECURITY.md").exists()
