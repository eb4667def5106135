"""`flowrl serve`, its flags and output: a leaf."""

from __future__ import annotations

import errno
import secrets
import signal
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from flowrl.errors import ConfigError, format_error
from flowrl.paths import DEFAULT_GRAPH, SweepPaths, graph_or_sweep, printable
from flowrl.reports.status import read_rows
from flowrl.storage.records import within


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Show graphs live on a web page.

    Examples:
      flowrl serve exp/demo
      flowrl serve exp/demo exp/other --port 9000
      flowrl serve exp/demo --allow_control
    """

    graph_path: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="GRAPH")]
    ] = (DEFAULT_GRAPH,)
    """Folders of graphs or sweeps; a graph's sweeps come with it."""
    port: Annotated[int, within(0, 65535)] = 8765
    """Port of the page; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Name or address to listen at; on any but this machine's own every request needs a token."""
    allow_control: bool = False
    """Let the page pause, resume and retry skills, for those who have the printed token."""

    def __call__(self) -> int:
        """Serve until Ctrl-C or SIGTERM; raises ConfigError if it cannot listen."""
        if not (find_spec("starlette") and find_spec("uvicorn")):
            raise ConfigError("flowrl serve needs pip install '.[web]' in flowrl's folder")
        from flowrl.serving.app import Door, Site, serve  # optional

        roots: dict[Path, None] = {}
        for root in self.graph_path:
            read_rows(graph_or_sweep(root))  # the folder is a graph's
            sweeps = SweepPaths(root).sweeps.glob("*/sweep.json")
            roots |= dict.fromkeys([root, *sorted(path.parent for path in sweeps)])
        door = Door(host=self.host, control=self.allow_control, token=secrets.token_urlsafe())
        with self._listener() as listener:
            port = listener.getsockname()[1]
            name = f"[{self.host}]" if ":" in self.host else self.host
            query = f"?token={door.token}" if self.allow_control or not door.local else ""
            shown = ", ".join(dict.fromkeys(map(str, self.graph_path)))
            said = f"http://{name}:{port}/{query} shows {shown}; Ctrl-C ends it"
            sys.stdout.write(printable(said) + "\n")
            sys.stdout.flush()
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            serve(Site(list(roots), door), listener)
        return 0

    def _listener(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family)
        except (OSError, TypeError) as error:  # TypeError: a name that cannot be encoded
            where = printable(f"{self.host}:{self.port}")
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise ConfigError(f"{where} is in use; choose another --port") from error
            problem = f"cannot listen at {where} ({format_error(error)})"
            raise ConfigError(f"{problem}; choose another --host or --port") from error
