"""Counts the machine instructions that the host takes for a step on the phantom:

    python -m benchmarks.phantom.instructions --out FOLDER [--model 1B] [--ranks 8] ... [LIBRARY ...]

It needs valgrind. Each library has a process of its own. Callgrind instruments the steps that are counted only, all
threads together: the one of the program, autograd's of the device, and NCCL's watchdog, which takes little. Counts
do not depend on what else the machine does. Below each count stand owners of a part of it, with all that their
functions call: hooks also begin gathers and reductions. Options are those of `phantom.record`.
"""

import argparse
import ctypes
import gc
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import install
from .run import ROOT, environment

LIBRARIES = ("plain", "fsdp2", "torch")
WARMUP, STEPS = 4, 2
SECONDS = 3000
# Of valgrind/callgrind.h: requests of a program to the tool that runs it.
ZERO_STATS, DUMP_STATS, START, STOP = 0x43540001, 0x43540000, 0x43540004, 0x43540005
# What a call of valgrind's is on x86-64: a sequence of rotations that changes nothing, and `xchg rbx, rbx`. rax has the
# address of the request and of its arguments. Without valgrind it does nothing.
CODE = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")

# Owner -> its functions of C++. What they call counts, so that an instruction may have two owners.
OWNERS = {
    "NCCL's process group: collectives": r"c10d::ProcessGroupNCCL::(_?allgather|_?reduce_scatter|allreduce)\w*\(",
    "NCCL's process group: waits": r"c10d::ProcessGroupNCCL::WorkNCCL::wait\(",
    "saved-tensor hooks": r"PySavedVariableHooks::call_(un)?pack_hook|PyDefaultSavedVariableHooks::get_hooks",
    "hooks of nodes and of leaves": r"PyFunction(Tensor)?P(re|ost)\w*Hooks?::operator\(\)",
    "events and streams": r"(THPStream_(wait|record|synchronize|enter|exit)|THPEvent_|THCPEvent_|THCPStream_)\w*",
    "casts and copies": r"at::_ops::(_foreach_copy_|split_with_sizes_copy_out|_chunk_cat_out|fsdp::)\w*.*::call",
}


class Callgrind:
    """Talks to the callgrind that runs this process."""

    def __init__(self) -> None:
        self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._code.write(CODE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(address)

    def ask(self, request: int) -> None:
        arguments = (ctypes.c_uint64 * 6)(request)
        self._call(ctypes.addressof(arguments))


def train(library: str, args: argparse.Namespace) -> None:
    """Is the program that valgrind runs."""
    from . import models, record

    mesh, callgrind = record.start(args), Callgrind()
    model, shape = record.build(library, args, mesh)
    ids = models.make_ids(shape, args.rows, args.tokens)

    def step() -> None:
        record.run_step(model, ids, None, None, lambda name: None)

    for _ in range(WARMUP):
        step()
    gc.collect()
    gc.disable()
    callgrind.ask(START)
    callgrind.ask(ZERO_STATS)
    for _ in range(STEPS):
        step()
    callgrind.ask(DUMP_STATS)
    callgrind.ask(STOP)
    os._exit(0)


def count(library: str, options: Sequence[str], out: Path) -> float:
    """Returns million instructions of a step, and leaves callgrind's file, LIBRARY.callgrind, in `out`.

    Raises:
        RuntimeError: it fails.
    """
    counts = out / f"{library}.callgrind"
    tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={counts}"]
    program = [str(install.python()), "-W", "ignore", "-m", __spec__.name, *options, "--train", library]
    more = {"PYTHONHASHSEED": "0", "ATEN_CPU_CAPABILITY": "default"}  # valgrind knows no AVX-512
    pipes = {"capture_output": True, "text": True, "errors": "replace"}
    done = subprocess.run([*tool, *program], cwd=ROOT, env=environment(**more), timeout=SECONDS, **pipes)
    dump = counts.with_suffix(".callgrind.1")
    if done.returncode or not dump.exists():
        raise RuntimeError(f"{library}: status {done.returncode}\n{done.stderr[-3000:]}")
    dump.replace(counts)
    (total,) = re.findall(r"^totals: (\d+)", counts.read_text(), re.M)
    return int(total) / STEPS / 1e6


def by_owner(counts: Path) -> dict[str, float]:
    """Returns owner -> million instructions of a step, with all that the owner's functions call."""
    command = ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(counts)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    told = re.sub(r".*'\d+ .*\n", "", told)  # a function within itself has been counted
    rows = re.findall(r"^\s*([\d,]+) \([^)]*\)\s+(.*)$", told, re.M)
    found = dict.fromkeys(OWNERS, 0.0)
    for number, function in rows:
        for owner, pattern in OWNERS.items():
            if re.search(pattern, function):
                found[owner] += int(number.replace(",", "")) / STEPS / 1e6
                break
    return found


def main() -> None:
    options = sys.argv[1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if "--train" in options:
        from . import record

        parser.add_argument("--train", metavar="LIBRARY")
        record.add_arguments(parser)
        args = parser.parse_args()
        return train(args.train, args)
    if not shutil.which("valgrind"):
        raise SystemExit("needs valgrind")
    parser.add_argument("--out", type=Path, required=True, help="folder for callgrind's files")
    args, rest = parser.parse_known_args()
    names = [name for name in rest if name in LIBRARIES] or list(LIBRARIES)
    rest = [option for option in rest if option not in LIBRARIES]
    install.install()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f"{name}: {count(name, rest, args.out.resolve()):.2f} million instructions a step", flush=True)
        for owner, number in by_owner(args.out / f"{name}.callgrind").items():
            print(f"    {owner}: {number:.2f}", flush=True)


if __name__ == "__main__":
    main()
