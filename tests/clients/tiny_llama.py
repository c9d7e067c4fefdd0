"""Writes a small random Llama to disk, which clients of the Hugging Face family load, and trains it plainly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from client_training import Record

VOCAB, STEPS, ROWS, LENGTH = 17, 4, 4, 5
SGD = (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5})
MAX_NORM = 0.5
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}  # fp32: models compute their norms, rotations and experts in it anyway
SIZES = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "intermediate_size": 12}


def save(config: Any, folder: Path) -> Path:
    """Before the fork, so that no rank imports the model's modules."""
    import transformers

    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, vocab: int = VOCAB) -> None:
    """Every token is a number. Also before the fork."""
    import tokenizers
    import transformers

    words = {str(token): token for token in range(vocab)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "0", "eos_token": "1", "unk_token": "0"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def load(folder: Path, **options: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def batch(step: int) -> Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def texts(step: int) -> list[Tensor]:
    """Returns texts of different lengths."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in (5, 7, 4, 6)]


def train(
    model: nn.Module,
    own: Callable[[Tensor], Tensor] = lambda batch: batch,
    mean: Callable[[Tensor], Tensor] = Tensor.detach,
    clip: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> Record:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = optimizer or SGD[0](trained, **SGD[1])
    record = Record()
    for step in range(STEPS):
        tokens = own(batch(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        record.add(f"loss {step}", mean(loss))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    record.add_params(model.named_parameters())
    return record
