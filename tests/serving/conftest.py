"""The real server as a process, and a real browser where Chromium is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


@dataclass(frozen=True)
class Served:
    """A running server: its process, the address it printed, and the file of its log."""

    process: subprocess.Popen[str]
    address: str  # with its token, if it has one
    log: Path

    @property
    def url(self) -> str:
        return self.address.partition("/?")[0].rstrip("/")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def token(self) -> str:
        return self.address.partition("?token=")[2]


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., Served]]:
    """A function that starts `flowrl serve` with these words at a free port."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: object) -> Served:
        log = tmp_path / f"serve{len(started)}.log"
        command = [sys.executable, "-m", "flowrl.cli", "serve", *map(str, words), "--port=0"]
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True, env=dict(os.environ)
            )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        return Served(process, line.split()[0], log)

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def browser():
    """Chromium, for the tests of one file: its event loop would disturb those of others."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """A new page; the test fails if it has written to its console or opened a dialog."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    elsewhere: list[str] = []
    page.on("request", lambda request: elsewhere.append(request.url))
    yield page
    assert said == []
    assert {address.split("/")[2].partition(":")[0] for address in elsewhere} <= {"127.0.0.1"}
    context.close()
