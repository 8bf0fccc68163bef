"""Whether an answer can go on at another engine when its own is lost, read from the request alone.

Two ways, each with a reason where it is closed (docs/http.md has the table):

- **by tokens**: the prompt's and the answer's token ids so far become the prompt of a completion elsewhere. Open when
  nothing but those tokens decides what comes next: no state of the sampler, of a grammar or of a parser.
- **again**: the same request runs from its beginning and what the client has is swallowed. Open when a second run says
  the same: greedy, or with a seed.

Fields that this list does not know close the first way: a future field may well be such a state.

An answer that is not streamed can always run again: its client has seen nothing of it. One that may be long and could
go on by tokens is **gathered**: asked of the engine as a stream, carried like one, and put together in the form that
the engine would have given it (`node.relay.carry.whole`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node.quick import quick

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

#: Asks vLLM for the ids of prompt and answer beside the text.
IDS_FIELD = "return_token_ids"

#: What makes a stream of a request that is gathered.
STREAM_FIELDS: Mapping[str, object] = {"stream": True, "stream_options": {"include_usage": True}}

#: An answer in one piece is gathered when it may have so many tokens. Below, running it again costs about a second at
#: the usual 30 ms a token, as much as it takes to know of a loss; and every event costs engine and nodes something.
GATHER_TOKENS = 32
#: Choices of an answer that is gathered at most.
MAX_GATHERED = 64
#: The limit of a completion that names none (OpenAI's, and vLLM's).
COMPLETION_TOKENS = 16

#: Sampling fields that go along into the continuation as they are.
KEPT = frozenset(
    [
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "stop_token_ids",
        "ignore_eos",
        "allowed_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "cache_salt",
        "priority",
        "user",
        "session_id",
        "stream_interval",
        "seed",
        "stream_options",
    ]
)

#: Fields that the continuation makes anew, or that did their work in the prompt or the first event.
_DONE = frozenset(
    [
        "prompt",
        "messages",
        "stream",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stop",
        "include_stop_str_in_output",
        "return_token_ids",
        "request_id",
        "kv_transfer_params",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "return_prompt_text",
        "length_penalty",
        "include_reasoning",
        "parallel_tool_calls",
        "best_of",
        "return_tokens_as_token_ids",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    ]
)

#: Fields with values that mean "not used"; every other value closes the first way.
_UNUSED: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "bad_words": ([],),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}

#: Names of fields of a client in a message, and how many of them.
_MAX_NAME = 40
_MAX_NAMES = 4


@dataclass(frozen=True, slots=True)
class Carriage:
    """How an answer can be carried. Reasons are for people; an empty one means that the way is open."""

    tokens: str = ""
    again: str = ""
    #: The client asked for token ids itself: they are its own, and stay in what it sees.
    own_ids: bool = False
    #: Ask the engine for token ids on our behalf.
    ask_ids: bool = False
    #: The body holds fields that we set, with other values: they must go when ours come.
    strip: bool = False
    #: It is not streamed, and may be gathered.
    gathers: bool = False

    @property
    def possible(self) -> bool:
        """Whether there is any way."""
        return not self.tokens or not self.again


quick(Carriage)


def carriage(path: str, fields: Mapping[str, object]) -> Carriage | None:
    """How the answer to this body can be carried; None where its events, or its form, are none that we understand."""
    path, stream = path.rstrip("/"), fields.get("stream")
    if path not in (CHAT, COMPLETIONS) or not (stream is None or isinstance(stream, bool)):
        return None
    if not stream and not _gathers(path, fields):
        return None
    own_ids = fields.get(IDS_FIELD) is True
    echo = bool(fields.get("echo"))  # with ids, vLLM shows another echo
    ask_ids = not own_ids and not echo
    return Carriage(
        tokens=_state(path, fields),
        again=_chance(fields),
        own_ids=own_ids,
        ask_ids=ask_ids,
        strip=(ask_ids and IDS_FIELD in fields) or (not stream and any(name in fields for name in STREAM_FIELDS)),
        gathers=not stream,
    )


def answer_limit(path: str, fields: Mapping[str, object]) -> int | None:
    """The most tokens of each answer, as the engine reads it from a body that it accepts; None = up to the engine."""
    chat = path.rstrip("/") == CHAT
    limit = whole_number(fields.get("max_completion_tokens")) if chat else None
    if limit is None:
        limit = whole_number(fields.get("max_tokens"))
    return COMPLETION_TOKENS if limit is None and not chat else limit


def whole_number(value: object) -> int | None:
    """A number that counts something; None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _gathers(path: str, fields: Mapping[str, object]) -> bool:
    """Whether it is worth it, and its answer is one that `node.relay.carry.whole` knows to the byte."""
    limit = answer_limit(path, fields)
    return (
        (limit is None or limit >= GATHER_TOKENS)
        and (whole_number(fields.get("n")) or 1) <= MAX_GATHERED
        and fields.get("stream_options") is None  # the engine refuses it
        and not fields.get("return_prompt_text")
        and not _state(path, fields)
    )


def _state(path: str, fields: Mapping[str, object]) -> str:
    """Why the tokens alone do not say how the answer goes on."""
    used = [
        name
        for name, value in fields.items()
        if value is not None and name not in KEPT and name not in _DONE and not _unused(name, value)
    ]
    if used:
        shown = ", ".join(name[:_MAX_NAME] for name in sorted(used)[:_MAX_NAMES])
        return f"the engine keeps state for {shown}"
    if _draws(fields) and fields.get("seed") is not None:
        return "a seed's random numbers cannot be continued"
    if path == COMPLETIONS and not _one_prompt(fields.get("prompt")):
        return "it has several prompts, or none"
    if path == CHAT and _media(fields.get("messages")):
        return "its messages hold more than text"
    if (fields.get("best_of") or 1) != 1:
        return "best_of"
    return ""


def _unused(name: str, value: object) -> bool:
    # The type counts: `logprobs: 0` asks for them, `logprobs: false` does not, and Python calls the two equal.
    return any(type(value) is type(unused) and value == unused for unused in _UNUSED.get(name, ()))


def _draws(fields: Mapping[str, object]) -> bool:
    """Whether tokens are drawn by chance."""
    temperature = fields.get("temperature")
    return not (isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0)


def _chance(fields: Mapping[str, object]) -> str:
    """Why a second run may say something else."""
    if not _draws(fields) or fields.get("seed") is not None:
        return ""
    return "its tokens are drawn by chance, without a seed"


def _one_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)


def _media(messages: object) -> bool:
    """Whether a message holds a part that is no text: its tokens in the prompt are only place holders."""
    if not isinstance(messages, list):
        return True
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        if isinstance(content, list) and not all(_is_text(part) for part in content):
            return True
    return False


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type", "text") == "text")
