"""An endpoint that lies holds nobody up: it drips, floods, packs, hangs and sends elsewhere."""

from __future__ import annotations

import gzip
import json
import random
import socket
import threading
import time
import tracemalloc
from contextlib import contextmanager, suppress
from functools import cache

import pytest

from flowrl.judging.judge import JudgeUnavailableError, SkillText
from flowrl.llm.exchange import Budget, Cost
from tests.judging.endpoint import needs_openai

pytestmark = needs_openai
SECONDS = 1.0


@cache
def bomb() -> bytes:
    """A quarter of a gigabyte in 260 kB."""
    return gzip.compress(b" " * 2**28)


def lines(rng: random.Random) -> list[tuple[bytes, float]]:
    """What an endpoint sends: pieces, and a wait after each; drawn anew for each seed."""
    status = rng.choice(
        ["200 OK", "429 Too Many Requests", "503 Busy", "302 Found", "100 Continue"]
    )
    head = f"HTTP/1.1 {status}\r\n" * rng.choice([1, 1, 1, 50])
    fields = ["content-type: application/json", "location: /v1/again"]
    fields += rng.sample(
        ["retry-after: 59", "transfer-encoding: chunked", "content-length: 999999999",
         "content-encoding: gzip", "x: " + "y" * 3000, "connection: close"],
        rng.randint(0, 3),
    )  # fmt: skip
    body = rng.choice([b"", bomb(), b" " * 2**22, b'{"choices": [', b"5\r\nhello\r\n" * 1000])
    whole = head.encode() + "\r\n".join(fields).encode() + b"\r\n\r\n" + body
    cut = rng.choice([0, 5, len(head), len(head) + 30, len(whole) - len(body), len(whole)])
    quick, slow = whole[:cut], whole[cut : cut + 200]
    wait = rng.choice([0.0, 0.02, 0.2])
    return [(quick, 0.0), *((slow[i : i + 1], wait) for i in range(len(slow)))]


@contextmanager
def lying(seed: int):
    """A server whose every answer is drawn; it stays open for ever after the last piece."""
    over, server = threading.Event(), socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.05)

    def answer(peer: socket.socket, rng: random.Random) -> None:
        with peer, suppress(OSError):
            peer.recv(2**16)
            for piece, wait in lines(rng):
                peer.sendall(piece)
                over.wait(wait)
            over.wait(rng.choice([0.0, 60.0]))

    def serve() -> None:
        rng = random.Random(seed)
        while not over.is_set():
            with suppress(TimeoutError):
                peer, _ = server.accept()
                threads.append(threading.Thread(target=answer, args=(peer, rng)))
                threads[-1].start()

    threads = [threading.Thread(target=serve)]
    threads[0].start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"
    finally:
        over.set()
        for thread in threads:
            thread.join()
        server.close()


@pytest.mark.parametrize("seed", range(24))
def test_an_endpoint_that_lies_ends_within_its_seconds_and_bytes(seed, monkeypatch):
    from flowrl.judging.openai import OpenAIJudge

    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    bomb()  # made before time and memory are counted
    with lying(seed) as url:
        budget = Budget(Cost(calls=100, tokens=10**6, seconds=SECONDS))
        judge = OpenAIJudge(base_url=url, model="m", budget=budget)
        item = SkillText(skill="A", text=json.dumps({"description": "\x1b[31m"}))
        tracemalloc.start()
        began = time.monotonic()
        for _ in range(3):
            try:
                said = judge.score(item)
            except JudgeUnavailableError as error:
                why = str(error)
            else:
                assert said.score is None
                why = said.why
            assert why.isprintable()
        took = time.monotonic() - began
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert took < 10 * SECONDS, "an hour of Retry-After, drips and floods, on a loaded machine"
    assert most < 64 * 2**20


def test_a_call_in_time_returns_and_raises_as_it_is():
    from flowrl.llm.client import DeadlineError, within

    assert within(60.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 // 0)
    with pytest.raises(DeadlineError):
        within(0.01, lambda: time.sleep(0.5))
