"""Replaces torch's FSDP2 by fsdp2 in the program that this process is about to run.

Python runs this file before a program if this folder is on PYTHONPATH: see __main__.py of the package. It does not
import torch, since most processes that a program starts do not need it.
"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from os.path import basename, dirname, join, realpath
from types import ModuleType
from typing import Any

HERE = dirname(realpath(__file__))
PACKAGE = dirname(dirname(HERE))
REPLICATE = "torch.distributed._composable.replicate_with_fsdp"


def load(name: str, spec: Any) -> Any:
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def patch(module: ModuleType) -> None:
    spec = getattr(sys.modules.get(REPLICATE), "__spec__", None)
    if getattr(spec, "_initializing", False) and module.__name__ != REPLICATE:
        return  # this module imported torch's FSDP2 first, and needs torch's own classes until it is complete
    if find_spec(basename(PACKAGE)) is None:  # the package is run from its folder, and not installed
        sys.path.append(dirname(PACKAGE))
    import_module(basename(PACKAGE)).patch_torch()


def run_hidden_sitecustomize() -> None:
    """Runs another sitecustomize.py, which this one hides."""
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if realpath(folder) != HERE])
    if spec is not None:
        load("sitecustomize", spec)


NAME = "_fsdp2_when_imported"
tool = load(NAME, spec_from_file_location(NAME, join(PACKAGE, "bridge", "when_imported.py")))
for name in ("torch.distributed.fsdp", REPLICATE, "torch.distributed.pipelining.stage"):
    tool.when_imported(name, patch)
run_hidden_sitecustomize()
