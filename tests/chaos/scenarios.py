"""What is done while files fail: each scenario with its start, its act, and what must hold."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowrl import notices, storage
from flowrl.averaging.rules import Rule
from flowrl.config import MergePolicyName
from flowrl.experts import manifest as manifests
from flowrl.experts import repair
from flowrl.experts.merge import MERGE_RULES, Blended, Compared, Evidence, Question
from flowrl.experts.store import ExpertStore
from flowrl.parallel import comparisons
from flowrl.parallel.comparisons import Comparison
from flowrl.parallel.events import Verb
from flowrl.parallel.requests import send_request
from flowrl.parallel.state import SchedulerState, StateFile
from flowrl.parallel.status import Entry, Running, Waiting
from flowrl.parallel.training_processor import process_completed_training, verified_candidates
from flowrl.parallel.training_setup import (
    KEPT_FAILURES,
    PreparedRun,
    clear_for_launch,
    fail_run,
    live_runs,
    pinned_versions,
)
from flowrl.paths import GraphPaths, SweepPaths
from flowrl.replicas.rounds import Round, Rounds, fold
from flowrl.runs import LineageEntry, read_run
from flowrl.storage import records
from flowrl.tuning.sweep import create_sweep, prepare_trial, remove_leftovers
from flowrl.tuning.trials import Sweep, open_sweep, propose, read_trials, write_outcome
from tests.averaging import stand_in
from tests.chaos.frozen import content
from tests.experts.making import content_digest, contents, make_expert
from tests.parallel.making import (
    GRAPH,
    PICKAXE,
    SWORD,
    TABLE,
    WOOD,
    finish,
    merge_finished,
    prepare,
    train,
)
from tests.parallel.scheduling import state_of_entries
from tests.tuning.making import a_record

COMPLETED = {WOOD: 0, TABLE: 1}
AT = datetime(2026, 1, 1, tzinfo=UTC)
Work = Callable[[GraphPaths], Any]


def scenarios(policies: Sequence[MergePolicyName]) -> list[Scenario]:
    """All of them; those that merge, once for each policy."""
    merging = [make(policy) for policy in policies for make in (_merge, _recover)]
    return [
        *merging,
        _archive(policies[0]),
        _prepare(),
        _fail(),
        _resume(),
        _collect(),
        _roll_back(),
        _offer(),
        _round(),
        _begin_sweep(),
        _propose(),
        _end_trial(),
        *_small(),
    ]


# --- readers


def look(graph_paths: GraphPaths) -> Any:
    """What counts in a graph: every expert verified, every record whole, the ledger once."""
    store = ExpertStore(graph_paths)
    present = store.manifest()
    assert len(set(present.merged)) == len(present.merged), present.merged
    for generation in manifests.generations(graph_paths):
        manifests.read_file(manifests.history_file(graph_paths, generation))
    for run_paths in live_runs(graph_paths):
        run = read_run(run_paths)
        for local, expert in enumerate(run.experts):
            for ancestor in run.ancestors:
                if ancestor.index == expert:
                    assert storage.tree_digest(run_paths.seed(local)) == ancestor.sha256
    return contents(graph_paths), present.merged


def everything(graph_paths: GraphPaths) -> Any:
    """Every file of the graph, byte for byte."""
    return content(graph_paths.root)


def _recovered(graph_paths: GraphPaths, act: Work, policy: MergePolicyName = "frame_count") -> None:
    merge_finished(graph_paths, MERGE_RULES[policy])
    act(graph_paths)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One act under faults.

    `build` makes the start in an empty folder. `look` is a reader, at whatever instant; it raises
    when what it finds is no consistent state, and its answer must be one of those before the act
    or after it. `again` ends what a fault interrupted: by default a recovery, and the act once
    more. `end` is what must come of it.
    """

    name: str
    build: Work
    act: Work
    again: Work | None = None
    look: Work = look
    end: Work = everything

    def end_it(self, graph_paths: GraphPaths) -> None:
        """End what a fault has interrupted."""
        again = self.again or partial(_recovered, act=self.act)
        again(graph_paths)


# --- merging


def trained(graph_paths: GraphPaths) -> None:
    """Experts 0 (50 frames) and 1 (20 frames)."""
    train(graph_paths, WOOD, 0, {}, acted={0: 50})
    train(graph_paths, TABLE, 1, {WOOD: 0}, acted={1: 20})


def _conflict(policy: MergePolicyName, graph_paths: GraphPaths) -> None:
    """A finished run of the pickaxe, whose ancestor another run has improved meanwhile."""
    trained(graph_paths)
    ready = prepare(graph_paths, PICKAXE, 4, COMPLETED)
    other = prepare(graph_paths, SWORD, 5, COMPLETED)
    finish(other.run_paths, {0: 8, 5: 5})
    process_completed_training(other.run_folder, SWORD, 5, graph_paths.root)
    finish(ready.run_paths, {0: 30, 4: 30})
    files = (ready.run_paths.tensorboard / "events", ready.run_paths.wandb / "run" / "run.wandb")
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("kept")
    (ready.run_paths.wandb / "latest").symlink_to("run")
    ready.run_paths.older_training_log.write_text("older")
    _find_out(policy, graph_paths, ready)


def _find_out(policy: MergePolicyName, graph_paths: GraphPaths, ready: PreparedRun) -> None:
    """Answer what the policy will ask, as the program that compares experts would have."""
    run, run_paths = ready.run, ready.run_paths
    candidates = verified_candidates(run_paths, run, "acted")
    questions = ExpertStore(graph_paths).questions(run.run_id, candidates, rule=MERGE_RULES[policy])
    if not questions:
        return
    folder = storage.make_dir(graph_paths.comparisons / run.run_id)
    answered = Comparison(
        run_id=run.run_id,
        run_folder=run_paths.folder.name,
        expert=run.expert,
        limit_seconds=comparisons.LIMIT_SECONDS,
        questions=questions,
        answers=tuple(_answer(folder, question) for question in questions),
    )
    records.write(comparisons.record_of(folder), answered)


def _answer(comparison_folder: Path, question: Question) -> Evidence:
    if question.kind == "compare":
        return Compared(question=question, wins=30, losses=2, ties=224)
    folder = make_expert(comparisons.blend_of(comparison_folder, question.expert), "blended")
    return Blended(
        question=question,
        folder=folder,
        sha256=storage.tree_digest(folder),
        content=content_digest(folder),
    )


def _merge_pickaxe(policy: MergePolicyName, graph_paths: GraphPaths) -> Any:
    folder = graph_paths.run(4, PICKAXE).folder
    return process_completed_training(
        folder, PICKAXE, 4, graph_paths.root, merge_policy=MERGE_RULES[policy]
    )


def _merge(policy: MergePolicyName) -> Scenario:
    act = partial(_merge_pickaxe, policy)
    return Scenario(
        name=f"merge ({policy})",
        build=partial(_conflict, policy),
        act=act,
        again=partial(_recovered, act=act, policy=policy),
    )


def _killed_at(point: str, policy: MergePolicyName, graph_paths: GraphPaths) -> None:
    """A merge that a fault ended there, as a kill would have: nothing was tidied up."""
    _conflict(policy, graph_paths)
    child = os.fork()
    if child == 0:
        os.environ["FLOWRL_FAULT"] = f"{point}:kill"
        with suppress(BaseException):
            _merge_pickaxe(policy, graph_paths)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 9


def _archive(policy: MergePolicyName) -> Scenario:
    act = partial(_merge_pickaxe, policy)
    return Scenario(
        name=f"archive ({policy})",
        build=partial(_killed_at, "merge.committed", policy),
        act=act,
        again=partial(_recovered, act=act, policy=policy),
    )


def _recover(policy: MergePolicyName) -> Scenario:
    def act(graph_paths: GraphPaths) -> Any:
        return merge_finished(graph_paths, MERGE_RULES[policy])

    return Scenario(
        name=f"recovery ({policy})",
        build=partial(_killed_at, "write.global_latest.json", policy),
        act=act,
        again=act,
    )


# --- run folders


def _with_dead_attempt(graph_paths: GraphPaths) -> None:
    trained(graph_paths)
    prepare(graph_paths, PICKAXE, 4, COMPLETED)


def _prepare() -> Scenario:
    def act(graph_paths: GraphPaths) -> Any:
        return prepare(graph_paths, PICKAXE, 4, COMPLETED, attempt=2)

    def end(graph_paths: GraphPaths) -> Any:
        """One whole run folder of the attempt, and the attempts before it."""
        run_paths = graph_paths.run(4, PICKAXE)
        names = sorted(path.relative_to(run_paths.folder) for path in run_paths.folder.rglob("*"))
        present = {path.name for path in graph_paths.training_runs.iterdir()}
        assert present == {"failed", run_paths.folder.name}, present
        kept = {
            path.name.rpartition(".attempt")[2][0] for path in graph_paths.failed_runs.iterdir()
        }
        assert "1" in kept <= {"1", "2"}, kept
        return look(graph_paths), read_run(run_paths).attempt, names

    return Scenario(name="prepare", build=_with_dead_attempt, act=act, end=end)


def _fail() -> Scenario:
    def build(graph_paths: GraphPaths) -> None:
        for attempt in range(1, KEPT_FAILURES + 2):
            prepare(graph_paths, WOOD, 0, {}, attempt=attempt)

    def act(graph_paths: GraphPaths) -> Any:
        return fail_run(graph_paths, 0, WOOD)

    def end(graph_paths: GraphPaths) -> Any:
        assert not list(live_runs(graph_paths))
        names = sorted(path.name for path in graph_paths.failed_runs.iterdir())
        # One that was moved before the fault may not have pushed the oldest out yet.
        assert len(names) <= KEPT_FAILURES + 1, names
        return look(graph_paths), _last(names)

    return Scenario(name="fail", build=build, act=act, end=end)


def _last(names: list[str]) -> list[str]:
    return names[-KEPT_FAILURES:]


def _resume() -> Scenario:
    def build(graph_paths: GraphPaths) -> None:
        run_paths = prepare(graph_paths, WOOD, 0, {}).run_paths
        for path in (run_paths.start_json, run_paths.exit_json, run_paths.result_json):
            path.write_text("{}\n")
        (run_paths.resume / "0").mkdir(parents=True)
        (run_paths.resume / "0" / "d0").write_text("arrays")

    def act(graph_paths: GraphPaths) -> None:
        clear_for_launch(graph_paths.run(0, WOOD))

    return Scenario(name="resume", build=build, act=act, again=act)


# --- rounds of replicas


def _rounds(graph_paths: GraphPaths) -> Rounds:
    return Rounds(graph_paths.root / "rounds")


def _look_at_round(graph_paths: GraphPaths) -> Any:
    """The newest round and its arrays; every offer for the next is whole."""
    rounds = _rounds(graph_paths)
    if (newest := rounds.newest()) is None:
        return None
    mean = rounds.mean(newest)
    found = [k for k in (0, 1) if rounds.offer_folder(newest.number + 1, k).exists()]
    offers = [rounds.read_offer(newest, k, mean)[0].digest for k in found]
    return newest.number, newest.digest, tuple(offers)


def _begin_rounds(graph_paths: GraphPaths) -> None:
    rounds = _rounds(graph_paths)
    rounds.commit(Round(number=0, acted=(0, 0, 0)), stand_in.first_mean())


def _make_offer(graph_paths: GraphPaths, replica: int = 1) -> None:
    rounds = _rounds(graph_paths)
    base = rounds.newest()
    assert base is not None
    arrays = stand_in.learned(rounds.mean(base), base.number, replica)
    state = {"state": np.arange(3)}
    rounds.offer(base.number + 1, stand_in.offer_of(base, replica), arrays, state)


def _two_rounds_and_offers(graph_paths: GraphPaths) -> None:
    _begin_rounds(graph_paths)
    for _ in range(2):  # the third round removes the first
        _make_offer(graph_paths, 0)
        _make_offer(graph_paths, 1)
        _fold_round(graph_paths)
    _make_offer(graph_paths, 0)
    _make_offer(graph_paths, 1)


def _fold_round(graph_paths: GraphPaths, target: int | None = None) -> None:
    rounds = _rounds(graph_paths)
    base = rounds.newest()
    assert base is not None
    rounds.collect(base)
    if base.number == target:
        return
    before = rounds.mean(base)
    offers = {k: rounds.read_offer(base, k, before) for k in (0, 1)}
    record = Round(
        number=base.number + 1,
        members=tuple(offer for offer, _ in offers.values()),
        frames=base.frames + sum(sum(offer.acted) for offer, _ in offers.values()),
        acted=base.acted,
    )
    rounds.commit(record, fold(before, offers, Rule()))


def _offer() -> Scenario:
    return Scenario(
        name="offer of a replica", build=_begin_rounds, act=_make_offer, look=_look_at_round
    )


def _round() -> Scenario:
    act = partial(_fold_round, target=3)
    return Scenario(
        name="round of replicas", build=_two_rounds_and_offers, act=act, look=_look_at_round
    )


# --- the store


def _collect() -> Scenario:
    def build(graph_paths: GraphPaths) -> None:
        trained(graph_paths)
        prepare(graph_paths, SWORD, 3, COMPLETED)
        store = ExpertStore(graph_paths)
        for _ in range(manifests.KEPT_GENERATIONS + 3):
            present = store.manifest().experts[0]
            train_once_more(store, present.frames + 1)

    def act(graph_paths: GraphPaths) -> Any:
        return ExpertStore(graph_paths).collect_garbage(pinned_versions(graph_paths))

    return Scenario(name="garbage", build=build, act=act)


def train_once_more(store: ExpertStore, frames: int) -> None:
    """A new version of expert 0 without any collection of garbage."""
    place = store.graph_paths.root / "made"
    before = store.manifest()
    version = dataclasses.replace(
        before.experts[0],
        version=manifests.version_name(before.generation + 1, f"r{frames}"),
        frames=frames,
        lineage=(LineageEntry(run_id=f"r{frames}", frames=frames),),
    )
    storage.copy_tree(store.path_of(before.experts[0]), place)
    storage.commit_dir(place, store.path_of(version))
    store.amend(lambda before: before.after(f"r{frames}", {0: version}))


def _roll_back() -> Scenario:
    def act(graph_paths: GraphPaths) -> Any:
        store = ExpertStore(graph_paths)
        if set(store.manifest().experts) != {0}:
            repair.rollback(store, 1)

    return Scenario(name="rollback", build=trained, act=act)


# --- sweeps


def _sweep_paths(graph_paths: GraphPaths) -> SweepPaths:
    return SweepPaths(graph_paths.sweeps / "s")


def _create(graph_paths: GraphPaths) -> Sweep:
    """A sweep of the table, which needs wood."""
    sweep_paths = _sweep_paths(graph_paths)
    if sweep_paths.sweep_json.exists():
        return open_sweep(sweep_paths)
    sweep = Sweep(sweep_paths, a_record(skill=TABLE, expert=1))
    create_sweep(sweep, graph_paths, GRAPH)
    return sweep


def _begin_trial(graph_paths: GraphPaths) -> None:
    sweep = _create(graph_paths)
    remove_leftovers(sweep.sweep_paths)
    if not sweep.run(0).folder.exists():
        prepare_trial(sweep, GRAPH, propose(sweep, [], 0))


def _tried(graph_paths: GraphPaths) -> Any:
    """What the records of the sweep say; every seed of a trial is the expert that is pinned."""
    sweep_paths = _sweep_paths(graph_paths)
    if not sweep_paths.sweep_json.exists():
        return None
    tried, left_out = read_trials(open_sweep(sweep_paths))
    assert not left_out, left_out
    store = ExpertStore(sweep_paths)
    for version in store.manifest().experts.values():
        store.verify(version)
    return tried


def _begun(graph_paths: GraphPaths) -> None:
    """Create the sweep, and clear up as its start does."""
    remove_leftovers(_create(graph_paths).sweep_paths)


def _begin_sweep() -> Scenario:
    def end(graph_paths: GraphPaths) -> Any:
        return _tried(graph_paths), content(_sweep_paths(graph_paths).root)

    return Scenario(
        name="begin a sweep", build=trained, act=_create, again=_begun, look=_tried, end=end
    )


def _propose() -> Scenario:
    def build(graph_paths: GraphPaths) -> None:
        trained(graph_paths)
        _create(graph_paths)

    def end(graph_paths: GraphPaths) -> Any:
        folder = _sweep_paths(graph_paths).trial(0, 1).folder
        return _tried(graph_paths), sorted(path.relative_to(folder) for path in folder.rglob("*"))

    return Scenario(
        name="begin a trial",
        build=build,
        act=_begin_trial,
        again=_begin_trial,
        look=_tried,
        end=end,
    )


def _end_trial() -> Scenario:
    def build(graph_paths: GraphPaths) -> None:
        trained(graph_paths)
        _begin_trial(graph_paths)
        finish(open_sweep(_sweep_paths(graph_paths)).run(0), {1: 50})

    def act(graph_paths: GraphPaths) -> Any:
        write_outcome(open_sweep(_sweep_paths(graph_paths)), 0)

    def again(graph_paths: GraphPaths) -> None:
        remove_leftovers(_sweep_paths(graph_paths))
        act(graph_paths)

    return Scenario(name="end a trial", build=build, act=act, again=again, look=_tried)


# --- small files


def _state(attempt: int) -> SchedulerState:
    running = Running(
        run_id=f"e1.a{attempt}.x", attempt=attempt, handle=None, devices=("0",), since=AT
    )
    statuses = [running, *(Waiting(attempt=attempt) for _ in range(20))]
    entries = [
        Entry(skill=f"Skill {order}", status=status, expert=order)
        for order, status in enumerate(statuses)
    ]
    return state_of_entries(entries, next_expert=len(entries))


def _save(graph_paths: GraphPaths, attempt: int = 2) -> None:
    StateFile(graph_paths.scheduler_state).save(_state(attempt))


def _saved(graph_paths: GraphPaths) -> Any:
    state = StateFile(graph_paths.scheduler_state).load()
    return None if state is None else state.entries["Skill 0"]


def _small() -> list[Scenario]:
    def tell(graph_paths: GraphPaths) -> None:
        notices.publish(graph_paths, "disk", "full")
        notices.withdraw(graph_paths, "old")

    def shown(graph_paths: GraphPaths) -> None:
        """Each notice is whole; the two are not written at one stroke."""
        found = notices.read(graph_paths)
        assert set(found.values()) <= {"full", "long gone"}, found

    def asked(graph_paths: GraphPaths) -> Any:
        """How often the request was understood; a user who saw it fail may ask twice."""
        found = [storage.read_json(path) for path in sorted(graph_paths.requests.glob("*.json"))]
        assert all(facts["skill"] == WOOD for facts in found), found
        return bool(found)

    save = Scenario(name="state save", build=partial(_save, attempt=1), act=_save, look=_saved)
    request = Scenario(
        name="request",
        build=lambda graph_paths: None,
        act=lambda graph_paths: send_request(graph_paths, Verb.RETRY, WOOD),
        look=asked,
        end=asked,
    )
    notice = Scenario(
        name="notice",
        build=lambda graph_paths: notices.publish(graph_paths, "old", "long gone"),
        act=tell,
        look=shown,
    )
    first_save = dataclasses.replace(save, name="first save", build=lambda graph_paths: None)
    return [save, first_save, request, notice]
