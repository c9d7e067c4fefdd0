"""Tests the engine of examples/adapters in verl's registry, as verl's workers build it, against a plain model."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_llama
from documents import ROOT
from helpers import alone, assert_same

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
STEPS, LR, CLIP, WARMUP = 3, 0.01, 0.3, 4
OPTIMIZER = {"lr": LR, "clip_grad": CLIP, "weight_decay": 0.0, "lr_warmup_steps": WARMUP, "total_training_steps": 10}
NEEDED = ("verl", "ray", "tensordict", "codetiming", "hydra", "peft", "transformers", "PIL", "orjson", "uvicorn", "zmq")


def log_probs(model: Any, row: Tensor) -> Tensor:
    """Of each token but the first."""
    logits = model(input_ids=row[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1)


def trained_plainly(folder: Path) -> dict[str, Any]:
    """On all texts, by the mean over their predicted tokens, with verl's optimizer, clipping and warm-up."""
    model = tiny_llama.load(folder, attn_implementation="eager")
    record: dict[str, Any] = {"log_probs": [log_probs(model, row).detach() for row in tiny_llama.texts(0)]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / WARMUP))
    for step in range(STEPS):
        found = torch.cat([log_probs(model, row) for row in tiny_llama.texts(step)])
        loss = -found.sum() / found.numel()
        record[f"loss {step}"] = loss.detach()
        optimizer.zero_grad()
        loss.backward()
        record[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        record[f"lr {step}"] = schedule.get_last_lr()[0]
    record["weights"] = {name: each.detach() for name, each in model.state_dict().items()}
    return record


CASES: dict[str, dict[str, Any]] = {
    "one text at a time": {"micro": 1, "engine": {}},
    "shards leave the device between phases": {
        "micro": 2,
        "engine": {"param_offload": True, "optimizer_offload": True},
    },
    "each micro-batch is reduced": {
        "micro": 1,
        "engine": {"use_no_sync_for_gradient_accumulation": False, "reshard_after_forward": False},
    },
}


def run_verl(folder: Path, settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Starts two ranks as verl's workers are started: its environment names the modules with the engine and with CPUs.

    In processes of their own, since verl reads the platform when it is imported.
    """
    here, adapters = Path(__file__).parent, ROOT / "examples" / "adapters"
    paths = [str(path) for path in (ROOT, ROOT / "tests", here, adapters)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "VERL_PLATFORM": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    environment |= {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpus,verl_engine", "VERL_ENGINE_VENDOR": "fsdp2"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [
        str(here / "verl_program.py"),
        str(folder),
        json.dumps({"steps": STEPS, "optimizer": OPTIMIZER} | settings),
    ]
    return subprocess.run([*launch, *program], env=environment, capture_output=True, text=True, timeout=280)


def make_folder(folder: Path) -> Path:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        pytest.skip(f"verl's engines need {', '.join(missing)}: see tests/clients/README.md")
    import transformers

    return tiny_llama.save(transformers.LlamaConfig(**tiny_llama.SIZES), folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_engine(case: str, tmp_path: Path) -> None:
    """It scores, trains, exports weights and changes of weights, saves and resumes. The program compares the latter."""
    folder = make_folder(tmp_path)
    expected = alone(partial(trained_plainly, folder))
    done = run_verl(folder, CASES[case])
    assert done.returncode == 0, done.stderr[-6000:]
    records = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
    for rank, record in enumerate(records):
        assert record["class"] == "verl_engine.LanguageModelEngine"
        assert record["sharded"] == 3
        for own, row in zip(record["log_probs"], expected["log_probs"][rank::2], strict=True):
            assert_same(own[:-1], row, **tiny_llama.TOLERANCE, name="log_probs")
        for step in range(STEPS):
            assert record[f"lr {step}"] == pytest.approx(expected[f"lr {step}"])
            for name in (f"loss {step}", f"norm {step}"):
                assert_same(torch.as_tensor(record[name]), expected[name], **tiny_llama.TOLERANCE, name=name)
        assert record["weights"].keys() == expected["weights"].keys()
        for name, value in expected["weights"].items():
            assert_same(record["weights"][name], value, **tiny_llama.TOLERANCE, name=name)
    assert sum(record["changes"] for record in records) > 0
    assert expected["norm 0"] > CLIP, "the test shall clip"
    import transformers

    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "step2" / "huggingface")
    assert saved.state_dict().keys() == expected["weights"].keys()


def test_settings_that_it_lacks(tmp_path: Path) -> None:
    fp16 = {"mixed_precision": {"param_dtype": "fp16"}}
    done = run_verl(make_folder(tmp_path), {"micro": 1, "engine": fp16 | {"forward_prefetch": True}})
    assert done.returncode != 0
    assert "mixed_precision.param_dtype=fp16, forward_prefetch: fsdp2's engine for verl does not have it" in done.stderr
