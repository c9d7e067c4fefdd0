"""Is one measuring process, as jobs.py starts it: reads a job from its command line, writes rows to a file.

python -m benchmarks.worker '{"suite": "host", "worlds": [8], "libraries": ["fsdp2", "torch"], "quick": true}' rows.json
"""

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

from .jobs import Job
from .libraries import load_library
from .suites import SUITES


def main(job: Job, rows: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns about deprecated collectives of its own
    suite = SUITES[job.suite]
    if suite.num_ranks == 1:  # gathered contents are arbitrary; denormals would slow the arithmetic down
        torch.set_flush_denormal(True)
    libraries = [load_library(name) for name in job.libraries]
    measured = suite.measure(job, libraries)
    rows.write_text(json.dumps([asdict(row) for row in measured]))


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), Path(sys.argv[2]))
