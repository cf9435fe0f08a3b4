"""A server of a tiny target in a thread: OpenAI's completions as vLLM answers them, SGLang's `/generate`, or
text alone, with faults to be switched on.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dflash_lab.models import server

Say = Callable[[list[int], int], tuple[list[int], list[int]]]  # prompt, limit -> ids, accepted by round


def hurry(monkeypatch: Any) -> None:
    """Pauses of milliseconds, no proxy, no key."""
    monkeypatch.setattr(server, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(server, "SETTLE_S", 0.1)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", *server.KEYS):
        monkeypatch.delenv(name, raising=False)


class ModelServer:
    """What is served and how: `say` answers, `form` is vllm, sglang or text, and the rest are faults.

    `statuses` are given, one a request, before anything is answered: (code, headers) or "reset"; `asked`
    holds every prompt that came.
    """

    def __init__(self, say: Say, text_of: Callable[[list[int]], str], stop_ids: list[int], form: str) -> None:
        self.say, self.text_of, self.stop_ids, self.form = say, text_of, stop_ids, form
        self.models = ["tiny"]
        self.statuses: list[Any] = []
        self.asked: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.prompt_tokens = 0  # more than the prompt has
        self.finish: str | None = ""  # in place of stop or length
        self.slow_s = 0.0
        self.longest = 10**9  # tokens of a prompt
        self.page = False  # HTML in place of JSON
        self.dies_after = 10**9  # answers
        self.draft_tokens = 4  # slots that the drafter fills; 0: no drafter
        self.others = 0  # tokens that other users got beside every answer
        self.per_request = False  # vLLM's metrics of each request
        self.rounds = self.drafted = self.accepted = self.tokens = 0
        self.url = ""
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[ModelServer]:
        """Serve at 127.0.0.1, at a free port, for the time of the block."""
        http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"of": self}))
        http.daemon_threads, http.handle_error = True, lambda *args: None  # clients may go as they please
        self.url = f"http://127.0.0.1:{http.server_port}/v1"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            http.shutdown()
            http.server_close()

    def generated(self, prompt: list[int], limit: int) -> tuple[list[int], list[int], bool]:
        """Answer one request, and count it."""
        with self.lock:
            self.asked.append(prompt)
            ids, rounds = self.say(prompt, limit)
            rounds = rounds if self.draft_tokens else []
            self.rounds += len(rounds)
            self.drafted += len(rounds) * self.draft_tokens
            self.accepted += sum(rounds)
            self.tokens += len(ids) + self.others
            return ids, rounds, bool(ids) and ids[-1] in self.stop_ids


class _Handler(BaseHTTPRequestHandler):
    of: ModelServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def _give(self, body: Any, code: int = 200, kind: str = "application/json", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        of = self.of
        if of.page:
            self._give("<html>sign in</html>", kind="text/html")
        elif self.path == "/v1/models":
            owner = {"vllm": "vllm", "sglang": "sglang"}.get(of.form, "somebody")
            self._give({"object": "list", "data": [{"id": name, "owned_by": owner} for name in of.models]})
        elif self.path == "/server_info" and of.form == "sglang":
            self._give({"speculative_num_draft_tokens": of.draft_tokens + 1})
        elif self.path == "/metrics" and of.form == "vllm":
            counts = {"generation_tokens_total": of.tokens}
            if of.draft_tokens:
                names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
                values = (of.rounds, of.drafted, of.accepted)
                counts |= {f"spec_decode_{name}_total": value for name, value in zip(names, values)}
                counts |= {f"spec_decode_{name}_created": 1.7e9 for name in names}
            lines = (f'vllm:{name}{{engine="0",model_name="tiny"}} {float(n)}' for name, n in counts.items())
            self._give("# HELP\n" + "\n".join(lines) + "\n", kind="text/plain")
        else:
            self._give({"error": {"message": f"no {self.path}"}}, 404)

    def do_POST(self) -> None:
        of = self.of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with of.lock:
            of.bodies.append(body)
            of.headers.append(dict(self.headers))
            fault = of.statuses.pop(0) if of.statuses else None
            dead = len(of.asked) >= of.dies_after
        if dead or fault == "reset":
            self.close_connection = True
            self.connection.close()
            return
        if fault is not None:
            code, headers = fault
            self._give({"error": {"message": "not now"}}, code, **headers)
            return
        if of.form == "strict" and (extra := set(body) & {"return_token_ids", "repetition_penalty"}):
            self._give({"error": {"message": f"unknown fields {sorted(extra)}"}}, 400)
            return
        time.sleep(of.slow_s)
        native = self.path == "/generate"
        prompt = body["input_ids" if native else "prompt"]
        if len(prompt) > of.longest:
            self._give({"error": {"message": f"a prompt has at most {of.longest} tokens"}}, 400)
            return
        limit = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        ids, rounds, closed = of.generated(prompt, limit)
        reason = of.finish if of.finish != "" else ("stop" if closed else "length")
        text = of.text_of(ids[:-1] if closed else ids)
        count = len(prompt) + of.prompt_tokens
        if native:
            spec = {"spec_verify_ct": len(rounds), "spec_num_correct_drafts": sum(rounds)}
            meta = {
                "prompt_tokens": count,
                "completion_tokens": len(ids),
                "finish_reason": {"type": reason, "matched": ids[-1] if closed else None},
                **(spec if of.draft_tokens else {}),
            }
            chunks = [{"text": text, "output_ids": ids, "meta_info": meta}]
            if body["stream"]:
                partial = {**meta, "finish_reason": None, "completion_tokens": 1}
                chunks.insert(0, {"text": "", "output_ids": ids[:1], "meta_info": partial})
        else:
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason, "stop_reason": None}
            whole: dict[str, Any] = {"usage": {"prompt_tokens": count, "completion_tokens": len(ids)}}
            if of.form == "vllm" and body.get("return_token_ids"):
                choice |= {"token_ids": ids, "prompt_token_ids": prompt}
            if of.per_request:
                counts = (len(rounds), len(rounds) * of.draft_tokens, sum(rounds))
                names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
                whole["metrics"] = {"speculative_decoding": dict(zip(names, counts))}
            chunks = [{"choices": [choice], **whole}]
            if body["stream"]:
                first = {**choice, "text": "", "finish_reason": None}
                rest = {name: value for name, value in choice.items() if name != "prompt_token_ids"}
                if "token_ids" in choice:
                    first["token_ids"], rest["token_ids"] = ids[:1], ids[1:]
                chunks = [{"choices": [first]}, {"choices": [rest], "usage": None}, {"choices": [], **whole}]
        if not body["stream"]:
            self._give(chunks[0])
            return
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self._give(events, kind="text/event-stream")
