"""Run as a program: answers as vLLM's own classes write them, streamed and in one piece, of cases on standard input.

A process of its own, because importing vLLM takes seconds and leaves much behind. What is done with the classes is what
`entrypoints/openai/*/serving.py` and `api_router.py` of vLLM 0.32 do.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def chat_events(case: dict[str, Any]) -> list[str]:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponseStreamChoice,
        ChatCompletionStreamResponse,
    )

    head = {"id": case["id"], "created": case["created"], "model": case["model"]}
    ids = case["prompt_ids"]
    events = []
    for index in range(len(case["choices"])):
        delta = DeltaMessage(role=case["role"], content="")
        choice = ChatCompletionResponseStreamChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
        chunk = ChatCompletionStreamResponse(**head, choices=[choice], prompt_token_ids=ids, prompt_text=None)
        events.append(chunk.model_dump_json(exclude_unset=True))
    for index, text, tokens, last in case["steps"]:
        end = case["choices"][index]
        more = {"finish_reason": end["finish_reason"], "stop_reason": end["stop_reason"]} if last else {}
        choice = ChatCompletionResponseStreamChoice(
            index=index,
            delta=DeltaMessage(content=text),
            logprobs=None,
            token_ids=tokens,
            **({"finish_reason": None} | more),
        )
        chunk = ChatCompletionStreamResponse(**head, choices=[choice])
        events.append(chunk.model_dump_json(exclude_unset=True))
    chunk = ChatCompletionStreamResponse(
        **head, choices=[], usage=usage(case), system_fingerprint=case["fingerprint"], metrics=metrics(case)
    )
    events.append(chunk.model_dump_json(exclude_unset=True, exclude_none=True))
    return events


def text_events(case: dict[str, Any]) -> list[str]:
    from vllm.entrypoints.openai.completion.protocol import CompletionResponseStreamChoice, CompletionStreamResponse

    head = {"id": case["id"], "created": case["created"], "model": case["model"]}
    events, begun = [], set()
    for index, text, tokens, last in case["steps"]:
        end = case["choices"][index]
        choice = CompletionResponseStreamChoice(
            index=index,
            text=text,
            logprobs=None,
            finish_reason=end["finish_reason"] if last else None,
            stop_reason=end["stop_reason"] if last else None,
            prompt_token_ids=None if index in begun else case["prompt_ids"],
            token_ids=tokens,
        )
        begun.add(index)
        chunk = CompletionStreamResponse(**head, object="text_completion", choices=[choice])
        events.append(chunk.model_dump_json(exclude_unset=True))
    chunk = CompletionStreamResponse(
        **head, choices=[], usage=usage(case), system_fingerprint=case["fingerprint"], metrics=metrics(case)
    )
    events.append(chunk.model_dump_json(exclude_unset=False, exclude_none=True))
    return events


def chat_body(case: dict[str, Any]) -> bytes:
    from starlette.responses import JSONResponse
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatMessage,
    )

    choices = [
        ChatCompletionResponseChoice(
            index=index,
            message=ChatMessage(role=case["role"], reasoning=None, content=choice["text"]),
            logprobs=None,
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            token_ids=choice["ids"] if case["own_ids"] else None,
            routed_experts=None,
        )
        for index, choice in enumerate(case["choices"])
    ]
    answer = ChatCompletionResponse(
        id=case["id"],
        created=case["created"],
        model=case["model"],
        choices=choices,
        usage=usage(case),
        system_fingerprint=case["fingerprint"],
        prompt_logprobs=None,
        prompt_token_ids=case["prompt_ids"] if case["own_ids"] else None,
        prompt_text=None,
        kv_transfer_params=None,
        ec_transfer_params=None,
        metrics=metrics(case),
    )
    return bytes(JSONResponse(content=answer.model_dump()).body)


def text_body(case: dict[str, Any]) -> bytes:
    from starlette.responses import JSONResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice

    choices = [
        CompletionResponseChoice(
            index=index,
            text=choice["text"],
            logprobs=None,
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            prompt_logprobs=None,
            prompt_token_ids=case["prompt_ids"] if case["own_ids"] else None,
            token_ids=choice["ids"] if case["own_ids"] else None,
            routed_experts=None,
        )
        for index, choice in enumerate(case["choices"])
    ]
    answer = CompletionResponse(
        id=case["id"],
        created=case["created"],
        model=case["model"],
        choices=choices,
        usage=usage(case),
        system_fingerprint=case["fingerprint"],
        kv_transfer_params=None,
        ec_transfer_params=None,
        metrics=metrics(case),
    )
    return bytes(JSONResponse(content=answer.model_dump()).body)


def usage(case: dict[str, Any]) -> Any:
    from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo

    prompt, completion = len(case["prompt_ids"]), sum(len(choice["ids"]) for choice in case["choices"])
    told = UsageInfo(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        completion_tokens_details=None,
    )
    if case["cached"] is not None:
        told.prompt_tokens_details = PromptTokenUsageInfo(cached_tokens=case["cached"])
    return told


def metrics(case: dict[str, Any]) -> Any:
    from vllm.entrypoints.generate.base.protocol import PerRequestMetrics

    return None if case["metrics"] is None else PerRequestMetrics(**case["metrics"])


def main() -> None:
    """Standard input: a JSON list of cases. Standard output: for each, its events and its body."""
    told = sys.stdout
    sys.stdout = sys.stderr  # vLLM may talk
    done = []
    for case in json.load(sys.stdin):
        events = chat_events(case) if case["chat"] else text_events(case)
        body = chat_body(case) if case["chat"] else text_body(case)
        done.append([events, body.decode()])
    json.dump(done, told)


if __name__ == "__main__":
    main()
