"""Which sequence is in which row, and what each has said so far.

Invariant: active sequences fill rows 0..n-1 without gaps, and every sequence of a started call ends in exactly one completion.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.engines.base import Completion, GenerateRequest, Piece, ScoredRow, Version
from pipeline.engines.sampling import draw, uniforms
from pipeline.engines.torch_model import TorchModel


class GenerateCall:
    """One call of an engine: answered as a whole, by one weight version."""

    def __init__(self, requests: list[GenerateRequest], version: Version, deadline: float) -> None:
        self.requests, self.version = requests, version
        self.deadline = deadline
        """On the monotonic clock: when waiting for the version ends."""
        self.future: Future[list[Completion]] = Future()
        self.completions: dict[int, Completion] = {}


class StreamCall(GenerateCall):
    """A call that hears of each token. tell: called in the engine's thread."""

    def __init__(
        self,
        requests: list[GenerateRequest],
        version: Version,
        deadline: float,
        top_logprobs: int | None,
        tell: Callable[[list[Piece]], None],
    ) -> None:
        super().__init__(requests, version, deadline)
        self.top_logprobs, self.tell = top_logprobs, tell
        self.sequences: list[_Sequence] = []


@dataclass(slots=True)
class _Sequence:
    call: GenerateCall
    index: int
    room: int
    """Tokens it may still say in all: its own bound, or the context's."""
    noise: list[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[tuple[float, list[int], list[float]]] = field(default_factory=list)
    """Of a stream with log-probabilities, a token each: of itself, and the likeliest ids with theirs."""
    told: int = 0
    """Tokens of a stream that its caller has heard."""

    @property
    def request(self) -> GenerateRequest:
        return self.call.requests[self.index]

    @property
    def position(self) -> int:
        """Of the newest token."""
        return len(self.request.prompt) + len(self.tokens) - 1


class Batching:
    """The rows of one model. Used by the engine's thread only; the counters may be read by others."""

    def __init__(self, model: TorchModel, slots: int, stop_ids: frozenset[int]) -> None:
        self._model, self._slots, self._stop_ids = model, slots, stop_ids
        self._join_at = max(1, slots // 8)  # one prefill for several newcomers costs little more than for one
        self._calls: list[GenerateCall] = []
        self._streams: list[StreamCall] = []
        """Those of the calls that hear of each token."""
        self._queue: list[_Sequence] = []
        self._rows: list[_Sequence] = []
        self.generated_tokens = 0

    @property
    def active(self) -> int:
        return len(self._rows)

    @property
    def unstarted(self) -> int:
        """Sequences of started calls that wait for a row."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Some call is started and not answered."""
        return bool(self._calls)

    @property
    def has_room(self) -> bool:
        return len(self._rows) + len(self._queue) < self._slots

    def start(self, call: GenerateCall) -> None:
        self._calls.append(call)
        sequences = [self._sequence(call, index) for index in range(len(call.requests))]
        self._queue += sequences
        if isinstance(call, StreamCall):
            call.sequences = sequences
            self._streams.append(call)

    def abort(self) -> list[GenerateCall]:
        """Take all started calls back, as if they had never been started."""
        calls, self._calls = self._calls, []
        self._queue, self._rows, self._streams = [], [], []
        for call in calls:
            call.completions.clear()
        return calls

    def drop_cancelled(self) -> None:
        if not any(call.future.cancelled() for call in self._calls):
            return
        self._calls = [call for call in self._calls if not call.future.cancelled()]
        self._streams = [call for call in self._streams if not call.future.cancelled()]
        self._queue = [each for each in self._queue if not each.call.future.cancelled()]
        self._free([row for row, each in enumerate(self._rows) if each.call.future.cancelled()])

    def step(self, version: int) -> None:
        """One more token for every active row, then new sequences join, then whole calls are answered."""
        if self._rows:
            logits_bv = self._model.decode([each.tokens[-1] for each in self._rows], [each.position for each in self._rows])
            self._extend(self._rows, logits_bv)
        self._settle_rows(version)
        while self._queue and self._slots - len(self._rows) >= min(len(self._queue), self._join_at):
            self._join()
            self._settle_rows(version)
        self._tell(version)
        self._answer()

    def _sequence(self, call: GenerateCall, index: int) -> _Sequence:
        request = call.requests[index]
        room = min(request.sampling.max_tokens, self._model.max_context - len(request.prompt))
        return _Sequence(call, index, room, uniforms(request.seed, room))

    def _join(self) -> None:
        free = self._slots - len(self._rows)
        joining, self._queue = self._queue[:free], self._queue[free:]
        for joined in self._model.prefill([each.request.prompt for each in joining], len(self._rows)):
            fresh, joining = joining[: joined.count], joining[joined.count :]
            self._extend(fresh, joined.logits_bv)
            self._rows += fresh

    def _extend(self, sequences: list[_Sequence], logits_bv: Tensor) -> None:
        settings = [each.request.sampling for each in sequences]
        tokens, logprobs = draw(logits_bv, settings, [each.noise[len(each.tokens)] for each in sequences])
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
        if self._streams:
            self._score(sequences, logits_bv)
        self.generated_tokens += len(tokens)

    def _score(self, sequences: list[_Sequence], logits_bv: Tensor) -> None:
        """The newest tokens of streams that ask for log-probabilities, at temperature 1."""
        for row, sequence in enumerate(sequences):
            top = sequence.call.top_logprobs if isinstance(sequence.call, StreamCall) else None
            if top is not None:
                logprobs_v = torch.log_softmax(logits_bv[row].float(), -1)
                best_k, ids_k = logprobs_v.topk(min(top, len(logprobs_v)))
                sequence.scores.append((float(logprobs_v[sequence.tokens[-1]]), ids_k.tolist(), best_k.tolist()))

    def _tell(self, version: int) -> None:
        for call in self._streams:
            fresh = [each for each in call.sequences if each.told < len(each.tokens)]
            if fresh:
                call.tell([_piece(call, each, version) for each in fresh])
        if self._streams:
            self._streams = [call for call in self._streams if len(call.completions) < len(call.requests)]

    def _settle_rows(self, version: int) -> None:
        ended = [row for row, each in enumerate(self._rows) if each.tokens[-1] in self._stop_ids or len(each.tokens) >= each.room]
        for row in ended:
            sequence = self._rows[row]
            sequence.call.completions[sequence.index] = Completion(
                request_id=sequence.request.request_id,
                token_ids=np.asarray(sequence.tokens, np.int32),
                logprobs=np.asarray(sequence.logprobs, np.float32),
                finish_reason="stop" if sequence.tokens[-1] in self._stop_ids else "length",
                weight_version=version,
            )
        self._free(ended)

    def _free(self, rows: list[int]) -> None:
        """Close the gaps with the last rows; `rows` ascends."""
        for row in reversed(rows):
            last = len(self._rows) - 1
            if row != last:
                self._model.move(last, row, self._rows[last].position)
                self._rows[row] = self._rows[last]
            self._rows.pop()

    def _answer(self) -> None:
        answered = [call for call in self._calls if len(call.completions) == len(call.requests)]
        for call in answered:
            self._calls.remove(call)
            settle(call.future, result=[call.completions[index] for index in range(len(call.requests))])


def _piece(call: StreamCall, sequence: _Sequence, version: int) -> Piece:
    """What the caller has not heard yet; from here on it has."""
    start, sequence.told = sequence.told, len(sequence.tokens)
    request_id = sequence.request.request_id
    scores = None
    if call.top_logprobs is not None:
        values, ids, best = zip(*sequence.scores[start:], strict=True)
        scores = ScoredRow(request_id, np.asarray(values, np.float32), np.asarray(ids, np.int32), np.asarray(best, np.float32))
    ended = call.completions.get(sequence.index)
    tokens = np.asarray(sequence.tokens[start:], np.int32)
    return Piece(request_id, start, tokens, scores, ended.finish_reason if ended is not None else None, version)


def settle(future: Future, *, result: Any = None, error: BaseException | None = None) -> None:
    """Answer a caller; one that was cancelled in the meantime hears nothing."""
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:
        if not future.cancelled():
            raise
