"""The server itself, asked by plain sockets and urllib: who is let in, and what it withstands."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrl import cli
from flowrl.errors import EXIT_INTERRUPTED
from tests.commands.making import DONE, WAITING, running, save
from tests.hostile_names import HOSTILE
from tests.serving.making import a_graph, a_judge
from tests.waiting import limit, until

app = pytest.importorskip("flowrl.serving.app", reason="pip install '.[web]' is missing")


def asked(served, path="/", *, method="GET", body: bytes | None = None, **headers: str):
    """The status, headers and content of an answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(served.url + path, body, named, method=method)
    opener = urllib.request.build_opener(NoRedirect)
    try:
        with opener.open(request, timeout=limit(20)) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *facts):
        return None


def raw(served, text: str) -> bytes:
    """The whole answer to these bytes."""
    with socket.create_connection(("127.0.0.1", served.port), limit(10)) as line:
        line.sendall(text.encode("latin-1", "replace"))
        return b"".join(iter(lambda: line.recv(65536), b""))


def raw_get(served, path: str) -> int:
    said = raw(served, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    return int(said.split(b" ", 2)[1])


@contextmanager
def stream(served, graph: int = 0) -> Iterator[socket.socket]:
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(limit(20))
        line.connect(("127.0.0.1", served.port))
        line.sendall(f"GET /graphs/{graph}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        yield line


def connected(served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), limit(20))


def status_of(line: socket.socket) -> int:
    return int(line.recv(12).split(b" ")[1])


@pytest.fixture
def served(tmp_path, serve):
    return serve(a_graph(tmp_path / "graph").root)


def test_it_answers_with_documents_and_headers(served):
    for path in ("/", "/page.js", "/page.css", "/cytoscape.js", "/uPlot.js", "/uPlot.css"):
        code, headers, content = asked(served, path)
        assert (code, len(content)) == (200, int(headers["Content-Length"]))
    assert asked(served, "/", method="HEAD")[0] == 200
    assert json.loads(asked(served, "/graphs")[2])["control"] is False
    for path in ("/", "/graphs", "/graphs/0/skill?skill=Place%20Table", "/nothing"):
        _, headers, _ = asked(served, path)
        assert headers["Content-Security-Policy"].startswith("default-src 'self'; ")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
    document = json.loads(asked(served, "/graphs/0/skill?skill=Place%20Table")[2])
    assert [step["success"] for step in document["plan"]] == [0.9, 0.25]
    assert document["problems"] == []


def test_another_host_is_refused_with_a_line_of_the_log(served):
    hosts = ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "[")
    for host in hosts:
        code, _, content = asked(served, "/graphs", Host=host)
        assert (code, content) == (403, b"another Host than this server")
    for host, line in zip(hosts, served.log.read_text().splitlines(), strict=True):
        assert re.fullmatch(rf"\S+ refused GET '/graphs' for {re.escape(repr(host))}: 403", line)
    for host in ("localhost", "127.0.0.1:1", "[::1]:8765", "LOCALHOST:9"):  # forwarded ports
        assert asked(served, "/graphs", Host=host)[0] == 200


def test_another_origin_is_refused(served):
    for origin in ("http://evil.example", "null", "", "http://127.0.0.1:1", f"{served.url}.evil"):
        assert asked(served, "/graphs", Origin=origin)[0] == 403
    assert asked(served, "/graphs", Origin=served.url)[0] == 200


def test_nothing_but_reading_is_let_in_without_control(served, tmp_path):
    body = b'{"verb": "pause", "skill": "Place Table"}'
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"):
        code, headers, _ = asked(served, "/graphs/0/requests", method=method, body=body)
        assert (code, headers["Allow"]) == (405, "GET, HEAD")
    assert not (tmp_path / "graph" / "requests").exists()


def test_no_path_of_a_request_becomes_a_file(served):
    paths = ["/../app.py", "/page/../../app.py", "//etc/passwd", "/%2e%2e/app.py", "/page.js/"]
    paths += ["/graphs/0/film?skill=../../x", "/graphs/1/events", "/graphs/-1/events", "/graphs/"]
    paths += [f"/graphs/{'9' * 5000}/skill?skill=A", "/graphs/0/skill", "/index.html", "/%00"]
    assert [raw_get(served, path) for path in paths] == [404] * len(paths)
    for name in HOSTILE:
        word = urllib.request.quote(name.encode(errors="surrogatepass"), safe="")
        assert asked(served, f"/graphs/0/film?skill={word}")[0] == 404
        assert asked(served, f"/{word}")[0] == (404 if name.strip("\n") else 200)
    assert "Traceback" not in served.log.read_text()


def test_a_log_of_refusals_has_one_line_for_each(served):
    raw_get(served, "/a%0Ab%1b[31m")
    raw_get(served, "/" + "x" * 3000)
    lines = served.log.read_text().splitlines()
    assert [line.split(" ", 1)[1][:16] for line in lines] == [
        "refused GET '/a\\",
        "refused GET '/xx",
    ]
    assert all(len(line) < 400 and line.isprintable() for line in lines)


def test_what_is_no_request_ends_nothing(served):
    for text in ("\0" * 9000 + "\r\n\r\n", "GET / HTTP/9\r\n\r\n", "X" * 200_000, "GET /\r\n\r\n"):
        try:
            raw(served, text)
        except ConnectionError:
            continue
    assert asked(served)[0] == 200
    assert "Traceback" not in served.log.read_text()


def test_control_needs_the_token_as_a_header(tmp_path, serve):
    graph_paths = save(tmp_path / "graph", ("A", running()), ("B", DONE))
    served = serve(graph_paths.root, "--allow_control")

    def post(token: str, document: object, **headers: str):
        body = json.dumps(document).encode()
        named = {"Authorization": f"Bearer {token}", **headers}
        return asked(served, "/graphs/0/requests", method="POST", body=body, **named)[0]

    pause = {"verb": "pause", "skill": "A"}
    assert len(served.token) > 40
    for token in ("", "x", served.token[:-1], served.token + "x", "\xff"):
        assert post(token, pause) == 401
    assert post("", pause, Cookie=f"flowrl={served.token}") == 401
    assert post(served.token, pause, Origin="http://evil.example") == 403
    for wrong in ([], {}, {"verb": "pause"}, {"verb": "stop", "skill": "A"}, "x" * 5000, 3):
        assert post(served.token, wrong) in (400, 404, 413)
    assert post(served.token, {"verb": "pause", "skill": "../x"}) == 404
    assert post(served.token, {"verb": ["pause"], "skill": "A"}) == 400
    assert post(served.token, {"verb": "retry", "skill": "B"}) == 409
    assert not graph_paths.requests.exists()
    assert post(served.token, pause) == 200
    assert len([*graph_paths.requests.iterdir()]) == 1
    assert served.token not in served.log.read_text()


def test_on_another_host_everything_needs_the_token(tmp_path, serve):
    served = serve(a_graph(tmp_path / "graph").root, "--host=0.0.0.0")
    paths = ["/", "/page.js", "/graphs", "/graphs/0/events", "/nothing", "/?token=x"]
    assert [asked(served, path)[0] for path in paths] == [401] * len(paths)
    assert asked(served, "/graphs", Host="evil.example")[0] == 403
    code, headers, _ = asked(served, f"/?token={served.token}")
    assert (code, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert asked(served, "/graphs", Cookie=cookie.partition(";")[0])[0] == 200
    assert asked(served, "/graphs", Authorization=f"Bearer {served.token}")[0] == 200


def test_streams_are_bounded_and_given_back(served):
    lines = []
    try:
        for _ in range(app.MOST_STREAMS):
            lines.append(connected(served))
            lines[-1].sendall(b"GET /graphs/0/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert {status_of(line) for line in lines} == {200}
        code, _, content = asked(served, "/graphs/0/events")
        assert (code, content) == (503, b"64 pages watch already; close one")
        assert asked(served, "/graphs")[0] == 200
    finally:
        for line in lines:
            line.close()

    def is_free():
        with stream(served) as line:
            return status_of(line) == 200

    until(is_free)


def test_silent_connections_lock_nobody_out(served):
    """Also those that begin a request, or one more, and never end it."""
    words = itertools.cycle([b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nG"])
    lines = [connected(served) for _ in range(app.MOST_CONNECTIONS)]
    for line, begun in zip(lines, words, strict=False):
        line.sendall(begun)
    assert asked(served)[0] == 503
    until(lambda: asked(served)[0] == 200)
    until(lambda: not _connections(served))
    for line in lines:
        line.close()


def test_a_thousand_connections_are_refused_in_one_line_and_given_back(served):
    psutil.Process(served.process.pid).rlimit(psutil.RLIMIT_NOFILE, (1024, 1024))
    lines = [connected(served) for _ in range(1000)]
    answers = [line.recv(12) for line in lines]
    for line in lines:
        line.close()
    assert set(answers) == {b"HTTP/1.1 503", b""}
    assert answers.count(b"") < 2 * app.MOST_CONNECTIONS  # let in, and ended as silent ones
    assert asked(served)[0] == 200
    (told,) = served.log.read_text().splitlines()
    assert told.endswith(f" refused connections beyond {app.MOST_CONNECTIONS}")


def test_a_slow_reader_is_dropped_and_keeps_nobody_waiting(tmp_path, serve):
    root = tmp_path / "graph"
    graphs = [[(f"{word} {n}", WAITING) for n in range(300)] for word in ("Skill", "Other skill")]
    save(root, *graphs[0])
    served = serve(root)
    with stream(served) as slow, stream(served) as quick:
        assert (status_of(slow), status_of(quick)) == (200, 200)
        before, number = _megabytes(served.process.pid), 0
        deadline = time.monotonic() + limit(app.STALLED_SECONDS + 30)
        while len(_connections(served)) > 1:  # both readers'
            number += 1
            save(root, *graphs[number % 2])
            word = graphs[number % 2][-1][0].encode()
            content = b""
            while word not in content:
                content += quick.recv(2**20)
            assert time.monotonic() < deadline
        assert _megabytes(served.process.pid) < before + 100
    assert "Traceback" not in served.log.read_text()


def _connections(served) -> list[str]:
    """The server's established connections, as the kernel lists them."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    own = f":{served.port:04X}"
    return [line for line in lines if line.split()[1].endswith(own) and line.split()[3] == "01"]


def _megabytes(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_a_signal_ends_it_with_a_stream_open(served, number):
    with stream(served) as line:
        assert status_of(line) == 200
        began = time.monotonic()
        served.process.send_signal(number)
        assert served.process.wait(limit(10)) == EXIT_INTERRUPTED
        assert time.monotonic() - began < limit(3)
    assert served.log.read_text() == ""


def test_a_film_of_the_archive_is_served_in_ranges(tmp_path, serve):
    graph_paths = save(tmp_path / "graph", ("A", DONE), ("B", DONE))
    served = serve(graph_paths.root)
    film = graph_paths.archive(0, "A").folder / "video.mp4"
    film.parent.mkdir(parents=True)
    assert asked(served, "/graphs/0/film?skill=A")[0] == 404
    film.write_bytes(bytes(range(256)) * 4)
    code, headers, content = asked(served, "/graphs/0/film?skill=A", Range="bytes=256-258")
    assert (code, content, headers["Content-Type"]) == (206, b"\0\1\2", "video/mp4")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    film.unlink()
    film.symlink_to(secret)
    assert asked(served, "/graphs/0/film?skill=A")[0] == 404
    graph_paths.archive(1, "B").folder.symlink_to(film.parent)
    film.unlink()
    film.write_text("of another skill")
    assert asked(served, "/graphs/0/film?skill=B")[0] == 404


def test_damaged_files_are_told_and_end_nothing(tmp_path, serve):
    graph_paths = a_graph(tmp_path / "graph")
    served, run = serve(graph_paths.root), graph_paths.run(1, "Place Table")
    for path in (run.run_json, run.progress, run.metrics, run.training_log, graph_paths.manifest):
        for content in (b"", b"{", b"\xff\0", b"[" * 9999, b'{"frames": -1, "begun/0_A": "x"}\n'):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            code, _, said = asked(served, "/graphs/0/skill?skill=Place%20Table")
            assert (code, asked(served, "/graphs/0/merges")[0]) == (200, 200)
        if path in (run.run_json, run.metrics):
            assert path.name in json.loads(said)["problems"][-1]
    graph_paths.scheduler_state.write_text("{}")
    assert asked(served, "/graphs/0/skill?skill=Place%20Table")[0] == 503
    with stream(served) as line:
        until(lambda: b"reads 1" in line.recv(2**20))
    assert "Traceback" not in served.log.read_text()


def test_half_a_character_in_a_file_is_shown_and_ends_nothing(tmp_path, serve):
    graph_paths = a_graph(tmp_path / "graph")
    served, run = serve(graph_paths.root), graph_paths.run(1, "Place Table")
    text = run.metrics.read_text().replace("0_Collect", "0_\\ud800ollect")
    assert "ud800" in text
    run.metrics.write_text(text)
    code, _, said = asked(served, "/graphs/0/skill?skill=Place%20Table")
    assert (code, b"\\ud800ollect" in said) == (200, True)


def test_a_graph_that_has_gone_is_told_by_every_document(tmp_path, serve):
    graph_paths = a_graph(tmp_path / "graph")
    served = serve(graph_paths.root)
    graph_paths.root.rename(tmp_path / "gone")
    for name in ("merges", "skill?skill=Place%20Table", "film?skill=Place%20Table"):
        code, _, said = asked(served, f"/graphs/0/{name}")
        assert (code, b"is no graph" in said) == (503, True), name


def test_reading_writes_nothing(tmp_path, serve):
    graph_paths = a_graph(tmp_path / "graph")
    served = serve(graph_paths.root)
    files = {path: path.stat().st_mtime_ns for path in graph_paths.root.rglob("*")}
    with stream(served) as line:
        assert status_of(line) == 200
        for path in ("/graphs", "/graphs/0/skill?skill=Place%20Table", "/graphs/0/merges"):
            assert asked(served, path)[0] == 200
    assert {path: path.stat().st_mtime_ns for path in graph_paths.root.rglob("*")} == files


def test_a_port_in_use_is_one_line(served, flowrl):
    said = flowrl("serve", Path(served.log).parent / "graph", f"--port={served.port}", code=2).err
    assert said == f"flowrl: 127.0.0.1:{served.port} is in use; choose another --port\n"


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b", "é" * 80])
def test_a_host_that_is_not_here_is_one_line(tmp_path, flowrl, host):
    root = save(tmp_path, ("A", DONE)).root
    said = flowrl("serve", root, f"--host={host}", "--port=0", code=2).err
    assert f"cannot listen at {host}:0 (" in said
    assert "choose another --host or --port" in said


def test_what_is_no_graph_is_one_line(tmp_path, flowrl):
    assert "is no graph" in flowrl("serve", tmp_path, code=1).err


def test_without_its_extra_one_line_says_it(tmp_path, monkeypatch, capsys):
    root = save(tmp_path, ("A", DONE)).root
    monkeypatch.setattr("flowrl.serving.command.find_spec", lambda name: None)
    assert cli.main(["serve", str(root)]) == 2
    said = capsys.readouterr().err
    assert said == "flowrl: flowrl serve needs pip install '.[web]' in flowrl's folder\n"


def test_a_sweep_comes_with_its_graph(tmp_path, serve):
    graph_paths = save(tmp_path / "graph", ("A", DONE))
    sweep = save(graph_paths.sweeps / "A", ("A", running()))
    (sweep.root / "sweep.json").write_text("{}")
    served = serve(graph_paths.root)
    names = [str(graph_paths.root), str(sweep.root)]
    assert json.loads(asked(served, "/graphs")[2])["graphs"] == names
    with stream(served, 1) as line:
        until(lambda: b'"running"' in line.recv(2**20))


def test_the_server_loads_no_jax():
    code = "import sys, flowrl.serving.app; assert not {'jax', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_film_that_is_removed_while_it_is_sent_is_sent_whole_or_told(tmp_path, monkeypatch):
    film = tmp_path / "video.mp4"
    site = app.Site([tmp_path], app.Door(host="127.0.0.1", control=False, token="x"))
    monkeypatch.setattr(site, "_named", lambda request: (None, None))

    def answer(removed_when: str) -> tuple[int, bytes]:
        film.write_bytes(b"x" * 200_000)
        said: list[Any] = []

        def found(*_: object) -> Path:
            if removed_when == "found":
                film.unlink()
            return film

        async def send(message: Any) -> None:
            if removed_when == message["type"]:
                film.unlink(missing_ok=True)
            said.append(message)

        async def receive() -> Any:
            await asyncio.sleep(60)

        monkeypatch.setattr(app, "film_of_skill", found)
        scope = {"type": "http", "method": "GET", "path": "/graphs/0/film", "query_string": b""}
        scope |= {"headers": [(b"host", b"127.0.0.1")], "asgi": {"spec_version": "2.4"}}
        asyncio.run(site(scope, receive, send))
        return said[0]["status"], b"".join(each.get("body", b"") for each in said)

    assert answer("http.response.start") == (200, b"x" * 200_000)
    code, line = answer("found")
    assert (code, len(line.splitlines())) == (503, 1)
    assert b"No such file" in line


def test_the_page_gets_what_is_known_of_judges_and_of_the_machine(tmp_path, serve):
    graph_paths = a_graph(tmp_path / "graph")
    served = serve(graph_paths.root)
    with stream(served) as line:
        until(lambda: b'"judges": []' in line.recv(2**20))
        a_judge(graph_paths)
        until(lambda: b"rule, 200 of 200 unseen episodes: AUC" in line.recv(2**20))
