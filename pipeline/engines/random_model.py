"""A Llama of random weights in the shape of a real one, on any device: what a scoring call costs does not depend on the weights."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.engines.base import ScoreRow
from pipeline.errors import ConfigError

SHAPES = {
    "1.7b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512},
}
VOCAB = 49152
"""Where the shape says nothing else."""
PADDING = 0


class RandomModel:
    """Raises ConfigError for a shape or a device that is not there."""

    def __init__(self, shape: str, device: str) -> None:
        if shape not in SHAPES:
            raise ConfigError(f"shape {shape!r} is unknown: one of {sorted(SHAPES)}")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"device {device!r}: this machine has no GPU that torch can use")
        settings = LlamaConfig(**({"vocab_size": VOCAB, "max_position_embeddings": 8192} | SHAPES[shape]))
        with torch.device(device), torch.random.fork_rng(devices=[]):
            self._model = LlamaForCausalLM(settings).to(torch.float32 if device == "cpu" else torch.bfloat16).eval()
        self._device = torch.device(device)
        self.vocab_size: int = settings.vocab_size

    @torch.inference_mode()
    def score(self, rows: list[ScoreRow]) -> list[np.ndarray]:
        """float32 [T - start] a row: logprobs of its tokens, in one forward pass. The device has finished when it returns."""
        lengths = [len(row.token_ids) for row in rows]
        tokens_bt = np.full((len(rows), max(lengths)), PADDING, np.int64)
        for place, row in enumerate(rows):
            tokens_bt[place, : lengths[place]] = row.token_ids
        given_bt = torch.from_numpy(tokens_bt).to(self._device)
        hidden_bth = self._model.model(input_ids=given_bt).last_hidden_state
        return [self._row(hidden_bth[place], given_bt[place], row.start, lengths[place]) for place, row in enumerate(rows)]

    def _row(self, hidden_th: torch.Tensor, tokens_t: torch.Tensor, start: int, length: int) -> np.ndarray:
        logits_sv = self._model.lm_head(hidden_th[start - 1 : length - 1]).float()
        picked_s = logits_sv.gather(-1, tokens_t[start:length, None])[:, 0] - logits_sv.logsumexp(-1)
        return picked_s.cpu().numpy()
