"""Digests of model folders. Equal digests mean equal bytes, whatever the folder is called."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pipeline.errors import UserError

_TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder", "added_tokens")


def model_digest(folder: Path) -> str:
    """Digest of the weights and of config.json."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no *.safetensors file")
    digest = hashlib.sha256()
    for file in [folder / "config.json", *files]:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def tokenizer_digest(folder: Path) -> str:
    """Digest of what maps ids to text and back: two models with equal digests read each other's tokens."""
    record = json.loads((folder / "tokenizer.json").read_text())
    return text_digest({part: record.get(part) for part in _TOKENIZER_PARTS})


def text_digest(value: object) -> str:
    """Digest of anything that JSON can say; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]
