"""The process that starts a job, waits for it and records how it ended.

It runs by path, `python -I -S runner.py SPEC.json`, with the standard library alone, so that no
installed package can break it. Three files in the spec's folder are its whole interface:
`run.lock` (an flock that the job inherits: a free lock means that no process of the run lives),
`start.json` (which processes run) and `exit.json` (how the job ended). An engine starts it as
`runner.py SPEC.json LAUNCH`; then a claim and a beat beside that folder are two more.

SIGHUP does not say whether the session was killed or the whole tmux server ended, since tmux ends
its server after the last session. So the runner keeps an idle connection to its server: one that
is told to exit closes it, and so does the kernel for one that is killed.
"""
# ruff: noqa: PTH100, PTH105, PTH108, PTH110, PTH118, PTH120, PTH123, PTH208 — pathlib loads slowly

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from functools import partial

FORMAT = 1
EXIT_BUSY, EXIT_NOT_STARTED = 75, 127  # run.lock is held; the program cannot be executed
ASKED = (85, 130, 128 + signal.SIGTERM)  # a job ends so that was asked to: 85 once it has saved
FORWARDED = (signal.SIGHUP, signal.SIGTERM)  # as SIGTERM
TYPED = (signal.SIGINT, signal.SIGQUIT)  # the terminal sends them itself, except to a sandbox
WATCHED = (*FORWARDED, *TYPED, signal.SIGCHLD)
RESET = (*WATCHED, signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores the last two
SERVER_SECONDS, LOG_WRITER_SECONDS = 0.5, 30.0  # for a busy machine; both answer at once
WRITE_ATTEMPTS, WRITE_PAUSE_SECONDS = 10, 0.5
LOCK_ATTEMPTS, LOCK_PAUSE_SECONDS = 20, 0.01
MAX_FILE_BYTES = 2**34
LOOK_SECONDS = 0.5  # between two looks at what a job with limits uses
BEAT_SECONDS = 5.0
# Where nobody ends what a killed runner leaves behind, the kernel does; a sandbox does so itself.
TETHER = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
OF_NODE = (  # the engine's words; the last three lead to the other nodes of the job
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"),
)


def main(argv: list[str]) -> int:
    """Run the job that the spec describes; returns its exit code, or 128 + its signal.

    It is 0 for a job that was asked to end: tmux keeps the sessions of failures alone.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(0o077)
    folder = os.path.dirname(os.path.abspath(argv[0]))
    with open(argv[0], encoding="utf-8") as file:
        spec = json.load(file)
    launch = spec.get("launch")
    if launch != (argv[1] if argv[1:] else None):
        report(f"another launch of run {spec['run_id']} has taken the place of {argv[1:]}")
        return EXIT_BUSY
    if not take_lock(os.path.join(folder, "run.lock")):
        report(f"another process of run {spec['run_id']} is alive; nothing was started")
        return EXIT_BUSY
    lease = Lease(folder, launch, spec["lost_after"]) if launch else None
    if lease and (os.path.exists(os.path.join(folder, "start.json")) or not lease.renewed()):
        report(f"run {spec['run_id']} was started before, or taken for lost; nothing was started")
        return EXIT_BUSY
    start = started(spec["run_id"], launch)
    write_record(folder, "start.json", start)  # and again below: no job lives without one
    kills_before, server = oom_kills(), connect_to_server()
    try:
        pid, release = spawn(spec, environment_of(folder, OF_NODE if spec.get("engine") else ()))
    except OSError as error:
        report(f"{spec['argv'][0]} cannot be started in {spec['cwd']}: {error}")
        return finish(spec, folder, code=EXIT_NOT_STARTED, detail=str(error))
    start |= {"job_pid": pid, "job_start_time": start_time_of(pid)}
    try:
        write_record(folder, "start.json", start)
    except OSError as error:  # a full disk: the job goes on
        report(f"start.json does not name the job: {error}")
    release()
    excess: list[str] = []
    looks = [partial(kill_beyond, pid, spec["limits"], folder, excess)] if spec["limits"] else []
    looks += [partial(lease.keep, pid)] if lease else []
    look = (lambda: [one() for one in looks]) if looks else None
    status, received = wait_for(pid, spec, server, look)
    if lease and not lease.renewed():
        report(f"run {spec['run_id']} was taken for lost; how it ended is not recorded")
        return EXIT_BUSY
    number = death_signal(status, sandboxed=bool(spec["sandbox"]))
    ended = {"code": os.WEXITSTATUS(status)} if number is None else {"signal": number}
    detail = "".join(excess)
    killed = number == signal.SIGKILL and oom_kills() > kills_before
    oom = killed or "--run_memory" in detail
    return finish(spec, folder, **ended, oom=oom, received=received, detail=detail)


def started(run_id: str, launch: str | None) -> dict:
    """The record of a runner that has started no job yet."""
    server_pid = os.environ.get("TMUX", "").rpartition(",")[0].rpartition(",")[2]
    return {
        **{"format": FORMAT, "run_id": run_id, "started_at": time.time(), "launch": launch},
        **{"host": socket.gethostname(), "namespace": namespace()},
        **{"runner_pid": os.getpid(), "runner_start_time": start_time_of(os.getpid())},
        **{"job_pid": None, "job_start_time": "", "pane": os.environ.get("TMUX_PANE")},
        "server_pid": int(server_pid) if server_pid.isdigit() else None,
    }


class Lease:
    """The right of an engine's job to go on: the claim beside its folder names this launch.

    A runner that cannot renew it for half of the time after which others take the run for lost
    has lost it, too: they may have started the run again where it cannot see them. A thread renews
    it, since a disk whose network is cut may let us wait.
    """

    def __init__(self, folder: str, launch: str, lost_after: float) -> None:
        self._claim, self._beat, self._launch = f"{folder}.engine.json", f"{folder}.beat", launch
        self._seconds, self._renewed_at = lost_after / 2, time.monotonic()
        self._stopping = self._renewing = self._late = self._lost = False

    def renewed(self) -> bool:
        """Renew the lease by a beat; False if it is lost."""
        now = time.monotonic()
        try:
            with open(self._claim, encoding="utf-8") as file:
                claim = json.load(file)
            if claim["launch"] != self._launch:
                return False
            os.close(os.open(self._beat, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            os.utime(self._beat)  # by the clock of the file server
        except FileNotFoundError:
            return False  # the graph, or its claim on this run, is gone
        except (OSError, ValueError) as error:
            report(f"no beat: {error}")
            return now - self._renewed_at < self._seconds
        if now - self._renewed_at > 2 * self._seconds:  # it was stopped, or the disk hung
            return False
        self._renewed_at = now
        if claim["stop"] and not self._stopping:
            self._stopping = True
            os.kill(os.getpid(), signal.SIGTERM)
        return not self._lost

    def keep(self, pid: int) -> None:
        """Kill the job's processes once the lease is lost; twice in a row it may not be late."""
        if not self._renewing:
            self._renewing = bool(start_new_thread(self._renew, ()))
        was_late, self._late = self._late, time.monotonic() - self._renewed_at > self._seconds
        self._lost = self._lost or (was_late and self._late)
        if self._lost:
            for one in tree_of(pid):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)

    def _renew(self) -> None:
        while not self._lost:
            time.sleep(BEAT_SECONDS)
            self._lost = not self.renewed()


def namespace() -> str:
    """The name of the namespace in which our process ids hold."""
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115


def take_lock(path: str) -> bool:
    """Hold run.lock until the last process that inherits it is gone; False if it is held.

    A look at it from another process shares it for an instant.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    for _ in range(LOCK_ATTEMPTS):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.set_inheritable(descriptor, True)
            return True
        time.sleep(LOCK_PAUSE_SECONDS)
    return False


def environment_of(folder: str, kept: tuple[str, ...] = ()) -> dict[str, str]:
    """The job's environment, whose file is removed: no secret stays on the disk.

    Those of our own that are `kept` are in it, too.

    The log's writer removes its list of secrets as soon as it has read it; the job waits for that.
    """
    deadline = time.monotonic() + LOG_WRITER_SECONDS
    while os.path.exists(os.path.join(folder, "secrets.json")) and time.monotonic() < deadline:
        time.sleep(0.002)
    path = os.path.join(folder, "environment.json")
    with open(path, encoding="utf-8") as file:
        os.unlink(path)
        of_job = json.load(file)["environment"]
    return of_job | {name: os.environ[name] for name in kept if name in os.environ}


def spawn(spec: dict, environment: dict[str, str]) -> tuple[int, Callable[[], None]]:
    """Start the job's program on this terminal, within its limits.

    A sandboxed one gets a session of its own: it writes to the terminal, but nothing can be typed.

    Returns:
      The program's pid, and a function to call once start.json names it. A sandbox waits for that,
      because it makes start.json unchangeable for the job: a file replaced later would not be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    least = min((limit for limit in (soft, hard) if limit >= 0), default=MAX_FILE_BYTES)
    least = min(least, MAX_FILE_BYTES, spec["limits"].get("run_disk", MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (least, hard))
    if spec["cpus"]:
        os.sched_setaffinity(0, spec["cpus"])
    os.chdir(spec["cwd"])
    argv, alone = spec["argv"], bool(spec["sandbox"])
    if spec.get("launch") and not alone:
        argv = [sys.executable, "-I", "-S", "-c", TETHER, str(os.getpid()), *argv]
    options, given = os.pipe()
    if alone:
        os.set_inheritable(options, True)
        argv = [spec["sandbox"][0], "--args", str(options), "--", *argv]
    how = {"setsid": alone, "setsigmask": (), "setsigdef": RESET}
    pid = os.posix_spawnp(argv[0], argv, environment, **how)
    os.close(options)

    def release() -> None:
        with suppress(BrokenPipeError), open(given, "wb") as file:
            file.write(b"".join(os.fsencode(word) + b"\0" for word in spec["sandbox"][1:-1]))

    return pid, release


def wait_for(
    pid: int, spec: dict, server: socket.socket | None, look: Callable[[], object] | None = None
) -> tuple[int, list[str]]:
    """The job's wait status, and the names of the signals that the runner received meanwhile.

    `look` is called twice a second. SIGHUP and SIGTERM reach the job as SIGTERM; SIGKILL follows
    after the grace period. A plain waitpid would never act on SIGHUP: Python resumes it after
    every signal.
    """
    received: list[str] = []
    deadline: float | None = None
    sandboxed = bool(spec["sandbox"])
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status, received
        left = 1e6 if deadline is None else max(0.0, deadline - time.monotonic())
        info = next_signal(left, look)
        number = signal.Signals(info.si_signo) if info else signal.SIGCHLD
        if info is None and deadline is not None:
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + spec["grace_seconds"]
        elif number in FORWARDED and deadline is None:
            send(pid, signal.SIGTERM, sandboxed=sandboxed)
            send(pid, signal.SIGCONT, sandboxed=sandboxed)  # a stopped job would not notice
            deadline = time.monotonic() + spec["grace_seconds"]
        elif sandboxed and number in TYPED:
            send(pid, number, sandboxed=True)
        if number != signal.SIGCHLD and number.name not in received:
            received.append(number.name)
            if number == signal.SIGHUP and server is not None:  # it is at end of file
                ended = select.select([server], [], [], SERVER_SECONDS)[0]
                received += ["server ended"] if ended else []
                server.close()  # the server would wait for us


def next_signal(seconds: float, look: Callable[[], object] | None) -> signal.struct_siginfo | None:
    """The next signal, None after so many seconds; `look` is called twice in each."""
    while look is not None and seconds > LOOK_SECONDS:
        if info := signal.sigtimedwait(WATCHED, LOOK_SECONDS):
            return info
        look()
        seconds -= LOOK_SECONDS
    return signal.sigtimedwait(WATCHED, seconds)


def kill_beyond(pid: int, limits: dict[str, int], folder: str, excess: list[str]) -> None:
    """Kill a job that is seen to use more than it may, and add to `excess` what that is."""
    processes = tree_of(pid)
    used = {"run_memory": sum(map(resident_bytes, processes)), "run_processes": len(processes)}
    if "run_disk" in limits:
        used["run_disk"] = bytes_in(folder)
    for name, most in limits.items():
        if used[name] > most:
            for one in processes:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            excess[:] = [f"it used {used[name]:,}, more than --{name} {most:,}"]
            return


def tree_of(pid: int) -> list[int]:
    """A process and all that it and its descendants have started."""
    pids = [pid]
    for one in pids:  # which grows meanwhile
        pids += children_of(one)
    return pids


def resident_bytes(pid: int) -> int:
    """The memory that a process holds now; 0 if it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def bytes_in(folder: str) -> int:
    """The room that a folder takes on the disk."""
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(path, name)).st_blocks * 512
    return size


def send(pid: int, number: int, *, sandboxed: bool) -> None:
    """Send a signal to the job itself.

    A sandboxed job is the grandchild of bubblewrap, which would die of the signal and take the job
    with it. As long as there is no grandchild, bubblewrap gets the signal.
    """
    pids = [job for child in children_of(pid) for job in children_of(child)] if sandboxed else []
    for receiver in pids or [pid]:
        with suppress(ProcessLookupError):
            os.kill(receiver, number)


def children_of(pid: int) -> list[int]:
    """The processes that this one has started, by any of its threads."""
    pids: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                pids += map(int, file.read().split())
    return pids


def death_signal(status: int, *, sandboxed: bool) -> int | None:
    """The signal that killed a job; bubblewrap reports it as shells do, by 128 and its number.

    130 stays an exit code: it is flowrl's own for Ctrl-C, and means the same.
    """
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    number = os.WEXITSTATUS(status) - 128
    return number if sandboxed and number != signal.SIGINT and 0 < number < signal.NSIG else None


def oom_kills() -> int:
    """Return how often the kernel killed for lack of memory: in our cgroup, else on the machine."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        groups = [line.rstrip("\n").partition("::")[2] for line in file if line.startswith("0::")]
    for path in (*(f"/sys/fs/cgroup{group}/memory.events" for group in groups), "/proc/vmstat"):
        try:
            with open(path, encoding="ascii") as file:
                return int(dict(line.split()[:2] for line in file)["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return 0


def connect_to_server() -> socket.socket | None:
    """An idle connection to the tmux server of our pane; None outside of tmux."""
    path = os.environ.get("TMUX", "").rpartition(",")[0].rpartition(",")[0]
    server = socket.socket(socket.AF_UNIX)
    server.settimeout(SERVER_SECONDS)
    try:
        server.connect(path)
    except OSError as error:
        if path:
            report(f"{path} does not answer, a killed server will look like a session's: {error}")
        return None
    return server


def start_time_of(pid: int) -> str:
    """The boot id and a process's start time: a reused pid has another one."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        ticks = file.read().rpartition(")")[2].split()[19]
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}:{ticks}"


def finish(spec: dict, folder: str, **facts: object) -> int:
    """Write exit.json; returns the runner's own exit code."""
    record = {"format": FORMAT, "run_id": spec["run_id"], "launch": spec.get("launch")}
    record |= {"code": None, "signal": None}
    record |= {"oom": False, "received": [], "detail": "", "ended_at": time.time(), **facts}
    for attempt in range(WRITE_ATTEMPTS):  # a full disk may have room again
        try:
            write_record(folder, "exit.json", record)
            break
        except OSError as error:
            report(f"exit.json cannot be written, attempt {attempt + 1}: {error}")
            time.sleep(WRITE_PAUSE_SECONDS)
    code = record["code"] if record["code"] is not None else 128 + int(record["signal"])
    return 0 if code in ASKED or "SIGTERM" in record["received"] else code


def write_record(folder: str, name: str, record: dict) -> None:
    """Replace a JSON file in one step, whatever the job has put in its place."""
    part = os.path.join(folder, f".{name}.part")
    if os.path.lexists(part):
        os.unlink(part)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(record))
        file.flush()
        if name == "exit.json":  # the other is of no use after a crash of the machine
            os.fsync(descriptor)
    os.replace(part, os.path.join(folder, name))


def report(text: str) -> None:
    """Write one line to the terminal, if it is not closed."""
    with suppress(OSError):
        os.write(2, f"flowrl: {text}\n".encode())


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
