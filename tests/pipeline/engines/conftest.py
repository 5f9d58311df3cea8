"""Tiny models in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.engines.renderer import ChatRenderer
from pipeline.trainer.tokenizer import build_tokenizer

WORDS = ["sun", "moon", "tree", "stone", "river", "cloud", "Bird", "fox"]
TEXTS = [((("user", f"Spell this word backward: {word}"),), word[::-1]) for word in WORDS]


def make_model(
    folder: Path,
    *,
    seed: int = 0,
    kv_heads: int = 4,
    tie: bool = False,
    rows: int | None = None,
    hidden: int = 32,
    std: float = 0.3,
) -> LlamaForCausalLM:
    """Random weights wide enough that distributions are far from flat. rows: of the output matrix, at least the vocabulary."""
    build_tokenizer(TEXTS, folder)
    renderer = ChatRenderer.load(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=rows or renderer.vocab_size,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=48,
        initializer_range=std,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=renderer.eos_token_id,
        pad_token_id=renderer.pad_token_id,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def constant_model(folder: Path, token: int) -> None:
    """A model that says `token` whatever it reads: its output matrix favours that row and its hidden states are constant."""
    model = make_model(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[token].fill_(1.0)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path
