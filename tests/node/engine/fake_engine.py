"""Stands for vLLM: an OpenAI-like server on a Unix socket, with the standard library only (it starts in no time).

Usage: fake_engine.py SOCKET [KEY=VALUE...]
  say=TEXT      printed first (a log line)     fail=STATUS   exit at once with that status
  orphan=1      leave a process behind that ignores SIGTERM, in its own session
  stubborn=1    ignore SIGTERM
POST /do/exit?STATUS, /do/kill, /do/hang, /do/resume, /do/sick, /do/stuck, /do/adapter change it while it runs.
A stuck one is healthy and computes nothing: /v1/completions is answered after /do/resume.
"""

import json
import os
import signal
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler

OPTIONS = dict(word.split("=", 1) for word in sys.argv[2:])
MODELS = [{"id": "small", "object": "model", "root": "/models/small", "parent": None, "max_model_len": 4096}]
FREE = threading.Event()
FREE.set()
SICK = threading.Event()
FLOWS = threading.Event()
FLOWS.set()
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="small"} 3.0
vllm:num_requests_waiting{engine="0",model_name="small"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="small"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="small"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="small"} 512.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="small"} 128.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",num_cpu_blocks="None",num_gpu_blocks="364",engine="0"} 1.0
vllm:request_success_total{engine="0",finished_reason="stop"} 7.0
"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        FREE.wait()
        match self.path:
            case "/health":
                self.answer(503 if SICK.is_set() else 200, b"")
            case "/v1/models":
                self.answer(200, json.dumps({"object": "list", "data": MODELS}).encode())
            case "/version":
                self.answer(200, b'{"version": "0.32.0"}')
            case "/metrics":
                self.answer(200, METRICS.encode())
            case _:
                self.answer(404, b"{}")

    def do_POST(self) -> None:
        if self.path == "/v1/completions":
            FLOWS.wait()
            self.answer(200, b"{}")
            return
        name, _, value = self.path.removeprefix("/do/").partition("?")
        if name == "exit":
            os._exit(int(value))
        if name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "adapter":
            MODELS.append({"id": "small-lora", "root": "/adapters/a", "parent": "small"})
        changes = {"hang": [FREE.clear], "resume": [FREE.set, FLOWS.set], "sick": [SICK.set], "stuck": [FLOWS.clear]}
        for change in changes.get(name, []):
            change()
        self.answer(200, b"{}")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass

    def address_string(self) -> str:
        return "unix"


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def leave_orphan() -> None:
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("orphan", os.getpid(), flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    if "stubborn" in OPTIONS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "orphan" in OPTIONS:
        leave_orphan()
    if "say" in OPTIONS:
        print(OPTIONS["say"], flush=True)
    if "fail" in OPTIONS:
        sys.exit(int(OPTIONS["fail"]))
    with Server(sys.argv[1], Handler) as server:
        print("Starting vLLM server on unix", flush=True)
        server.serve_forever()
