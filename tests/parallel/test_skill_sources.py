"""What a graph is, and how each of its skills is trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flowrl import cli, notices, storage
from flowrl.command_line import parse
from flowrl.config import BottomUpConfig, GraphConfig, LaunchConfig, PPOConfig
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.parallel import skill_sources
from flowrl.parallel.skill_sources import (
    SkillSources,
    check_graph_record,
    for_skill,
    open_graph,
    record_graph,
    skill_configs,
)
from flowrl.paths import GraphPaths
from flowrl.runs import read_run
from flowrl.skills.amount import Amount
from flowrl.skills.skill import Skill
from flowrl.storage import records
from tests.parallel.making import LIBRARY, TABLE, WOOD, approve, make_skill
from tests.parallel.stand_in_story import Place
from tests.skills.making import skill_text


def toml(folder, text: str) -> BottomUpConfig:
    path = folder / "skills.toml"
    path.write_text(text)
    return BottomUpConfig(graph=GraphConfig(skill_config=path), ppo=PPOConfig(gamma=0.9))


def test_each_skill_is_trained_as_its_file_and_its_table_say(tmp_path):
    config = toml(tmp_path, '["Own"]\ntotal_timesteps = "3e6"\nlr = 0.5\n')
    own = make_skill("Own", training={"lr": 0.25, "gae_lambda": 0.5})
    found = skill_configs(config, {**LIBRARY, "Own": own})
    assert found[WOOD].ppo == config.ppo
    ppo = found["Own"].ppo
    assert (ppo.lr, ppo.gae_lambda, ppo.gamma) == (0.5, 0.5, 0.9)
    assert ppo.total_timesteps == 3_000_000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('["Collect Wod"]\nlr = 1\n', "no skill 'Collect Wod'; closest are 'Collect Wood'"),
        ('["Collect Wood"]\nlrr = 1\n', "'lrr' is no setting of"),
        ('["Collect Wood"]\nactivation = "relu"\n', "activation is the same for all skills"),
        ('["Collect Wood"]\nnum_minibatches = 7\n', "do not divide into --num_minibatches 7"),
        ('["Collect Wood"]\nslurm_args = "mem=1"\n', 'no list of words; write ["partition=gpu"]'),
        ('["Collect Wood"]\nslurm_args = ["wrap=id"]\n', "--slurm_args 'wrap=id': give NAME=VALUE"),
        ('["Collect Wood"]\ncpus_per_run = -1\n', "--cpus_per_run (--skill_config) "),
        ("lr = 1\n", "'lr' stands outside of a table; write it below"),
        ("[", "skills.toml cannot be read: "),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path, text, complaint):
    with pytest.raises(ConfigError) as caught:
        skill_configs(toml(tmp_path, text), LIBRARY)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("launcher", "given", "cpus", "words"),
    [
        ("slurm", {}, 8, ("partition=low", "partition=gpu")),
        ("slurm", {"cpus_per_run": "command line"}, 2, ("partition=low", "partition=gpu")),
        ("slurm", {"cpus_per_run": "config file"}, 8, ("partition=low", "partition=gpu")),
        ("tmux", {}, 2, ("partition=low",)),
    ],
)
def test_a_table_asks_an_engine_for_its_skill_alone(tmp_path, launcher, given, cpus, words):
    config = toml(tmp_path, '["Collect Wood"]\ncpus_per_run = 8\nslurm_args = ["partition=gpu"]\n')
    launch = LaunchConfig(launcher=launcher, cpus_per_run=2, slurm_args=("partition=low",))
    found = skill_configs(dataclasses.replace(config, launch=launch, origins=given), LIBRARY)
    assert (found[WOOD].launch.cpus_per_run, found[WOOD].launch.slurm_args) == (cpus, words)
    assert found[TABLE].launch == launch


def test_a_missing_file_of_settings_is_named():
    config = BottomUpConfig(graph=GraphConfig(skill_config=Path("nowhere.toml")))
    with pytest.raises(ConfigError, match=r"--skill_config nowhere.toml cannot be read: No such"):
        skill_configs(config, LIBRARY)


def test_a_run_says_what_it_is_trained_with_and_status_shows_it(tmp_path, flowrl):
    place = Place(tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    (own / "wood.py").write_text(skill_text(head='training = {"lr": 0.25, "gamma": 0.5}\n'))
    approve(place.graph_paths, skill_text())
    (tmp_path / "skills.toml").write_text(f'["{WOOD}"]\ngamma = 0.75\n')
    flags = ("--skills_dir", str(own), "--skill_config", str(tmp_path / "skills.toml"))
    code, said = place.run("--target_skill", TABLE, "--total_timesteps=2000", *flags)
    assert code == 0, said
    wood, table = (
        read_run(place.graph_paths.archive(i, name)) for i, name in enumerate((WOOD, TABLE))
    )
    assert (wood.config["lr"], wood.config["gamma"]) == (0.25, 0.75)
    assert table.config["lr"] == PPOConfig().lr
    given = {"total_timesteps": "command line"}
    assert table.origins == given
    assert wood.origins == {**given, "lr": "skill file", "gamma": "--skill_config"}
    shown = " ".join(flowrl("status", place.graph_paths.root, "--verbose").out.split())
    assert "Collect Wood: total_timesteps 2000 (command line), lr 0.25 (skill file)" in shown
    assert "Place Table: total_timesteps 2000 (command line)" in shown


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Place:
    """A graph with one trained skill."""
    place = Place(tmp_path_factory.mktemp("begun"))
    code, said = place.run("--target_skill", WOOD, "--launcher=local")
    assert code == 0, said
    return place


def test_a_graph_without_a_record_is_what_its_runs_say(begun, tmp_path):
    place = begun.copied(tmp_path)
    place.graph_paths.graph_json.unlink()
    check_graph_record(place.graph_paths, PPOConfig())
    with pytest.raises(ConfigError, match=r"begun with --layer_size 64, not .* 32 \(its runs"):
        check_graph_record(place.graph_paths, PPOConfig(layer_size=32))
    with pytest.raises(ConfigError, match="not --env_name Craftax-Symbolic-v1"):
        check_graph_record(place.graph_paths, PPOConfig(env_name="Craftax-Symbolic-v1"))
    record_graph(place.graph_paths, PPOConfig())
    assert place.graph_paths.graph_json.exists()


def test_a_damaged_record_is_named_by_fsck_which_sets_it_aside(begun, tmp_path, flowrl):
    place = begun.copied(tmp_path)
    path = place.graph_paths.graph_json
    path.write_text(path.read_text().replace("64", "65"))
    with pytest.raises(FileRefusedError, match=r"graph\.json is damaged.* fsck .* --repair, which"):
        check_graph_record(place.graph_paths, PPOConfig())
    assert f"{path} is damaged or was edited" in flowrl("fsck", place.graph_paths.root, code=1).out
    assert cli.main(["fsck", str(place.graph_paths.root), "--repair"]) == 0
    check_graph_record(place.graph_paths, PPOConfig())


def test_a_library_that_changed_is_told_and_its_trained_skills_stay(tmp_path, monkeypatch):
    graph_paths = GraphPaths(tmp_path / "graph")
    storage.make_dir(graph_paths.root)
    record_graph(graph_paths, PPOConfig())
    assert notices.read(graph_paths) == {}
    changed = dataclasses.replace(LIBRARY[WOOD], gain={"wood": Amount(per=2, base=0)})
    described = dataclasses.replace(LIBRARY[TABLE], description="A table.", training={"lr": 0.5})
    library = {**LIBRARY, WOOD: changed, TABLE: described}
    monkeypatch.setattr(skill_sources, "load_library", lambda _: library)
    record_graph(graph_paths, PPOConfig())
    assert f"other versions of {WOOD} than" in notices.read(graph_paths)["library"]
    monkeypatch.setattr(skill_sources, "load_library", lambda _: LIBRARY)
    record_graph(graph_paths, PPOConfig())
    assert notices.read(graph_paths) == {}


def keep(graph_paths: GraphPaths, *skills: Skill) -> None:
    """Skills as an earlier version kept them, which checked their code by rules of its own."""
    storage.make_dir(graph_paths.skill_files)
    for skill in skills:
        records.write(graph_paths.skill_file(skill.name), skill.to_json())


def test_a_kept_skill_that_this_version_refuses_stops_only_what_needs_it(tmp_path, caplog):
    graph_paths, config = GraphPaths(tmp_path), BottomUpConfig()
    code = "def task_reward(inventory):\n    return jnp.where(inventory.wood > 9, jnp.inf, 0.0)"
    old = dataclasses.replace(make_skill("Old", gain="old"), reward=code)
    new = make_skill("New", gain="new", needs=("old",))
    keep(graph_paths, old, new, make_skill("Other", gain="other"))
    sources = SkillSources(graph_paths)
    graph = open_graph(config, sources)
    assert graph.skills.keys() == {*LIBRARY, "Other"}
    assert (
        f"{graph_paths.skill_file('Old')}: this version of flowrl refuses it: skill 'Old':"
        in caplog.text
    )
    assert "jnp.inf is not admitted" in caplog.text
    assert "correct it in a file of its name, and use flowrl add or --skills_dir" in caplog.text
    assert cli.main(["fsck", str(tmp_path)]) == 1
    right = dataclasses.replace(old, reward=code.replace("jnp.inf", "9.0"))
    sources._fixed = lambda: {"Old"}  # an expert was trained on it
    sources.record(right)
    assert sources.over({"Old": old})["Old"] == right
    assert f"flowrl retrain {tmp_path} Old trains it anew under the new text" in caplog.text
    assert "another --graph_path all skills" in caplog.text
    again = open_graph(config, SkillSources(graph_paths))
    assert again.skills.keys() == {*graph.skills, "Old", "New"}
    sources.record(old)
    assert sources.recorded()["Old"].reward == right.reward


@pytest.mark.parametrize("name", ["sum", "task_is_done"])
def test_a_kept_skill_may_have_a_local_that_is_a_later_word(tmp_path, name):
    code = f"def task_reward(inventory):\n    {name} = inventory.wood\n    return {name} * 0.5"
    keep(GraphPaths(tmp_path), dataclasses.replace(make_skill("Old"), reward=code))
    assert SkillSources(GraphPaths(tmp_path)).recorded()["Old"].reward == code


def test_a_library_skill_that_a_later_version_drops_is_not_an_own_one(tmp_path):
    graph_paths = GraphPaths(tmp_path)
    storage.make_dir(graph_paths.root)
    record_graph(graph_paths, PPOConfig())
    own = make_skill("Own")
    replaced = dataclasses.replace(LIBRARY[TABLE], reward=own.reward)
    keep(graph_paths, LIBRARY[WOOD], own, replaced)
    found = SkillSources(graph_paths).over({})
    assert {name: skill.embedded for name, skill in found.items()} == {
        **{WOOD: True, "Own": False, TABLE: False}
    }


@pytest.mark.parametrize(
    ("words", "of_file", "of_toml", "lr", "origin"),
    [
        ([], {}, {}, 1e-3, None),
        ([], {"lr": 0.1}, {}, 0.1, "skill file"),
        (["file"], {"lr": 0.1}, {}, 0.2, "config file"),
        ([], {"lr": 0.1}, {"lr": 0.3}, 0.3, "--skill_config"),
        (["file"], {"lr": 0.1}, {"lr": 0.3}, 0.3, "--skill_config"),
        (["env"], {"lr": 0.1}, {"lr": 0.3}, 0.4, "environment"),
        (["env", "file", "--lr=0.001"], {"lr": 0.1}, {"lr": 0.3}, 0.001, "command line"),
    ],
)
def test_what_a_skill_is_trained_with_and_where_that_is_said(
    tmp_path, monkeypatch, words, of_file, of_toml, lr, origin
):
    """A flag that was really given counts, also if its value is the default."""
    path = tmp_path / "flags.toml"
    path.write_text("lr = 0.2")
    if "env" in words:
        monkeypatch.setenv("FLOWRL_LR", "0.4")
    given = [word for word in words if word.startswith("--")]
    given += [f"--config={path}"] if "file" in words else []
    found = for_skill(parse(BottomUpConfig, given), of_file=of_file, of_toml=of_toml)
    assert found.ppo.lr == lr
    assert found.origins == ({"lr": origin} if origin else {})


@pytest.mark.parametrize("times", [1, 2])
def test_a_text_that_the_graph_corrected_itself_is_not_told(tmp_path, caplog, times):
    """Until the file says something that the graph has never had."""
    graph_paths, written = GraphPaths(tmp_path), make_skill("Own", gain="own", training={"lr": 0.5})
    keep(graph_paths, written)
    sources = SkillSources(graph_paths)
    sources._fixed = lambda: {"Own"}  # an expert was trained on it
    for per in range(2, times + 2):
        corrected = dataclasses.replace(written, gain={"own": Amount(per=per, base=0)})
        sources.correct(corrected, ["gain of own: 40 of 40 had more"])
    now = dataclasses.replace(written, training={"lr": 0.25})
    assert sources.over({"Own": now})["Own"].gain == corrected.gain
    assert not caplog.text
    other = dataclasses.replace(written, gain={"own": Amount(per=9, base=0)})
    assert sources.over({"Own": other})["Own"].gain == corrected.gain
    assert "Own has changed since this graph began to train it" in caplog.text


def test_a_former_text_that_this_version_refuses_says_nothing(tmp_path, caplog):
    graph_paths, written = GraphPaths(tmp_path), make_skill("Own", gain="own")
    keep(graph_paths, written)
    sources = SkillSources(graph_paths)
    sources._fixed = lambda: {"Own"}
    corrected = dataclasses.replace(written, gain={"own": Amount(per=2, base=0)})
    sources.correct(corrected, ["gain of own: 40 of 40 had more"])
    (former,) = (graph_paths.skill_files / "former").iterdir()
    told = records.read_document(former)
    records.write(former, told | {"reward": "import os"})
    assert sources.over({"Own": written})["Own"].gain == corrected.gain
    assert "Own has changed since this graph began to train it" in caplog.text
