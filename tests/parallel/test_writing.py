"""`--write_skills`: a real scheduler over stand-in trainers, a real `flowrl write`, real HTTP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest

from flowrl import notices
from flowrl.errors import EXIT_INTERRUPTED, EXIT_USAGE
from flowrl.llm.transcript import NEXT, Answered, Begun, Ended, read_events
from flowrl.parallel.writing import WRITING
from tests.judging.endpoint import KEY, FakeEndpoint, needs_openai, serving
from tests.llm.making import amounts, approve, contract, rewards, scripted
from tests.parallel.making import TABLE, WOOD
from tests.parallel.stand_in_story import Place, ended
from tests.waiting import until

pytestmark = needs_openai
FIRST = (contract(), rewards())
SECOND = (contract("Fell More", gain=amounts({"beams": "n"})), rewards())
GIVEN_UP = contract("Fell None", gain=[])


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(FakeEndpoint()) as found:
        yield scripted(found, FIRST)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A graph with one trained skill, and the approval that the dry run would give."""
    place = Place(tmp_path_factory.mktemp("begun"))
    assert place.run("--launcher=local", f"--target_skill={WOOD}")[0] == 0
    approve(place.graph_paths.root)
    return place


@pytest.fixture
def place(begun, tmp_path):
    """A copy of that graph."""
    place = begun.copied(tmp_path)
    yield place
    place.end()


def words(endpoint: FakeEndpoint, count: int, *more: str, target: str = WOOD) -> list[str]:
    told = ["--base_url", endpoint.url, "--model", "m", *more]
    flags = [f"--write_skills={count}", "--write_flags", " ".join(told)]
    return ["--launcher=local", f"--target_skill={target}", *flags]


def transcripts(place: Place) -> list[list]:
    return [read_events(path) for path in sorted(place.graph_paths.transcripts.glob("*.jsonl"))]


def answers(place: Place) -> int:
    return sum(isinstance(event, Answered) for each in transcripts(place) for event in each)


def writer_of(daemon: subprocess.Popen[str]) -> psutil.Process:
    """The child that writes, beside trainers that have ended."""
    children = psutil.Process(daemon.pid).children()
    [found] = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
    assert "--next" in found.cmdline()
    return found


def told(place: Place) -> str:
    return notices.read(place.graph_paths).get(WRITING, "")


def test_so_many_skills_are_written_and_trained_in_all_starts_together(place, endpoint):
    scripted(endpoint, [*FIRST, *SECOND, GIVEN_UP])
    assert place.run(*words(endpoint, 2))[0] == 0
    trained = [WOOD, "Fell Trees", "Fell More"]
    assert [skill for skill, _ in place.experts().values()] == trained
    assert set(place.statuses().values()) == {"completed"}
    assert "Fell Trees" in endpoint.asked[2]["messages"][-1]["content"]
    assert place.run(*words(endpoint, 2))[0] == 0
    assert len(endpoint.asked) == 4, "those of the first start count"
    assert told(place) == ""
    assert place.run(*words(endpoint, 4, "--llm_repairs", "0"))[0] == 0
    assert "given up: the skill:6: gain is empty" in told(place)
    assert len(endpoint.asked) == 6, (
        "a wish that is given up counts, and the next one is told of it"
    )
    assert "gain is empty" in endpoint.asked[5]["messages"][-1]["content"]
    assert place.run(*words(endpoint, 4))[0] == 0
    assert len(endpoint.asked) == 6
    assert place.launches() == trained


def test_an_endpoint_that_hangs_holds_up_nothing_and_its_child_ends_with_the_scheduler(
    place, endpoint
):
    """The scheduler is killed, interrupted and stopped; then the same command goes on."""
    place.order({TABLE: {"gate": "open"}})
    stop = [sys.executable, "-m", "flowrl", "stop", str(place.graph_paths.root)]
    endpoint.delay_seconds = 600.0
    endpoint.say = lambda data: contract() if '"wish"' in data else rewards()
    codes = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: EXIT_INTERRUPTED, None: 0}
    for number, sent in enumerate(codes, start=1):
        daemon = place.start(*words(endpoint, 1, target=TABLE))
        until(lambda number=number: len(endpoint.asked) == number)
        place.open("open")
        until(lambda: place.statuses() == {WOOD: "completed", TABLE: "completed"})
        child = writer_of(daemon)
        assert daemon.poll() is None, "it stays while the child asks"
        if sent is None:
            subprocess.run(stop, check=True)
        else:
            daemon.send_signal(sent)
        assert ended(daemon)[0] == codes[sent]
        if sent is not None:
            until(lambda child=child: not child.is_running())
        assert not child.is_running(), "a stop has ended it before"
        assert len(endpoint.asked) == number, "no other one was begun"
    endpoint.released.set()
    assert place.run(*words(endpoint, 1, target=TABLE))[0] == 0
    assert [skill for skill, _ in place.experts().values()] == [WOOD, TABLE, "Fell Trees"]
    assert place.launches() == [WOOD, TABLE, "Fell Trees"]
    [events] = transcripts(place)
    assert isinstance(events[0], Begun)
    assert events[0].wish.startswith(NEXT)
    assert answers(place) == 2


def test_a_child_that_is_killed_is_told_and_pays_for_nothing_twice(place, endpoint, monkeypatch):
    monkeypatch.setenv("FLOWRL_FAULT", "transcript.answered:kill")
    assert place.run(*words(endpoint, 1))[0] == 0
    assert "flowrl write ended with exit code -9" in told(place)
    monkeypatch.delenv("FLOWRL_FAULT")
    assert place.run(*words(endpoint, 1))[0] == 0
    assert told(place) == ""
    assert answers(place) == len(endpoint.asked) == 2
    assert [skill for skill, _ in place.experts().values()] == [WOOD, "Fell Trees"]


def test_a_skill_whose_writer_was_killed_before_its_last_line_counts(place, endpoint):
    assert place.run(*words(endpoint, 1))[0] == 0
    [path] = place.graph_paths.transcripts.glob("*.jsonl")
    *lines, last = path.read_text().splitlines(keepends=True)
    assert json.loads(last)["kind"] == Ended.kind
    path.write_text("".join(lines))
    assert place.run(*words(endpoint, 1))[0] == 0
    assert len(endpoint.asked) == 2


FAULTS = {
    "a wrong key": ({"refuse": 9, "status": 401}, (), "exit code 69: flowrl: the endpoint at"),
    "a budget": ({}, ("--llm_calls", "1"), "exit code 76: flowrl: the budget is used up"),
}


@pytest.mark.parametrize(("behaves", "more", "said"), FAULTS.values(), ids=FAULTS)
def test_an_endpoint_that_cannot_be_asked_stops_the_asking_by_a_notice(
    place, endpoint, behaves, more, said
):
    for name, value in behaves.items():
        setattr(endpoint, name, value)
    assert place.run(*words(endpoint, 3, *more))[0] == 0
    assert told(place).startswith("no further skill is written: flowrl write ended with ")
    assert said in told(place)
    assert len(endpoint.asked) == 1
    endpoint.refuse = 0
    assert place.run(*words(endpoint, 1))[0] == 0
    assert told(place) == ""
    assert answers(place) == 2
    assert [skill for skill, _ in place.experts().values()] == [WOOD, "Fell Trees"]


GOOD = "--base_url http://localhost:1/v1 --model m"
BAD_FLAGS = {
    "none": ("", "--write_flags: an endpoint is asked that you name"),
    "an unknown one": (f"{GOOD} --modle m", "has no flag --modle; closest is '--model'"),
    "open quotes": ("--model 'm", "--write_flags: No closing quotation"),
    "no model": ("--base_url http://localhost:1/v1", "--write_flags: --model is missing"),
    "no key": (f"{GOOD} --api_key_env NOBODY_SET_THIS", "NOBODY_SET_THIS is not set"),
    "a password": ("--base_url http://ann:hunter2@x/v1 --model m", "without a user or a password"),
    "no number": (f"{GOOD} --llm_calls many", "--llm_calls is 'many', not a whole number"),
    "a graph": (f"exp/demo {GOOD}", "--write_flags: the graph says GRAPH; leave it out"),
    "a wish": (f"Fly {GOOD}", "--write_flags: the graph says WISH; leave it out"),
    "a folder": (f"-o mine {GOOD}", "--write_flags: the graph says --output; leave it out"),
}


@pytest.mark.parametrize(("flags", "said"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_bad_flags_are_one_line_before_anything_starts(tmp_path, flags, said, flowrl, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    told = ["train", tmp_path / "new", "--launcher=local", "--write_skills=1"]
    told += ["--write_flags", flags] if flags else []
    found = flowrl(*told, code=EXIT_USAGE).err
    assert said in found
    assert found.count("\n") == 1
    assert "hunter2" not in found
    assert not (tmp_path / "new").exists()


def test_flags_without_skills_to_write_are_refused(tmp_path, flowrl):
    told = ["train", tmp_path / "new", "--write_flags", GOOD]
    said = flowrl(*told, code=EXIT_USAGE).err
    assert "--write_flags does nothing without --write_skills 1" in said
