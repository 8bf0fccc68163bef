"""What a client asks for, read from the body of a completion or chat request; refusals in vLLM's words.

Fields that change nothing a router could see (penalties, logprobs, tools' results) are accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from node.emulator.config import EngineConfig
from node.emulator.serve.chat import render
from node.emulator.tokens import VOCABULARY, Tokenizer, pack

Fields = Mapping[str, object]

#: Choices of one request, and bytes of all its stop strings together.
MAX_CHOICES = 64
MAX_STOP_BYTES = 4096


class ApiError(Exception):
    """The answer is this error."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """As vLLM writes it."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, checked."""

    chat: bool
    model: str
    #: Packed token ids of each prompt (`node.emulator.tokens.pack`).
    prompts: tuple[bytes, ...]
    choices: int
    #: Most tokens of an answer; None = as many as fit.
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    include_stop: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    #: What separates answers to the same prompt: the seed and temperature that were given.
    salt: str
    cache_salt: str
    #: The node's id for this request, which reports to it name.
    rid: str
    #: Seconds that the node may need to pull its blocks; 0 = it pulls none.
    hold_s: float


def read(body: bytes, *, chat: bool, config: EngineConfig, models: tuple[str, ...], tokenizer: Tokenizer) -> Ask:
    """The request in a body. Raises `ApiError`."""
    fields = json_object(body)
    model = checked_model(fields, models)
    prompts = (pack(render(fields, tokenizer)),) if chat else _prompts(fields, tokenizer)
    limit = _number(fields, "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens")
    if limit is None and not chat:
        limit = 16  # the default of OpenAI's completions
    options, ours = fields.get("stream_options"), _of_node(fields)
    ask = Ask(
        chat=chat,
        model=model,
        prompts=prompts,
        choices=_number(fields, "n", 1, MAX_CHOICES) or 1,
        max_tokens=limit,
        min_tokens=_number(fields, "min_tokens", 0) or 0,
        ignore_eos=fields.get("ignore_eos") is True,
        stop=_stop(fields),
        include_stop=fields.get("include_stop_str_in_output") is True,
        stream=fields.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        return_token_ids=fields.get("return_token_ids") is True,
        salt=_salt(fields),
        cache_salt=str(fields.get("cache_salt") or ""),
        rid=rid if isinstance(rid := ours.get("rid"), str) else "",
        hold_s=float(hold_s) if isinstance(hold_s := ours.get("hold_s"), int | float) else 0.0,
    )
    for prompt in prompts:
        check_length(len(prompt) // 4, limit, config.max_model_len)
    return ask


def json_object(body: bytes) -> Fields:
    """The JSON object in a body. Raises `ApiError`."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"Invalid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    return fields


def checked_model(fields: Fields, models: tuple[str, ...]) -> str:
    """The model that is asked for; the only one when none is named. Raises `ApiError`."""
    model = fields.get("model")
    if model is None:
        return models[0]
    if model not in models:
        raise ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
    return str(model)


def check_length(prompt: int, limit: int | None, max_model_len: int) -> None:
    """Refuse what does not fit the context. Raises `ApiError`."""
    longest = f"This model's maximum context length is {max_model_len} tokens. However, "
    if prompt < 1:
        raise ApiError(400, "The decoder prompt cannot be empty", param="prompt")
    if prompt >= max_model_len:
        message = (
            f"{longest}your prompt contains {prompt} input tokens, which exceeds this limit even without any output "
            "tokens. Please reduce the length of the input prompt."
        )
        raise ApiError(400, message, param="input_tokens")
    if limit is not None and prompt + limit > max_model_len:
        message = (
            f"{longest}you requested {limit} output tokens and your prompt contains {prompt} input tokens, for a total "
            f"of {prompt + limit} tokens. Please reduce the length of the input prompt or the number of requested "
            "output tokens."
        )
        raise ApiError(400, message, param="max_tokens")


def _prompts(fields: Fields, tokenizer: Tokenizer) -> tuple[bytes, ...]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return tuple(_prompt(entry, tokenizer) for entry in prompt)
    return (_prompt(prompt, tokenizer),)


def _prompt(prompt: object, tokenizer: Tokenizer) -> bytes:
    if isinstance(prompt, str):
        return pack(tokenizer.encode(prompt))
    if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
        raise ApiError(400, "prompt must be a string, a list of strings, or a list of token ids", param="prompt")
    if not all(0 <= token < VOCABULARY for token in prompt):
        raise ApiError(400, "Token id out of vocabulary", param="prompt")
    return pack(prompt)


def _number(fields: Fields, name: str, least: int = 1, most: int = 1 << 30) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ApiError(400, f"{name} must be a whole number from {least} to {most}, got {value!r}.", param=name)
    return value


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.get("stop")
    given = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(given, list) or not all(isinstance(text, str) and text for text in given):
        raise ApiError(400, "stop must be a string or a list of strings, none of them empty", param="stop")
    if sum(map(len, given)) > MAX_STOP_BYTES:
        raise ApiError(400, "stop strings are too long", param="stop")
    return tuple(given)


def _salt(fields: Fields) -> str:
    """Greedy answers are a function of the prompt; sampled ones of the seed too."""
    temperature, seed = fields.get("temperature"), fields.get("seed")
    return f"{temperature}/{seed}" if temperature and seed is not None else ""


def _of_node(fields: Fields) -> Fields:
    params = fields.get("kv_transfer_params")
    ours = params.get("grapevine") if isinstance(params, dict) else None
    return ours if isinstance(ours, dict) else {}
