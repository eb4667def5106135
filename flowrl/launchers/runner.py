"""The process inside the pane: it starts the trainer, waits, and writes down how it ended.

Begun by `start_runner.py SPEC.json`, with the standard library alone, so that it costs 20 ms and
5 MB and cannot be broken by what is installed. Three files in the spec's folder are its whole
interface: `run.lock` (an flock that the trainer inherits: free means that nobody of this run
lives), `start.json` (who they are) and `exit.json` (how the trainer ended).

A hang-up does not say whether the session was killed or the whole tmux server ended, and after the
last session the server ends too. So the runner is a silent client of its server: a server with a
client waits for it, tells it when it is told to end itself, and breaks the connection when it is
killed. Where all stays quiet, only the session was killed. No option of the server is touched.
"""
# pathlib alone would double the time to start:
# ruff: noqa: PTH100, PTH108, PTH118, PTH120, PTH123

from __future__ import annotations

# What json, signal and socket put around these would more than double the time to start.
import _signal  # pyright: ignore[reportMissingImports]
import _socket
import fcntl
import os
import select
import time

from flowrl.launchers import pane_log
from flowrl.launchers.lean_json import loads
from flowrl.launchers.records import open_part, overwrite, write_record
from flowrl.launchers.trainer_process import limit_files, oom_kills, signal_in, tell

FORMAT = 1
EXIT_BUSY = 75  # another runner holds run.lock
EXIT_NOT_STARTED = 127  # the trainer's program could not be executed
ASKS = {
    _signal.SIGHUP: "hup",
    _signal.SIGINT: "int",
    _signal.SIGQUIT: "quit",
    _signal.SIGTERM: "term",
}
PASSED_ON = (_signal.SIGHUP, _signal.SIGTERM)
TYPED = (
    _signal.SIGINT,
    _signal.SIGQUIT,
)  # the terminal itself sends them, but not to a confined one
WATCHED = (*ASKS, _signal.SIGCHLD)
# Python ignores SIGPIPE and SIGXFSZ, and a shell's background job ignores SIGINT and SIGQUIT.
RESET = (*WATCHED, _signal.SIGPIPE, _signal.SIGXFSZ)
SERVER_ENDED = "server"  # in asked_by, after "hup"
SERVER_SAYS_SECONDS = 0.5  # it says so at once; a busy machine may take longer
WRITE_TRIES = 10
WRITE_PAUSE_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """Run the trainer that the spec describes; returns its exit code, or 128 + its signal."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, WATCHED)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    os.umask(0o077)
    spec_path = os.path.abspath(argv[0])
    folder = os.path.dirname(spec_path)
    pane_log.begin(folder)
    with open(spec_path, encoding="utf-8") as file:
        spec = loads(file.read())
    if not take_lock(os.path.join(folder, "run.lock")):
        say(f"another process of run {spec['run_id']} is alive; nothing was started")
        return EXIT_BUSY
    return run(spec, folder)


def run(spec: dict, folder: str) -> int:
    """Start the trainer, wait for its end and record it."""
    start = start_record(spec["run_id"])
    # Written before and after the spawn: there is no instant at which a trainer lives unnamed.
    write_record(os.path.join(folder, "start.json"), start)
    kills_before = oom_kills()
    server = connect_to_server()
    pane_log.await_log(folder)
    try:
        place_ourselves(spec)
        trainer = execute(spec)
    except OSError as error:
        say(f"{spec['argv'][0]} cannot be started in {spec['cwd']}: {error}")
        return finish(spec, folder, code=EXIT_NOT_STARTED, detail=str(error))
    start["trainer"] = identity(trainer)
    try:  # a full disk: the trainer goes on, and would be found by its lock
        write_record(os.path.join(folder, "start.json"), start)
    except OSError as error:
        say(f"start.json does not name the trainer: {error}")
    try:
        os.close(open_part(os.path.join(folder, "exit.json")))  # so that the end is told at once
    except OSError as error:
        say(f"exit.json cannot be made ahead: {error}")
    status, asked_by = wait_for(trainer, spec, server)
    number = signal_in(status, confined=bool(spec.get("sandbox")))
    if number is None:
        return finish(spec, folder, code=os.WEXITSTATUS(status), asked_by=asked_by)
    oom = number == _signal.SIGKILL and oom_kills() > kills_before
    return finish(spec, folder, signal=number, oom=oom, asked_by=asked_by)


def take_lock(path: str) -> bool:
    """Hold run.lock until the last process that inherits it is gone; False if it is held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    os.set_inheritable(descriptor, True)
    return True


def place_ourselves(spec: dict) -> None:
    """Be where the trainer is to be, within its limits: it inherits them."""
    limit_files()
    if spec.get("cpus"):
        os.sched_setaffinity(0, spec["cpus"])
    os.chdir(spec["cwd"])


def execute(spec: dict) -> int:
    """Start the trainer's program on our terminal, with its environment; answers its pid.

    A confined one only writes to that terminal: it is not its own, so nothing can be typed there.
    """
    confined = list(spec.get("sandbox") or ())
    argv = [*confined, *spec["argv"]]
    alone = bool(confined)
    return os.posix_spawnp(argv[0], argv, spec["env"], setsid=alone, setsigmask=(), setsigdef=RESET)


def wait_for(trainer: int, spec: dict, server: _socket.socket | None) -> tuple[int, list[str]]:
    """The trainer's wait status, and the signals that somebody sent us meanwhile.

    HUP and TERM reach the trainer as TERM; KILL follows after the grace.
    """
    asked_by: list[str] = []
    deadline: float | None = None
    grace_seconds, confined = spec["grace_seconds"], bool(spec.get("sandbox"))
    while True:
        ended, status = os.waitpid(trainer, os.WNOHANG)
        if ended:
            return status, asked_by
        number = next_signal(deadline)
        if number is None:
            os.kill(trainer, _signal.SIGKILL)
            deadline = time.monotonic() + grace_seconds
            continue
        if number in PASSED_ON and deadline is None:
            tell(trainer, _signal.SIGTERM, confined=confined)
            tell(trainer, _signal.SIGCONT, confined=confined)  # a stopped one would not hear it
            deadline = time.monotonic() + grace_seconds
        elif confined and number in TYPED:
            tell(trainer, number, confined=True)
        if number in ASKS and ASKS[number] not in asked_by:
            asked_by += ask_of(number, server)


def next_signal(deadline: float | None) -> int | None:
    """The next signal, or None when the deadline has passed.

    A plain waitpid would never act on SIGHUP: Python takes it up again after every signal.
    """
    if deadline is None:
        return _signal.sigwaitinfo(WATCHED).si_signo
    info = _signal.sigtimedwait(WATCHED, max(0.0, deadline - time.monotonic()))
    return None if info is None else info.si_signo


def connect_to_server() -> _socket.socket | None:
    """A connection to the tmux server of our pane, on which nothing is ever said."""
    path = os.environ.get("TMUX", "").rpartition(",")[0].rpartition(",")[0]
    if not path:
        return None
    server = _socket.socket(_socket.AF_UNIX)
    server.settimeout(SERVER_SAYS_SECONDS)
    try:
        server.connect(path)
    except OSError as error:
        say(f"{path} does not answer, so a killed server would look like a killed session: {error}")
        server.close()
        return None
    return server


def ask_of(number: int, server: _socket.socket | None) -> list[str]:
    """What a signal asks for, in the words of exit.json."""
    if number == _signal.SIGHUP and server is not None and has_ended(server):
        return [ASKS[number], SERVER_ENDED]
    return [ASKS[number]]


def has_ended(server: _socket.socket) -> bool:
    """Whether the server takes its leave of its clients, or is gone; it need not wait for us."""
    poll = select.poll()
    poll.register(server, select.POLLIN)
    ended = bool(poll.poll(SERVER_SAYS_SECONDS * 1000))
    server.close()
    return ended


def start_record(run_id: str) -> dict:
    """start.json: who runs, on which boot of the machine, in which pane of which tmux server."""
    server_pid = os.environ.get("TMUX", "").rpartition(",")[0].rpartition(",")[2]
    return {
        "format": FORMAT,
        "run_id": run_id,
        "runner": identity(os.getpid()),
        "trainer": None,
        "pane": os.environ.get("TMUX_PANE"),
        "server_pid": int(server_pid) if server_pid.isdigit() else None,
        "started_at": time.time(),
    }


def identity(pid: int) -> dict:
    """A process's pid and birth (boot id and start time): a reused pid has another birth."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            ticks = file.read().rpartition(")")[2].split()[19]
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return {"pid": pid, "birth": f"{file.read().strip()}:{ticks}"}
    except OSError:
        return {"pid": pid, "birth": ""}


def finish(spec: dict, folder: str, **facts: object) -> int:
    """Write exit.json and answer what to exit with ourselves."""
    record = {
        "format": FORMAT,
        "run_id": spec["run_id"],
        "code": None,
        "signal": None,
        "oom": False,
        "asked_by": [],
        "detail": "",
        "ended_at": time.time(),
        **facts,
    }
    for attempt in range(WRITE_TRIES):  # a full disk may be emptied by whoever fills it
        try:
            write_record(os.path.join(folder, "exit.json"), record)
            break
        except OSError as error:
            say(f"exit.json cannot be written, try {attempt + 1} of {WRITE_TRIES}: {error}")
            time.sleep(WRITE_PAUSE_SECONDS)
    forget_environment(spec, folder)
    return record["code"] if record["code"] is not None else 128 + int(record["signal"])


def forget_environment(spec: dict, folder: str) -> None:
    """Keep no secrets beyond the trainer's life; a spec that cannot be rewritten is removed."""
    path = os.path.join(folder, "spec.json")
    try:
        overwrite(path, {**spec, "env": {}})
    except FileNotFoundError:
        return
    except OSError:
        try:
            os.unlink(path)
        except OSError as error:
            say(f"{path} still holds the trainer's environment, remove it: {error}")


def say(text: str) -> None:
    """One line for whoever reads the pane or the log; a closed terminal is no error."""
    try:
        os.write(2, f"flowrl: {text}\n".encode())
    except OSError:
        return
