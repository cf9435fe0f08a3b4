"""A running server asked over HTTP: prompts go as token ids, answers come back as the ids that it chose.

vLLM's additions to OpenAI's completions are used where they are known; SGLang is asked in its own form.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from dflash_lab.data.records import BadRecord
from dflash_lab.errors import InputError, near
from dflash_lab.models.source import load_config, load_tokenizer, resolve, served_name, source_stop_ids
from dflash_lab.models.template import closing_id
from dflash_lab.secrets import redact

log = logging.getLogger(__name__)
KEYS = ("DFLASH_LAB_SERVER_KEY", "OPENAI_API_KEY")  # of the environment; the first that is set is sent
CONNECT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a request is sent again, doubled each time
TRIES, SLOW_TRIES = 6, 2  # of one request; of one that ran into the time limit
IN_A_ROW = 16  # failures without an answer between them that end a run
_ITS_OWN = {"server slow", "server busy", "server error", "server connection"}  # whatever the prompt
SETTLE_S = 2.0  # how long counters may lag behind the last answer
_QUOTED = 300  # characters of what a server says that are passed on
IDS, NATIVE, TEXT = "ids", "native", "text"  # forms of an answer: vLLM's, SGLang's, and text alone


class ServerError(InputError):
    """The server cannot be used at all, or no longer: what is wrong with it, and what to type."""


@dataclass(frozen=True)
class Drafting:
    """What a server counted of its speculative decoding: rounds, drafted and accepted tokens, and all tokens
    that it generated.
    """

    rounds: int
    drafted: int
    accepted: int
    tokens: int

    def __sub__(self, other: Drafting) -> Drafting:
        return Drafting(*(ours - theirs for ours, theirs in zip(vars(self).values(), vars(other).values())))

    @property
    def tau(self) -> float:
        """Tokens a round, pooled, the last round of an answer in full; NaN where nothing was drafted."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")


@dataclass(frozen=True)
class ServedAnswer:
    """An answer: its ids, closing token included, whether that token ended it, how long it took, and what was
    drafted for it (None: the server tells it of no single request).
    """

    tokens: list[int]
    closed: bool
    seconds: float
    first_seconds: float  # until the first token; NaN where the answer came in one piece
    drafting: Drafting | None


class _Again(Exception):
    """A request that may be sent again: at most so often, after a pause if the server names one."""

    def __init__(self, error: ServerError | BadRecord, tries: int, pause_s: float | None = None) -> None:
        self.error, self.tries, self.pause_s = error, tries, pause_s


class Server:
    """A server of `target` (as `load_target` takes it; its tokenizer and config are read, no weights).

    Opening it asks for its models and for one token, so that whatever is wrong with it is told at once, as
    `ServerError`. `form` says how answers come: as ids (vLLM), by SGLang's own endpoint, or as text, which is
    tokenised and taken only if it is the same text again. `model` empty: the only one it offers.
    """

    def __init__(self, url: str, target: str, model: str = "", *, timeout_s: float = 600) -> None:
        import httpx

        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.root = self.url.removesuffix("/v1")
        self.tokenizer = load_tokenizer(target)
        config = load_config(target)
        self.vocab_size, self.stop_ids = int(config.vocab_size), source_stop_ids(resolve(target), config)
        key = next((os.environ[name] for name in KEYS if os.environ.get(name)), "")
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
        )
        offered = self._offered()
        self.model = self._chosen(offered, model, target)
        self.block_size = 0  # as SGLang was started with; 0: not known
        self.form = NATIVE if offered[self.model].get("owned_by") == "sglang" else IDS
        if self.form == NATIVE:
            self.block_size = self._native_block()
        self._try_form()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *args: object) -> None:
        self._client.close()

    # ---- Which server is it? ----

    def _offered(self) -> dict[str, dict[str, Any]]:
        """Return what the server offers, by name."""
        try:
            models = self._once("GET", f"{self.url}/models").get("data")
        except _Again as again:
            raise ServerError(str(again.error)) from None
        except BadRecord as error:
            raise ServerError(error.reason) from None
        if not isinstance(models, list) or not all(isinstance(one, dict) and "id" in one for one in models):
            raise ServerError(f"{self.url}/models: {_NO_OPENAI}")
        if not models:
            raise ServerError(f"{self.url}/models: the server offers no model.")
        return {str(one["id"]): one for one in models}

    def _chosen(self, offered: Mapping[str, Any], model: str, target: str) -> str:
        listed = ", ".join(offered)
        if model in offered:
            return model
        if model:
            hint = near(model, offered)
            raise ServerError(
                f"server_model={model}: {self.url} does not serve it{hint}. It offers: {listed}."
            )
        if len(offered) > 1:
            raise ServerError(
                f"{self.url} offers several models: give the one that serves {served_name(target)} as "
                f"server_model. It offers: {listed}."
            )
        return next(iter(offered))

    def _native_block(self) -> int:
        """Return the block size that SGLang was started with; 0 where it does not tell."""
        for name in ("server_info", "get_server_info"):
            if (response := self._beside(name)) is not None:
                return int(response.json().get("speculative_num_draft_tokens") or 0)
        return 0

    def _try_form(self) -> None:
        """Ask for one token, by which the form of answers is settled."""
        prompt = self.tokenizer.encode("Hello", add_special_tokens=False)
        try:
            try:
                body, _ = self._sent(prompt, 1, stop=threading.Event())
            except BadRecord as error:
                if self.form != IDS or error.kind != "server refused":
                    raise
                log.info("%s takes no additions to OpenAI's completions: %s", self.url, error.reason)
                self.form = TEXT
                body, _ = self._sent(prompt, 1, stop=threading.Event())
            if self.form == IDS and _choice(body, self.url).get("token_ids") is None:
                self.form = TEXT
            if self.form != TEXT:
                self._tokens(prompt, 1, body)
            else:
                log.warning(
                    "%s gives text, no token ids: answers are tokenised, and taken only if they are the same "
                    "text again", self.url,
                )  # fmt: skip
                self._check_prompt(prompt, body)
        except BadRecord as error:
            raise ServerError(f"{self.url} did not answer a first request: {error.reason}") from None

    # ---- Asking ----

    def answer(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stream: bool = False,
        stop: threading.Event | None = None,
    ) -> ServedAnswer:
        """Return the answer to a prompt; `BadRecord` where it fails, `ServerError` where every other would.

        temperature 0: greedy. stream: let tokens come one by one, which tells when the first came. stop: once
        set, nothing is sent again.
        """
        start = time.perf_counter()
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        body, first = self._sent(
            prompt, max_new_tokens, stop=stop or threading.Event(), stream=stream, **sampling
        )
        seconds = time.perf_counter() - start
        tokens, closed = self._tokens(prompt, max_new_tokens, body)
        return ServedAnswer(tokens, closed, seconds, first, self._drafting(body, len(tokens)))

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        requests: int,
        on_wait: Callable[[], None] | None = None,
        answered: bool = False,
        **how: Any,
    ) -> Generator[tuple[int, ServedAnswer | BadRecord], None, None]:
        """Yield (number of the prompt, answer or why there is none) as they come, `requests` at a time.

        `how`: as `answer` takes it. on_wait is called now and then while nothing comes; it may raise to stop.
        `ServerError` after `IN_A_ROW` failures without an answer between them. Once there was one (`answered`
        says so from the start), those that lie in a prompt, such as one too long, are not among them.
        """
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        todo = iter(list(enumerate(zip(prompts, limits, strict=True))))
        lock, stop = threading.Lock(), threading.Event()
        found: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

        def work() -> None:
            while not stop.is_set():
                with lock:
                    number, (prompt, limit) = next(todo, (-1, ((), 0)))
                if number < 0:
                    return
                try:
                    found.put((number, self.answer(prompt, limit, stop=stop, **how)))
                except Exception as error:  # raised, or told, where the answers are taken
                    found.put((number, error))

        for _ in range(min(requests, len(prompts))):  # daemons: what hangs in a request holds up no exit
            threading.Thread(target=work, daemon=True).start()
        failed = 0
        try:
            for _ in prompts:
                number, answer = _next(found, on_wait)
                if isinstance(answer, Exception) and not isinstance(answer, BadRecord):
                    raise answer
                yield number, answer
                if not isinstance(answer, BadRecord):
                    answered, failed = True, 0
                elif not answered or answer.kind in _ITS_OWN:
                    failed += 1
                if failed >= IN_A_ROW:
                    assert isinstance(answer, BadRecord)
                    raise ServerError(
                        f"{self.url}: {failed} requests in a row failed, the last one: {answer.reason} What "
                        "was answered is kept; once the server is well, the same command goes on."
                    )
        finally:
            stop.set()

    def _sent(
        self,
        prompt: Sequence[int],
        limit: int,
        *,
        stop: threading.Event,
        stream: bool = False,
        **sampling: Any,
    ) -> tuple[dict[str, Any], float]:
        """Send a request until it is answered, and return the body and the seconds to its first token."""
        path, body = self._request(list(prompt), limit, stream, **sampling)
        for tried in range(1, TRIES + 1):
            start = time.perf_counter()
            try:
                chunks = self._stream(path, body) if stream else iter([self._once("POST", path, body)])
                first = float("nan")
                kept: list[dict[str, Any]] = []
                for chunk in chunks:
                    if stream and not kept:
                        first = time.perf_counter() - start
                    kept.append(chunk)
                return (self._joined(kept) if stream else kept[0]), first
            except _Again as again:
                if tried >= again.tries or stop.is_set():
                    raise again.error from None
                pause = min(FIRST_PAUSE_S * 2 ** (tried - 1), LONGEST_PAUSE_S)
                pause = pause if again.pause_s is None else again.pause_s
                log.info("%s Asked again in %.3g s.", again.error, pause)
                if stop.wait(pause):
                    raise again.error from None
        raise AssertionError("the last try returns or raises")

    def _request(
        self,
        prompt: list[int],
        limit: int,
        stream: bool,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> tuple[str, dict[str, Any]]:
        """Return where to ask and what to send. What a model's own generation config would put in place of a
        missing value (vLLM takes top_k and repetition_penalty from there) is spelled out.
        """
        plain = {"temperature": temperature, "top_p": top_p}
        added = {
            "top_k": top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": self.stop_ids,
        }
        if self.form == NATIVE:
            sampling = {**plain, **added, "max_new_tokens": limit}
            return f"{self.root}/generate", {
                "input_ids": prompt,
                "sampling_params": sampling,
                "stream": stream,
            }
        body = {"model": self.model, "prompt": prompt, "max_tokens": limit, "stream": stream, **plain}
        if temperature:  # of the prompt's own, so that the order of requests changes no answer
            body["seed"] = xxhash.xxh3_64_intdigest(np.asarray(prompt, "<i4").tobytes(), seed=seed) >> 1
        if stream:
            body["stream_options"] = {"include_usage": True}
        if self.form == IDS:
            body |= {**added, "return_token_ids": True}
        elif top_k:
            body["top_k"] = top_k
        return f"{self.url}/completions", body

    def _once(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request once and return the JSON that answers it."""
        with _naming(path, self):
            response = self._client.request(method, path, json=body)
        self._check(response, path)
        try:
            found = response.json()
        except ValueError:
            raise ServerError(self._page(response, path)) from None
        if not isinstance(found, dict):
            raise ServerError(f"{path}: {_NO_OPENAI}")
        return found

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request and yield the events that answer it."""
        with _naming(path, self), self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
            self._check(response, path)
            if "event-stream" not in response.headers.get("content-type", ""):
                response.read()
                raise ServerError(self._page(response, path))
            for line in response.iter_lines():
                told = line.removeprefix("data:").strip()
                if line.startswith("data:") and told != "[DONE]":
                    yield json.loads(told)

    def _beside(self, name: str) -> Any:
        """Return what the server shows beside its API, None where it does not."""
        try:
            with _naming(f"{self.root}/{name}", self):
                response = self._client.get(f"{self.root}/{name}")
        except _Again as again:
            raise ServerError(str(again.error)) from None
        return response if response.status_code == 200 else None

    def _check(self, response: Any, path: str) -> None:
        """Raise what a status means."""
        if (code := response.status_code) == 200:
            return
        told = f"{path} answered {code}{_said(response)}"
        if code in (408, 429) or code >= 500:
            kind = "server busy" if code == 429 else "server error"
            raise _Again(BadRecord(kind, told), TRIES, _pause(response.headers.get("retry-after", "")))
        if code in (401, 403):
            names = " or ".join(KEYS)
            raise ServerError(
                f"{told}. It wants a key, or another one: put it into the environment as {names}."
            )
        if 300 <= code < 400:
            raise ServerError(
                f"{told}. It sends on to {response.headers.get('location', 'elsewhere')}: give that "
                "address as server."
            )
        if code in (404, 405):
            raise ServerError(f"{told}. {self._misplaced()}")
        raise BadRecord("server refused", told)

    def _page(self, response: Any, path: str) -> str:
        kind = response.headers.get("content-type", "no type").partition(";")[0]
        return (
            f"{path} answered with {kind} in place of JSON: a proxy, a login page or another program stands "
            f"there. {self._misplaced()}"
        )

    def _misplaced(self) -> str:
        """What to type in place of an address under which there is no server."""
        if not self.url.endswith("/v1"):
            return f"The address usually ends in /v1: give server={self.url}/v1."
        return "Give the server's own address, such as http://localhost:8000/v1."

    # ---- Reading an answer ----

    def _joined(self, chunks: list[dict[str, Any]]) -> dict[str, Any]:
        """Make the body of an answer that came in pieces what it would be in one."""
        if not chunks:
            raise BadRecord("server error", f"{self.url} ended an answer before it began.")
        if "error" in chunks[-1]:
            raise BadRecord("server error", f"{self.url}: {redact(str(chunks[-1]['error']))[:_QUOTED]}")
        if self.form == NATIVE:
            ids: list[int] = []
            for chunk in chunks:  # some versions send all ids so far, others the new ones
                new, meta = chunk.get("output_ids") or [], chunk.get("meta_info") or {}
                ids = new if len(new) == meta.get("completion_tokens") else ids + new
            return {**chunks[-1], "output_ids": ids}
        whole: dict[str, Any] = {"text": ""}
        body: dict[str, Any] = {}
        for chunk in chunks:
            body |= {name: value for name, value in chunk.items() if value is not None}
            for choice in chunk.get("choices") or []:
                whole["text"] += choice.get("text") or ""
                if choice.get("token_ids") is not None:
                    whole.setdefault("token_ids", []).extend(choice["token_ids"])
                for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
                    if choice.get(name) is not None:
                        whole[name] = choice[name]
        return {**body, "choices": [whole]}

    def _tokens(self, prompt: Sequence[int], limit: int, body: dict[str, Any]) -> tuple[list[int], bool]:
        """Return the ids of an answer and whether a closing token ended it, or say what is wrong with it."""
        self._check_prompt(prompt, body)
        if self.form == NATIVE:
            meta, text = body["meta_info"], body.get("text")
            finish = meta.get("finish_reason") or {}
            reason, ended = finish.get("type"), finish.get("matched")
            ids, count = body.get("output_ids"), meta.get("completion_tokens")
        else:
            choice = _choice(body, self.url)
            text, ids = choice.get("text"), choice.get("token_ids")
            reason, ended = choice.get("finish_reason"), choice.get("stop_reason")
            count = (body.get("usage") or {}).get("completion_tokens")
        if reason not in ("stop", "length"):
            told = f"ended an answer with finish_reason {reason}, which is neither stop nor length."
            raise BadRecord("server cut", f"{self.url} {told}")
        closed = reason == "stop"
        if self.form == TEXT:
            ids = self._tokenised(str(text), closed, count)
        elif not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise ServerError(f"{self.url} gave no token ids, though it did at first.")
        else:
            self._check_vocabulary(ids, str(text))
            if closed and isinstance(ended, int) and ids[-1:] != [ended]:
                ids = [*ids, ended]  # some versions keep the closing token to themselves
        if closed and (not ids or ids[-1] not in self.stop_ids):
            last = f"token {ids[-1]}" if ids else "once"
            told = f"{self.url} ended an answer at {last}; the target's answers end at {self.stop_ids}."
            raise BadRecord("server cut", told)
        if not closed and (count or len(ids)) < limit:
            told = f"cut an answer after {count or len(ids)} of {limit} tokens: is its context too short?"
            raise BadRecord("server cut", f"{self.url} {told}")
        return ids, closed

    def _check_prompt(self, prompt: Sequence[int], body: dict[str, Any]) -> None:
        """`ServerError` where the server read other tokens than it was given."""
        if self.form == NATIVE:
            if not isinstance(body.get("meta_info"), dict):
                raise ServerError(f"{self.root}/generate: the answer has no meta_info, as SGLang's have.")
            count, ids = body["meta_info"].get("prompt_tokens"), None
        else:
            count = (body.get("usage") or {}).get("prompt_tokens")
            ids = _choice(body, self.url).get("prompt_token_ids")
        if (ids is not None and list(ids) != list(prompt)) or count not in (None, len(prompt)):
            raise ServerError(
                f"{self.url} read a prompt of {len(prompt)} tokens as {count if ids is None else len(ids)} "
                f"{'' if ids is None else 'other '}tokens: it has another tokenizer, or adds tokens of its "
                f"own. {self._serve_it()}"
            )

    def _check_vocabulary(self, ids: list[int], text: str) -> None:
        """`ServerError` where ids are beyond the target's vocabulary, or mean another text here."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ServerError(
                f"{self.url} answered with token {max(ids)}, but the target's vocabulary ends at "
                f"{self.vocab_size - 1}: it serves another model. {self._serve_it()}"
            )
        shown = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        ours = str(self.tokenizer.decode(shown, skip_special_tokens=True))
        # Bytes that are no whole letter are shown in different ways, and spaces at an answer's start too.
        if "\ufffd" not in ours + text and "".join(ours.split()) != "".join(text.split()):
            raise ServerError(
                f"{self.url} means {text[:40]!r} by tokens that are {ours[:40]!r} to the target: it has "
                f"another tokenizer. {self._serve_it()}"
            )

    def _serve_it(self) -> str:
        return f"{self.model} is served; give the target that it is, or serve the target."

    def _tokenised(self, text: str, closed: bool, count: int | None) -> list[int]:
        """Return the ids of a text, if they are sure to be those that the target chose."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        counts = (None, len(ids), len(ids) + closed)
        if "\ufffd" in text or self.tokenizer.decode(ids) != text or count not in counts:
            raise BadRecord(
                "server text",
                "the answer came as text, and its tokens are not sure to be those that the server chose "
                f"({len(ids)} here, {count or 'not counted'} there); vLLM and SGLang tell the ids.",
            )
        closing = closing_id(self.tokenizer, "assistant")
        return [*ids, closing if closing is not None else self.stop_ids[0]] if closed else ids

    # ---- What the server counts ----

    def _drafting(self, body: dict[str, Any], tokens: int) -> Drafting | None:
        """Return what was drafted for one answer, where the server tells."""
        if self.form == NATIVE:
            meta = body["meta_info"]
            if meta.get("spec_verify_ct") is None:
                return None
            rounds = int(meta["spec_verify_ct"])
            accepted = _first(
                meta, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"
            )
            drafted = _first(meta, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
            if drafted is None:
                drafted = rounds * max(self.block_size - 1, 0)
            if accepted is None:  # the first token comes from the prefill, one more from every round
                accepted = max(0, tokens - 1 - rounds)
            return Drafting(rounds, drafted, accepted, tokens)
        told = (body.get("metrics") or {}).get("speculative_decoding")
        if not isinstance(told, dict):
            return None
        names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        rounds, drafted, accepted = (int(told[name]) for name in names)
        return Drafting(rounds, drafted, accepted, tokens)

    def counters(self, at_least: int = 0) -> Drafting | None:
        """Return vLLM's counters since its start, of all its users; None where it shows none.

        They lag a little behind answers: they are read again until `at_least` tokens are counted.
        """
        if self.form == NATIVE:
            return None
        until = time.monotonic() + SETTLE_S
        while True:
            response = self._beside("metrics")
            values = _prometheus(response.text) if response is not None else {}
            if "vllm:generation_tokens" not in values:
                return None
            names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            rounds, drafted, accepted = (int(values.get(f"vllm:spec_decode_{name}", 0)) for name in names)
            found = Drafting(rounds, drafted, accepted, int(values["vllm:generation_tokens"]))
            if found.tokens >= at_least or time.monotonic() > until:
                return found
            time.sleep(SETTLE_S / 20)


_NO_OPENAI = "what it answers is not in OpenAI's form; vLLM's and SGLang's servers have it under /v1."


@contextlib.contextmanager
def _naming(path: str, server: Server) -> Iterator[None]:
    """Put what the network says of a request into words, and say whether it may be sent again."""
    import httpx

    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if "SSL" in str(error) and "CERTIFICATE" not in str(error):
            plain = server.url.replace("https://", "http://", 1)
            raise ServerError(f"{server.url} does not speak https: give server={plain}.") from None
        told = f"{server.url}: no server answers there ({error or 'in vain'}). {_START}"
        raise _Again(ServerError(told), TRIES) from None
    except httpx.TimeoutException:
        told = f"{path} said nothing for {server.timeout_s:g} s: raise server_timeout_s, or ask for less."
        raise _Again(BadRecord("server slow", told), SLOW_TRIES) from None
    except httpx.TransportError as error:
        raise _Again(
            BadRecord("server connection", f"{path}: the connection broke: {error}"), TRIES
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, json.JSONDecodeError) as error:
        raise ServerError(f"{path}: {error}.") from None


_START = (
    "Start it (vllm serve TARGET, or python -m sglang.launch_server --model-path TARGET) or correct server; "
    "what was answered is kept, and the same command goes on."
)


def _next(found: queue.SimpleQueue, on_wait: Callable[[], None] | None) -> tuple[int, Any]:
    while True:
        try:
            return found.get(timeout=1.0)
        except queue.Empty:
            if on_wait is not None:
                on_wait()


def _choice(body: dict[str, Any], url: str) -> dict[str, Any]:
    choices = body.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise ServerError(f"{url}/completions: {_NO_OPENAI}")
    return choices[0]


def _said(response: Any) -> str:
    """Return what a server says of an error, after a colon; nothing for a page."""
    try:
        found = response.json()
    except ValueError:
        return ""
    if isinstance(found, dict):
        inner = found.get("error", found.get("detail", found.get("message", "")))
        found = inner.get("message", "") if isinstance(inner, dict) else inner
    return f": {redact(str(found))[:_QUOTED].rstrip('.')}" if found else ""


def _pause(retry_after: str) -> float | None:
    """Return the seconds of a Retry-After header, which holds a number or a date."""
    if not retry_after:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            when = email.utils.parsedate_to_datetime(retry_after)
        except ValueError:
            return None
        seconds = (when - datetime.datetime.now(when.tzinfo)).total_seconds()
    return min(max(seconds, 0.0), 10 * LONGEST_PAUSE_S)


def _first(meta: Mapping[str, Any], *names: str) -> int | None:
    return next((int(meta[name]) for name in names if meta.get(name) is not None), None)


_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)


def _prometheus(text: str) -> dict[str, float]:
    """Return each counter's sum over all engines, by its name without `_total`."""
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        name = name.removesuffix("_total")
        values[name] = values.get(name, 0.0) + float(value)
    return values
