"""Two hosts with one folder, of which each may be lost at any instant: nothing is lost or doubled.

Hosts are namespaces of this machine (pid, mount, uts, ipc). They have no network of their own, as
flowrl's hosts meet in the folder only. Each has mounted it by FUSE: file locks do not reach across,
attributes are cached, and "the network" is cut by stopping or killing the process that serves it.
Either host may run the scheduler, and both run what the engine of `two_hosts` starts.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from flowrl.errors import EXIT_BUSY, EXIT_IO
from flowrl.parallel import shared_claim
from tests.chaos.place import ChaosPlace
from tests.chaos.two_hosts import LOST_SECONDS, Host
from tests.parallel.making import TABLE, WOOD
from tests.parallel.test_shared_folder import needs_hosts
from tests.waiting import PACE, limit, until

pytestmark = [
    needs_hosts,
    pytest.mark.skipif(shutil.which("bindfs") is None, reason="bindfs is missing"),
]
SKILLS = 6
FLAGS = (
    *("--sandbox=none", "--shared_folder", f"--max_nodes={SKILLS}"),
    *("--retry_backoff=0.05", "--scheduler_poll_interval=0.5", "--max_retries=200"),
)
KILLS = {  # by words of command lines
    "scheduler": ("chaos.two_hosts",),
    "runner": ("runner.py",),
    "trainer": ("stand_in",),
    "runner and trainer": ("runner.py", "stand_in"),
}
AWAY = ("frozen", "hanging", "broken")  # for a while, often longer than others wait
FAULTS = (*KILLS, "scheduler", "host", "host", *AWAY, *AWAY, "engine")
ENDS = {0, EXIT_BUSY, EXIT_IO, -signal.SIGKILL}  # of schedulers
OVERLAP_SECONDS = 2.0  # within which a host that comes back ends what was started elsewhere


class Places:
    """A graph, its hosts and the engine that they are in."""

    def __init__(self, folder: Path, chance: random.Random, launcher: str) -> None:
        folder.mkdir(parents=True)
        self.place, self.chance = ChaosPlace(folder / "shared"), chance
        root = self.place.graph_paths.root
        self.kinds = FAULTS if launcher == "slurm" else FAULTS[:-1]  # without the engine
        self._flags = (f"--graph_path={root}", f"--launcher={launcher}", *FLAGS)
        self.engine = folder / "queue"
        self.engine.mkdir()
        self.hosts = [Host(name, self.place.folder, self.engine) for name in ("h1", "h2")]
        self.ends: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self.longest = 2.5 * LOST_SECONDS  # for which a host is away
        self.replaced = 0  # schedulers that came back and found another at work

    def step(self) -> bool:
        """Start the schedulers that are missing; returns whether one has completed the graph."""
        for host in self.hosts:
            if host.cut or host.frozen or not host.has_ended:
                continue
            if wrong := set(host.ends) - ENDS:
                raise AssertionError(f"{wrong}: {_read(self.engine.parent / f'{host.name}.log')}")
            if 0 in host.ends:
                return True
            if not host.ends or self.chance.random() < 0.3:
                self.start(host)
        return False

    def start(self, host: Host) -> None:
        """Start a scheduler on a host."""
        host.start(self._flags, self.place.env)

    def hit(self, fault: str) -> bool:
        """Make a fault, and mend what it has broken; returns False if there was nothing to hit."""
        number = self.chance.randrange(2)
        host, seconds = self.hosts[number], self.chance.uniform(0.3, self.longest)
        if fault in KILLS:
            hit = host.send(signal.SIGKILL, *KILLS[fault])
        elif fault == "host":
            hit = self.lose(number)
        elif fault == "engine":
            hit = self.silence(seconds)
        else:
            hit = self.take_away(host, fault, seconds)
        self.faults[fault] += bool(hit)
        return bool(hit)

    def lose(self, number: int) -> bool:
        """Kill a host; the engine finds out a little later, and another comes in its place."""
        host = self.hosts[number]
        host.kill()
        _ = host.has_ended
        time.sleep(self.chance.uniform(0.0, 2.0))
        host.lose_jobs()
        self.ends.update(host.ends)
        self.hosts[number] = Host(host.name, self.place.folder, self.engine)
        return True

    def silence(self, seconds: float) -> bool:
        """Let the engine not answer for a while, in which a host may be lost, too."""
        mark = self.engine.parent / "silent"
        mark.touch()
        if self.chance.random() < 0.5:
            self.lose(self.chance.randrange(2))
        self.pass_time(seconds)
        mark.unlink()
        return True

    def take_away(self, host: Host, fault: str, seconds: float) -> bool:
        """Freeze a host or cut it off; the engine finds that out at any time."""
        away = {"frozen": host.freeze, "hanging": host.hang_network, "broken": host.break_network}
        held = self.holder == host.name and bool(host.pids("chaos.two_hosts"))
        away[fault]()
        found_out = self.chance.uniform(0.0, 2 * seconds)
        self.pass_time(min(seconds, found_out))
        if seconds > found_out:
            host.lose_jobs()
            self.pass_time(seconds - found_out)
        taken = held and self.holder not in (host.name, "")
        (host.thaw if host.frozen else host.mend_network)()
        if taken and fault != "broken":  # what it was about to record or merge, it does not
            until(lambda: host.has_ended)
            assert host.ends[-1] == EXIT_BUSY
            self.replaced += 1
        return True

    @property
    def holder(self) -> str:
        """The host whose scheduler has the graph, as far as the claim says."""
        holder = shared_claim.holder_of(self.place.graph_paths.daemon_lock.with_suffix(".claim"))
        return str(holder["host"]) if holder else ""

    def pass_time(self, seconds: float) -> None:
        """Let the other host work."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.step()
            time.sleep(0.1)

    def end(self) -> None:
        for host in self.hosts:
            host.thaw()
            host.kill()
            self.ends.update(host.ends)
        self.place.end()

    def working(self) -> Iterator[str]:
        """Yield the run folder of every trainer that could be training now."""
        for host in self.hosts:
            if not host.frozen:
                for pid in host.pids("stand_in --module_path"):
                    words = _read(Path(f"/proc/{pid}/cmdline")).split("\0")
                    if "--module_path" in words:
                        yield words[words.index("--module_path") + 1]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


class Watch:
    """A look at all trainers ten times a second: no run may be trained twice at a time."""

    def __init__(self, places: Places) -> None:
        self._places, self._over = places, Event()
        self.longest, self._since = 0.0, dict[str, float]()
        self._thread = Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            now, counts = time.monotonic(), Counter(self._places.working())
            twice = {run for run, number in counts.items() if number > 1}
            self._since = {run: self._since.get(run, now) for run in twice}
            self.longest = max([self.longest, *(now - since for since in self._since.values())])

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("launcher", "faults", "seed"),
    [
        pytest.param("slurm", 2, 0, id="small"),
        pytest.param("slurm", 110, 1, id="long", marks=pytest.mark.slow),
        pytest.param("local", 40, 2, id="local", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost_or_doubled_whichever_host_is_lost(
    tmp_path, launcher, faults, seed, record_property
):
    chance, made, ends, replaced = random.Random(seed), Counter(), Counter(), 0
    for number in range(1000):
        if made.total() >= faults:
            break
        places = Places(tmp_path / f"round{number}", chance, launcher)
        if faults < 10:
            places.longest = 3.0
        train(places, least=faults - made.total())
        made += places.faults
        ends += places.ends
        replaced += places.replaced
        print(f"round {number}: {dict(places.faults)}, ends {dict(places.ends)}", flush=True)
    record_property("faults", dict(made))
    said = f"{dict(made)}; ends {dict(ends)}; {replaced} came back and found another"
    print(f"{made.total()} faults in {number} graphs: {said}")


def train(places: Places, *, least: int) -> None:
    """Train a graph to its end while hosts come and go, and check what came of it."""
    place, chance, watch = places.place, places.chance, Watch(places)
    place.order({skill: {"seconds": chance.uniform(0.5, 4.0)} for skill in (WOOD, TABLE)})
    deadline = time.monotonic() + limit(600)
    try:
        while not places.step():
            assert time.monotonic() < deadline, place.statuses()
            places.pass_time(chance.uniform(0.1, 2.0))
            if places.faults.total() < least and place.statuses():
                places.hit(chance.choice(places.kinds))
        until(lambda: all(host.has_ended for host in places.hosts))
        places.start(places.hosts[0])  # it clears up what kills have left
        until(lambda: places.hosts[0].has_ended)
        assert places.hosts[0].ends[-1] == 0
        statuses = place.statuses()
        until(lambda: not any(host.pids("runner.py") for host in places.hosts))
        verdict = place.judged("faults", 0.0, skills=SKILLS, calls_for=dict.fromkeys(statuses, 999))
        assert (verdict.lost, verdict.merged_twice, verdict.left_over) == (0, 0, 0), statuses
        assert not list(place.graph_paths.training_runs.glob("*.engine.json"))
        assert not any(host.pids("stand_in") for host in places.hosts)
        assert watch.longest < OVERLAP_SECONDS * PACE
    finally:
        watch.end()
        places.end()
    assert places.ends.keys() <= ENDS
