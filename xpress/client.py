"""A client of OpenAI-compatible servers (vLLM, SGLang, `transformers serve`): many requests in flight, faults retried.

`completions` sends the prompt's ids as our own render function made them, and asks for the ids of the answer; where
the server gives text alone, the text is tokenised again and the row says so. `chat` sends messages, for servers that
have no other endpoint: their template and sampling defaults apply, so the length of the rendered prompt is compared.
"""

from __future__ import annotations

import email.utils
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import httpx

ENDPOINTS = {"completions": "/completions", "chat": "/chat/completions"}
LONGEST_WAIT = 60.0  # seconds between two tries, unless the server asks for more


@dataclass(frozen=True)
class Turn:
    """One question: prompt ids as rendered, the messages behind them, the seed of its sampling."""

    id: str
    prompt_ids: list[int]
    messages: list[dict]
    seed: int


@dataclass(frozen=True)
class Answer:
    """The generated ids, stop token included, and what the row records of how they came."""

    ids: list[int]
    facts: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """No answer after every retry."""

    why: str


class _Half(Exception):
    """A reply that is no whole answer."""


class _GaveUp(Exception):
    """Every retry is used up."""


class Tokens:
    """What rendering and stopping need of a target whose weights only the server holds: no weights are loaded."""

    def __init__(self, name: str, tokenizer, generation_config=None, context_length: int | None = None):
        self.name, self.tokenizer, self.context_length = name, tokenizer, context_length
        self.generation_config = generation_config

    @property
    def model(self):
        return self  # stop_ids reads model.generation_config

    def fingerprint(self) -> None:
        """Unknown: the weights are the server's."""
        return None

    @classmethod
    def from_pretrained(cls, name: str, revision=None) -> Tokens:
        """`name` is a local folder or a hub id. Raises OSError naming `target` where neither can be read."""
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        try:
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
            config = AutoConfig.from_pretrained(name, revision=revision)
        except (OSError, ValueError) as error:
            known = (
                "the folder has no readable tokenizer" if Path(name).is_dir() else "no such folder, and no hub access"
            )
            raise OSError(f"target={name}: {known}. Give a local folder or a hub id (with network). {error}") from error
        try:
            own = GenerationConfig.from_pretrained(name, revision=revision)
        except OSError:
            own = GenerationConfig.from_model_config(config)
        return cls(str(name), tokenizer, own, getattr(config.get_text_config(), "max_position_embeddings", None))


class Server:
    """Answers from `base_url` (http://host:port/v1). `model`: the id to ask for, by default the only one served.

    sleep(seconds) and jitter() -> [0, 1) are there to be replaced in tests. The API key comes from OPENAI_API_KEY.
    Raises ValueError for bad settings and for requests that the server refuses, OSError where it cannot be reached.
    """

    def __init__(
        self,
        base_url: str | None,
        endpoint: str = "completions",
        model: str | None = None,
        concurrency: int = 16,
        retries: int = 6,
        timeout: float = 600.0,
        sleep=None,
        jitter=random.random,
    ):
        if not str(base_url).startswith(("http://", "https://")):
            raise ValueError(f"base_url={base_url}: backend=openai needs the server's address, http://host:port/v1")
        if endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint={endpoint}: known are {', '.join(ENDPOINTS)}")
        for name, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout}: must be a positive number of seconds")
        self.base_url, self.endpoint, self.concurrency, self.retries = (
            base_url.rstrip("/"),
            endpoint,
            concurrency,
            retries,
        )
        self._stop = threading.Event()
        self._sleep, self._jitter = sleep or self._stop.wait, jitter
        key = os.environ.get("OPENAI_API_KEY")
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            limits=httpx.Limits(max_connections=concurrency + 1),
        )
        self.model, self.context_length = self._find_model(model)

    @property
    def settings(self) -> dict:
        """What the folder of rows records. The address may change between runs; the rest may not."""
        return {"backend": "openai", "base_url": self.base_url, "endpoint": self.endpoint, "model": self.model}

    def _find_model(self, model: str | None) -> tuple[str, int | None]:
        """The id and the context length that /models reports."""
        try:
            listed = self._request("GET", "/models", None, lambda found: [dict(entry) for entry in found["data"]])
        except _GaveUp as error:
            raise OSError(f"base_url={self.base_url}: no server answers there ({error}); start it first") from error
        except ValueError:
            if model is None:
                raise
            return model, None
        names = [entry.get("id") for entry in listed]
        if model is None and len(names) != 1:
            raise ValueError(f"base_url={self.base_url} serves {names or 'no model'}; say which with model=<id>")
        chosen = model or names[0]
        return chosen, next((entry.get("max_model_len") for entry in listed if entry.get("id") == chosen), None)

    # --- asking -----------------------------------------------------------------------------------------------------

    def answers(self, turns: list[Turn], how: dict, tokenizer, stops) -> Iterator[list[tuple[Turn, Answer | Failed]]]:
        """Answers in the order in which they come. how: max_new_tokens, temperature, top_p, thinking.

        Where many turns in a row fail after all retries, the server is taken for gone and the rest is not asked.
        """
        waiting, running, failed = iter(turns), {}, 0
        self._stop.clear()
        pool = ThreadPoolExecutor(self.concurrency)
        finished = lambda future: (running.pop(future), self._read(future.result(), tokenizer, stops))  # noqa: E731
        try:
            while True:
                if failed < 2 * self.concurrency:
                    for turn in islice(waiting, self.concurrency - len(running)):
                        running[pool.submit(self._ask, turn, how, stops)] = turn
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    turn, answer = finished(future)
                    failed = failed + 1 if isinstance(answer, Failed) else 0
                    yield [(turn, answer)]
            if left := [(turn, Failed("not asked, since the server is gone")) for turn in waiting]:
                yield left
        except KeyboardInterrupt:  # what has arrived is not lost
            yield [finished(future) for future in list(running) if future.done() and not future.exception()]
            raise
        finally:
            self._stop.set()  # wakes whoever waits for a retry
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, turn: Turn, how: dict, stops) -> dict | Failed:
        """The choice that came back, or Failed."""
        body = {"model": self.model, "max_tokens": how["max_new_tokens"], "seed": turn.seed}
        body |= {"temperature": how["temperature"], "top_p": how["top_p"]}
        if self.endpoint == "chat":
            body |= {"messages": turn.messages, "chat_template_kwargs": {"enable_thinking": how["thinking"]}}
        else:  # the server's defaults come from the model's generation config, and are not the target's own argmax
            body |= {"prompt": turn.prompt_ids, "return_token_ids": True, "skip_special_tokens": False}
            body |= {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": list(stops)}
            body |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}

        def check(found: dict) -> dict:
            choice = found["choices"][0]
            if choice.get("finish_reason") not in ("stop", "length"):
                raise _Half(f"finish_reason={choice.get('finish_reason')}")
            if not isinstance(choice["message"] if self.endpoint == "chat" else choice["text"], (dict, str)):
                raise _Half("no text")
            return {"used": (found.get("usage") or {}).get("prompt_tokens"), "seed": turn.seed, **choice}

        try:
            choice = self._request("POST", ENDPOINTS[self.endpoint], body, check)
        except _GaveUp as error:
            return Failed(str(error))
        message = choice.get("message") or {}
        if isinstance(choice["used"], int) and choice["used"] != len(turn.prompt_ids):
            raise ValueError(
                f"row {turn.id}: the server read {choice['used']} prompt tokens, target.name's template renders "
                f"{len(turn.prompt_ids)}; use endpoint=completions, or start the server with the same chat template"
            )
        if message.get("reasoning_content") or message.get("reasoning"):
            raise ValueError("the server takes the reasoning out of its answers; start it without a reasoning parser")
        return choice

    def _read(self, choice: dict | Failed, tokenizer, stops) -> Answer | Failed:
        """The ids of an answer. Here and not in the threads: a tokenizer is not made for several at once."""
        if isinstance(choice, Failed):
            return choice
        ids, origin = choice.get("token_ids"), "server"
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            text = choice["message"].get("content") or "" if self.endpoint == "chat" else choice["text"]
            ids, origin = tokenizer(text, add_special_tokens=False)["input_ids"], "retokenized"
        if choice["finish_reason"] == "stop" and stops and (not ids or ids[-1] not in stops):
            named = choice.get("stop_reason", choice.get("matched_stop"))
            usual = getattr(tokenizer, "eos_token_id", None)
            ids = [*ids, named if named in stops else usual if usual in stops else stops[0]]
        return Answer(list(ids), {"ids": origin, "seed": choice["seed"]})

    def _request(self, method: str, path: str, body: dict | None, check):
        """check(reply) of the first whole reply. Raises ValueError with the server's words where it refuses."""
        why = ""
        for attempt in range(self.retries + 1):
            asked_for = 0.0
            try:
                reply = self._http.request(method, self.base_url + path, json=body)
                if reply.status_code in (408, 429) or reply.status_code >= 500:
                    why, asked_for = f"HTTP {reply.status_code}: {reply.text[:200]}", retry_after(reply.headers)
                elif reply.status_code >= 300:
                    raise ValueError(f"{method} {self.base_url}{path}: HTTP {reply.status_code}: {_message(reply)}")
                else:
                    try:
                        return check(reply.json())
                    except (ValueError, LookupError, TypeError, AttributeError) as error:
                        raise _Half(f"not a whole answer ({type(error).__name__}: {error})") from error
            except (httpx.RequestError, _Half) as error:
                why = f"{type(error).__name__.lstrip('_')}: {error}"
            if attempt < self.retries:
                self._sleep(max(asked_for, min(LONGEST_WAIT, 2.0**attempt) * (0.5 + self._jitter() / 2)))
                if self._stop.is_set():
                    break
        raise _GaveUp(f"{why} (tried {attempt + 1} times)")


def retry_after(headers) -> float:
    """Seconds of a Retry-After header, a number or a date; 0 where there is none."""
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def _message(reply) -> str:
    """The server's own words: {"error": {"message"}}, {"message"} and {"detail"} are all in use."""
    try:
        found = reply.json()
        found = found.get("error", found)
        return str(found if isinstance(found, str) else found.get("message") or found.get("detail") or found)
    except (ValueError, AttributeError):
        return reply.text[:500]
