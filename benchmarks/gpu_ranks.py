"""Runs a program on several ranks of one machine, which may share a GPU:

    python -m benchmarks.gpu_ranks 2 tests/cuda/ranks_program.py cuda

NCCL refuses two ranks on a GPU of one host. So each rank names a host of its own (`NCCL_HOSTID`), and ranks talk over
sockets of the loopback interface. That is slow, and it is NCCL: its sums, its grouped calls, its streams. The ranks
stay in the caller's process group, which can be ended as a whole; torchrun puts each into a session of its own.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from .jobs import ROOT

# After one rank has failed, the others get so long to report errors of their own.
GRACE_S = 5.0


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Returns the variables of one rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_NCHANNELS": "1",  # kernels of several processes take turns: one of few blocks waits less
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # NCCL 2.30 and later
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_on_ranks(size: int, command: Sequence[str]) -> int:
    """Returns 0 if all ranks end with 0, else the status of one that has failed; the others are ended then."""
    port = free_port()
    ranks = [
        subprocess.Popen([sys.executable, *command], cwd=ROOT, env={**os.environ, **rank_environment(rank, size, port)})
        for rank in range(size)
    ]
    try:
        deadline = float("inf")
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() for rank in ranks):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.05)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    codes = [rank.returncode for rank in ranks]
    return next((code for code in codes if code > 0), 1 if any(codes) else 0)


if __name__ == "__main__":
    raise SystemExit(run_on_ranks(int(sys.argv[1]), sys.argv[2:]))
