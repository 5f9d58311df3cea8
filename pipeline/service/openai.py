"""What the OpenAI-compatible routes take: the part of that interface which an engine of ours can answer.

Invariant: nothing is ignored. A key that would change the answer and is not supported is refused by name; one that changes
nothing (`user`, `metadata`) is taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from pipeline.config.base import as_sent
from pipeline.records import Sampling

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
"""OpenAI takes 4; tasks of lm-eval have more."""
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS, pattern="^[^\ufffd]*$")]
"""Without U+FFFD, which is what stands for bytes that are no text yet."""
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_TEXT_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["type", "text"]}


def _null_may_stand(schema: dict[str, Any]) -> None:
    """Says in the schema what `_null_is_left_out` does."""
    for name, part in schema["properties"].items():
        if name not in schema.get("required", ()) and isinstance(part.get("type"), str) and part["type"] != "null":
            part["type"] = [part["type"], "null"]


def _one_bound(schema: dict[str, Any]) -> None:
    """Says in the schema what `ChatRequest._said_once` does."""
    _null_may_stand(schema)
    both = ("max_tokens", "max_completion_tokens")
    schema["not"] = {"required": list(both), "properties": {name: {"type": "integer"} for name in both}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    include_usage: bool = False
    """Send the usage in a last chunk that has no choices."""
    include_obfuscation: bool = False


class _Request(BaseModel):
    """What both routes take. Strict: true is no number, and 1 is not true."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, json_schema_extra=_null_may_stand)

    model: str = "live"
    """`live`, or the path of a checkpoint below the folder of runs."""
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    """Choices a prompt."""
    seed: int | None = None
    """The same weights, prompt, sampling and seed (modulo 2^63) give the same tokens."""
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    """0 switches the cut off."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    """The text ends before the one of these that is said first."""
    stream: bool = False
    """Server-sent events: each token when it is made, unless the engine says only whole choices (kind `openai`)."""
    stream_options: StreamOptions | None = None
    """Of a reply that is no stream it asks nothing."""
    return_token_ids: bool = False
    """Also `prompt_token_ids` and the `token_ids` of each choice."""
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    presence_penalty: float | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, data: Any) -> Any:
        """Clients send null for what they do not say."""
        data = as_sent(data)
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    def sampling(self, max_tokens: int) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, max_tokens)


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: Text | Annotated[list[Text], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    """A text, token ids, or a list of either."""
    max_tokens: int = Field(16, ge=0, lt=2**31)
    """0 makes nothing; with `echo` and `logprobs` the prompt is scored."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """Log-probabilities of the tokens, and of this many of the likeliest at each place, at temperature 1."""
    echo: bool = False
    """The prompt stands before the text (and its log-probabilities before those of the text)."""
    best_of: None = None
    suffix: None = None

    def prompts(self) -> list[str | TokenIds]:
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)


class ChatMessage(BaseModel):
    """What other servers put into their replies comes back in the history, and is left out. Calls of tools, which a model would
    have to be told of, are refused."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: str
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    tool_call_id: None = None
    audio: None = None
    content: str | list[Annotated[dict[str, Any], WithJsonSchema(_TEXT_PART)]] | None = None

    @field_validator("content")
    @classmethod
    def _only_text(cls, content: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]] | None:
        for part in content if isinstance(content, list) else ():
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a part of type {part.get('type')!r} is not supported: only text is")
        return content

    def text(self) -> str:
        """Its parts are joined."""
        return "".join(part["text"] for part in self.content) if isinstance(self.content, list) else self.content or ""


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra=_one_bound)

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    """None: what the context has left."""
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    """The newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """This many of the likeliest tokens at each place; above 0 it asks for `logprobs` too."""
    response_format: TextFormat | None = None
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _said_once(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if value is not None and other is not None:
            raise ValueError(f"{value} stands beside max_tokens {other}: say one of the two")
        return value

    @property
    def likeliest(self) -> int | None:
        """How many tokens a place; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None

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
