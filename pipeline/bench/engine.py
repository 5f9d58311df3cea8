"""The engines that this machine has, with the same requests and the same model: tokens a second, and scored rows a second.

What is measured is the engine behind its face: for vLLM and SGLang the way over HTTP is part of it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.models import LAUNCHED, Architecture, Engine, Launch
from pipeline.config.schema import RunConfig
from pipeline.engines.base import Engine as AnyEngine
from pipeline.engines.base import GenerateRequest, ScoreRow, Version
from pipeline.engines.opening import open_student
from pipeline.records import Sampling

SHAPE = Architecture(heads=2, max_positions=128)
"""Heads of 32, which every engine runs without a GPU."""
SEQUENCES, TOKENS, PROMPT, GROUP, SLOTS = 256, 32, 16, 4, 64
ROWS, TOP_K = 256, 4
ROUNDS = 3


def figures(environments: Path) -> dict[str, Any]:
    """environments: folder that `make engines` filled; an engine that is not there is said to be missing."""
    found: dict[str, float] = {}
    notes = [f"{SEQUENCES} sequences of {TOKENS} tokens, {SLOTS} at a time; {ROWS} rows scored with top-{TOP_K}; best of {ROUNDS}"]
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder))
        for kind in ("torch", *LAUNCHED):
            python = environments / kind / "bin" / "python"
            if kind in LAUNCHED and not python.exists():
                notes.append(f"{kind}: not measured, no {python}: `make engines`")
                continue
            launch = Launch(python=python.absolute()) if kind in LAUNCHED else None
            config = _config(model, Engine(kind=kind, slots=SLOTS, launch=launch))
            started = time.perf_counter()
            engine = open_student(config, model, None, log=Path(folder) / f"{kind}.log")
            found[f"{kind}_start_s"] = time.perf_counter() - started
            tokens, rows = asyncio.run(_measure(engine))
            found[f"{kind}_tokens_s"], found[f"{kind}_scored_rows_s"] = tokens, rows
    return {"figures": found, "notes": notes}


async def _measure(engine: AnyEngine) -> tuple[float, float]:
    random = np.random.default_rng(0)
    prompts = random.integers(5, 60, (SEQUENCES, PROMPT)).astype(np.int32)
    requests = [GenerateRequest(f"{i}.0.0", prompt, Sampling(max_tokens=TOKENS), i) for i, prompt in enumerate(prompts)]
    rows = [ScoreRow(f"{i}.0", random.integers(5, 60, PROMPT + TOKENS).astype(np.int32), PROMPT) for i in range(ROWS)]
    tokens_s, rows_s = 0.0, 0.0
    try:
        for _ in range(ROUNDS):
            started = time.perf_counter()
            calls = (engine.generate(requests[i : i + GROUP], Version()) for i in range(0, SEQUENCES, GROUP))
            said = [completion for call in await asyncio.gather(*calls) for completion in call]
            tokens_s = max(tokens_s, sum(len(each.token_ids) for each in said) / (time.perf_counter() - started))
            started = time.perf_counter()
            await engine.score(rows, "topk", TOP_K)
            rows_s = max(rows_s, ROWS / (time.perf_counter() - started))
    finally:
        await engine.close()
    return tokens_s, rows_s


def _model(folder: Path) -> Path:
    """Random weights and a tokenizer of characters."""
    from pipeline.engines.renderer import ChatRenderer
    from pipeline.trainer.models import new_llama, save_model
    from pipeline.trainer.tokenizer import build_tokenizer

    letters = "".join(map(chr, range(33, 100)))
    build_tokenizer([((("user", letters),), letters)], folder)
    save_model(new_llama(SHAPE, ChatRenderer.load(folder), 0), folder, folder)
    return folder


def _config(model: Path, engine: Engine) -> RunConfig:
    words = {"words": {"generator": "spell_backward"}}
    said = {"student": {"path": model}, "datasets": words, "algorithm": {"name": "grpo"}, "engine": engine.model_dump()}
    return RunConfig.model_validate(said)
