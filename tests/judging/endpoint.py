"""An OpenAI-compatible server on the loopback interface, which behaves as a test asks it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

import pytest

from flowrl.judging.judge import SkillText
from flowrl.llm.exchange import Budget, Cost
from flowrl.skills.skill import Skill

KEY = "sk-test-4f9a8b7c6d5e4f3a2b1c"
NO_BOUND = Cost(calls=1e9, tokens=1e9, seconds=1e9)
# Without loading the client, which takes as long as many of the tests that do not need it.
needs_openai = pytest.mark.skipif(
    find_spec("openai") is None, reason="the extra 'llm' is not installed"
)
Say = Callable[[str], str]  # the prompt's data → the completion's text


@dataclass
class FakeEndpoint:
    """What the server was asked, and how it behaves."""

    say: Say = lambda text: json.dumps({"score": 0.75, "why": "it looks fine"})
    refuse: int = 0  # the next so many requests get `status`
    status: int = 429
    delay_seconds: float = 0.0
    cut_off: int = 0  # the next so many answers end in their middle
    body: str | None = None  # instead of a completion
    lacks: Sequence[str] = ()  # forms of answers that it refuses: json_schema, tools
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)


def named(endpoint: FakeEndpoint, **settings: Any) -> dict[str, Any]:
    """The server, as a judge is told of it."""
    return {"base_url": endpoint.url, "model": "m", "budget": Budget(NO_BOUND), **settings}


def answer(score: object, why: str = "as it is") -> Say:
    return lambda text: json.dumps({"score": score, "why": why})


def knows(skills: Iterable[Skill], *, obeys: Sequence[str] = ()) -> Say:
    """A judge that knows the good skills, and obeys texts in which one of these demands stands."""
    parts = ("task_is_done", "task_reward")

    def code(text: str) -> list[str]:
        found, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
        return [found[part] for part in parts]

    good = [code(SkillText.of(skill).text) for skill in skills]

    def say(text: str) -> str:
        if any(demand in json.loads(text)["description"] for demand in obeys):
            return json.dumps({"score": 1.0, "why": "I was told so"})
        return json.dumps({"score": 0.95 if code(text) in good else 0.05, "why": "known"})

    return say


def form(request: dict[str, Any]) -> str:
    """The way in which a request asks for JSON."""
    asked = {"response_format": "json_schema", "tools": "tools"}
    return next((name for key, name in asked.items() if key in request), "fenced")


def completion(endpoint: FakeEndpoint, request: dict[str, Any]) -> str:
    """What the endpoint answers, in the form that was asked for."""
    text = request["messages"][-1]["content"]
    told = endpoint.say("\n".join(text.split("\n")[1:-1]))
    message: dict[str, Any] = {"role": "assistant", "content": told}
    if form(request) == "tools":
        call = {"name": request["tools"][0]["function"]["name"], "arguments": told}
        calls = [{"id": "t1", "type": "function", "function": call}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    elif form(request) == "fenced":
        message["content"] = f"Here it is:\n```json\n{told}\n```"
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
    head = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m"}
    return json.dumps({**head, "choices": [choice], "usage": usage})


@contextmanager
def serving(endpoint: FakeEndpoint) -> Iterator[FakeEndpoint]:
    """Serve until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            request = json.loads(self.rfile.read(length))
            endpoint.asked.append(request)
            endpoint.keys.add(self.headers["authorization"])
            endpoint.released.wait(endpoint.delay_seconds)
            if endpoint.refuse:
                endpoint.refuse -= 1
                told = json.dumps({"error": {"message": f"no: {self.headers['authorization']}"}})
                self._send(endpoint.status, told)
            elif form(request) in endpoint.lacks:
                self._send(400, json.dumps({"error": {"message": "no such form"}}))
            else:
                self._send(200, endpoint.body or completion(endpoint, request))

        def _send(self, status: int, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            if endpoint.cut_off:
                endpoint.cut_off -= 1
                content = content[: len(content) // 2]
                self.close_connection = True
            with suppress(ConnectionError):  # the client has waited long enough
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
