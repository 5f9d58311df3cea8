"""SGLang behind the protocol of `engine_server`. Run with the interpreter of an environment that has SGLang.

python sglang_server.py --model FOLDER --max-context N [--engine-args '{"mem_fraction_static": 0.5}']
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.abc
import importlib.machinery
import os
import sys
import time
import types
import uuid
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine_server import Json, Refused, arguments, serve

KERNELS = "sgl_kernel"
"""SGLang's kernels for GPUs: their modules are imported everywhere, also where nothing calls them."""
CPU_TOKENS = 1 << 14
"""Of the cache without a GPU, unless one sequence may be longer."""
RESERVED = 7
"""Tokens of a context that SGLang keeps free beyond a prompt; a row to score may fill the whole context."""
IDLE_S = 10.0
POLL_S = 0.01


def on_cpu() -> bool:
    """True without the kernels for GPUs."""
    try:
        version("sglang-kernel")
    except PackageNotFoundError:
        return True
    return False


class NoKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets `from sgl_kernel... import name` pass on a machine without them; a kernel that is called says so."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != KERNELS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = lambda name: Absent(f"{module.__name__}.{name}") if not name.startswith("__") else _no(name)


class Absent:
    """What is named in such a module: a kernel, or a type that has its own members."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        return Absent(f"{self._name}.{name}") if not name.startswith("__") else _no(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} needs a GPU")


def _no(name: str) -> Any:
    raise AttributeError(name)


def prepare_cpu() -> None:
    """In this process and in those that SGLang starts from it, before anything of SGLang is imported."""
    import torch

    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.meta_path.append(NoKernels())
    for name in ("nms", "qnms"):  # a torchvision whose operators are not built for this torch asks for these two when imported
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Sglang:
    """Implements engine_server.Backend."""

    name = "sglang"

    def __init__(self, args: argparse.Namespace) -> None:
        import sglang

        context = args.max_context + RESERVED
        settings: dict[str, Any] = {
            "model_path": args.model,
            "dtype": args.dtype,
            "context_length": context,
            "max_running_requests": args.slots,
            "skip_tokenizer_init": True,
            "log_level": "warning",
        }
        if on_cpu():
            settings |= {
                "device": "cpu",
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "grammar_backend": "none",
                "disable_cuda_graph": True,
                "disable_overlap_schedule": True,
                "sleep_on_idle": True,
                "mem_fraction_static": 0.1,
                "max_total_tokens": max(context, min(CPU_TOKENS, max(4096, args.slots * context))),
            }
        self.engine_version = sglang.__version__
        self._engine = sglang.Engine(**settings | args.engine_args)
        self._manager = self._engine.tokenizer_manager
        self.vocab_size: int = self._manager.model_config.vocab_size

    def _params(self, request: Json) -> Json:
        greedy = request["temperature"] == 0
        return {
            "temperature": request["temperature"],
            "top_p": 1.0 if greedy else request["top_p"],
            "top_k": -1 if greedy or not request["top_k"] else request["top_k"],
            "max_new_tokens": request["max_tokens"],
            "stop_token_ids": request["stop_ids"],
            "sampling_seed": request["seed"] % 2**31,
        }

    async def generate(self, request: Json) -> Json:
        reply = await self._run(request["prompt"], self._params(request))
        reason = (reply["meta_info"]["finish_reason"] or {}).get("type")
        if reason not in ("stop", "length"):
            raise RuntimeError(f"SGLang ended a sequence with {reason!r}")
        pairs = reply["meta_info"]["output_token_logprobs"]
        token_ids = [token for _, token, *_ in pairs]
        if token_ids != list(reply["output_ids"]):
            raise RuntimeError("SGLang's logprobs are of other tokens than it says")
        return {"token_ids": token_ids, "logprobs": [logprob for logprob, *_ in pairs]}

    async def stream(self, request: Json) -> AsyncIterator[list[int]]:
        """Each of SGLang's replies says all tokens so far."""
        ident, known = uuid.uuid4().hex, 0
        asked = {"input_ids": request["prompt"], "sampling_params": self._params(request), "rid": ident, "stream": True}
        try:
            async for reply in await self._engine.async_generate(**asked):
                fresh, known = list(reply["output_ids"][known:]), len(reply["output_ids"])
                yield fresh
        except (asyncio.CancelledError, GeneratorExit):
            self._manager.abort_request(rid=ident)
            raise
        except ValueError as error:
            raise Refused(str(error)) from error

    async def score(self, token_ids: list[int], start: int, top_k: int) -> Json:
        params = {"temperature": 1.0, "max_new_tokens": 0}
        meta = (await self._run(token_ids, params, logprob_start_len=start - 1, top_logprobs_num=top_k))["meta_info"]
        count = len(token_ids) - start
        pairs = meta["input_token_logprobs"][-count:]  # the first entry is of the token before, and empty
        # SGLang writes 0 for the last id of the vocabulary and for those above, though the logprob is of the given token.
        shown = [token if token < self.vocab_size - 1 else 0 for token in token_ids[start:]]
        if [token for _, token, *_ in pairs] != shown or any(logprob is None for logprob, *_ in pairs):
            raise RuntimeError("SGLang's logprobs of the prompt are not of the given tokens")
        best = meta["input_top_logprobs"][-count:] if top_k else [[]] * count
        return {
            "logprobs": [logprob for logprob, *_ in pairs],
            "topk_ids": [[token for _, token, *_ in entry] for entry in best],
            "topk_logprobs": [[logprob for logprob, *_ in entry] for entry in best],
        }

    async def load(self, path: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        await self._idle()
        done, message, *_ = await self._manager.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path=path))
        if not done:  # it returns its failures
            raise RuntimeError(f"SGLang did not take the weights: {message}")

    async def _idle(self) -> None:
        """SGLang's last batch outlives its last answer for a moment, and weights that meet it end its scheduler."""
        deadline = time.monotonic() + IDLE_S
        while not (await self._manager.flush_cache()).success:
            if time.monotonic() > deadline:
                raise RuntimeError(f"SGLang was not idle within {IDLE_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def check(self) -> None:
        """SGLang ends this process when one of its own dies."""

    async def _run(self, prompt: list[int], params: Json, **logprobs: Any) -> Json:
        """Cancelling it ends the sequence in the engine, too."""
        ident = uuid.uuid4().hex
        try:
            return await self._engine.async_generate(
                input_ids=prompt, sampling_params=params, return_logprob=True, rid=ident, **logprobs
            )
        except asyncio.CancelledError:
            self._manager.abort_request(rid=ident)
            raise
        except ValueError as error:
            raise Refused(str(error)) from error


if on_cpu():  # also in SGLang's own processes, which import this program anew
    prepare_cpu()

if __name__ == "__main__":
    os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")  # for the reserve beyond the model's context
    serve(arguments(), Sglang)
