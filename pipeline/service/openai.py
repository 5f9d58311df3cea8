"""What the OpenAI-compatible routes take: the part of that interface which an engine of ours can answer.

Invariant: nothing is ignored. A key that would change the answer and is not supported is refused by name; one that changes
nothing (`user`, `metadata`) is taken.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.config.base import refuse_broken_text
from pipeline.records import Sampling

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
TokenIds = list[int]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    include_usage: bool = False
    """Send the usage in a last chunk that has no choices."""
    include_obfuscation: bool = False


class _Request(BaseModel):
    """What both routes take. Strict: true is no number, and 1 is not true."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    model: str = "live"
    """`live`, or the path of a checkpoint below the folder of runs."""
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    """Choices a prompt."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """The same weights, prompt, sampling and seed give the same tokens."""
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 switches the cut off."""
    stop: str | list[str] | None = Field(None)
    """The text ends before the first of these."""
    stream: bool = False
    """Server-sent events; a choice is one chunk."""
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Also `prompt_token_ids` and the `token_ids` of each choice."""
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, data: Any) -> Any:
        """Clients send null for what they do not say."""
        refuse_broken_text(data)
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    def sampling(self, max_tokens: int) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, max_tokens)


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    """A text, token ids, or a list of either."""
    max_tokens: int = Field(16, ge=0)
    """0 only with `echo`: the prompt is scored and nothing is made."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """Log-probabilities of the tokens, and of this many of the likeliest at each place, at temperature 1."""
    echo: bool = False
    """The prompt stands before the text (and its log-probabilities before those of the text)."""
    best_of: int | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _sizes(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of {self.best_of} is not supported: leave it out, or say n {self.n}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 makes nothing: it needs echo")
        return self

    def prompts(self) -> list[str | TokenIds]:
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")  # what other servers put into their replies comes back in the history

    role: str
    content: str | list[dict[str, Any]] | None = None

    def text(self) -> str:
        """Parts of kind `text` are joined. Raises ValueError for any other."""
        if not isinstance(self.content, list):
            return self.content or ""
        parts = []
        for part in self.content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a part of type {part.get('type')!r} in a message is not supported: only text is")
            parts.append(part["text"])
        return "".join(parts)


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    """None: what the context has left."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: TextFormat | None = None
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _plain(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        for message in self.messages:
            message.text()
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class Choice(BaseModel):
    model_config = ConfigDict(extra="allow")

    index: int
    finish_reason: Literal["stop", "length"] | None
    logprobs: dict[str, Any] | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Reply(BaseModel):
    """Of either route, not streamed."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["text_completion", "chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    """Names the weight version that made the tokens."""
    choices: list[Choice]
    usage: Usage
