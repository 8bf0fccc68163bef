"""LlamaIndex's usual calls: `python llamaindex_calls.py URL MODEL`, the answers as JSON. In an environment apart."""

import asyncio
import json
import sys

from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
common = {"model": model, "api_base": url, "api_key": "none", "max_retries": 0, "max_tokens": 12, "temperature": 0}
chat = OpenAILike(is_chat_model=True, context_window=4096, **common)
plain = OpenAILike(is_chat_model=False, context_window=4096, **common)
asked = [ChatMessage(role="system", content="You are brief."), ChatMessage(role="user", content="Name a river.")]


async def later() -> tuple[str, str]:
    stream = await chat.astream_chat(asked)
    streamed = "".join([piece.delta or "" async for piece in stream])
    return str((await chat.achat(asked)).message.content), streamed


awaited, awaited_stream = asyncio.run(later())
print(
    json.dumps(
        {
            "whole": chat.chat(asked).message.content,
            "streamed": "".join(piece.delta or "" for piece in chat.stream_chat(asked)),
            "awaited": awaited,
            "awaited_stream": awaited_stream,
            "predicted": chat.predict(PromptTemplate("Name a {thing}."), thing="river"),
            "completion": plain.complete("Once upon a time").text,
            "completion_streamed": "".join(piece.delta or "" for piece in plain.stream_complete("Once upon a time")),
        }
    )
)
