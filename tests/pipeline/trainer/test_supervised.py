from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from pipeline.config.models import Architecture, Supervised
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import ConfigError
from pipeline.trainer.models import new_llama
from pipeline.trainer.supervised import train_supervised
from pipeline.trainer.tokenizer import build_tokenizer

PAIRS = [((("user", f"Multiply these numbers: {a} * {b} ="),), str(a * b)) for a in range(8) for b in range(8)]


def made(folder: Path, **shape):
    build_tokenizer(PAIRS, folder)
    renderer = ChatRenderer.load(folder)
    return new_llama(Architecture(**{"hidden": 32, "mlp": 64, **shape}), renderer, seed=0), renderer


@torch.no_grad()
def greedy_accuracy(model, renderer: ChatRenderer, pairs) -> float:
    """Share of the pairs whose answer transformers' own greedy decoding gives."""
    by_length: dict[int, list] = {}
    for messages, answer in pairs:
        prompt = torch.tensor(renderer.render(messages))
        by_length.setdefault(len(prompt), []).append((prompt, answer))
    solved = 0
    for length, found in by_length.items():
        prompts = torch.stack([prompt for prompt, _ in found])
        said = model.generate(prompts, do_sample=False, max_new_tokens=8, attention_mask=torch.ones_like(prompts))[:, length:]
        solved += sum(renderer.decode(line.tolist()).strip() == answer for line, (_, answer) in zip(said, found, strict=True))
    return solved / len(pairs)


def test_learns_a_set_that_can_be_memorised_and_stops_when_it_has(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, renderer = made(tmp_path)
    assert greedy_accuracy(model, renderer, PAIRS) < 0.1
    began, seen = time.process_time(), []
    settings = Supervised(steps=1000, batch=32, lr=1e-2, stop_at=0.95)
    trained = train_supervised(model, renderer, PAIRS, settings, 0, lambda *step: seen.append(step))
    assert time.process_time() - began < 8
    assert trained.stopped_by == "stop_at" and trained.steps < 1000 and trained.accuracy >= 0.95
    assert greedy_accuracy(model, renderer, PAIRS) >= 0.95
    assert [step for step, _, _ in seen] == list(range(50, trained.steps + 1, 50))


def test_the_same_seed_gives_the_same_weights_and_leaves_the_process_alone(tmp_path: Path) -> None:
    def weights(seed: int) -> torch.Tensor:
        model, renderer = made(tmp_path)
        train_supervised(model, renderer, PAIRS, Supervised(steps=5, batch=16), seed)
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    state = torch.random.get_rng_state()
    first = weights(1)
    torch.rand(3)
    torch.random.set_rng_state(state)
    assert torch.equal(first, weights(1)) and not torch.equal(first, weights(2))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_time_is_bounded_and_impossible_input_is_named(tmp_path: Path) -> None:
    model, renderer = made(tmp_path)
    trained = train_supervised(model, renderer, PAIRS, Supervised(steps=10000, batch=8, max_seconds=0.2), 0)
    assert trained.stopped_by == "max_seconds" and trained.seconds < 2
    with pytest.raises(ConfigError, match="none"):
        train_supervised(model, renderer, [], Supervised(), 0)
    small, renderer = made(tmp_path, max_positions=8)
    with pytest.raises(ConfigError, match="max_positions"):
        train_supervised(small, renderer, PAIRS, Supervised(), 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_teacher_generalises_to_words_it_was_not_trained_on(tmp_path: Path, seed: int) -> None:
    import zlib

    import reasoning_gym

    items = reasoning_gym.create_dataset("spell_backward", size=5000, seed=0, min_word_len=3, max_word_len=4)
    answers = {item["question"]: item["answer"] for item in items}
    held_out = [((("user", q),), a) for q, a in answers.items() if zlib.crc32(q.encode()) % 5 == 0]
    train = [((("user", q),), a) for q, a in answers.items() if zlib.crc32(q.encode()) % 5]
    assert len(held_out) >= 200
    build_tokenizer(train + held_out, tmp_path)
    renderer = ChatRenderer.load(tmp_path)
    torch.set_num_threads(1)
    teacher = new_llama(Architecture(), renderer, seed)
    train_supervised(teacher, renderer, train, Supervised(steps=300), seed)
    student = new_llama(Architecture(), renderer, seed)
    train_supervised(student, renderer, train, Supervised(steps=60), seed)
    assert greedy_accuracy(teacher, renderer, held_out) >= 0.9
    assert 0.15 <= greedy_accuracy(student, renderer, held_out) <= 0.55
