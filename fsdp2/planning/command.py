"""Runs `python -m fsdp2 plan`: builds a model on meta, plans, and prints the plan."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..engine.policy import MixedPrecisionPolicy
from ..tools.columns import terminal_width
from .plan import plan
from .table import plan_text
from .times import Machine

SECONDS_BETWEEN_LINES = 1.0
_logger = logging.getLogger("fsdp2.planning")
# The arguments that are fields of a Machine.
_OF_MACHINE = (
    *("memory", "headroom", "device", "backend", "flops", "link"),
    *("network", "ranks_per_machine", "host_memory", "host_link"),
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str]) -> int:
    """Prints a plan. Returns 0; or 1 if nothing fits, or nothing but the model itself is wrapped.

    Raises:
        SystemExit: 2, for wrong arguments, or --help.
    """
    parser = _parser()
    given = parser.parse_args([*arguments])
    sys.path.insert(0, "")  # the models of the folder in which it is called
    progress = _Progress()
    try:
        _logger.addHandler(progress)
        _logger.setLevel(logging.DEBUG)
        _logger.info("building the model")
        model, is_of_transformers = _build(given.model)
        made = plan(
            model,
            ranks=given.ranks,
            batch=_batch(given, is_of_transformers),
            loss=_find(given.loss) if given.loss else None,
            policy=_policy(given.policy),
            mp_policy=_precision(given),
            optimizer=_number(given.optimizer),
            machine=Machine(**{name: getattr(given, name) for name in _OF_MACHINE}),
        )
    except (ImportError, AttributeError, OSError, TypeError, ValueError, NotImplementedError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    finally:
        _logger.removeHandler(progress)
        _logger.setLevel(logging.NOTSET)
    print(plan_text(made, terminal_width()))
    if getattr(getattr(model, "config", None), "use_cache", False):
        print(
            "the model returns its cache of keys and values, which stays until backward: to train, and to plan, set "
            "use_cache to false in the config"
        )
    only_root = len(made.groups) == 1
    if only_root:
        print("expected blocks to wrap, found none: pass --policy")
    return int(only_root or not made.fits)


class _Progress(logging.Handler):
    """Writes how far a plan is to stderr: each stage, and settings at most once a second."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._shown_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.DEBUG or time.monotonic() - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._shown_at = time.monotonic()
            print(f"planning: {record.getMessage()}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 plan",
        description="Predicts memory, communication and time of training a model with several settings. It needs no "
        "ranks and no device. Exits with 1 if nothing fits.",
        epilog="For example: python -m fsdp2 plan config.json --ranks 8 --memory 24GB --sequence-length 4096 "
        "--param-dtype bfloat16 --link 370GB/s --flops 4e14",
    )
    add = parser.add_argument
    add("model", help="package.module:name of a class or function without arguments; or a config.json, or its folder")
    add("--ranks", type=int, nargs="+", required=True, help="how many ranks train; several are compared")
    add("--memory", help='bytes of a device: "24GB", "24GiB"')
    add("--headroom", type=float, default=0.1, help="share of it to keep for what is not counted (%(default)s)")
    add("--batch-size", type=int, default=1, help="rows of a rank's batch of token ids (%(default)s)")
    add("--sequence-length", type=int, help="columns of a rank's batch of token ids; without it there is no batch")
    add("--batch", help="package.module:function that returns the arguments of the model, instead")
    add("--loss", help="package.module:function that computes a scalar of the model's output")
    add("--policy", help="classes of blocks, separated by commas, or a number of parameter elements")
    add("--param-dtype", choices=_DTYPES, help="the dtype of compute")
    add("--reduce-dtype", choices=_DTYPES, help="the dtype in which gradients are summed")
    add(
        "--optimizer",
        default="adamw",
        help="adamw, adam, muon, lion, momentum, sgd, or bytes for each element (%(default)s)",
    )
    add("--device", default="cuda", help="type of the device that trains (%(default)s)")
    add("--backend", choices=("nccl", "gloo"), help="of the process group; else as the device usually has")
    add("--flops", type=float, help="floating-point operations per second that a rank reaches in a whole step: 4e14")
    add("--link", help='bytes per second that a rank sends to ranks of its own machine: "370GB/s"')
    add("--network", help='bytes per second that a rank sends to other machines: "50GB/s"')
    add("--ranks-per-machine", type=int, default=8, help="how many neighbouring ranks are on one machine (%(default)s)")
    add("--host-memory", help='bytes of a machine\'s CPU memory, for offload: "1TB"')
    add("--host-link", default="25GB/s", help="bytes per second between that and a device (%(default)s)")
    return parser


def _build(name: str) -> tuple[nn.Module, bool]:
    """Returns the model on meta, and whether it is one of Transformers, made of a config."""
    with torch.device("meta"):
        if Path(name).exists():
            return _of_config(Path(name)), True
        found = _find(name)
        model = found() if callable(found) and not isinstance(found, nn.Module) else found
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: expected a class or a function that makes an nn.Module, got {type(model).__name__}")
    return model, hasattr(model, "config")


def _of_config(path: Path) -> nn.Module:
    try:
        import transformers  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise  # it names the package that transformers misses
        raise ModuleNotFoundError(
            f"{path}: a model of a config needs the package transformers: pip install transformers. Or name a class or "
            "a function that makes the model, as package.module:name"
        ) from error
    config = transformers.AutoConfig.from_pretrained(path)
    classes = [getattr(transformers, each, None) for each in getattr(config, "architectures", None) or ()]
    cls = next(filter(None, classes), None)
    made: nn.Module = cls(config) if cls else transformers.AutoModelForCausalLM.from_config(config)
    return made


def _find(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"expected package.module:name, or a config that exists, got {name!r}, which is no file")
    found: Any = importlib.import_module(module)
    for each in attribute.split("."):
        found = getattr(found, each)
    return found


def _batch(given: argparse.Namespace, is_of_transformers: bool) -> Callable[[], Any] | None:
    if given.batch:
        found: Callable[[], Any] = _find(given.batch)
        return found
    if given.sequence_length is None:
        return None
    ids = torch.zeros(given.batch_size, given.sequence_length, dtype=torch.long)
    return lambda: {"input_ids": ids, "labels": ids} if is_of_transformers else (ids,)


def _policy(text: str | None) -> Any:
    if text is None:
        return None
    number = _number(text)
    return text.split(",") if isinstance(number, str) else number


def _number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _precision(given: argparse.Namespace) -> MixedPrecisionPolicy:
    param, reduce = (_DTYPES.get(each) for each in (given.param_dtype, given.reduce_dtype))
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
