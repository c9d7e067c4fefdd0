"""One measuring process, as compare.py starts it: reads a job from its command line, writes rows to a file.

python worker.py '{"job": "host", "world_size": 8, "libraries": ["fsdp2", "torch"], "quick": true}' rows.json
"""

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import alignment
import fake_group
import gloo_group
from libraries import load_library
from report import Row


def run_job(job: dict[str, Any]) -> list[Row]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns about deprecated collectives of its own
    libraries = [load_library(name) for name in job["libraries"]]
    if job["job"] == "gloo":
        return gloo_group.run_job(job["rank"], job["store"], libraries, job["quick"])
    if job["job"] == "alignment":
        return alignment.measure_alignment(libraries)
    return fake_group.run_job(job["job"], job["world_size"], libraries, job["quick"])


if __name__ == "__main__":
    rows = run_job(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps([asdict(row) for row in rows]))
