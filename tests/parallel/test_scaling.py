"""As many runs train side by side as give more steps per second together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flowrl import notices
from flowrl.config import ScheduleConfig, checked
from flowrl.errors import ConfigError
from flowrl.launchers.base import Handle
from flowrl.parallel.scaling import Scaling, next_number
from flowrl.paths import GraphPaths
from tests.commands.making import tell_progress


@pytest.mark.parametrize(
    ("speeds", "least", "most", "found"),
    [
        ([100, 100, 100, 100], 1, 4, 1),  # two cores: one beside another gains nothing
        ([100, 60, 200], 1, 4, 1),
        ([100, 190, 192, 400], 1, 4, 2),
        ([100, 190, 260, 400], 1, 4, 4),
        ([100, 190, 260, 400], 1, 3, 3),
        ([100, 60, 58, 100], 2, 4, 2),
        ([100, 200, 300], 3, 3, 3),
    ],
)
def test_a_number_is_tried_once_the_one_below_is_known(speeds, least, most, found):
    """Each number is measured in turn, with a sample that is far off."""
    history, tried = {}, []
    for _ in range(20):
        number = next_number(history, least=least, most=most)
        tried.append(number)
        speed = float(speeds[number - 1])
        history.setdefault(number, []).append(speed if len(tried) % 3 else 10 * speed)
    assert tried[-1] == found
    assert next_number(history, least=least, most=most) == found
    assert max(tried) <= min(most, found + 1)
    assert min(tried) == least


class Machine:
    """A scheduler whose runs share so many steps per second, and half of them in vain.

    That is with runs that were launched for different numbers. The first run of each slot goes on
    from before, as long as it is not relaunched.
    """

    def __init__(self, root, speeds: dict[int, float], *, adopted: int = 0) -> None:
        self.graph_paths = GraphPaths(root)
        self.schedule = ScheduleConfig(max_parallel_skills=3, auto_scaling=True)
        self.state = SimpleNamespace(launched=lambda: list(self._launched.values()))
        self.speeds, self.shared = speeds, []
        self._launched, self._launched_with = {}, {}  # by slot
        self._frames, self._now, self._pid = [0.0] * 3, 0.0, 1
        for run in range(adopted):
            self.launch(run, number=3)
        self.scaling = Scaling(self, self.shared.append)

    def launch(self, run: int, *, number: int, frames: float = 0.0) -> None:
        """A slot's run begins, or goes on from a checkpoint, in another process."""
        self._pid += 1
        self._frames[run], self._launched_with[run] = frames, number
        handle = Handle(run_id=f"e{run}", session="s", pid=self._pid)
        self._launched[run] = SimpleNamespace(expert=run, skill=f"S{run}"), handle

    def passes(self, seconds: float, phase: str = "training", *, go_on: bool = False) -> int:
        """The slots after so many seconds, in which as many runs have trained as there were.

        All runs are launched with the number that there is now, unless those before `go_on`.
        """
        number = self.schedule.max_parallel_skills
        for run in range(number):
            if run not in self._launched or (self._launched_with[run] != number and not go_on):
                self.launch(run, number=number)
        self._launched = {run: self._launched[run] for run in range(number)}
        mixed = len({self._launched_with[run] for run in self._launched}) > 1
        self._now += seconds
        for run, (_, handle) in self._launched.items():
            self._frames[run] += self.speeds[number] / number * seconds * (0.5 if mixed else 1.0)
            figures = {"frames": int(self._frames[run]), "updated_at": self._now}
            run_paths = self.graph_paths.run(run, f"S{run}")
            tell_progress(run_paths, handle.run_id, phase=phase, **figures)
        self.scaling.tick()
        return self.schedule.max_parallel_skills


def test_runs_are_measured_while_all_of_them_train(tmp_path):
    machine = Machine(tmp_path, {1: 1000.0, 2: 1900.0, 3: 1901.0})
    assert [machine.passes(9, "compiling") for _ in range(5)] == [1] * 5
    assert [machine.passes(1) for _ in range(6)] == [1] * 6  # a sample takes 5 seconds
    assert [machine.passes(9) for _ in range(10)] == [1, 2, 2, 2, 2, 3, 3, 3, 3, 2]
    assert machine.shared == [1, 2, 3, 2]
    said = notices.read(machine.graph_paths)["scaling"]
    assert "side by side: 2 of 1 to 3 (1: 1,000 steps/s, 2: 1,900 steps/s, 3: 1,901" in said


def test_a_run_without_figures_of_its_own_ends_a_sample(tmp_path):
    machine = Machine(tmp_path, {1: 1000.0, 2: 1900.0})
    for _ in range(9):
        machine.passes(9)
        machine.graph_paths.run(0, "S0").progress.write_text("{")
        machine.scaling.tick()
    assert machine.shared == [1]


def test_a_number_is_measured_by_runs_that_were_launched_with_it(tmp_path):
    """A run that is there already keeps more threads than are its share."""
    machine = Machine(tmp_path, {1: 1000.0, 2: 1900.0, 3: 1900.0})
    assert [machine.passes(9) for _ in range(4)] == [1, 1, 1, 2]
    assert [machine.passes(9, go_on=True) for _ in range(9)] == [2] * 9
    assert "2: " not in notices.read(machine.graph_paths)["scaling"].partition("(")[2]
    assert [machine.passes(9) for _ in range(8)] == [2, 2, 2, 3, 3, 3, 3, 2]
    assert "(1: 1,000 steps/s, 2: 1,900" in notices.read(machine.graph_paths)["scaling"]


def test_runs_of_an_earlier_start_are_not_measured(tmp_path):
    machine = Machine(tmp_path, {1: 1000.0, 2: 1900.0}, adopted=1)
    assert [machine.passes(9, go_on=True) for _ in range(9)] == [1] * 9
    machine.launch(0, number=1)
    assert [machine.passes(9) for _ in range(4)] == [1, 1, 1, 2]


def test_frames_that_a_run_has_lost_are_no_sample(tmp_path):
    machine = Machine(tmp_path, {1: 1000.0, 2: 1900.0})
    assert [machine.passes(9) for _ in range(3)] == [1, 1, 1]
    machine.launch(0, number=1, frames=500.0)
    assert [machine.passes(9), machine.passes(9)] == [1, 2]
    assert "1: 1,000 steps/s" in notices.read(machine.graph_paths)["scaling"]


def test_bounds_that_leave_no_number_are_refused():
    with pytest.raises(ConfigError, match="--min_workers 4 is above --max_workers 3; lower it"):
        checked(ScheduleConfig(auto_scaling=True, min_workers=4))
    assert checked(ScheduleConfig(min_workers=4, max_parallel_skills=2))
