"""The load generator as a process of its own, so that the bench stays out of what it measures.

It reads a question per line (`Ask`, as JSON) and answers with one line:

    {"ports": [9000], "kind": "c16", "seconds": 1.0, "requests": 400000}
"""

from __future__ import annotations

import json
import sys

import uvloop

from benches.proxy.load import KINDS, Ask, Run


def main() -> None:
    """Answer questions until the input ends."""
    for line in sys.stdin:
        ask = Ask(**json.loads(line))
        told = uvloop.run(Run(ask.ports, KINDS[ask.kind]).measure(ask.seconds, ask.requests))
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
