"""What a hostile trainer tries, and the places that it tries it on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.launchers import sandbox
from flowrl.launchers.base import Job
from flowrl.paths import RunPaths

# Every attempt is a function; it succeeds unless it raises. Its first arguments say where to try.
HOSTILE = r"""
import ctypes, fcntl, json, os, signal, socket, sys
goals = json.loads(sys.argv[1])
attempts = {}

def attempt(act):
    try:
        act()
        attempts[act.__name__] = True
    except (OSError, ValueError) as error:
        attempts[act.__name__] = False

def put(path):
    with open(path, "a") as file:
        file.write("escaped\n")

def take(path):
    with open(path) as file:
        if "secret" not in file.read():
            raise ValueError(path)

def write_the_manifest(): put(goals["manifest"])
def write_to_another_run(): put(goals["other_run"] + "/result.json")
def read_another_runs_spec(): take(goals["other_run"] + "/spec.json")
def read_a_key_at_home(): take(goals["home"] + "/.ssh/id_ed25519")
def follow_a_link_out_of_the_run():
    os.symlink(goals["home"] + "/.ssh/id_ed25519", "link")
    take("link")
def change_the_bashrc():
    take(goals["home"] + "/.bashrc")
    put(goals["home"] + "/.bashrc")
def write_a_file_to_tmp_for_others(): put(goals["tmp"]); take(goals["tmp"])
def change_python():
    folder = os.path.dirname(json.__file__)
    if not os.access(folder, os.W_OK):
        raise ValueError(folder)
def change_what_the_run_is():
    os.replace("run.json", "run.json.old")
    put("run.json")
def take_the_lock_away(): os.unlink("run.lock")
def overwrite(path):
    "By any way there is."
    tried = []
    for change in (put, os.unlink, lambda path: os.replace(path, path + ".old"), replace):
        try:
            change(path)
            tried.append(change)
        except OSError:
            pass
    if not tried:
        raise ValueError(path)
def replace(path):
    put("forged")
    os.replace("forged", path)
def forge_how_it_ended(): overwrite("exit.json")
def forge_what_runs(): overwrite("start.json")
def forge_what_is_to_run(): overwrite("spec.json")
def connect_to_the_machine():
    socket.create_connection(("127.0.0.1", goals["port"]), timeout=5).close()
def connect_to_a_program():
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(goals["socket"])
def read_the_schedulers_environment(): take(f"/proc/{goals['victim']}/environ")
def trace_the_scheduler():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, goals["victim"], 0, 0) < 0:
        raise OSError(ctypes.get_errno())
    os.waitpid(goals["victim"], 0x40000000)
    libc.ptrace(17, goals["victim"], 0, 0)
def type_into_the_terminal(): fcntl.ioctl(0, 0x5412, b"#")
def kill_the_scheduler(): os.kill(goals["victim"], signal.SIGKILL)
def open_a_setting_of_the_kernel():
    # Opened for writing and closed: nothing is ever written.
    for top in ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/sys"):
        for folder, _, files in os.walk(top):
            for name in files:
                try:
                    os.close(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_NONBLOCK))
                    return
                except OSError:
                    pass
    os.close(os.open("/proc/sysrq-trigger", os.O_WRONLY))
def make_a_user_namespace():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) < 0:
        raise OSError(ctypes.get_errno())
def leave_somebody_behind():
    ready, told = os.pipe()  # the kernel closes it as the child becomes another program
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, told)
        os.closerange(told + 1, 100)
        code = "import time; time.sleep(600)"
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, goals["token"]])
    os.close(told)
    os.read(ready, 1)

for name in goals["attempts"]:
    attempt(globals()[name])
with open("attempts.json", "w") as file:
    json.dump(attempts, file)
"""
ATTEMPTS = tuple(
    line.removeprefix("def ").partition("(")[0]
    for line in HOSTILE.splitlines()
    if line.startswith("def ") and "_" in line.partition("(")[0]
)
TYPING = "type_into_the_terminal"  # there must be one
KEY = "secret key\n"


def confined(job: Job, *, hidden: Path | None = None) -> Job:
    """The same job in bubblewrap."""
    how = sandbox.confinement("bwrap", hidden or job.folder.parent)
    run_paths = RunPaths(job.folder, 0)
    return replace(job, sandbox=how.around(run_paths, cwd=job.cwd, env=job.env))


@dataclass(frozen=True, kw_only=True)
class Prey:
    """A home, a graph, a scheduler and a server, none of which a trainer has any business with."""

    root: Path
    victim: subprocess.Popen[bytes]
    server: socket.socket
    program: socket.socket

    def goals(self, attempts: tuple[str, ...]) -> str:
        """What a hostile trainer is told."""
        return json.dumps(
            {
                "attempts": attempts,
                "manifest": str(self.manifest),
                "other_run": str(self.other_run),
                "home": str(self.home),
                "tmp": str(self.root / "for_all"),
                "port": self.server.getsockname()[1],
                "socket": self.program.getsockname(),
                "victim": self.victim.pid,
                "token": self.token,
            }
        )

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def manifest(self) -> Path:
        return self.root / "graph" / "global_latest.json"

    @property
    def other_run(self) -> Path:
        return self.root / "graph" / "other_run"

    @property
    def token(self) -> str:
        return f"left_behind_{self.root.name}"

    def left_behind(self) -> list[int]:
        """Processes that outlived the trainer that started them."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if path.read_bytes().rstrip(b"\0").endswith(b"\0" + self.token.encode()):
                    found.append(int(path.parent.name))
        return found

    def contents(self) -> dict[str, str]:
        """Every file outside the trainer's own folder, to be compared."""
        files = [path for path in self.root.rglob("*") if path.is_file()]
        return {str(path): path.read_text() for path in sorted(files)}


@contextmanager
def prey(root: Path) -> Iterator[Prey]:
    """The places and processes to be attacked; all of them end with the block."""
    for folder in ("home/.ssh", "graph/other_run"):
        (root / folder).mkdir(parents=True)
    (root / "home/.ssh/id_ed25519").write_text(KEY)
    (root / "home/.bashrc").write_text("# secret of mine\n")
    (root / "graph/global_latest.json").write_text("{}\n")
    (root / "graph/other_run/spec.json").write_text('{"env": "secret"}\n')
    (root / "for_all").write_text("secret\n")
    victim = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"],
        env={"OPENAI_API_KEY": "secret"},
    )
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as program:
        program.bind(str(root / "program"))
        program.listen()
        found = Prey(root=root, victim=victim, server=server, program=program)
        try:
            yield found
        finally:
            victim.kill()
            victim.wait()
            for pid in found.left_behind():
                os.kill(pid, signal.SIGKILL)
