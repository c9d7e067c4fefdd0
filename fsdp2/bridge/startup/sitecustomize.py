"""Replaces torch's FSDP2 by fsdp2 in the program that this process is about to run.

Python runs this file before a program if this folder is on PYTHONPATH: see __main__.py of the package. It does not
import torch, since most processes that a program starts do not need it.
"""

import atexit
import os
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


def watch_training(optimizers: Any) -> None:
    """Has this process say at its end that it has trained, and sharded nothing. `optimizers`: torch's module.

    Processes that take no optimizer step say nothing: launchers, workers, programs that only generate.
    """
    steps: set[str] = set()  # the hook stays: it can't be removed while torch calls it
    optimizers.register_optimizer_step_post_hook(lambda *_: steps.add("one"))
    atexit.register(say_if_unsharded, steps)


def say_if_unsharded(steps: set[str]) -> None:
    if not steps:
        return
    distributed = import_module("torch.distributed")
    is_initialized = distributed.is_available() and distributed.is_initialized()
    rank = distributed.get_rank() if is_initialized else int(os.environ.get("RANK", "0"))
    module = getattr(sys.modules.get(basename(PACKAGE)), "FSDPModule", None)
    sharded = [] if module is None else [each for each in module.__subclasses__() if each.__name__.startswith("FSDP")]
    if rank == 0 and not sharded:
        what = "fully_shard was never called in this process, and fsdp2 has sharded nothing"
        where = "accelerate and Trainer call it only where there is an accelerator, and with fsdp_version: 2"
        print(f"python -m fsdp2: {what}. ({where}.)", file=sys.stderr)


def run_hidden_sitecustomize() -> None:
    """Runs another sitecustomize.py, which this one hides."""
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if realpath(folder) != HERE])
    if spec is not None:
        load("sitecustomize", spec)


NAME = "_fsdp2_when_imported"
tool = load(NAME, spec_from_file_location(NAME, join(PACKAGE, "torch_private", "when_imported.py")))
for name in ("torch.distributed.fsdp", REPLICATE, "torch.distributed.pipelining.stage"):
    tool.when_imported(name, patch)
tool.when_imported("torch.optim.optimizer", watch_training)
run_hidden_sitecustomize()
