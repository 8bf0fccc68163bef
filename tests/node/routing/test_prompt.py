from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import BadRequest
from node.prompt import ParsedRequest, parse_request

LONG = "The quick brown fox jumps over the lazy dog. " * 60


def parse(path: str, **fields: object) -> ParsedRequest:
    return parse_request(path, orjson.dumps({"model": "m", **fields}))


def chat(*contents: object, **fields: object) -> ParsedRequest:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": c} for i, c in enumerate(contents)]
    return parse("/v1/chat/completions", messages=messages, **fields)


def shared(left: ParsedRequest, right: ParsedRequest) -> int:
    count = 0
    for a, b in zip(left.chunks, right.chunks, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_a_chat_body_gives_model_stream_limit_and_size() -> None:
    parsed = chat(LONG, stream=True, max_tokens=7, n=2)
    assert (parsed.model, parsed.stream, parsed.max_tokens, parsed.answers) == ("m", True, 7, 2)
    assert parsed.prompt_bytes == len(LONG) + len("\x1euser\x1f")
    assert parsed.est_prompt_tokens == round(parsed.prompt_bytes / 4)
    assert len(parsed.chunks) == parsed.prompt_bytes // 512
    assert parsed.is_json and not parsed.has_kv_params and not parsed.exact_tokens


def test_a_conversation_that_goes_on_keeps_its_chunks() -> None:
    first = chat(LONG)
    later = chat(LONG, "an answer", "and " + LONG)
    assert shared(first, later) == len(first.chunks) > 3


def test_text_and_a_list_of_one_text_part_are_the_same() -> None:
    assert chat(LONG).chunks == chat([{"type": "text", "text": LONG}]).chunks


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"documents": [{"text": "d"}]},
        {"chat_template_kwargs": {"x": 1}},
    ],
)
def test_whatever_separates_caches_separates_chunks(change: dict[str, object]) -> None:
    assert not set(chat(LONG).chunks) & set(chat(LONG, **change).chunks)


def test_fields_that_do_not_change_the_prompt_do_not_change_chunks() -> None:
    assert chat(LONG).chunks == chat(LONG, temperature=0.5, max_tokens=3, stream=True, seed=1, user="u").chunks


def test_the_order_of_keys_in_tools_does_not_matter() -> None:
    one = chat(LONG, tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}])
    two = chat(LONG, tools=[{"function": {"parameters": {"b": 2, "a": 1}, "name": "f"}, "type": "function"}])
    assert one.chunks == two.chunks


def test_the_role_is_part_of_the_text() -> None:
    body = {"messages": [{"role": "system", "content": LONG}]}
    assert not set(parse("/v1/chat/completions", **body).chunks) & set(chat(LONG).chunks)


def test_pictures_count_by_their_content() -> None:
    def picture(url: str) -> ParsedRequest:
        return chat([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": LONG}])

    big = "data:image/png;base64," + "A" * 100_000
    assert picture(big).chunks == picture(big).chunks
    assert picture(big).chunks[0] != picture(big + "B").chunks[0]
    assert picture(big).prompt_bytes < len(LONG) + 200
    assert picture(big).est_prompt_tokens > chat(LONG).est_prompt_tokens + 400


def test_completions_take_text_texts_ids_and_lists_of_ids() -> None:
    path = "/v1/completions"
    one = parse(path, prompt=LONG)
    many = parse(path, prompt=[LONG, LONG[:400]])
    assert one.chunks == many.chunks and (one.prompts, many.prompts) == (1, 2)
    assert many.est_prompt_tokens == round((len(LONG) + 400) / 4)
    ids = parse(path, prompt=list(range(300)))
    batch = parse(path, prompt=[list(range(300)), [1, 2]])
    assert ids.exact_tokens and ids.est_prompt_tokens == 300 and len(ids.chunks) == 300 * 4 // 512
    assert batch.chunks == ids.chunks and batch.est_prompt_tokens == 302 and batch.prompts == 2
    assert parse(path, prompt=[*range(299), 7]).chunks == ids.chunks


def test_token_ids_and_text_of_the_same_bytes_are_different_prompts() -> None:
    ids = [int.from_bytes(b"abcd", "little")] * 256
    assert parse("/v1/completions", prompt=ids).chunks != parse("/v1/completions", prompt="abcd" * 256).chunks


@pytest.mark.parametrize("prompt", [[-1, 2], [1 << 40], [1.5], [None], [{}], 7, None, {}, [], [[]], [["x"]], True])
def test_a_prompt_that_is_nonsense_is_left_to_the_engine(prompt: object) -> None:
    parsed = parse("/v1/completions", prompt=prompt)
    assert parsed.chunks == () and parsed.model == "m"


def test_responses_and_chat_of_the_same_messages_share_chunks() -> None:
    whole = parse("/v1/responses", instructions=LONG, input=LONG)
    items = parse(
        "/v1/responses", instructions=LONG, input=[{"role": "user", "content": [{"type": "input_text", "text": LONG}]}]
    )
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": LONG}]
    assert whole.chunks == items.chunks == parse("/v1/chat/completions", messages=messages).chunks


def test_anthropic_messages_put_the_system_text_first() -> None:
    claude = parse(
        "/v1/messages",
        system=[{"type": "text", "text": LONG}],
        max_tokens=5,
        messages=[{"role": "user", "content": LONG}],
    )
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": LONG}]
    assert claude.chunks == parse("/v1/chat/completions", messages=messages).chunks
    assert claude.max_tokens == 5


def test_embeddings_rerank_and_score_are_read() -> None:
    assert parse("/v1/embeddings", input=LONG).chunks
    assert parse("/v1/embeddings", input=[LONG, LONG]).prompts == 2
    assert parse("/v1/embeddings", input=[1, 2, 3]).est_prompt_tokens == 3
    assert parse("/v1/rerank", query=LONG, documents=["a", "b"]).chunks
    assert parse("/v1/score", text_1=LONG, text_2=["a"]).chunks
    assert parse("/pooling", messages=[{"role": "user", "content": LONG}]).chunks


@pytest.mark.parametrize(
    "path", ["/tokenize", "/detokenize", "/v1/chat/completions/render", "/v1/messages/count_tokens"]
)
def test_endpoints_without_a_prefill_have_no_chunks(path: str) -> None:
    parsed = parse(path, prompt=LONG, messages=[{"role": "user", "content": LONG}])
    assert parsed.chunks == () and parsed.est_prompt_tokens == 0 and parsed.model == "m"


def test_a_batch_of_conversations_is_told_by_its_first() -> None:
    messages = [{"role": "user", "content": LONG}]
    batch = parse("/v1/chat/completions/batch", messages=[messages, messages])
    assert batch.chunks == chat(LONG).chunks and batch.prompts == 2


def test_unknown_paths_give_the_model_alone() -> None:
    parsed = parse("/v1/something/new", anything={"deep": [1]})
    assert parsed.model == "m" and parsed.chunks == ()


def test_a_request_without_a_body_or_model_is_fine() -> None:
    assert parse_request("/v1/models", b"").model is None
    assert parse_request("/v1/chat/completions", b'{"messages":[]}').model is None
    assert parse_request("/v1/chat/completions", b'{"model":null}').model is None


def test_stored_responses_are_named() -> None:
    assert parse_request("/v1/responses/resp_1", b"").refers_to == "resp_1"
    assert parse_request("/v1/responses/resp_1/cancel", b"").refers_to == "resp_1"
    assert parse("/v1/responses", input="x", previous_response_id="resp_2").refers_to == "resp_2"
    assert parse("/v1/responses/render", input="x").refers_to is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "could not parse"),
        (b"hello", "could not parse"),
        (b"\xff\xfe", "could not parse"),
        (b"[1]", "not an array"),
        (b'"x"', "not a string"),
        (b"3", "not a number"),
        (b"null", "not null"),
        (b"[" * 100_000, "could not parse"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "could not parse"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_with_a_reason(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        parse_request("/v1/chat/completions", body)


def test_what_only_the_engines_parser_takes_is_taken() -> None:
    parsed = parse_request("/v1/completions", b'{"model":"m","temperature":NaN,"prompt":"\\ud800 x"}')
    assert parsed.model == "m" and parsed.prompt_bytes == 5


def test_deeply_nested_tools_are_read_or_refused_but_never_crash() -> None:
    for depth in (100, 300, 900, 5000):
        deep: str = '{"a":' * depth + "1" + "}" * depth
        body = f'{{"model":"m","tools":{deep},"messages":[]}}'.encode()
        try:
            assert parse_request("/v1/chat/completions", body).model == "m"
        except BadRequest:
            assert depth >= 900


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["model", "prompt", "messages", "input", "tools", "system", "instructions", "n", "max_tokens", "stream", "query",
     "documents", "cache_salt", "kv_transfer_params", "vllm_xargs", "previous_response_id", "token_ids"]
)  # fmt: skip
PATHS = st.sampled_from(
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"]
)


@given(PATHS, st.dictionaries(FIELDS, JSON, max_size=6))
def test_any_json_object_is_read_without_an_error(path: str, fields: dict[str, object]) -> None:
    parsed = parse_request(path, json.dumps(fields).encode())
    assert parsed.est_prompt_tokens >= 0 and parsed.prompts >= 1 and parsed.answers >= 1
    assert len(parsed.chunks) <= parsed.prompt_bytes // 512


@given(
    st.binary(max_size=60),
    st.sampled_from(["application/json", "", "text/plain", "multipart/form-data; boundary=x", "audio/wav"]),
)
def test_any_bytes_are_read_or_refused(body: bytes, content_type: str) -> None:
    try:
        parse_request("/v1/x", body, content_type)
    except BadRequest as error:
        assert str(error)


def form(boundary: str, *parts: tuple[str, bytes]) -> bytes:
    lines = [
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"
        for head, data in parts
    ]
    return b"".join(lines) + f"--{boundary}--\r\n".encode()


def test_the_model_of_a_form_is_found_behind_its_file() -> None:
    audio = b"\r\n--other\r\n" + bytes(range(256)) * 1000
    body = form(
        "XyZ", ('name="file"; filename="a.wav"', audio), ('name="model"', b"whisper"), ('name="stream"', b"true")
    )
    for header in ("multipart/form-data; boundary=XyZ", 'Multipart/Form-Data; charset=utf-8; boundary="XyZ"'):
        parsed = parse_request("/v1/audio/transcriptions", body, header)
        assert (parsed.model, parsed.stream, parsed.is_json) == ("whisper", True, False)
        assert parsed.body is body


def test_a_form_without_a_model_or_boundary() -> None:
    assert (
        parse_request(
            "/v1/audio/translations", form("b", ('name="file"', b"x")), "multipart/form-data; boundary=b"
        ).model
        is None
    )
    assert parse_request("/v1/audio/translations", b"--b", "multipart/form-data; boundary=b").model is None
    with pytest.raises(BadRequest, match="boundary"):
        parse_request("/v1/audio/translations", b"x", "multipart/form-data")


def test_matched_tokens_follow_the_share_of_the_text_and_leave_one_to_compute() -> None:
    parsed = chat("x" * 5113)  # 5119 or so bytes with its marker
    assert parsed.prompt_bytes == 5119
    assert parsed.matched_tokens(0, 1000) == 0
    assert parsed.matched_tokens(5, 1000) == 500
    assert parsed.matched_tokens(99, 1000) == 999
