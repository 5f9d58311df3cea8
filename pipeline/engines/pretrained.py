"""Model folders in Hugging Face format: reading and writing them without progress bars on the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from pipeline.errors import EngineError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def load_model(folder: Path, dtype: str | torch.dtype = "float32") -> PreTrainedModel:
    """The model in evaluation mode, with torch's own attention."""
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, attn_implementation="sdpa").eval()


def save_model(model: PreTrainedModel, folder: Path, tokenizer_folder: Path) -> None:
    """Write what `from_pretrained` of transformers, vLLM and SGLang loads: config, weights, generation config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file() and tokenizer_folder != folder:
            shutil.copyfile(tokenizer_folder / name, folder / name)


def read_state(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's *.safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} holds no *.safetensors file")
    return {name: value for file in files for name, value in load_file(file).items()}


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers inside."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
