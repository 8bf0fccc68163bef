"""LangChain's usual calls: `python langchain_calls.py URL MODEL`, the answers as JSON. In an environment of its own."""

import asyncio
import json
import sys

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1:]
common = {"base_url": url, "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(model=model, max_tokens=12, temperature=0, stream_usage=True, **common)
asked = [SystemMessage("You are brief."), HumanMessage("Name a river.")]

whole = chat.invoke(asked)
pieces = list(chat.stream(asked))
chain = ChatPromptTemplate.from_messages([("system", "You are brief."), ("human", "Name a {thing}.")]) | chat


async def together() -> list[str]:
    answers = await asyncio.gather(*(chat.ainvoke(f"Number {number}") for number in range(8)))
    return [str(answer.content) for answer in answers]


try:
    ChatOpenAI(model="nobody-has-it", **common).invoke("x")
    error = ""
except openai.NotFoundError as refused:
    error = str(refused)

completion = OpenAI(model=model, max_tokens=12, temperature=0, **common)
print(
    json.dumps(
        {
            "whole": whole.content,
            "usage": whole.usage_metadata,
            "finish": whole.response_metadata["finish_reason"],
            "streamed": "".join(str(piece.content) for piece in pieces),
            "pieces": len(pieces),
            "streamed_usage": next(piece.usage_metadata for piece in pieces if piece.usage_metadata),
            "chain": (chain | StrOutputParser()).invoke({"thing": "river"}),
            "batch": [str(answer.content) for answer in chat.batch(["a", "b", "c"])],
            "together": asyncio.run(together()),
            "completion": completion.invoke("Once upon a time"),
            "completion_streamed": "".join(completion.stream("Once upon a time")),
            "error": error,
        }
    )
)
