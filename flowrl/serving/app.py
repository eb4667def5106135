"""The server of the page: its routes, and the guard that every request passes."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    FileResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowrl.errors import FlowrlError, format_error
from flowrl.parallel.events import Verb, why_not
from flowrl.parallel.requests import RequestRecord, send_request
from flowrl.paths import GraphPaths, existing_graph_or_sweep, graph_or_sweep
from flowrl.reports.status import SkillRow, read_rows
from flowrl.serving.documents import FILMS, film_of_skill, merges_document, skill_document
from flowrl.serving.events import POLL_SECONDS, GraphWatch, changes
from flowrl.storage import records

logger = logging.getLogger(__name__)
MOST_STREAMS, MOST_CONNECTIONS = 64, 256
_BACKLOG = 128  # connections taken at once, so that descriptors suffice to refuse them
SILENT_SECONDS = 5  # after which a connection is ended that asks for nothing
STALLED_SECONDS = 10  # after which a connection is ended whose reader takes nothing
_PING_SECONDS = 10.0
_MOST_BODY_BYTES = 4096
_ASKED_HERE = (Verb.PAUSE, Verb.RESUME, Verb.RETRY)
_PAGE = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/cytoscape.js": ("cytoscape.min.js", "text/javascript"),
    "/uPlot.js": ("uPlot.min.js", "text/javascript"),
    "/uPlot.css": ("uPlot.min.css", "text/css"),
}
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {
    b"content-security-policy": _POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::[0-9]+)?", re.IGNORECASE)
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_NO_TOKEN = "open the address that flowrl serve has printed"  # noqa: S105 — a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Decides who may ask for what."""

    host: str
    control: bool
    token: str

    @property
    def local(self) -> bool:
        """True if only this machine can reach it; else every request needs the token."""
        return self.host == "localhost" or _is_address(self.host, loopback=True)

    def refusal(self, request: Request) -> Response | None:
        """Return why a request is not let in, or where it is sent first; None if it is let in."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self._is_own(host):
            return PlainTextResponse("another Host than this server", 403)
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return PlainTextResponse("another Origin than this server", 403)
        methods = ["GET", "HEAD", *(["POST"] if self.control else [])]
        if request.method not in methods:
            remedy = "read only; start flowrl serve with --allow_control"
            said = "only GET, HEAD and POST" if self.control else remedy
            return PlainTextResponse(said, 405, {"Allow": ", ".join(methods)})
        given = request.query_params.get("token")
        if given is not None and request.scope["path"] == "/" and self._opens(given):
            answer = RedirectResponse(f"/#{given}" if self.control else "/", 303)
            answer.set_cookie("flowrl", given, httponly=True, samesite="strict")
            return answer
        known = self.local or self.bears(request) or self._opens(request.cookies.get("flowrl", ""))
        return None if known and given is None else PlainTextResponse(_NO_TOKEN, 401)

    def bears(self, request: Request) -> bool:
        """Return whether a request has the token as a header, which no other site can add."""
        return self._opens(request.headers.get("authorization", "").removeprefix("Bearer "))

    def _opens(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())

    def _is_own(self, header: str) -> bool:
        """Return whether a Host header is an address or a name of this machine.

        A page of another site that rebinds its name to this address sends its own name.
        """
        match = _HOST.fullmatch(header)
        name = (match[1] or match[2]).lower() if match else ""
        own = ["localhost"] if self.local else ["localhost", self.host, socket.gethostname()]
        return name in map(str.lower, own) or _is_address(name, loopback=self.local)


class Site:
    """The routes of the page. Graphs are named by their number, skills by a name of the state."""

    def __init__(self, roots: Sequence[Path], door: Door) -> None:
        self.server: uvicorn.Server | None = None
        self._door = door
        self._streams: set[int] = set()  # of events, by the id of their request's scope
        self._watches = {str(number): GraphWatch(root) for number, root in enumerate(roots)}
        work = {"events": self._events, "merges": self._merges, "skill": self._skill}
        work |= {"film": self._film}
        routes = [Route(path, _page_file(*facts)) for path, facts in _FILES.items()]
        routes += [Route(f"/graphs/{{number}}/{name}", each) for name, each in work.items()]
        routes += [Route("/graphs/{number}/requests", self._request, methods=["POST"])]
        routes += [Route("/graphs", self._graphs)]
        handlers: Any = {FlowrlError: _unreadable, OSError: _unreadable}
        self._app = Starlette(routes=routes, exception_handlers=handlers)
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in by the door, add headers, and log it in a line if it is refused."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS.items()]
                if message["status"] >= 400:
                    what = f"{scope['method']:.20} {scope['path']!r:.200}"
                    host = f"{request.headers.get('host')!r:.80}"
                    logger.warning("refused %s for %s: %d", what, host, message["status"])
            try:
                await asyncio.wait_for(send(message), STALLED_SECONDS)
            except TimeoutError:
                self._drop(scope)

        request = Request(scope)
        try:
            await (self._door.refusal(request) or self._app)(scope, receive, guarded)
        finally:
            self._streams.discard(id(scope))

    def _drop(self, scope: Scope) -> None:
        """End the connection of a request whose reader takes nothing."""
        connections: Any = self.server.server_state.connections if self.server else ()
        for connection in [one for one in connections if one.scope is scope]:
            logger.warning("dropped a reader of %.200r, who took nothing", scope["path"])
            connection.transport.abort()

    async def _graphs(self, request: Request) -> Response:
        names = [str(watch.root) for watch in self._watches.values()]
        return _json({"graphs": names, "control": self._door.control})

    async def _events(self, request: Request) -> Response:
        watch = self._watch(request)
        if len(self._streams) >= MOST_STREAMS:
            raise HTTPException(503, f"{MOST_STREAMS} pages watch already; close one")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        self._streams.add(id(request.scope))
        return StreamingResponse(self._stream(watch), media_type="text/event-stream")

    async def _stream(self, watch: GraphWatch) -> AsyncIterator[str]:
        """Yield what changes, made from what this reader was sent last: there is no queue."""
        sent, quiet = None, 0.0
        while not (self.server and self.server.should_exit):
            document = await watch.newest()
            if document is not sent or quiet > _PING_SECONDS:
                yield f"data: {json.dumps(changes(sent, document))}\n\n"
                sent, quiet = document, 0.0
            await asyncio.sleep(POLL_SECONDS)
            quiet += POLL_SECONDS

    def _merges(self, request: Request) -> Response:
        return _json(merges_document(existing_graph_or_sweep(self._watch(request).root)))

    def _skill(self, request: Request) -> Response:
        return _json(skill_document(*self._named(request)))

    def _film(self, request: Request) -> Response:
        film = film_of_skill(*self._named(request))
        if film is None:
            raise HTTPException(404, "this skill has no film; make one by flowrl play --keep")
        file = film.open("rb")  # it may be removed or replaced from now on
        opened, kind = Path(f"/proc/self/fd/{file.fileno()}"), FILMS[film.suffix]
        found, close = os.fstat(file.fileno()), BackgroundTask(file.close)
        return FileResponse(opened, media_type=kind, stat_result=found, background=close)

    async def _request(self, request: Request) -> Response:
        if not self._door.bears(request):
            raise HTTPException(401, _NO_TOKEN)
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > _MOST_BODY_BYTES:
                    raise HTTPException(413, f"over {_MOST_BODY_BYTES} bytes")
        except ClientDisconnect as error:
            raise HTTPException(400, "the connection ended within the request") from error
        try:
            asked = records.from_json(RequestRecord, json.loads(body))
        except (ValueError, RecursionError) as error:
            raise HTTPException(
                400, "send a JSON object with verb and skill: pause, resume or retry"
            ) from error
        if asked.verb not in _ASKED_HERE:
            raise HTTPException(400, "only pause, resume and retry are taken here")
        graph_paths, row = await asyncio.to_thread(self._named, request, asked.skill)
        if refusal := why_not(asked.verb, row.status):
            raise HTTPException(409, refusal)
        name = await asyncio.to_thread(send_request, graph_paths, asked.verb, row.skill)
        return _json({"id": name})

    def _watch(self, request: Request) -> GraphWatch:
        if watch := self._watches.get(request.path_params["number"]):
            return watch
        raise HTTPException(404, "there is no such graph; /graphs lists them from 0")

    def _named(self, request: Request, skill: str | None = None) -> tuple[GraphPaths, SkillRow]:
        """The graph and the skill that a request names; HTTPException 404 if there is none."""
        graph_paths = graph_or_sweep(self._watch(request).root)
        wanted = request.query_params.get("skill") if skill is None else skill
        for row in read_rows(graph_paths):
            if row.skill == wanted:
                return graph_paths, row
        how = "?skill=NAME" if skill is None else '{"skill": NAME}'
        raise HTTPException(404, f"there is no such skill; name one of the graph: {how}")


class _Connection(H11Protocol):
    """A connection that is ended if it asks for nothing, and refused if there are too many."""

    _told = -STALLED_SECONDS  # when a line of the log last said that some are refused
    _answered: Any = None  # the request that the last look found answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._next = self.loop.call_later(SILENT_SECONDS, self._look)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.write(_FULL)
            transport.close()
            if self.loop.time() - self._told > STALLED_SECONDS:
                _Connection._told = self.loop.time()
                logger.warning("refused connections beyond %d", MOST_CONNECTIONS)

    def _should_upgrade(self) -> bool:
        return False  # such a request is answered as any other, without uvicorn's advice in the log

    def connection_lost(self, exc: Exception | None) -> None:
        self._next.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """End the connection if all is answered, and was so at the last look."""
        if self.cycle is None or self.cycle.response_complete:
            if self.cycle is self._answered:
                self.transport.abort()
                return
            self._answered = self.cycle
        self._next = self.loop.call_later(SILENT_SECONDS, self._look)


def serve(site: Site, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, which end streams of events, too."""
    plain: Any = {"loop": "asyncio", "http": _Connection, "ws": "none", "lifespan": "off"}
    plain |= {"log_config": None, "access_log": False, "server_header": False}
    limits: Any = {"backlog": _BACKLOG, "timeout_graceful_shutdown": 2}
    site.server = uvicorn.Server(uvicorn.Config(site, proxy_headers=False, **plain, **limits))
    site.server.run(sockets=[listener])


def _page_file(name: str, media_type: str) -> Callable[[Request], Response]:
    return lambda request: FileResponse(_PAGE / name, media_type=media_type)


def _json(document: Any) -> Response:
    """A document; half a character, which no response can hold, stays escaped."""
    return Response(json.dumps(document, allow_nan=False), media_type="application/json")


def _unreadable(request: Request, error: Exception) -> Response:
    """The answer about a graph whose files are missing, damaged or not to be written now."""
    return PlainTextResponse(format_error(error), 503)


def _is_address(name: str, *, loopback: bool) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback or not loopback
    return False
