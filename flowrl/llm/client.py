"""The client of OpenAI-compatible endpoints, for judges and the writer; alone in importing openai.

Nothing is sent unless an endpoint was given by name, and redirects are not followed. The key comes
from the environment alone. A client's own time limit is for each read, so an endpoint that drips a
byte now and then holds it for ever; here a call ends at its deadline, and an answer is plain bytes
of bounded size. An answer is read without trust, and may hold the key: callers redact it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from multiprocessing import TimeoutError as PoolTimeoutError
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

import httpx
import openai

from flowrl.llm.exchange import (
    MALFORMED,
    Budget,
    Completion,
    Endpoint,
    EndpointError,
    Form,
    Message,
)
from flowrl.paths import printable

WHY_LIMIT = 300
MOST_BYTES = 2**20  # of an answer
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_PLAIN = {"accept-encoding": "identity"}  # a header: a small answer could unpack to gigabytes
_QUOTED = 60  # characters of an answer
_LACKING = (400, 422, 501)  # statuses of an endpoint that does not know a form of answers
_FENCED = "\nAnswer with one JSON object of this schema, between ```json and ```:\n"
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
Result = TypeVar("Result")


class ChatClient:
    """Asks a model by messages; each request counts against a budget, retries too."""

    def __init__(self, endpoint: Endpoint, budget: Budget) -> None:
        self.endpoint, self.budget = endpoint, budget
        self._faults: list[str] = []  # of the answers to this call, as `bound` says
        self._forms: list[Form] = ["json_schema", "tools", "fenced"]  # those that it may know
        self._client = openai.OpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.key,
            timeout=endpoint.timeout_seconds,
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False,
                headers=_PLAIN,
                event_hooks={
                    "request": [lambda _: budget.spend(calls=1)],
                    "response": [lambda response: bound(response, self._faults)],
                },
            ),
        )

    def complete(
        self, messages: Sequence[Message], name: str, schema: Mapping[str, Any]
    ) -> Completion:
        """Return the answer to messages, in the first form of JSON that the endpoint knows.

        Raises EndpointError if there is no answer in time, or it is no completion.
        """
        before, began = self.budget.spent, time.monotonic()
        try:
            body = self._body(messages, name, schema)
        finally:
            self.budget.spend(seconds=time.monotonic() - began)
        text, finish, tokens = read_completion(body, self.endpoint.redacted)
        text = text.encode(errors="replace").decode()  # half characters
        sent = sum(len(each["content"]) for each in messages)
        self.budget.spend(tokens=(sent + len(text)) / 4 if tokens is None else tokens)
        if finish == MALFORMED:
            what = f"answers {text!r}, no completion"
            raise EndpointError(f"{what}; correct --base_url, or try later")
        cost = self.budget.spent - before
        return Completion(text=text, finish=finish, form=self._forms[0], cost=cost)

    def _body(self, messages: Sequence[Message], name: str, schema: Mapping[str, Any]) -> str:
        """Return the body of an answer; a form that is not known is not asked for again."""
        while True:
            try:
                return self._answer(_worded(self._forms[0], messages, name, schema))
            except openai.APIStatusError as error:
                if error.status_code in _LACKING and self._forms[1:] and self.budget.left:
                    self._forms.pop(0)
                    continue
                raise unavailable(self.endpoint, error, error.status_code) from error
            except openai.OpenAIError as error:
                if isinstance(error, openai.APITimeoutError):
                    raise late(self._faults) from error
                raise unavailable(self.endpoint, error, None) from error
            except DeadlineError as error:
                raise late(self._faults) from error

    def _answer(self, words: Mapping[str, Any]) -> str:
        """Ask up to `retries` times more, until a deadline."""
        left, endpoint = self.budget.most - self.budget.spent, self.endpoint
        retries = int(min(endpoint.retries, left.calls - 1))
        given = {"temperature": endpoint.temperature, "seed": endpoint.seed}
        given = {key: value for key, value in given.items() if value is not None}
        client = self._client.with_options(max_retries=max(retries, 0))
        create = client.chat.completions.with_raw_response.create
        asked = partial(create, model=endpoint.model, **given, **words)
        self._faults.clear()
        return within(min(endpoint.timeout_seconds, left.seconds), lambda: asked().text)


def _worded(
    form: Form, messages: Sequence[Message], name: str, schema: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the messages, and the words of a request that ask for JSON of a schema."""
    told: dict[str, Any] = {"messages": list(messages)}
    if form == "json_schema":
        asked = {"name": name, "strict": True, "schema": schema}
        return {**told, "response_format": {"type": "json_schema", "json_schema": asked}}
    if form == "tools":
        tool = {"type": "function", "function": {"name": name, "parameters": schema}}
        choice = {"type": "function", "function": {"name": name}}
        return {**told, "tools": [tool], "tool_choice": choice}
    first, *rest = messages
    fenced = f"{first['content']}{_FENCED}{json.dumps(schema)}"
    return {"messages": [{**first, "content": fenced}, *rest]}


def read_completion(body: str, clean: Callable[[str], str] = str) -> tuple[str, str, int | None]:
    """Return a completion's text, the reason of its end, and its tokens if it says them.

    What is no completion is quoted, after `clean` has removed secrets.

    >>> read_completion('{"choices": [{"message": {"content": "hm"}, "finish_reason": "stop"}]}')
    ('hm', 'stop', None)
    >>> read_completion("<html>")
    ('<html>', 'malformed', None)
    """
    text, finish, tokens = clean(body)[:_QUOTED], MALFORMED, None
    with suppress(*UNREADABLE):
        used = json.loads(body)["usage"]["total_tokens"]
        tokens = used if type(used) is int and 0 <= used < 2**31 else None
    with suppress(*UNREADABLE):
        choice = json.loads(body)["choices"][0]
        message, calls = choice["message"], choice["message"].get("tool_calls")
        said = calls[0]["function"]["arguments"] if calls else message.get("content")
        if refusal := message.get("refusal"):
            said, choice = refusal, {"finish_reason": "refusal"}
        ended = str(choice.get("finish_reason"))
        if isinstance(said, str):
            text, finish = _plain(said), ended if ended in ("length", "refusal") else "stop"
    return text, finish, tokens


def _plain(text: str) -> str:
    """Return the JSON in an answer, whose escapes could hide a secret; other text as it is."""
    fenced = _FENCE.search(text)
    with suppress(*UNREADABLE):
        return json.dumps(json.loads(fenced[1] if fenced else text), ensure_ascii=False)
    return text


def late(faults: Sequence[str] = ()) -> EndpointError:
    """Return the error of an endpoint whose answers until the deadline had these faults."""
    if not faults:
        return EndpointError("does not answer in time; try later")
    remedy = "correct --base_url or --model, or try later"
    return EndpointError(f"{faults[-1]} until the time is over; {remedy}")


def unavailable(endpoint: Endpoint, error: Exception, status: int | None) -> EndpointError:
    """Return the error of an endpoint that cannot be asked: the cause and the remedy."""
    if status in (401, 403):
        return EndpointError(f"refuses the key ({status}); correct {endpoint.api_key_env}")
    if status == 429:
        return EndpointError("says each time that it is asked too often (429); try later")
    if status is not None:
        return EndpointError(f"answers {status}; correct --base_url or --model, or try later")
    cause = endpoint.redacted(printable(" ".join(str(error.__cause__ or error).split())))
    what = "cannot be read" if isinstance(error.__cause__, httpx.ReadError) else "cannot be reached"
    return EndpointError(f"{what}: {cause[:WHY_LIMIT]}; correct --base_url, or try later")


class DeadlineError(Exception):
    """A call took longer than it may."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of a call, or raise what it raises, within so many seconds.

    Raises DeadlineError if it takes longer; it goes on in a thread that nobody waits for.
    """
    pool = ThreadPool(1)
    try:
        return pool.apply_async(copy_context().run, (call,)).get(max(seconds, 0.0))
    except PoolTimeoutError as error:
        raise DeadlineError from error
    finally:
        pool.close()


def bound(response: httpx.Response, faults: list[str]) -> None:
    """Limit the answer's size; a hook of a client's responses. Refuses packed answers.

    What is wrong with an answer is added to `faults`: a client may ask again until its deadline.
    """
    packed = response.headers.get("content-encoding", "identity").casefold()
    if packed not in ("", "identity"):
        faults.append(f"answers in a packed form ({printable(packed)[:_QUOTED]})")
        raise httpx.DecodingError(faults[-1], request=response.request)
    if response.is_error:
        faults.append(f"answers {response.status_code}")
    assert isinstance(response.stream, httpx.SyncByteStream)  # of a client that is not async
    response.stream = _BoundedStream(response.stream, faults)


class _BoundedStream(httpx.SyncByteStream):
    """A stream that ends with an error after MOST_BYTES."""

    def __init__(self, stream: httpx.SyncByteStream, faults: list[str]) -> None:
        self._stream, self._faults = stream, faults

    def __iter__(self) -> Iterator[bytes]:
        left = MOST_BYTES
        for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                self._faults.append(f"answers with more than {MOST_BYTES:,} bytes")
                raise httpx.ReadError(self._faults[-1])
            yield chunk

    def close(self) -> None:
        """Close the connection's stream."""
        self._stream.close()
