"""Agents train in Spark's tasks, and a task that runs twice trains once; real sessions are slow."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flowrl.averaging.spark import PartTask, SparkDistributedTrainer, publish
from flowrl.averaging.state import AgentState
from flowrl.averaging.trainer import DistributedTrainer, simple_loss_function
from flowrl.errors import ConfigError, FileRefusedError, TrainingError

ROOT = Path(__file__).parents[2]


def first_round(folder: Path, loss_fn=simple_loss_function, agents=4) -> PartTask:
    """The task of round 1, with agents whose weights are their numbers."""
    trainer = DistributedTrainer(num_agents=agents)
    for number, agent in enumerate(trainer.get_all_agents()):
        agent.set_weights(np.full(3, float(number)))
    publish(trainer, folder / "0" / "0")
    return PartTask(folder, 1, loss_fn, 5, 0.1)


def run_elsewhere(folder: Path, **environ: str) -> subprocess.CompletedProcess:
    """Run the task of round 1 in a process of its own."""
    program = (
        "import sys, pathlib; from flowrl.averaging.spark import PartTask as Task;"
        "from flowrl.averaging import simple_loss_function as loss_fn;"
        "Task(pathlib.Path(sys.argv[1]), 1, loss_fn, 5, 0.1).run(0, b'')"
    )
    argv = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(argv, check=False, env={**os.environ, **environ}, capture_output=True)


# One part of a round


def test_a_task_sums_what_its_agents_learned(tmp_path):
    found = AgentState.from_bytes(first_round(tmp_path).run(0, b""))
    np.testing.assert_allclose(found.weights, np.full(3, (0 + 1 + 2 + 3) * 0.8**5))
    assert found.metadata == {"members": 4, "missed": [], "left_out": {}}


def test_agents_go_on_from_the_mean(tmp_path):
    mean = AgentState(agent_id="mean", weights=np.ones(3)).to_bytes()
    found = AgentState.from_bytes(first_round(tmp_path).run(0, mean))
    np.testing.assert_allclose(found.weights, np.full(3, 4 * 0.8**5))


def test_a_task_that_runs_twice_trains_once(tmp_path):
    steps = []

    def other_each_time(weights):
        steps.append(1)
        return 0.0, np.full_like(weights, len(steps))

    task = first_round(tmp_path, other_each_time)
    assert task.run(0, b"") == task.run(0, b"")
    assert len(steps) == 4 * 5


def test_of_two_tries_at_once_the_first_one_counts(tmp_path):
    """The other one runs, as a process, while this one takes its first step."""

    def while_another_runs(weights):
        if not (tmp_path / "1").exists():
            assert run_elsewhere(tmp_path).returncode == 0
        return 0.0, np.ones_like(weights)

    late = first_round(tmp_path, while_another_runs).run(0, b"")
    np.testing.assert_allclose(AgentState.from_bytes(late).weights, np.full(3, 6 * 0.8**5))
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["0"]


@pytest.mark.parametrize("fault", ["kill", "torn", "enospc"])
def test_a_task_that_dies_as_it_writes_is_run_again(tmp_path, fault):
    whole = first_round(tmp_path / "whole").run(0, b"")
    task = first_round(tmp_path / "killed")
    code = run_elsewhere(task.folder, FLOWRL_FAULT=f"write.agents.json:{fault}").returncode
    assert code == (1 if fault == "enospc" else -signal.SIGKILL)
    assert not (task.folder / "1" / "0").exists()
    assert task.run(0, b"") == whole


def test_agents_that_raise_or_are_not_finite_do_not_count(tmp_path):
    def loss_fn(weights):
        if weights[0] == 1:
            raise ValueError("no data")
        return 0.0, np.full_like(weights, np.nan if weights[0] == 2 else 0.0)

    found = AgentState.from_bytes(first_round(tmp_path, loss_fn).run(0, b""))
    np.testing.assert_array_equal(found.weights, np.full(3, 3.0))
    assert found.metadata["members"] == 2
    assert found.metadata["missed"] == ["agent2"]
    assert [*found.metadata["left_out"]] == ["agent1"]


def test_a_part_without_agents_that_learn_sums_nothing(tmp_path):
    found = AgentState.from_bytes(first_round(tmp_path, lambda _: 1 / 0).run(0, b""))
    np.testing.assert_array_equal(found.weights, np.zeros(3))
    assert (found.metadata["members"], len(found.metadata["left_out"])) == (0, 4)


# All parts, in a context that runs tasks one after another, the last one first and each one twice


class SerialContext:
    master, defaultParallelism = "local", 3

    def __init__(self):
        self.stopped, self.jobs = False, 0

    def broadcast(self, value):
        return SimpleNamespace(value=value, destroy=lambda: None)

    def parallelize(self, items, parts):
        assert len(items) == parts
        self.items = [*items]
        return self

    def map(self, function):
        self.function = function
        return self

    def collect(self):
        self.jobs += 1
        done = {item: self.function(item) for item in self.items[::-1]}
        return [self.function(item) for item in self.items if done[item] == self.function(item)]

    def stop(self):
        self.stopped = True


@pytest.fixture
def serial():
    pytest.importorskip("py4j", reason="pyspark is not installed")
    return SerialContext()


def train(trainer, loss_fn=simple_loss_function, iterations=20, rate=0.05, interval=5):
    return asyncio.run(trainer.train(loss_fn, iterations, rate, interval))


def weights_of(trainer) -> np.ndarray:
    return np.stack([agent.get_state().weights for agent in trainer.get_all_agents()])


@pytest.mark.parametrize("iterations", [20, 22])
def test_training_is_that_of_the_local_trainer(serial, iterations):
    trainers = SparkDistributedTrainer(None, serial, num_agents=7), DistributedTrainer(num_agents=7)
    for trainer in trainers:
        trainer.initialize_weights(np.ones(3), noise=0.5)
    ours, others = [[train(each, iterations=iterations) for _ in range(2)] for each in trainers]
    np.testing.assert_allclose(*map(weights_of, trainers), rtol=1e-12)
    assert ours[1]["mean_loss"] == pytest.approx(others[1]["mean_loss"])
    assert trainers[0].get_agent("agent6").get_state().iteration == 2 * iterations
    assert serial.jobs == 2 * -(-iterations // 5)


def test_another_ones_session_is_not_ended_and_no_files_stay(serial, tmp_path):
    trainer = SparkDistributedTrainer(["a", "b"], serial, folder=tmp_path)
    trainer.initialize_weights(np.ones(3))
    train(trainer)
    trainer.stop()
    assert not serial.stopped
    assert [*tmp_path.iterdir()] == []


def test_a_folder_of_a_trainer_that_runs_or_was_killed_is_refused(serial, tmp_path):
    trainer = SparkDistributedTrainer(["a", "b"], serial, folder=tmp_path)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"flowrl-rounds-\w+ is of a trainer that runs or was"
        ):
            SparkDistributedTrainer(["a", "b"], serial, folder=tmp_path)
    trainer.stop()
    SparkDistributedTrainer(["a", "b"], serial, folder=tmp_path)


def test_what_a_task_of_a_failed_job_writes_late_counts_nowhere(serial, tmp_path):
    trainer = SparkDistributedTrainer(["a", "b", "c"], serial)
    trainer.initialize_weights(np.ones(3))

    def fail(items, parts):
        raise TrainingError("an executor was lost")

    serial.parallelize = fail
    with pytest.raises(TrainingError, match="executor was lost"):
        train(trainer)
    del serial.parallelize
    late = DistributedTrainer(["a"])
    late.initialize_weights(np.full(3, 99.0))
    publish(late, trainer._folder / str(trainer._round) / "0")
    assert train(trainer)["active_agents"] == 3
    np.testing.assert_allclose(weights_of(trainer), 0.9**20)


def test_a_torn_file_is_named_and_all_agents_keep_what_they_had(serial):
    trainer = SparkDistributedTrainer(["a", "b", "c"], serial)
    trainer.initialize_weights(np.ones(3))

    def tear(weights):
        if weights[0] < 0.6:  # in the second job, by the task of part 2, which is the first
            file = trainer._folder / "2" / "1" / "agents.json"
            file.write_bytes(file.read_bytes()[:-9])
        return simple_loss_function(weights)

    with pytest.raises(FileRefusedError, match=r"/2/1/agents\.json is not valid"):
        train(trainer, tear)
    np.testing.assert_array_equal(weights_of(trainer), np.ones((3, 3)))
    assert train(trainer)["active_agents"] == 3


def test_a_saved_trainer_goes_on_in_tasks(serial, tmp_path):
    trainer = SparkDistributedTrainer(["a", "b", "c"], serial, min_agents=2)
    trainer.initialize_weights(np.ones(3), noise=0.5)
    train(trainer)
    trainer.save(tmp_path / "agents.json")
    loaded = SparkDistributedTrainer.load(tmp_path / "agents.json", serial, folder=tmp_path / "to")
    for each in (trainer, loaded):
        train(each)
    assert weights_of(loaded).tobytes() == weights_of(trainer).tobytes()
    assert loaded.min_agents == 2


def test_faulty_agents_are_named(serial):
    def loss_fn(weights):
        if weights[0] == 1:
            raise ValueError("no data")
        return 0.0, np.full_like(weights, np.nan if weights[0] == 2 else 0.0)

    trainer = SparkDistributedTrainer(None, serial, num_agents=5)
    for number, agent in enumerate(trainer.get_all_agents()):
        agent.set_weights(np.full(2, float(number)))
    summary = train(trainer, loss_fn, iterations=1, interval=1)
    assert [*summary["left_out"]] == ["agent1"]
    assert summary["rounds_missed"] == {"agent2": 1}
    expected = [1.0 if number == 1 else (0 + 3 + 4) / 3 for number in range(5)]
    np.testing.assert_allclose(weights_of(trainer)[:, 0], expected)


def test_too_few_agents_or_none_that_is_finite_end_training(serial):
    trainer = SparkDistributedTrainer(None, serial, num_agents=3, min_agents=2)
    trainer.initialize_weights(np.ones(2))
    with pytest.raises(TrainingError, match="no agent's weights are finite"):
        train(trainer, lambda weights: (0.0, weights * np.nan))
    trainer.initialize_weights(np.ones(2))
    for _ in range(2):
        with pytest.raises(
            TrainingError, match=r"fewer than 2 agents are left, .*agent0.*division"
        ):
            train(trainer, lambda _: 1 / 0)
    assert serial.jobs == 2
    np.testing.assert_array_equal(weights_of(trainer), np.ones((3, 2)))


def test_weights_that_have_no_mean_are_refused_before_any_job(serial):
    trainer = SparkDistributedTrainer(["a", "b"], serial)
    trainer.get_agent("a").set_weights(np.ones(2))
    trainer.get_agent("b").set_weights(np.ones(3))
    with pytest.raises(ConfigError, match=r"\(3,\) instead of \(2,\)"):
        train(trainer)
    assert serial.jobs == 0


def test_a_cluster_needs_a_shared_folder():
    with pytest.raises(ConfigError, match="spark://host:7077 need folder="):
        SparkDistributedTrainer(["a"], "spark://host:7077")


def test_without_the_extra_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setitem(sys.modules, "py4j.protocol", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[spark\]'"):
        SparkDistributedTrainer(["a"])


# Real sessions, each in a process of its own

BEGIN = """
import asyncio, os, signal, sys
from pathlib import Path
import numpy as np
from flowrl.averaging import (
    DistributedTrainer, SparkDistributedTrainer, simple_loss_function
)
from flowrl.errors import ConfigError, TrainingError
"""
MANY = """
names = [f"agent{number}" for number in range(1000)]
trainer = SparkDistributedTrainer(names)
context, local = trainer._context, DistributedTrainer(names)
for each in (trainer, local):
    each.initialize_weights(np.ones(1000), noise=0.5)
    asyncio.run(each.train(simple_loss_function, 6, 0.05, 2))
ours, others = [[a.get_state().weights for a in t.get_all_agents()] for t in (trainer, local)]
np.testing.assert_allclose(ours, others, rtol=1e-12)
assert len({each.tobytes() for each in ours}) == 1

jobs = context.statusTracker().getJobIdsForGroup(None)
assert len(jobs) == 3, jobs  # one for each round
store = context._jsc.sc().statusStore()
for stage in (s for job in jobs for s in context.statusTracker().getJobInfo(job).stageIds):
    tasks = store.taskList(stage, 0, 1000)
    sent = [tasks.apply(i).taskMetrics().get().resultSize() for i in range(tasks.size())]
    assert len(sent) == 2 and sum(sent) <= 4 * 2 * 1000 * 8, sent
    print("bytes to the driver", sent)

try:
    SparkDistributedTrainer(names, "local[2]")
    raise SystemExit("two sessions")
except ConfigError as error:
    assert "give its SparkContext" in str(error), error
guest = SparkDistributedTrainer(names, context)
guest.initialize_weights(np.ones(3))
before = guest.get_agent("agent7").get_state()
try:
    asyncio.run(guest.train(lambda _: os.kill(os.getpid(), signal.SIGKILL)))
    raise SystemExit("a killed task was no error")
except TrainingError as error:
    assert str(error).startswith("Spark's job of round 2 failed: "), error
    print(error)
assert (guest.get_agent("agent7").get_state().weights == before.weights).all()
guest.stop()
assert context.parallelize([1], 1).collect() == [1]  # it is another's
trainer.stop()
try:
    SparkDistributedTrainer(names, "nowhere", folder=Path(sys.argv[1]))
    raise SystemExit("a master without a name")
except ConfigError as error:
    assert "not 'nowhere'" in str(error) and "\\n" not in str(error), error

last = SparkDistributedTrainer(["a"])
last.initialize_weights(np.ones(3))
os.kill(last._context._gateway.proc.pid, signal.SIGKILL)
last._context._gateway.proc.wait()
try:
    asyncio.run(last.train(simple_loss_function))
    raise SystemExit("without Java")
except TrainingError as error:
    assert "its Java process is gone" in str(error) and "\\n" not in str(error), error
last.stop()
"""
KILLED = """
folder = Path(sys.argv[1])

def loss_fn(weights):
    if kill and weights[0] > 0.9 and os.getpid() != driver:
        try:
            (folder / kill).touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            victim = os.getpid()
            if kill == "executor":  # the JVM, two processes up
                for _ in range(2):
                    victim = int(Path(f"/proc/{victim}/stat").read_text().split(") ")[1].split()[1])
            os.kill(victim, signal.SIGKILL)
    return simple_loss_function(weights)

driver, found, context = os.getpid(), [], "local-cluster[2,1,1024]"
for kill in ("", "worker", "executor"):
    trainer = SparkDistributedTrainer([f"agent{n}" for n in range(8)], context)
    first = trainer if not kill else first
    context = first._context
    trainer.initialize_weights(np.ones(100), noise=0.5)
    asyncio.run(trainer.train(loss_fn, 6, 0.01, 2))
    found.append(b"".join(a.get_state().weights.tobytes() for a in trainer.get_all_agents()))
    print(kill, "killed:", (folder / kill).is_file())
    assert not kill or (folder / kill).is_file()
    assert trainer._round == 4
assert len({*found}) == 1
first.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [MANY, KILLED], ids=["many", "killed"])
def test_real_sessions(tmp_path, program):
    pytest.importorskip("pyspark")
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("Java is not installed")
    (tmp_path / "program.py").write_text(BEGIN + program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path)],
        env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
