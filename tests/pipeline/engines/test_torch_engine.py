from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config.models import Engine as EngineSettings
from pipeline.engines.base import Completion, GenerateRequest, ScoreRow, Version
from pipeline.engines.renderer import ChatRenderer
from pipeline.engines.torch_engine import TorchEngine
from pipeline.engines.weights import WeightStore
from pipeline.errors import ConfigError, EngineError, RowRefused, SwapTimeout
from pipeline.records import Sampling
from tests.pipeline.engines.conftest import WORDS, constant_model, make_model

GREEDY = Sampling(temperature=0.0, max_tokens=12)


@asynccontextmanager
async def engine(folder: Path | None, weights: WeightStore | None = None, **options) -> AsyncIterator[TorchEngine]:
    smoothing = options.pop("smoothing", 0.0)
    made = TorchEngine(folder, weights, EngineSettings(**{"slots": 4, "swap_timeout_s": 5.0, **options}), smoothing=smoothing)
    try:
        yield made
    finally:
        await made.close()


def requests(folder: Path, count: int, sampling: Sampling, seed: int = 100) -> list[GenerateRequest]:
    """Prompts of different lengths."""
    renderer = ChatRenderer.load(folder)
    texts = [("Spell this word backward: " if i % 3 else "") + WORDS[i % len(WORDS)] * (1 + i % 4) for i in range(count)]
    return [GenerateRequest(f"{i}.0.0", renderer.render((("user", text),)), sampling, seed + i) for i, text in enumerate(texts)]


def plain_greedy(folder: Path, prompt: np.ndarray, tokens: int, stop: int) -> tuple[list[int], list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids, said, logprobs = list(map(int, prompt)), [], []
    with torch.no_grad():
        while len(said) < tokens and (not said or said[-1] != stop):
            row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
            said.append(int(row.argmax()))
            logprobs.append(float(row.max()))
            ids.append(said[-1])
    return said, logprobs


@pytest.mark.parametrize(("kv_heads", "tie"), [(4, False), (2, False), (1, True)])
async def test_generates_what_a_plain_loop_generates(tmp_path: Path, kv_heads: int, tie: bool) -> None:
    make_model(tmp_path, seed=3, kv_heads=kv_heads, tie=tie)
    asked = requests(tmp_path, 11, GREEDY)
    async with engine(tmp_path) as made:
        completions = await made.generate(asked, Version())
    assert [each.request_id for each in completions] == [each.request_id for each in asked]
    for request, completion in zip(asked, completions, strict=True):
        tokens, logprobs = plain_greedy(tmp_path, request.prompt, 12, stop=2)
        assert completion.token_ids.tolist() == tokens
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
        assert completion.finish_reason == ("stop" if tokens[-1] == 2 else "length")
        assert completion.weight_version == 0


def rows_of(asked: list[GenerateRequest], completions: list[Completion]) -> list[ScoreRow]:
    """What was said, to be scored."""
    said = zip(asked, completions, strict=True)
    return [ScoreRow(c.request_id, np.concatenate([r.prompt, c.token_ids]), len(r.prompt)) for r, c in said]


async def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch(folder: Path) -> None:
    asked = requests(folder, 24, Sampling(temperature=1.3, top_p=0.95, max_tokens=16))
    async with engine(folder, slots=24) as wide, engine(folder, slots=3) as narrow:
        together = await wide.generate(asked, Version())
        alone = [(await narrow.generate([each], Version()))[0] for each in asked]
        calls = await asyncio.gather(*(narrow.generate(asked[i : i + 5][::-1], Version()) for i in range(0, 24, 5)))
    shuffled = {each.request_id: each for call in calls for each in call}
    for first, second in zip(together, alone, strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist() == shuffled[first.request_id].token_ids.tolist()
        np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)
    assert len({tuple(each.token_ids) for each in together}) > 12


async def test_sampled_logprobs_equal_the_scores_of_the_same_tokens(folder: Path) -> None:
    asked = requests(folder, 10, Sampling(max_tokens=16))
    async with engine(folder) as made:
        completions = await made.generate(asked, Version())
        scored = await made.score(rows_of(asked, completions), "sampled", 0)
    for completion, row in zip(completions, scored, strict=True):
        np.testing.assert_allclose(completion.logprobs, row.logprobs, atol=1e-4)


async def test_the_context_bounds_a_response(folder: Path) -> None:
    prompt = np.full(45, 7, np.int32)
    async with engine(folder) as made:
        (completion,) = await made.generate([GenerateRequest("a", prompt, Sampling(max_tokens=30), 0)], Version())
        assert len(completion.token_ids) <= 3
        with pytest.raises(RowRefused, match="b: 48 tokens"):
            await made.generate([GenerateRequest("b", np.full(48, 7, np.int32), GREEDY, 0)], Version())
        with pytest.raises(RowRefused, match="outside the vocabulary"):
            await made.generate([GenerateRequest("c", np.full(3, 999, np.int32), GREEDY, 0)], Version())
    with pytest.raises(ConfigError, match="max_context 64"):
        TorchEngine(folder, None, EngineSettings(max_context=64))


@pytest.mark.fault(31)
async def test_no_tokens_carry_a_version_that_did_not_make_them(tmp_path: Path) -> None:
    """Version v says token 5 + v, so that every token tells which weights made it."""
    folders = [tmp_path / f"m{i}" for i in range(6)]
    for version, each in enumerate(folders):
        constant_model(each, 5 + version)
    store = WeightStore(tmp_path / "weights")
    publish(store, 0, folders[0])

    async def roll(made: TorchEngine, index: int) -> None:
        for turn in range(6):
            prompt = np.full(3 + index, 8, np.int32)
            asked = [
                GenerateRequest(f"{index}.{j}.{turn}", prompt, Sampling(temperature=0.0, max_tokens=20 + j), j) for j in range(3)
            ]
            completions = await made.generate(asked, Version())
            assert len({each.weight_version for each in completions}) == 1
            for each in completions:
                assert set(each.token_ids.tolist()) == {5 + each.weight_version}
                seen.append(each.weight_version)

    for swap in ("drain", "abort"):
        seen: list[int] = []
        async with engine(folders[0], store, slots=5, swap=swap) as made:
            rolls = [asyncio.create_task(roll(made, index)) for index in range(8)]
            for version in range(1, 6):
                enough = len(seen) + 10
                while len(seen) < enough and not all(each.done() for each in rolls):
                    await asyncio.sleep(0.002)
                publish(store, version, folders[version])
            await asyncio.gather(*rolls)
            assert (await made.generate([GenerateRequest("z", np.full(3, 8, np.int32), GREEDY, 0)], Version(5)))[
                0
            ].weight_version == 5
        assert len(set(seen)) > 1


def publish(store: WeightStore, version: int, source: Path) -> None:
    store.publish(version, lambda aside: shutil.copytree(source, aside, dirs_exist_ok=True) and None)


async def test_a_call_waits_for_its_version_and_not_for_ever(folder: Path, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    asked = requests(folder, 2, GREEDY)
    async with engine(folder, store, swap_timeout_s=0.3) as made:
        assert (await made.info()).weight_version == -1
        with pytest.raises(SwapTimeout, match="at least 0"):
            await made.generate(asked, Version())
        publish(store, 3, folder)
        assert (await made.generate(asked, Version()))[0].weight_version == 3
        with pytest.raises(SwapTimeout, match="at least 4.*newest published 3"):
            await made.generate(asked, Version(minimum=4))
        waiting = asyncio.create_task(made.generate(asked, Version(minimum=4)))
        exact = asyncio.create_task(made.generate(asked, Version(exact=4)))
        others = await made.generate(asked, Version(minimum=2))  # those who wait block nobody
        assert others[0].weight_version == 3
        publish(store, 4, folder)
        assert (await waiting)[0].weight_version == (await exact)[0].weight_version == 4
        publish(store, 5, folder)
        await made.generate(asked, Version(minimum=5))
        began = time.monotonic()
        with pytest.raises(SwapTimeout, match="exactly 4"):  # it will never be served again: said at once
            await made.generate(asked, Version(exact=4))
        assert time.monotonic() - began < 0.2


async def test_a_restarted_engine_serves_the_newest_version(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    constant_model(old, 6)
    constant_model(new, 9)
    store = WeightStore(tmp_path / "weights")
    publish(store, 0, old)
    publish(store, 7, new)
    async with engine(old, store) as made:
        (completion,) = await made.generate([GenerateRequest("a", np.full(3, 8, np.int32), GREEDY, 0)], Version())
    assert completion.weight_version == 7 and set(completion.token_ids.tolist()) == {9}


async def test_scores_equal_transformers_and_are_joined_by_row(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rng = np.random.default_rng(0)
    lengths = [5, 40, 2, 17, 1, 48, 30, 9]
    rows = [
        ScoreRow(f"r{i}", rng.integers(5, 20, length).astype(np.int32), int(rng.integers(1, length + 1)))
        for i, length in enumerate(lengths)
    ]
    async with engine(folder) as made:
        sampled = await made.score(rows, "sampled", 0)
        topk = await made.score(rows, "topk", 3)
        full = await made.score(rows, "full", 0)
    for row, first, second, third in zip(rows, sampled, topk, full, strict=True):
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor(row.token_ids[None].astype(np.int64))).logits[0], -1).numpy()
        wanted = table[row.start - 1 : len(row.token_ids) - 1]
        assert first.row_id == second.row_id == third.row_id == row.row_id
        np.testing.assert_allclose(first.logprobs, wanted[np.arange(len(wanted)), row.token_ids[row.start :]], atol=1e-5)
        np.testing.assert_allclose(third.full_logprobs, wanted, atol=1e-5)
        assert second.topk_ids.shape == second.topk_logprobs.shape == (len(wanted), 3)
        np.testing.assert_allclose(second.topk_logprobs, -np.sort(-wanted, -1)[:, :3], atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(wanted, second.topk_ids.astype(int), -1), second.topk_logprobs, atol=1e-5)


@pytest.mark.fault(21)
async def test_known_probabilities_land_on_the_right_tokens(tmp_path: Path) -> None:
    """A toy teacher that looks at the current token c only and says token 5 next with probability 2^-(c - 4)."""
    model = make_model(tmp_path)
    vocabulary = model.config.vocab_size
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(32**-0.5)  # a one-hot embedding comes out of the norm as the same one-hot
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        for current in range(5, 12):
            model.model.embed_tokens.weight[current, current] = 1000.0
            chance = 2.0 ** -(current - 4)
            model.lm_head.weight[:, current] = float(np.log((1 - chance) / (vocabulary - 1)))
            model.lm_head.weight[5, current] = float(np.log(chance))
    model.save_pretrained(tmp_path)
    tokens = np.array([5, 5, 6, 5, 7, 5, 8, 5], np.int32)
    rows = [ScoreRow(f"s{start}", tokens, start) for start in (1, 3, 7, 8)]
    async with engine(tmp_path) as made, engine(tmp_path, smoothing=0.1) as smooth:
        scored = await made.score(rows, "sampled", 0)
        flattened = await smooth.score(rows, "full", 0)
        assert (await made.info()).digest != (await smooth.info()).digest
    foreign = 0.5 / (vocabulary - 1)  # after token 5, of any token but 5
    full = np.log([1 / 2, foreign, 1 / 4, foreign, 1 / 8, foreign, 1 / 16])
    for row, result, flat in zip(rows, scored, flattened, strict=True):
        np.testing.assert_allclose(result.logprobs, full[row.start - 1 :], atol=1e-4)
        np.testing.assert_allclose(flat.logprobs, np.log(0.9 * np.exp(full[row.start - 1 :]) + 0.1 / vocabulary), atol=1e-4)
        np.testing.assert_allclose(np.exp(flat.full_logprobs).sum(-1), 1.0, atol=1e-5)
    assert scored[-1].logprobs.shape == (0,) and flattened[-1].full_logprobs.shape == (0, vocabulary)


async def test_a_row_that_cannot_be_scored_is_named(folder: Path) -> None:
    good = ScoreRow("good", np.full(4, 7, np.int32), 2)
    async with engine(folder) as made:
        for bad, words in [
            (ScoreRow("long", np.full(49, 7, np.int32), 1), "row long: 49 tokens"),
            (ScoreRow("foreign", np.array([7, 500], np.int32), 1), "row foreign: .*500"),
            (ScoreRow("negative", np.array([7, -1], np.int32), 1), "row negative"),
            (ScoreRow("start", np.full(4, 7, np.int32), 0), "row start: start 0"),
        ]:
            with pytest.raises(RowRefused, match=words):
                await made.score([good, bad], "sampled", 0)
        assert len(await made.score([good], "sampled", 0)) == 1


async def test_a_fault_reaches_everyone_who_waits_and_the_engine_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(folder, 9, GREEDY)
    async with engine(folder) as made:
        healthy = made._model.decode
        monkeypatch.setattr(made._model, "decode", lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
        results = await asyncio.gather(*(made.generate(asked, Version()) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(each, EngineError) and isinstance(each.__cause__, RuntimeError) for each in results)
        monkeypatch.setattr(made._model, "decode", healthy)
        assert len(await made.generate(asked, Version())) == 9
        monkeypatch.setattr(made._model, "decode", lambda *_: (_ for _ in ()).throw(SystemExit(3)))
        with pytest.raises(EngineError, match="SystemExit"):
            await made.generate(asked, Version())
        with pytest.raises(EngineError, match="dead"):
            await made.info()
        with pytest.raises(EngineError, match="dead"):
            await made.generate(asked, Version())


async def test_broken_weights_are_an_error_and_good_ones_heal(folder: Path, tmp_path: Path) -> None:
    broken, other = tmp_path / "broken", tmp_path / "other"
    model = make_model(broken)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(broken)
    make_model(other, rows=77)
    store = WeightStore(tmp_path / "weights")
    publish(store, 0, folder)
    asked = requests(folder, 3, GREEDY)
    async with engine(folder, store) as made:
        first = await made.generate(asked, Version())
        publish(store, 1, broken)
        with pytest.raises(EngineError, match="not finite"):
            await made.generate(asked, Version())
        publish(store, 2, other)
        with pytest.raises(EngineError, match="another model"):
            await made.generate(asked, Version())
        publish(store, 3, folder)
        again = await made.generate(asked, Version())
    assert [each.token_ids.tolist() for each in again] == [each.token_ids.tolist() for each in first]


async def test_a_cancelled_call_makes_room_and_a_closed_engine_says_so(folder: Path) -> None:
    endless = [GenerateRequest(f"{i}", np.full(2, 7, np.int32), Sampling(temperature=5.0, max_tokens=40), i) for i in range(200)]
    async with engine(folder, slots=2) as made:
        long = asyncio.create_task(made.generate(endless, Version()))
        await asyncio.sleep(0.05)
        long.cancel()
        await asyncio.wait_for(made.generate(requests(folder, 1, GREEDY), Version()), 2)
        left = asyncio.create_task(made.generate(endless, Version()))
        await asyncio.sleep(0.02)
        await made.close()
        with pytest.raises(EngineError, match="closed"):
            await left
        with pytest.raises(EngineError, match="closed"):
            await made.generate(endless, Version())


async def test_a_stream_says_what_a_call_says_token_by_token(folder: Path) -> None:
    asked = requests(folder, 6, Sampling(temperature=1.3, max_tokens=12))
    async with engine(folder) as made:
        whole = await made.generate(asked, Version())
        scored = await made.score(rows_of(asked, whole), "topk", 2)
        pieces = [piece async for found in made.stream(asked, Version(), 2) for piece in found]
        beside = asyncio.create_task(made.generate(asked, Version()))
        again = [piece async for found in made.stream(asked, Version(), None) for piece in found]
        assert [each.token_ids.tolist() for each in await beside] == [each.token_ids.tolist() for each in whole]
    for completion, row in zip(whole, scored, strict=True):
        mine = [piece for piece in pieces if piece.request_id == completion.request_id]
        others = [piece for piece in again if piece.request_id == completion.request_id]
        assert np.concatenate([piece.token_ids for piece in others]).tolist() == completion.token_ids.tolist()
        assert [(piece.start, len(piece.token_ids)) for piece in mine] == [(place, 1) for place in range(len(completion.token_ids))]
        assert np.concatenate([piece.token_ids for piece in mine]).tolist() == completion.token_ids.tolist()
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]
        np.testing.assert_allclose(np.concatenate([piece.scores.logprobs for piece in mine]), row.logprobs, atol=1e-4)
        np.testing.assert_allclose(np.concatenate([piece.scores.topk_logprobs for piece in mine]), row.topk_logprobs, atol=1e-4)
    order = [piece.request_id for piece in pieces]
    assert order[:4] == [request.request_id for request in asked[:4]], "as many as there are slots are told side by side"


async def test_a_stream_that_nobody_hears_makes_room(folder: Path) -> None:
    async with engine(folder, slots=1, swap_timeout_s=0.2) as made:
        long = [GenerateRequest(f"{i}", np.full(3, 7, np.int32), Sampling(max_tokens=40), i) for i in range(400)]
        stream = made.stream(long, Version(), None)
        assert (await anext(stream))[0].start == 0
        await stream.aclose()
        (completion,) = await made.generate(requests(folder, 1, GREEDY), Version())
        assert len(completion.token_ids) and (await made.info()).generated_tokens < 400
        with pytest.raises(SwapTimeout, match="exactly 5"):
            await anext(made.stream(long[:1], Version(exact=5), None))


async def test_a_stream_begins_anew_with_weights_that_end_it(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    constant_model(old, 6)
    constant_model(new, 9)
    store = WeightStore(tmp_path / "weights")
    publish(store, 0, old)
    long = [GenerateRequest(f"{i}", np.full(3, 8, np.int32), Sampling(0.0, max_tokens=40), i) for i in range(400)]
    async with engine(old, store, swap="abort", slots=1) as made, aclosing(made.stream(long, Version(), None)) as stream:
        assert {token for piece in await anext(stream) for token in piece.token_ids.tolist()} == {6}
        publish(store, 1, new)
        fresh = await anext(piece async for found in stream for piece in found if piece.weight_version == 1)
    assert (fresh.request_id, fresh.start) == ("0", 0) and set(fresh.token_ids.tolist()) == {9}


async def test_draws_follow_the_distribution(folder: Path) -> None:
    prompt = np.array([1, 7, 9, 3], np.int32)
    async with engine(folder, slots=256) as made:
        full = (await made.score([ScoreRow("r", np.append(prompt, 5), 4)], "full", 0))[0].full_logprobs[0]
        for sampling in (
            Sampling(max_tokens=1),
            Sampling(temperature=0.7, top_k=3, max_tokens=1),
            Sampling(top_p=0.5, max_tokens=1),
        ):
            asked = [GenerateRequest(str(i), prompt, sampling, i) for i in range(3000)]
            drawn = [(int(c.token_ids[0]), float(c.logprobs[0])) for c in await made.generate(asked, Version())]
            wanted = cut(full / sampling.temperature, sampling)
            counts = np.bincount([token for token, _ in drawn], minlength=len(full)) / 3000
            assert np.abs(counts - wanted).max() < 0.03
            assert all(abs(np.log(wanted[token]) - logprob) < 1e-4 for token, logprob in drawn)


async def test_what_leaves_one_token_is_greedy_and_spoils_no_other(folder: Path) -> None:
    prompt = np.array([1, 7, 9, 3], np.int32)
    cold = [Sampling(temperature=temperature, max_tokens=6) for temperature in (0.0, 1e-320, 1e-39, 1e-5)]
    async with engine(folder, slots=8) as made:
        settings = [*cold, Sampling(top_p=5e-324, max_tokens=6), Sampling(top_k=1, max_tokens=6)]
        asked = [GenerateRequest(str(i), prompt, sampling, i) for i, sampling in enumerate(settings)]
        greedy, *rest = await made.generate(asked, Version())
        assert all(row.token_ids.tolist() == greedy.token_ids.tolist() for row in rest)


def cut(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    probs = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-probs)
    keep = order[: sampling.top_k or len(order)]
    kept = probs[keep] / probs[keep].sum()
    keep = keep[np.cumsum(kept) - kept < sampling.top_p]
    result = np.zeros_like(probs)
    result[keep] = probs[keep] / probs[keep].sum()
    return result
