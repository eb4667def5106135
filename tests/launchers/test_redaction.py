"""Secrets do not reach what is written down, however they are cut, quoted or nested."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import console
from flowrl.errors import ConfigError
from flowrl.launchers import log_writer, run_status
from flowrl.launchers.base import ExitCause, Exited, Handle, Lost
from flowrl.launchers.sandbox import child_env
from flowrl.parallel import events
from flowrl.redaction import cleaned, redacted, secrets_of
from tests.launchers.conftest import SLEEP, end_of, start_of, until
from tests.waiting import limit

SECRET = "hunter2-hunter2"
NAMES = "API_KEY api_key MY_TOKEN AWS_SECRET_ACCESS_KEY PGPASSWORD PASSWD GOOGLE_CREDENTIALS"


@pytest.mark.parametrize("name", NAMES.split())
def test_a_value_is_a_secret_by_its_name(name):
    assert secrets_of({name: SECRET}) == (SECRET,)


@pytest.mark.parametrize(
    ("environ", "passed", "secrets"),
    [
        ({"PLAIN": SECRET, "OTHER": "other-other"}, [], ()),
        ({"PLAIN": SECRET, "OTHER": "other-other"}, ["PLAIN"], (SECRET,)),
        ({"https_proxy": f"http://ann:{SECRET}@proxy:3128", "HOME": "/home/ann"}, [], (SECRET,)),
        ({"http_proxy": f"ann:{SECRET}@proxy:3128", "no_proxy": "localhost,.org"}, [], (SECRET,)),
        ({"MY_KEY": "seven77", "B_KEY": ""}, [], ()),
    ],
    ids=["plain", "passed", "URL", "proxy without a scheme", "short"],
)
def test_what_is_passed_on_and_passwords_of_urls_are_secrets(environ, passed, secrets):
    assert secrets_of(environ, passed) == secrets


URLS = {
    "http://ann:hunt@er2secret@proxy:3128": "http://ann:[redacted]@proxy:3128",
    "postgres://u:pa/ssword12@h/db": "postgres://u:[redacted]@h/db",
    "https://0123456789abcdef0123456789abcdef@sentry.io/1": "https://[redacted]@sentry.io/1",
    f"https://a-token-of-a-user:{'x' * 3000}@host/simple": "https://[redacted]@host/simple",
    "https://ann@host.example/x:y@z": "https://ann@host.example/x:y@z",
    "https://a.long.name.of.a.host:8080/me@x": "https://a.long.name.of.a.host:8080/me@x",
    "http://ann:@host": "http://ann:@host",
}


@pytest.mark.parametrize("url", URLS)
def test_all_of_a_url_that_is_secret_is_redacted(url):
    assert redacted(f"no route to {url}; a@b", ()) == f"no route to {URLS[url]}; a@b"
    hidden = set(secrets_of({"SERVER": url}))
    assert bool(hidden) == (URLS[url] != url)
    assert not any(secret in URLS[url] for secret in hidden)


def test_each_password_of_a_list_of_urls_is_a_secret():
    value = "amqp://a:first-one@h1,amqp://b:second-one@h2"
    assert {"first-one", "second-one"} <= set(secrets_of({"BROKERS": value}))
    assert redacted(value, ()) == "amqp://a:[redacted]@h2"


PEM = "-----BEGIN KEY-----\nfirst-line-of-it\nsecond-line-of-it\n-----END KEY-----\n"


SIGNED = "https://ann:pw@host/q?sig=abcdef123456"
TWO_TOKENS = f"ghp_{'a1' * 18}:otherhalf99"


@pytest.mark.parametrize(
    ("environ", "text", "clean"),
    [
        ({"INDEX": f"https://a-token-of-a-user:{SECRET}@host"}, f"401 {SECRET}", "401 [redacted]"),
        ({"https_proxy": "http://ann:p%40ssw%2Frd1@proxy"}, "p%40ssw%2Frd1", "[redacted]"),
        ({"https_proxy": "http://ann:p%40ssw%2Frd1@proxy"}, "p@ssw/rd1", "[redacted]"),
        ({"A_KEY": "abcdefgh", "B_KEY": "abcdefghijkl"}, "x abcdefghijkl y", "x [redacted] y"),
        ({"MY_KEY": PEM}, "a second-line-of-it", "a [redacted]"),
        ({"DB_SECRET": SIGNED}, f"at {SIGNED}", "at [redacted]"),
        ({"X_TOKEN": TWO_TOKENS}, f"with {TWO_TOKENS}", "with [redacted]"),
    ],
    ids=["a long user", "as in the URL", "decoded", "the longest first", "a line", "signed", "two"],
)
def test_a_secret_is_found_in_each_of_its_forms(environ, text, clean):
    assert redacted(text, secrets_of(environ)) == clean


def test_urls_without_an_end_cost_little_time():
    began = time.monotonic()
    redacted("://a:" * 100_000 + " ://" + "a" * 100_000 + "@" * 100_000, ())
    assert time.monotonic() - began < limit(30.0)


@pytest.mark.parametrize(
    "value",
    [
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "a1b2c3d4e5f6a7b8c9d0",
        "eyJhbGciOiJIUzI1NiJ9.e30x",
    ],
)
def test_a_value_that_looks_like_a_token_is_a_secret_whatever_its_name(value):
    assert value in secrets_of({"SETTING": value})


@pytest.mark.parametrize(
    "value",
    [
        "/home/ann/a1b2c3d4e5f6a7b8c9d0e1f2",
        "--xla_force_host_platform_device_count=8",
        "Craftax-Classic-Symbolic-v1",
        "GPU-8f3c1d2e-1111-2222-3333-444455556666",
        "01234567890123456789",
        "a:b1c2d3e4f5a6b7c8d9e0f1",
        "en_US.UTF-8",
    ],
)
def test_ordinary_values_are_no_secrets(value):
    assert secrets_of({"SETTING": value}) == ()


def test_passwords_of_urls_and_known_tokens_are_redacted_wherever_they_come_from():
    token = "hf_abcdefghijklmnopqrstuv"
    text = f"401 for {token} by http://ann:pw@proxy:3128/x and http://host:80/a@b"
    clean = "401 for [redacted] by http://ann:[redacted]@proxy:3128/x and http://host:80/a@b"
    assert redacted(text, ()) == clean
    event = events.RunEnded("a", "b", Exited(cause=ExitCause.EXIT, detail=text), 3, (text,))
    found = cleaned(event, ())
    assert (found.outcome.detail, found.log) == (clean, (clean,))


def test_neither_logging_nor_an_error_tells_a_secret(capfd, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", SECRET)
    logger = logging.getLogger("flowrl.test")
    monkeypatch.setattr(logging.root, "handlers", [])
    console.start_logging()
    logger.warning("said %s", SECRET)

    def refused() -> int:
        raise ConfigError(f"{SECRET} is no flag")

    assert console.guarded(refused) == 2
    said = capfd.readouterr().err
    assert said.count("[redacted]") == 2
    assert SECRET not in said


@pytest.mark.parametrize("quoted", [json.dumps, repr, str], ids=["JSON", "repr", "plain"])
def test_a_quoted_secret_is_found(quoted):
    secret = "a\"b\\c\td'e-ünïcödé"
    text = f"KeyError: {quoted(secret)} in line 3"
    clean = redacted(text, secrets_of({"MY_KEY": secret}))
    assert "[redacted]" in clean
    assert "ünïcödé" not in clean


def test_a_secret_of_many_lines_is_found_line_by_line():
    secrets = secrets_of({"MY_KEY": PEM})
    for text in (PEM, PEM.replace("\n", "\r\n"), repr(PEM)):
        assert "line-of-it" not in redacted(text, secrets)


def test_the_texts_of_a_record_are_cleaned_and_nothing_else():
    ended = events.RunEnded(
        SECRET,
        SECRET,
        Exited(cause=ExitCause.EXIT, code=1, detail=f"exit: {SECRET}"),
        3,
        (f"a {SECRET}", "b"),
    )
    found = cleaned(ended, secrets_of({"MY_KEY": SECRET}))
    assert (found.skill, found.run_id, found.frames) == (SECRET, SECRET, 3)
    assert found.outcome == Exited(cause=ExitCause.EXIT, code=1, detail="exit: [redacted]")
    assert found.log == ("a [redacted]", "b")


def test_a_record_without_secrets_is_the_same_one():
    event = events.RunEnded("a", "b", Lost("nothing"))
    assert cleaned(event, (SECRET,)) is event
    assert cleaned(event, ()) is event


@dataclass(frozen=True)
class Foreign:
    why: int
    lines: tuple[int, ...]


def test_texts_that_are_none_stay_as_they_are():
    assert cleaned(Foreign(3, (4,)), (SECRET,)) == Foreign(3, (4,))


def cut(text: bytes, places) -> list[bytes]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(at)]


LETTERS = st.text("ab", min_size=8, max_size=12)


@given(
    secrets=st.lists(LETTERS, min_size=1, max_size=3),
    words=st.lists(st.text("abc\n", max_size=9), max_size=6),
    places=st.lists(st.integers(0, 500), max_size=12),
)
def test_a_stream_is_redacted_like_a_whole_text_wherever_it_is_cut(secrets, words, places):
    known = secrets_of({f"{n}_KEY": secret for n, secret in enumerate(secrets)})
    text = "".join(word + secret for word, secret in zip(words, secrets * 6, strict=False))
    pieces = cut(text.encode(), places)
    out = b"".join(log_writer.redacted(pieces, [word.encode() for word in known]))
    assert out == redacted(text, known).encode()
    assert not any(secret.encode() in out for secret in known)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_long_line_or_a_secret_of_short_lines_is_redacted_wherever_it_is_cut(size):
    secrets = [b"one\ntwo\nthree", SECRET.encode()]
    text = b"x" * 50 + secrets[1] + b"y" * 50 + secrets[0] + b"end"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    found = b"".join(log_writer.redacted(pieces, secrets))
    assert found == b"x" * 50 + b"[redacted]" + b"y" * 50 + b"[redacted]end"


def test_only_what_may_become_a_secret_is_held_back():
    pieces = [b"50 %\rhunt", b"ing\n", b"60 %\r", b"70"]
    shown = list(log_writer.redacted(pieces, [SECRET.encode()]))
    assert shown == [b"50 %\r", b"hunting\n", b"60 %\r", b"70", b""]


def test_without_secrets_nothing_is_held_back():
    assert list(log_writer.redacted([b"a", b"b"], [])) == [b"a", b"b"]


def test_the_log_of_a_run_holds_no_secret(launcher, make_job):
    source = (
        "import os, sys, time\n"
        "value = os.environ['MY_TOKEN']\n"
        "print('whole', value, flush=True)\n"
        "for char in 'cut ' + value + ' end ': sys.stdout.write(char); sys.stdout.flush()\n"
        "print(os.environ['PLAIN'], flush=True)\n"
        "raise ValueError(value)\n"
    )
    env = {"MY_TOKEN": SECRET, "PLAIN": "plain-but-passed"}
    job = make_job(source, env=env, passed=("PLAIN",))
    end_of(launcher, launcher.launch(job), job)
    log = job.folder / "training.log"
    until(lambda: "ValueError" in log.read_text())
    until(lambda: not (job.folder / "secrets.json").exists())
    text = log.read_text()
    assert "whole [redacted]" in text
    assert "cut [redacted] end [redacted]" in text
    for path in job.folder.rglob("*"):
        assert SECRET not in path.read_text()
        assert "plain-but-passed" not in path.read_text()


def test_a_run_that_lives_has_no_secret_on_the_disk(launcher, make_job):
    job = make_job(SLEEP, env={"MY_TOKEN": SECRET})
    launcher.launch(job)
    start_of(job)
    assert [path for path in job.folder.iterdir() if SECRET in path.read_text()] == []
    facts = json.loads((job.folder / "spec.json").read_text())
    assert facts["argv"] == list(job.argv)


def test_the_environment_of_a_run_that_never_began_is_removed(make_job):
    job = make_job(SLEEP, env={"MY_TOKEN": SECRET})
    run_status.prepare(job, grace_seconds=1.0)
    handle = Handle(run_id=job.run_id, session="s", pid=2**22 - 1, start_time="no:1")
    assert run_status.outcome(handle, job.folder) is not None
    assert [path for path in job.folder.iterdir() if SECRET in path.read_text()] == []


def test_a_launch_that_is_given_up_leaves_no_secret(make_job):
    job = make_job(SLEEP, env={"MY_TOKEN": SECRET})
    run_status.prepare(job, grace_seconds=1.0)
    assert SECRET in (job.folder / "secrets.json").read_text()
    for name in ("spec.json", "secrets.json", "environment.json"):
        assert (job.folder / name).stat().st_mode & 0o777 == 0o600, "their owner's alone"
    run_status.withdraw(job)
    assert [path for path in job.folder.iterdir() if SECRET in path.read_text()] == []


def test_the_logs_writer_follows_no_link_to_secrets(tmp_path):
    (tmp_path / "elsewhere").write_text(json.dumps({"secrets": ["something"]}))
    (tmp_path / "secrets.json").symlink_to(tmp_path / "elsewhere")
    words = [sys.executable, "-I", "-S", str(run_status.LOG_WRITER), str(tmp_path / "training.log")]
    subprocess.run(words, input=b"something\n", check=True, timeout=30)
    assert (tmp_path / "training.log").read_bytes() == b"something\n"
    assert (tmp_path / "elsewhere").exists()


def test_passed_variables_reach_the_trainer_and_only_they():
    environ = {"MY_TOKEN": SECRET, "OTHER_TOKEN": SECRET}
    assert child_env(environ=environ, passed=["MY_TOKEN"])["MY_TOKEN"] == SECRET
    assert "OTHER_TOKEN" not in child_env(environ=environ, passed=["MY_TOKEN"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NOT_SET", "--pass_env NOT_SET: it is not set here; export it"),
        ("MY_TOKEN=x", "--pass_env MY_TOKEN=: this takes a name alone; export"),
        ("", "it is not set here"),
        ("--flag", "it is not set here"),
    ],
)
def test_a_variable_that_cannot_be_passed_on_is_refused_by_name(name, said):
    with pytest.raises(ConfigError, match=said):
        child_env(environ={"MY_TOKEN": SECRET}, passed=[name])


def test_a_trainer_starts_only_when_its_log_knows_the_secrets(make_job):
    job = make_job("print('said')", env={"MY_TOKEN": SECRET})
    run_status.prepare(job, grace_seconds=1.0)
    words = [sys.executable, "-I", "-S", str(run_status.RUNNER), str(job.folder / "spec.json")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as runner:
        until((job.folder / "start.json").exists)
        with pytest.raises(subprocess.TimeoutExpired):
            runner.wait(timeout=0.3)
        assert run_status.read_exit(job.folder, job.run_id) is None
        words = [*words[:3], str(run_status.LOG_WRITER), str(job.folder / "training.log")]
        subprocess.run(words, stdin=subprocess.DEVNULL, check=True, timeout=30)
        assert runner.communicate(timeout=30)[0] == b"said\n"
