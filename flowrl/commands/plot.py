"""`flowrl plot`, its flags and output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from flowrl import config as configs
from flowrl import console, storage
from flowrl.arguments import ReportCommand
from flowrl.config import PPOConfig
from flowrl.errors import ConfigError, FileRefusedError
from flowrl.output import check_output
from flowrl.parallel.status import Completed, percent
from flowrl.paths import RunPaths, SweepPaths, existing_graph_or_sweep, printable
from flowrl.rates import newest_episodes
from flowrl.reports.status import find_row, read_rows
from flowrl.runs import read_result, read_run
from flowrl.tuning.outcome import paired_interval
from flowrl.tuning.trials import open_sweep, read_trials
from flowrl.viewing.curves import metric_picture, read_lines, skill_picture
from flowrl.viewing.drawing import ENDINGS, Picture
from flowrl.viewing.judges import judges_picture
from flowrl.viewing.plots import Rate, compare_picture, graph_picture, needs_picture, newest_run
from flowrl.viewing.sweeps import sweep_picture


@dataclass(frozen=True, kw_only=True)
class PlotCommand(ReportCommand):
    """Draw how a graph, a skill, a sweep or a run folder learns.

    Examples:
      flowrl plot exp/demo -o graph.html
      flowrl plot exp/demo "Collect Coal" --metric entropy --x minutes -o coal.png
      flowrl plot exp/demo --compare exp/other -o both.svg
      flowrl plot exp/demo/sweeps/mine -o sweep.svg
    """

    skill: tyro.conf.Positional[str | None] = None
    """The skill's name, or its expert number (default: the whole graph)."""
    metric: str | None = None
    """A figure of metrics.jsonl to draw for the skill or the run folder, such as entropy."""
    x: Literal["frames", "minutes"] = "frames"
    """What the figures of a skill or a run folder are drawn over."""
    graph: bool = False
    """Draw what needs what, coloured by success, instead of when skills trained."""
    judges: bool = False
    """Draw how reliable the scores of the graph's judges are."""
    compare: tuple[Path, ...] = ()
    """Other graphs or sweeps; draw the success of the skills side by side, and print a table."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("plot.svg")
    """File of the picture: .svg, .png, .pdf, or .html with a table of its numbers."""

    def __call__(self) -> int:
        """Draw, and write the file; raises ConfigError if there is nothing to draw yet."""
        check_output(self.output, endings=ENDINGS)
        self._check_flags()
        picture = self._picture()
        content = picture.written(self.output.suffix)
        storage.make_dir(self.output.parent)
        storage.write_atomic(self.output, content)
        lines = [*(_differences(picture) if self.compare else ())]
        lines.append(f"{self.output}: {len(content) / 1e3:.0f} kB")
        facts = {"picture": str(self.output), "rows": picture.rows}
        console.print_report(facts, lines, as_json=self.json)
        return 0

    def _check_flags(self) -> None:
        """Raise ConfigError for what does not go together, or with the folder."""
        whole = {"SKILL": self.skill, "--graph": self.graph, "--compare": self.compare}
        whole |= {"--judges": self.judges}
        given = [name for name, value in whole.items() if value]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other; give one of them")
        if given and RunPaths(self.graph_path, 0).metrics.exists():
            what = f"{self.graph_path} is a run's folder, and {given[0]} is for a graph"
            raise ConfigError(f"{what}; leave it out, or name a graph")
        places = [place.resolve() for place in (self.graph_path, *self.compare)]
        if twice := [one for one in self.compare if places.count(one.resolve()) > 1]:
            raise ConfigError(f"--compare names {twice[0]} twice, with GRAPH; name others")
        if self.skill is not None and Path(self.skill).suffix in ENDINGS:
            name = printable(self.skill)
            raise ConfigError(f"{name} stands where a skill's name does; for a file say -o {name}")
        if self.skill is not None and not self.graph_path.exists():
            what = f"there is neither a graph {self.graph_path} nor one {printable(self.skill)}"
            raise ConfigError(f"{what}; name the folder of a graph: flowrl plot GRAPH [SKILL]")

    def _picture(self) -> Picture:
        """The picture that the folder and the flags ask for."""
        root, alone = self.graph_path, RunPaths(self.graph_path, 0).metrics
        whole = self.graph or self.compare or self.judges or not alone.exists()
        if self.skill is None and whole and (self.metric or self.x == "minutes"):
            flag = f"--metric {self.metric}" if self.metric else "--x minutes"
            raise ConfigError(f"{printable(flag)} is for a skill or a run folder; name one")
        if self.compare:
            return compare_picture({str(one): _success(one) for one in (root, *self.compare)})
        if not whole:
            return self._of_run(root.absolute().name, alone)
        graph_paths = existing_graph_or_sweep(root)
        if self.judges:
            return judges_picture(graph_paths)
        rows = read_rows(graph_paths)
        if self.skill is not None:
            row = find_row(rows, self.skill, root)
            newest = newest_run(graph_paths, row)
            if row.status == Completed.kind and not (newest and newest.metrics.exists()):
                what = f"{row.skill} is completed, but its metrics.jsonl is gone"
                raise FileRefusedError(f"{what}; restore it from a copy, or plot another skill")
            return self._of_run(row.skill, newest and newest.metrics)
        if isinstance(graph_paths, SweepPaths):
            sweep = open_sweep(graph_paths)
            return sweep_picture(sweep, read_trials(sweep)[0])
        return needs_picture(str(root), rows) if self.graph else graph_picture(graph_paths, rows)

    def _of_run(self, title: str, path: Path | None) -> Picture:
        """The picture of a run's figures: those of independent agents are their returns."""
        lines, minutes = read_lines(path) if path else [], self.x == "minutes"
        of_agents = any(key.startswith("agent_") for key in (lines[-1] if lines else ()))
        if metric := self.metric or ("return" if of_agents else None):
            return metric_picture(title, lines, metric, minutes=minutes)
        return skill_picture(title, lines, minutes=minutes)


def _success(root: Path) -> dict[str, Rate]:
    """The success of each skill of a graph; of a sweep, that of its trial with the most."""
    graph_paths = existing_graph_or_sweep(root)
    rates = {
        row.skill: (row.success_rate, _episodes(newest_run(graph_paths, row)))
        for row in read_rows(graph_paths)
        if row.success_rate is not None
    }
    if isinstance(graph_paths, SweepPaths) and rates:
        return {open_sweep(graph_paths).record.skill: max(rates.values())}
    return rates


def _episodes(place: RunPaths | None) -> int:
    """The episodes that the success of a run is a share of; without its record, the fewest."""
    if place is None or not place.run_json.exists():
        return newest_episodes(1)
    config = configs.from_json(PPOConfig, read_run(place).config)
    ends = read_result(place).step_ends if place.result_json.exists() else ()
    ended = sum(end.died + end.cut for end in ends) + (ends[-1].done if ends else 0)
    most = newest_episodes(config.num_envs)
    return min(most, ended or most)


def _differences(picture: Picture) -> Iterator[str]:
    """Lines about the differences that a comparison's table has, and the mean of each graph."""
    gaps: dict[str, list[float]] = {}
    for row in picture.rows:
        here, there, gap = row["success"], row["success beside"], row["difference"]
        shares = " beside ".join("none" if x is None else percent(x) for x in (here, there))
        line = f"{row['skill']}: {row['graph']} has {shares} of {row['beside']}"
        if gap is not None:
            gaps.setdefault(row["graph"], []).append(gap)
            line += f", {gap:+.1%} (95 % interval {row['low']:+.1%} to {row['high']:+.1%})"
        yield line
    for graph, pairs in gaps.items():
        if len(pairs) > 1:
            mean, low, high = paired_interval(pairs, share=0.95)
            over = f"over {len(pairs)} skills, 95 % interval {low:+.1%} to {high:+.1%}"
            yield f"{graph}: {mean:+.1%} on average {over}"
