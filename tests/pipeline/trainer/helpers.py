"""Small models and groups made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config.schema import RunConfig
from pipeline.engines.pretrained import save_model
from pipeline.records import NOBODY, STUDENT, Column, Group, Sample, Sampling, Stopping, Task, aborted_sample

VOCAB = 12
PROMPT = 3


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    shape = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(shape).to(dtype).eval()


def saved_student(folder: Path, seed: int = 0) -> Path:
    save_model(tiny_model(seed), folder, folder)
    return folder


@torch.no_grad()
def logprobs_of(model: LlamaForCausalLM, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """[T, V]: row t is the distribution of token t; row 0 is NaN."""
    logits = model(input_ids=torch.from_numpy(tokens[None].astype(np.int64))).logits[0].double() / temperature
    after = torch.log_softmax(logits, -1).numpy()
    return np.concatenate([np.full((1, after.shape[1]), np.nan), after[:-1]])


def make_task(ordinal: int, samples: int = 4, temperature: float = 1.0) -> Task:
    return Task(
        ordinal, f"words/{ordinal}", "words", "single_turn", (("user", "hi"),), "ih", "exact", samples,
        Sampling(temperature=temperature), Stopping(), 7,
    )  # fmt: skip


def make_sample(
    ordinal: int,
    index: int,
    *,
    reward: float | None = 1.0,
    response: int = 4,
    model: LlamaForCausalLM | None = None,
    temperature: float = 1.0,
    finish_reason: str = "finish",
) -> Sample:
    """Random tokens; the behaviour logprobs are the model's own, or -1 without one."""
    tokens = np.random.default_rng([ordinal, index]).integers(3, VOCAB, PROMPT + response).astype(np.int32)
    mask = np.zeros(len(tokens), np.uint8)
    mask[PROMPT:] = 1
    picked = np.full(len(tokens), -1.0)
    if model is not None:
        picked = logprobs_of(model, tokens, temperature)[np.arange(len(tokens)), tokens]
    return Sample(
        sample_id=f"{ordinal}.{index}",
        index=index,
        status="ok",
        reward=reward,
        token_ids=tokens,
        loss_mask=mask,
        logprobs=np.where(mask > 0, picked, np.nan).astype(np.float32),
        executor=np.where(mask > 0, STUDENT, NOBODY).astype(np.uint8),
        versions=np.where(mask > 0, 0, -1).astype(np.int32),
        finish_reason=finish_reason,
    )


def aborted(ordinal: int, index: int) -> Sample:
    return aborted_sample(ordinal, index, [3, 4, 5], abort_reason="infra_conn", error="gone", phase="run")


def make_group(
    ordinal: int,
    rewards: tuple[float | None | str, ...] = (1.0, 0.0, 1.0, 0.0),
    *,
    step: int = 1,
    version: int = 0,
    temperature: float = 1.0,
    teacher: LlamaForCausalLM | None = None,
    signal: str = "sampled",
    **sample: Any,
) -> Group:
    """A reward of "abort" makes an aborted sample. teacher: adds its column."""
    samples = tuple(
        aborted(ordinal, index)
        if reward == "abort"
        else make_sample(ordinal, index, reward=reward, temperature=temperature, response=3 + (ordinal + index) % 3, **sample)
        for index, reward in enumerate(rewards)
    )
    group = Group(ordinal, step, 1, make_task(ordinal, len(samples), temperature), version, samples)
    if teacher is not None:
        group.columns["teacher"] = make_column(group, teacher, signal)
    return group


def make_column(group: Group, teacher: LlamaForCausalLM, signal: str = "sampled", k: int = 4) -> Column:
    samples: dict[str, dict[str, np.ndarray]] = {}
    for sample in group.samples:
        tokens, trained = sample.token_ids, sample.loss_mask > 0
        over = np.where(trained[:, None], logprobs_of(teacher, tokens), np.nan).astype(np.float32)
        arrays = {"logprobs": over[np.arange(len(tokens)), tokens]}
        if signal == "topk":
            ids = np.argsort(-np.nan_to_num(over), axis=1, kind="stable")[:, :k].astype(np.int32)
            arrays |= {"topk_ids": ids, "topk_logprobs": np.take_along_axis(over, ids, 1)}
        elif signal == "full":
            arrays |= {"full_logprobs": over}
        samples[sample.sample_id] = arrays
    return Column("teacher", group.ordinal, "big", "digest", samples)


def make_config(**parts: Any) -> RunConfig:
    """A small run; `parts` replace or extend whole sections."""
    sections: dict[str, Any] = {
        "student": {"path": "student"},
        "teachers": {"big": {"path": "big"}},
        "datasets": {"words": {"source": "jsonl", "path": "words.jsonl"}},
        "rollout": {"tasks_per_step": 4, "samples_per_task": 4},
        "trainer": {"steps": 6, "lr": 1e-2, "warmup_steps": 0, "save_every": 2, "minibatches": 2},
        "eval": {"every": 0, "hold_s": 0.001},
        "algorithm": {"name": "opd", "opd": {"signal": "sampled", "advantage": "raw"}},
    }
    for name, values in parts.items():
        sections[name] = {**sections.get(name, {}), **values}
    return RunConfig(**sections)
