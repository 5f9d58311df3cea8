"""vLLM behind the protocol of `engine_server`. Run with the interpreter of an environment that has vLLM.

python vllm_server.py --model FOLDER --max-context N [--engine-args '{"gpu_memory_utilization": 0.5}']
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from engine_server import Json, Refused, arguments, serve

ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Without a GPU: no compilation, a GB of cache, and threads that the operating system places."""


def on_cpu() -> bool:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def check_heads(model: str) -> None:
    """Ends this program for a model that vLLM would load on a CPU and then fail to run."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = json.loads((Path(model) / "config.json").read_text())
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        sys.exit(f"vLLM without a GPU runs models with heads of {', '.join(map(str, sizes))}; this one has heads of {size}")


class Vllm:
    """Implements engine_server.Backend."""

    name = "vllm"

    def __init__(self, args: argparse.Namespace) -> None:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings: dict[str, Any] = {
            "model": args.model,
            "dtype": args.dtype,
            "max_model_len": args.max_context + 1,  # a row to score may fill the context, and vLLM wants room for one more token
            "max_num_seqs": args.slots,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
            "max_logprobs": -1,
        }
        if on_cpu():
            check_heads(args.model)
            settings |= {"enforce_eager": True, "gpu_memory_utilization": 0.1, "distributed_executor_backend": "uni"}
        self.engine_version = vllm.__version__
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings | args.engine_args), start_engine_loop=True)
        self.vocab_size: int = self._engine.model_config.get_vocab_size()

    def _params(self, request: Json, **more: Any) -> Any:
        from vllm import SamplingParams

        greedy = request["temperature"] == 0
        return SamplingParams(
            temperature=request["temperature"],
            top_p=1.0 if greedy else request["top_p"],
            top_k=0 if greedy else request["top_k"],
            max_tokens=request["max_tokens"],
            seed=request["seed"] % 2**63,
            stop_token_ids=request["stop_ids"],
            ignore_eos=True,
            detokenize=False,
            **more,
        )

    async def generate(self, request: Json) -> Json:
        said = (await self._last(request["prompt"], self._params(request, logprobs=0))).outputs[0]
        token_ids = list(said.token_ids)
        if said.finish_reason not in ("stop", "length") or said.logprobs is None:
            raise RuntimeError(f"vLLM ended a sequence with {said.finish_reason!r}")
        pairs = zip(token_ids, said.logprobs, strict=True)
        return {"token_ids": token_ids, "logprobs": [entry[token].logprob for token, entry in pairs]}

    async def stream(self, request: Json) -> AsyncIterator[list[int]]:
        from vllm.sampling_params import RequestOutputKind

        params = self._params(request, output_kind=RequestOutputKind.DELTA)
        try:
            async for output in self._engine.generate({"prompt_token_ids": request["prompt"]}, params, uuid.uuid4().hex):
                yield list(output.outputs[0].token_ids)
        except ValueError as error:
            raise Refused(str(error)) from error

    async def score(self, token_ids: list[int], start: int, top_k: int) -> Json:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=top_k, detokenize=False)
        entries = (await self._last(token_ids, params)).prompt_logprobs
        if entries is None or len(entries) != len(token_ids):
            raise RuntimeError(f"vLLM gave {entries and len(entries)} prompt logprobs for {len(token_ids)} tokens")
        logprobs, topk_ids, topk_logprobs = [], [], []
        for token, entry in zip(token_ids[start:], entries[start:], strict=True):
            if entry is None or token not in entry:
                raise RuntimeError(f"vLLM gave no logprob of the given token {token}")
            logprobs.append(entry[token].logprob)
            # The given token stands among the others; what is not among the most likely k has a rank above k.
            best = sorted(((each.rank, one) for one, each in entry.items() if each.rank <= top_k))[:top_k]
            topk_ids.append([one for _, one in best])
            topk_logprobs.append([entry[one].logprob for _, one in best])
        return {"logprobs": logprobs, "topk_ids": topk_ids, "topk_logprobs": topk_logprobs}

    async def load(self, path: str) -> None:
        await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        if not await self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of the old weights")

    async def check(self) -> None:
        await self._engine.check_health()

    async def _last(self, prompt: list[int], params: Any) -> Any:
        """The whole output of one sequence. Cancelling it ends it in the engine, too."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
        found = None
        try:
            async for output in self._engine.generate({"prompt_token_ids": prompt}, params, uuid.uuid4().hex):
                found = output
        except ValueError as error:
            raise Refused(str(error)) from error
        if found is None:
            raise RuntimeError("vLLM ended a sequence without an output")
        return found


if __name__ == "__main__":
    if on_cpu():
        for key, value in ON_CPU.items():
            os.environ.setdefault(key, value)
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # for one token more than the model's context, never fed back
    serve(arguments(), Vllm)
