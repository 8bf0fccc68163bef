"""Several processes behind one port (`--workers N`): docs/dataplane.md, "More processes".

| file | where | what |
|---|---|---|
| `up.py`, `down.py` | both | what workers say to the main process, and it to them |
| `forms.py`, `told.py` | both | requests and plans in the form in which they travel |
| `packing.py` | both | messages as bytes and back, every field's type checked |
| `channel.py` | both | one Unix socket, framed messages, those of one turn of the loop in one write |
| `front.py`, `process.py` | main | the port: accepts, hands sockets out, keeps workers alive; one worker as a process |
| `desk.py`, `asked.py`, `runners.py` | main | one worker's questions: decide, admit, count, let it make the exchange |
| `setup.py` | main | connects all that with the parts of the node |
| `inner.py` | main | everything that is no request for an engine, asked over a Unix socket |
| `worker.py`, `link.py` | worker | the process: its parts, and its side of the socket |
| `entry.py`, `guests.py`, `passed.py` | worker | clients' requests, peers' requests, what the main process answers |

The main process owns all state; a worker owns sockets. A worker never decides, a main process never sees a body.
"""
