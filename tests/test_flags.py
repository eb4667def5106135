"""Every flag reaches the place it names: a new one fails here until it says where it arrives."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrl import arguments, bottomup_parallel, command_line, config, notices, storage
from flowrl.config import BottomUpConfig, PPOConfig, with_flags
from flowrl.errors import EXIT_DIVERGED, EXIT_RESUMABLE, ConfigError, SkillError
from flowrl.experts.merge import MERGE_RULES
from flowrl.launchers import sandbox as sandboxes
from flowrl.launchers.local import LocalLauncher
from flowrl.launchers.slurm import SlurmLauncher
from flowrl.launchers.tmux import TmuxLauncher
from flowrl.llm.flow import Flow
from flowrl.parallel import start, training, training_backend
from flowrl.parallel.events import RunRequest
from flowrl.parallel.scaling import Scaling
from flowrl.parallel.scheduler import SkillScheduler
from flowrl.parallel.skill_sources import SkillSources, open_graph, skill_configs
from flowrl.parallel.status import Completed, Entry, Held, Waiting
from flowrl.parallel.training_backend import TrainingBackend
from flowrl.paths import GraphPaths, RunPaths
from flowrl.runs import TrainConfig, read_run
from flowrl.skills.graph import SkillGraph
from tests.machine import program
from tests.parallel.making import LIBRARY, TABLE, WOOD, feeder_of, finish
from tests.parallel.scheduling import NOW
from tests.parallel.stand_in_story import Place
from tests.skills.making import skill_text
from tests.test_config import needed, other_value

NVIDIA_SMI = """
echo "0, GPU-aaaa, 81559"
echo "1, GPU-bbbb, 81559"
echo "2, GPU-cccc, 81559"
"""


class HandedOut(Exception):
    """What the flow of a story hands out; nothing is trained."""


class Bench:
    """Command lines in, and how far they get."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.graph_paths = GraphPaths(folder / "graph")

    def parsed(self, *words: str) -> BottomUpConfig:
        own = [] if "--graph_path" in str(words) else [f"--graph_path={self.graph_paths.root}"]
        return command_line.parse(BottomUpConfig, [*own, *words])

    def graph(self, parsed: BottomUpConfig) -> SkillGraph:
        return open_graph(parsed, SkillSources(self.graph_paths))

    def backend(self, *words: str) -> TrainingBackend:
        parsed = self.parsed(*words)
        graph = self.graph(parsed)
        skills = skill_configs(parsed, graph.skills)
        return TrainingBackend(self.graph_paths, parsed, graph, skills=skills)

    def job(self, *words: str, **facts):
        return self.backend(*words).prepare(RunRequest(skill=WOOD, expert=0, attempt=1, **facts))

    def scheduler(self, *words: str) -> SkillScheduler:
        launcher = () if "--launcher=slurm" in words else ("--launcher=local",)
        parsed = self.parsed(*launcher, *words)
        each = parsed.schedule.devices_per_run
        devices = start.device_slots(parsed.launch, parsed.ppo, each=each)
        return start.open_scheduler(
            self.graph_paths, parsed.schedule, parsed.launch, devices=devices
        )

    def handed_out(self, *words: str) -> list[str]:
        """The skills of a story, in order."""

        def drained(*args, **facts):
            flow, names = Flow(*args, **facts), []
            while handed := flow.next_skill():
                names.append(handed[0])
                flow.on_skill_added(handed[0])
                flow.on_skill_complete(handed[0])
            raise HandedOut(names)

        self.monkeypatch.setattr(training, "Flow", drained)
        with pytest.raises(HandedOut) as caught:
            bottomup_parallel.train(self.parsed("--launcher=local", *words))
        return caught.value.args[0]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(sandboxes, "problem_of", lambda _: None)  # a trial for each case takes long
    return Bench(tmp_path, monkeypatch)


def flag(name: str, value) -> list[str]:
    """A field's value as a user says it, and nothing else."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    if isinstance(value, tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


DONE = Completed(
    run_id="x", attempt=1, frames=1, success_rate=0.6, wall_seconds=1.0, at=NOW, goal=0.8
)
TRAINING = dataclasses.fields(PPOConfig)
NAMES = {item.name for item in TRAINING}
OF_THE_GRAPH = [name for name in config.flags(BottomUpConfig()) if name not in NAMES | {"config"}]


@pytest.mark.parametrize("item", TRAINING, ids=lambda item: item.name)
def test_a_training_flag_reaches_the_trainer_and_no_other_one_changes(bench, item):
    value = other_value(item)
    assert value != item.default
    given = {**needed(item.name), item.name: value}
    words = [word for name, one in given.items() for word in flag(name, one)]
    job = bench.job("--max_parallel_skills=1000", *words)
    assert job.argv[1:3] == ("-m", "flowrl.ppo_flow")
    arrived = TrainConfig.read(job.argv[3:], prog="ppo_flow")
    module = bench.graph_paths.run(0, WOOD).module
    known = {"acting_threads": 1, **given}  # a thousandth of the CPUs: one thread
    assert arrived == with_flags(TrainConfig(module_path=module), **known)
    said = {word.partition("=")[0] for word in job.argv[5:]}
    assert said <= {"--num_devices", "--acting_threads"}, "run.json says the rest"
    assert TrainConfig.read(arrived.command_line, prog="ppo_flow") == arrived


ARRIVALS: dict[str, Callable[[Bench], object]] = {}


@pytest.mark.parametrize("name", OF_THE_GRAPH)
def test_a_flag_of_the_graph_reaches_the_place_it_names(bench, name):
    assert name in ARRIVALS, "a new flag: say below where it arrives"
    ARRIVALS[name](bench)


def test_there_is_no_case_without_a_flag():
    assert set(ARRIVALS) == set(OF_THE_GRAPH)


def arrives(check: Callable[[Bench], object]) -> Callable[[Bench], object]:
    """A case: the function has the flag's name."""
    ARRIVALS[check.__name__] = check
    return check


IN_THE_SCHEDULE = {
    **{"max_parallel_skills": 7, "max_retries": 0, "retry_backoff": 0.25, "auto_scaling": True},
    **{"scheduler_poll_interval": 0.5, "min_success_rate": 0.4, "needs_success_rate": 0.4},
    **{"stall_timeout": 77.0, "slot_minutes": 0.5},
}
LIMITS = {"run_memory": "8G", "run_disk": "8e9", "run_processes": "8k"}


def in_the_schedule(bench: Bench, name: str, value) -> None:
    assert getattr(bench.scheduler().schedule, name) != value
    assert getattr(bench.scheduler(*flag(name, value)).schedule, name) == value


def a_limit(bench: Bench, name: str, value) -> None:
    assert bench.job(*flag(name, value)).limits == {name: arguments.count(value)}
    assert bench.job().limits == {}


for check, values in ((in_the_schedule, IN_THE_SCHEDULE), (a_limit, LIMITS)):
    ARRIVALS |= {name: partial(check, name=name, value=each) for name, each in values.items()}


@arrives
def graph_path(bench):
    assert bench.scheduler().graph_paths.root == bench.graph_paths.root
    bench.handed_out()
    assert bench.graph_paths.daemon_lock.exists()


@arrives
def max_nodes(bench):
    everything = bench.handed_out()
    assert len(everything) == len(LIBRARY)
    assert bench.handed_out("--max_nodes=4") == everything[:4]


@arrives
def target_skill(bench):
    assert bench.handed_out(f"--target_skill={TABLE}") == [WOOD, TABLE]


@arrives
def init_from(bench):
    words = ("--launcher=local", f"--init_from={TABLE}")
    with pytest.raises(ConfigError, match="--init_from Place Table has no expert"):
        bottomup_parallel.train(bench.parsed(*words))
    assert not bench.graph_paths.root.exists()
    with pytest.raises(ConfigError, match="--init_from Place Table has no expert"):
        bench.job(*words)


@arrives
def skills_dir(bench):
    folder = bench.folder / "mine"
    folder.mkdir()
    (folder / "00_fell_a_tree.py").write_text(skill_text().replace(WOOD, "Fell A Tree"))
    assert "Fell A Tree" in bench.handed_out(f"--skills_dir={folder}")


@arrives
def min_workers(bench):
    with bench.scheduler("--min_workers=2", "--auto_scaling") as scheduler:
        Scaling(scheduler, lambda _: None)
        assert scheduler.schedule.max_parallel_skills == 2


@arrives
def max_workers(bench):
    with bench.scheduler("--max_workers=9", "--auto_scaling") as scheduler:
        Scaling(scheduler, lambda _: None)
        assert "of 1 to 9" in notices.read(scheduler.graph_paths)["scaling"]


@arrives
def strict(bench):
    flow, scheduler = SimpleNamespace(requested=(WOOD,)), bench.scheduler()
    codes = []
    with scheduler:
        scheduler.add_skills([Entry(skill=WOOD, expert=0, status=DONE)])
        for words in [], ["--strict"]:
            strict = bench.parsed(*words).graph.strict
            codes.append(feeder_of(flow, scheduler).exit_code(strict=strict))
    assert codes == [0, 1]


@arrives
def curriculum(bench):
    """Tried skills wait behind new ones, and those that learn least behind all."""
    rising, flat = (Waiting(attempt=2), (0.0, 0.1, 0.5)), (Waiting(attempt=2), (0.2, 0.2, 0.2))
    tried = {"Rising": rising, "Flat": flat, "New": (Waiting(), ()), "Unread": (Waiting(), (9.0,))}
    flow = SimpleNamespace(
        requested=(), weight=lambda _: 3, on_skill_failed=lambda _: None, next_skill=lambda: None
    )
    flow.check_frontier_blocked = lambda: False
    scheduler, graph_paths = bench.scheduler(), bench.graph_paths
    with scheduler:
        for expert, (name, (status, curve)) in enumerate(tried.items()):
            scheduler.add_skills([Entry(skill=name, expert=expert, status=status)])
            folder = graph_paths.failed_run(expert, name, 1)
            folder.mkdir(parents=True)
            for number, success in enumerate(curve, start=2):
                figures = dict.fromkeys(
                    ("seconds", "mean_episode_length", "mean_episode_return"), 1
                )
                line = {"frames": 100 * number, "success_rate": success, **figures}
                with RunPaths(folder, expert).metrics.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        for words in [], ["--curriculum"]:
            scheduler.schedule = bench.parsed(*words).schedule
            feeder_of(flow, scheduler).on_skill_failed("Other")
            entries = scheduler.state.entries
            learners = {"Rising": -57, "Flat": -97, "New": 3, "Unread": 3}
            expected = learners if words else dict.fromkeys(tried, 0)
            assert {name: entries[name].priority for name in tried} == expected


@pytest.mark.parametrize(
    ("wood", "stack", "stopped", "code"),
    [
        (DONE, Held(why="not asked for", attempt=1, at=NOW), False, 0),
        (DONE, Held(why="not asked for", attempt=1, at=NOW), True, 0),
        (DONE, Waiting(), True, EXIT_RESUMABLE),
        (Held(why="paused", attempt=1, at=NOW), DONE, True, 1),
        (None, DONE, True, EXIT_RESUMABLE),
    ],
)
def test_the_exit_code_counts_what_was_asked_for_and_what_is_left(
    bench, wood, stack, stopped, code
):
    scheduler = bench.scheduler()
    with scheduler:
        for n, (name, status) in enumerate(((WOOD, wood), ("Stack Wood", stack))):
            expert = n if status is DONE else None
            if status is not None:
                scheduler.add_skills([Entry(skill=name, expert=expert, status=status)])
        scheduler.stopped_on_request = stopped
        flow = SimpleNamespace(requested=(WOOD,))
        assert feeder_of(flow, scheduler).exit_code(strict=False) == code


@arrives
def skill_config(bench):
    path = bench.folder / "skills.toml"
    path.write_text(f'["{WOOD}"]\nlr = 0.5\n')
    jobs = (bench.job(f"--skill_config={path}", *words) for words in ([], ["--lr=0.25"]))
    rates = [TrainConfig.read(job.argv[3:], prog="ppo_flow").ppo.lr for job in jobs]
    assert rates == [0.5, 0.25]


@arrives
def merge_policy(bench):
    seen = []
    bench.monkeypatch.setattr(
        training_backend, "merge_run", lambda *args, rule, **facts: seen.append(rule) or {}
    )
    bench.backend("--merge_policy=eval_gate").merge(RunRequest(skill=WOOD, expert=0, attempt=1))
    assert seen == [MERGE_RULES["eval_gate"]]


@arrives
def merge_objective(bench):
    seen = []
    bench.monkeypatch.setattr(
        training_backend, "merge_run", lambda *args, rule, **facts: seen.append(rule) or {}
    )
    flags = ("--merge_policy=eval_gate", "--merge_objective=success=1,deaths=1")
    bench.backend(*flags).merge(RunRequest(skill=WOOD, expert=0, attempt=1))
    assert seen[0].keywords == {"objective": "success=1,deaths=1"}
    with pytest.raises(
        ConfigError, match="frames is not measured here; use success, return, deaths"
    ):
        bench.backend("--merge_policy=eval_gate", "--merge_objective=success=1,frames=1")


@arrives
def skill_timesteps_budget(bench):
    """Of 605 frames the first run took 10, as its progress says: the new one has 595, not 600."""
    place = Place(bench.folder)
    place.order({WOOD: {"fails": 1, "code": EXIT_DIVERGED}})
    budget = ("--skill_timesteps_budget=605", "--total_timesteps=600", f"--target_skill={WOOD}")
    code, said = place.run("--launcher=local", "--retry_backoff=0.01", *budget)
    assert code == 0, said
    graph_paths = place.graph_paths
    archive = dataclasses.replace(
        graph_paths.run(0, WOOD), folder=graph_paths.skill_folder(0, WOOD)
    )
    failed = dataclasses.replace(archive, folder=graph_paths.failed_run(0, WOOD, 1))
    assert read_run(failed).config["total_timesteps"] == 600
    assert read_run(archive).config["total_timesteps"] == 595


def install_nvidia_smi(bench: Bench) -> None:
    """A machine with three GPUs, and JAX's CUDA plugin."""
    bin_folder = program(bench.folder / "bin" / "nvidia-smi", NVIDIA_SMI).parent
    bench.monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        bench.monkeypatch.delenv(name, raising=False)
    bench.monkeypatch.setattr(start, "CUDA_PLUGINS", ("json",))  # as if installed


@arrives
def gpu_ids(bench):
    install_nvidia_smi(bench)
    assert bench.scheduler().devices == {"0": 1, "1": 1, "2": 1}
    assert bench.scheduler("--gpu_ids", "2", "1").devices == {"2": 1, "1": 1}
    env = bench.job("--gpu_ids", "2", devices=("2",)).env
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("2", "PCI_BUS_ID")
    bench.monkeypatch.setattr(start, "CUDA_PLUGINS", ("no_such_plugin",))
    assert bench.scheduler().devices == {}
    with pytest.raises(ConfigError, match=r"pip install '\.\[cuda\]' in flowrl's folder"):
        bench.scheduler("--gpu_ids", "0")


@arrives
def devices_per_run(bench):
    assert bench.scheduler().schedule.devices_per_run == 1
    install_nvidia_smi(bench)
    scheduler = bench.scheduler("--devices_per_run=2")
    assert scheduler.schedule.devices_per_run == 2
    job = bench.job("--devices_per_run=2", devices=("0", "2"))
    assert job.env["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert "--num_devices=2" in job.argv
    assert read_run(bench.graph_paths.run(0, WOOD)).config["num_devices"] == 2
    with pytest.raises(ConfigError, match="num_envs 64 cannot be shared evenly by --num_devices 3"):
        bench.backend("--devices_per_run=3")
    for words, said in (
        ("--devices_per_run=4", r"there are 3 GPUs \(0, 1, 2\); lower it"),
        (
            "--devices_per_run=2 --num_envs=66 --num_devices=3",
            "all GPUs that it gets, here 2.*per_run 3",
        ),
        ("--num_devices=2", "all GPUs that it gets, here 1.*per_run 2"),
    ):
        with pytest.raises(ConfigError, match=said):
            bench.scheduler(*words.split())


@arrives
def skills_per_gpu(bench):
    bench.monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    shared = bench.job("--skills_per_gpu=3", devices=("0",)).env
    assert shared["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.3000"
    alone = bench.job("--skills_per_gpu=3", devices=("0",), alone=True).env
    assert alone["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9000"


@arrives
def gpu_memory_mb(bench):
    install_nvidia_smi(bench)
    devices = bench.scheduler("--gpu_memory_mb=20000").devices
    assert devices == {"0": 3, "1": 3, "2": 3}
    both = bench.scheduler("--gpu_memory_mb=20000", "--skills_per_gpu=2").devices
    assert both == {"0": 2, "1": 2, "2": 2}
    parsed = bench.parsed("--gpu_memory_mb=20000")
    backend = TrainingBackend(bench.graph_paths, parsed, bench.graph(parsed), devices=devices)
    env = backend.prepare(RunRequest(skill=WOOD, expert=0, attempt=1, devices=("1",))).env
    assert env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.3000"
    with pytest.raises(ConfigError, match="GPU 0 has 81559 MB, of which 73403 are for runs"):
        bench.scheduler("--gpu_memory_mb=80000")


@arrives
def cpus_per_run(bench):
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    assert bench.job().cpus == ()
    assert bench.job("--cpus_per_run=1").cpus == cpus[:1]
    assert bench.job("--cpus_per_run=1", devices=("0",)).cpus == (), "it has a GPU"


@arrives
def run_timeout(bench):
    assert bench.scheduler().schedule.run_timeout is None
    assert bench.scheduler("--run_timeout=99").schedule.run_timeout == 99
    assert bench.job("--total_timesteps=1_000_000").limit_seconds == 24 * 3600 + 10_000


@arrives
def sandbox(bench):
    """Bubblewrap goes before the trainer's own words, which stay as they are."""
    program = bench.folder / "bin" / "bwrap"
    program.parent.mkdir()
    program.touch(mode=0o755)
    bench.monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    confined, free = bench.job("--sandbox=bwrap"), bench.job("--sandbox=none")
    assert confined.sandbox[0] == str(program)
    assert str(confined.folder) in confined.sandbox
    assert free.sandbox == ()
    assert free.argv == confined.argv
    assert bench.job().sandbox[0] == str(program), "auto"


@arrives
def pass_env(bench):
    bench.monkeypatch.setenv("MY_TOKEN", "canary-canary")
    bench.monkeypatch.setenv("MY_NAME", "somebody-else")
    assert "MY_TOKEN" not in bench.job().env
    job = bench.job("--pass_env", "MY_TOKEN", "MY_NAME")
    assert (job.env["MY_TOKEN"], job.env["MY_NAME"]) == ("canary-canary", "somebody-else")
    assert job.passed == ("MY_TOKEN", "MY_NAME")
    assert "canary" not in " ".join(job.argv + job.sandbox)
    assert "somebody-else" in bench.scheduler("--pass_env", "MY_NAME")._secrets
    with pytest.raises(ConfigError, match="--pass_env MY_OTHER: it is not set"):
        bench.backend("--pass_env", "MY_OTHER")


@arrives
def trust_folder(bench):
    bench.graph_paths.root.mkdir(parents=True)
    bench.graph_paths.root.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod o-w it, or use --trust_folder"):
        bottomup_parallel.train(bench.parsed("--launcher=local"))
    assert list(bench.graph_paths.root.iterdir()) == []
    assert WOOD in bench.handed_out("--trust_folder")


@arrives
def trust_skills(bench):
    folder = bench.folder / "mine"
    folder.mkdir()
    reward = "def task_reward(n):\n    return sorted([1.0 * n])[0]"
    (folder / "own.py").write_text(skill_text(reward=reward).replace(WOOD, "Own Skill"))
    said = {}
    bench.monkeypatch.setattr(
        training, "approve_skills", lambda *_, **facts: said.update(facts) or {}
    )
    assert "Own Skill" in bench.handed_out(f"--skills_dir={folder}", "--trust_skills")
    assert said["trust"] is True
    with pytest.raises(SkillError, match="a call of 'sorted'"):
        bench.handed_out(f"--skills_dir={folder}")


@arrives
def launcher(bench):
    local = start.open_launcher(bench.parsed("--launcher=local").launch)
    assert isinstance(local, LocalLauncher)
    assert isinstance(start.open_launcher(bench.parsed().launch), TmuxLauncher)


@arrives
def slurm_args(bench):
    words = ("--launcher=slurm", "--slurm_args", "partition=gpu", "gres=gpu:1")
    with pytest.raises(ConfigError, match=r"Slurm|sbatch"):  # none answers here
        start.open_launcher(bench.parsed(*words).launch)
    with pytest.raises(ConfigError, match="--slurm_args 'wrap=id'"):
        start.open_launcher(bench.parsed("--launcher=slurm", "--slurm_args", "wrap=id").launch)


@arrives
def nodes_per_run(bench):
    """Each of the nodes has a process, and what they cannot share is refused."""
    words = ("--launcher=slurm", "--nodes_per_run=2", "--sandbox=none")
    job = bench.job(*words)
    assert (job.num_nodes, bench.job().num_nodes) == (2, 1)
    assert {"--num_processes=2", "--num_devices=2"} <= {*job.argv}
    assert "--num_devices=4" in bench.job(*words, "--num_devices=4").argv
    for more, said in {
        "--sandbox=auto": "--nodes_per_run 2: .* add --sandbox none",
        "--replicas=2": "--nodes_per_run 2 and --replicas 2 exclude each other",
        "--num_devices=3 --num_envs=96": "--num_devices 3 cannot be shared evenly",
    }.items():
        with pytest.raises(ConfigError, match=said):
            bench.scheduler(*words, *more.split())


@arrives
def ray_address(bench):
    words = ("--launcher=ray", "--ray_address=http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 does not answer"):
        start.open_launcher(bench.parsed(*words).launch)


@arrives
def ray_resources(bench):
    with pytest.raises(ConfigError, match="--ray_resources 'GPU'"):
        start.open_launcher(bench.parsed("--launcher=ray", "--ray_resources", "GPU").launch)


@arrives
def lost_after(bench):
    bench.monkeypatch.setattr(SlurmLauncher, "check", lambda self: None)
    found = start.open_launcher(bench.parsed("--launcher=slurm", "--lost_after=77").launch)
    assert isinstance(found, SlurmLauncher)
    assert found.lost_after == 77


@arrives
def shared_folder(bench):
    config = bench.parsed("--launcher=local", "--shared_folder")
    made = start.open_scheduler(bench.graph_paths, config.schedule, config.launch, devices={})
    with made:
        assert (bench.graph_paths.root / "daemon.claim").exists()
        assert made.launcher.shared_folder
    assert not (bench.graph_paths.root / "daemon.claim").exists()
    bench.monkeypatch.setattr(SlurmLauncher, "check", lambda self: None)
    config = bench.parsed("--launcher=slurm")
    with start.open_scheduler(bench.graph_paths, config.schedule, config.launch, devices={}):
        assert (bench.graph_paths.root / "daemon.claim").exists()  # its jobs are on other hosts


@arrives
def tmux_socket(bench):
    found = start.open_launcher(bench.parsed("--tmux_socket=mine").launch)
    assert isinstance(found, TmuxLauncher)
    assert found.server.address == ("-L", "mine")


@arrives
def video_after(bench):
    seen = []

    def filmer(when, _):
        seen.append(when)
        raise ConfigError("here")

    bench.monkeypatch.setattr("flowrl.parallel.training.Filmer", filmer)
    with pytest.raises(ConfigError, match="here"):
        bottomup_parallel.train(bench.parsed("--launcher=local", "--video_after=success"))
    assert seen == ["success"]


@arrives
def notify(bench):
    with pytest.raises(ConfigError, match="--notify nosuchprogram -x begins with no program"):
        bottomup_parallel.train(bench.parsed("--launcher=local", "--notify=nosuchprogram -x"))
    assert not bench.graph_paths.root.exists()


@arrives
def analyse_at(bench):
    """A skill's first run ends there; what is no success below the goal is refused."""
    for words, goal, origin in ([], 0.8, None), (["--analyse_at=0.25"], 0.25, "--analyse_at"):
        bench.job(*words)
        run = read_run(bench.graph_paths.run(0, WOOD))
        assert run.config["success_state_rate"] == goal
        assert run.origins.get("success_state_rate") == origin
    bench.graph_paths = GraphPaths(bench.folder / "other")
    with pytest.raises(ConfigError, match="not below --success_state_rate"):
        bottomup_parallel.train(bench.parsed("--launcher=local", "--analyse_at=0.9"))
    assert not bench.graph_paths.root.exists()


@arrives
def write_skills(bench):
    said = "--write_flags: an endpoint is asked that you name"
    with pytest.raises(ConfigError, match=said):
        bottomup_parallel.train(bench.parsed("--launcher=local", "--write_skills=1"))
    assert not bench.graph_paths.root.exists()


@arrives
def write_flags(bench):
    words = ("--write_skills=1", "--write_flags", "--model m --base_url ftp://x")
    with pytest.raises(ConfigError, match="--base_url is 'ftp://x'"):
        bottomup_parallel.train(bench.parsed("--launcher=local", *words))


def test_the_environment_chooses_the_library(bench):
    other = f"--graph_path={bench.folder / 'full'}"
    classic, full = bench.handed_out(), bench.handed_out("--env_name=Craftax-Symbolic-v1", other)
    assert WOOD in classic
    assert WOOD in full
    assert full != classic


@pytest.mark.parametrize(("accounting", "frames"), [("acted", 130), ("total", 200)])
def test_the_accounting_of_frames_reaches_the_merge(bench, accounting, frames):
    """An expert of 100 frames that acted in 30 of a run's 100."""
    backend = bench.backend(f"--frame_accounting={accounting}")
    for skill, expert, acted in ((WOOD, 0, {0: 100}), (TABLE, 1, {0: 30, 1: 70})):
        task = RunRequest(skill=skill, expert=expert, attempt=1)
        backend.prepare(task)
        finish(bench.graph_paths.run(expert, skill), acted)
        merged = backend.merge(task)
    assert merged["experts"][0]["frames"] == frames


def test_every_flag_is_kept_with_the_graph(bench, monkeypatch):
    def stop(*_, **facts):
        raise HandedOut

    words = "--launcher=local", "--lr=0.125", "--max_nodes=3"
    parsed = bench.parsed(*words)
    monkeypatch.setattr(training, "Feeder", stop)
    with pytest.raises(HandedOut):
        bottomup_parallel.train(parsed)
    assert not bench.graph_paths.config_json.exists(), "nothing is launched yet"
    bench.job(*words)
    facts = storage.read_json(bench.graph_paths.config_json)
    assert facts.pop("format") == 1
    assert config.from_json(BottomUpConfig, facts) == parsed
