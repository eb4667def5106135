"""Documents of a skill and of the merges as JSON values, from a graph's files alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from flowrl import runs
from flowrl.errors import FlowrlError, format_error
from flowrl.experts.manifest import generation_of, history_file, read_history
from flowrl.measures.causes import explanation_of
from flowrl.measures.objectives import read_curve
from flowrl.parallel.health import read_log_tail
from flowrl.paths import GraphPaths, RunPaths
from flowrl.redaction import cleaned
from flowrl.reports.status import SkillRow, settings
from flowrl.viewing.curves import read_lines, step_curves
from flowrl.viewing.film import KEPT
from flowrl.viewing.plots import newest_metrics

FILMS = {KEPT[0]: "video/mp4", KEPT[1]: "image/gif"}
_POINTS = 1000  # of a curve, about


def skill_document(graph_paths: GraphPaths, row: SkillRow) -> dict[str, Any]:
    """Return what is known of a skill besides its row; `problems` says which files are refused."""
    found: dict[str, Any] = {"problems": []}
    for name, read in _PARTS.items() if row.expert is not None else ():
        try:
            found[name] = read(graph_paths, row)
        except (FlowrlError, OSError) as error:
            found["problems"].append(format_error(error))
    return found


def film_of_skill(graph_paths: GraphPaths, row: SkillRow) -> Path | None:
    """Return the film in a skill's archive, a plain file to which no link leads; None without."""
    if row.expert is None:
        return None
    folder = graph_paths.archive(row.expert, row.skill).folder
    real = graph_paths.root.resolve() / folder.relative_to(graph_paths.root)
    films = (folder / name for name in FILMS)
    return next((one for one in films if one.is_file() and one.resolve() == real / one.name), None)


def merges_document(graph_paths: GraphPaths) -> list[dict[str, Any]]:
    """Return the last generations, the newest first: which run changed which experts, and when."""
    found: list[dict[str, Any]] = []
    for generation, manifest in read_history(graph_paths):
        experts = manifest.experts.values() if manifest else ()
        new = [each for each in experts if generation_of(each.version) == generation]
        run = new[0].version.partition("-")[2] if new else "rollback or repair"
        changed = [(one.skill, one.frames, one.own_run) for one in new]
        with suppress(FileNotFoundError):  # it was collected meanwhile
            found.append(
                {
                    "generation": generation,
                    "at": history_file(graph_paths, generation).stat().st_mtime,
                    "run": run if manifest else "damaged",
                    "experts": [
                        {"skill": skill, "frames": frames, "success": own and own.success_rate}
                        for skill, frames, own in changed
                    ],
                }
            )
    return found[::-1]


def _newest(graph_paths: GraphPaths, row: SkillRow) -> RunPaths:
    """The folder of a skill's newest run, or else its archive."""
    assert row.expert is not None
    run = graph_paths.run(row.expert, row.skill)
    return run if run.run_json.exists() else graph_paths.archive(row.expert, row.skill)


def _plan(graph_paths: GraphPaths, row: SkillRow) -> list[dict[str, Any]]:
    place, success = _newest(graph_paths, row), row.step_success
    if not place.run_json.exists():
        return []
    if not success and place.result_json.exists():
        success = runs.read_result(place).step_success
    plan = zip_longest(runs.read_run(place).plan, success)
    return [{"skill": s.skill, "count": s.count, "success": share} for s, share in plan if s]


def _why(graph_paths: GraphPaths, row: SkillRow) -> dict[str, Any] | None:
    found = explanation_of(graph_paths, row.skill, row.expert)
    return {"line": found.line, **asdict(found)} if found else None


def _curves(graph_paths: GraphPaths, row: SkillRow) -> list[dict[str, Any]]:
    path = newest_metrics(graph_paths, row)
    lines = read_lines(path) if path else []
    curves = step_curves(lines[:: -max(1, len(lines) // _POINTS)][::-1])  # with the last line
    return [{"skill": one.skill, "frames": one.places, "success": one.success} for one in curves]


def _returns(graph_paths: GraphPaths, row: SkillRow) -> dict[str, list[float]]:
    path = newest_metrics(graph_paths, row)
    curve = [one for one in (read_curve(path) if path else ()) if math.isfinite(one.episode_return)]
    curve = curve[:: -max(1, len(curve) // _POINTS)][::-1]
    returns = [one.episode_return for one in curve]
    return {"frames": [one.frames for one in curve], "returns": returns}


def _log(graph_paths: GraphPaths, row: SkillRow) -> tuple[str, ...]:
    return cleaned(read_log_tail(_newest(graph_paths, row).training_log), ()) or row.log


def _film_name(graph_paths: GraphPaths, row: SkillRow) -> str | None:
    film = film_of_skill(graph_paths, row)
    return film.name if film else None


_PARTS: dict[str, Callable[[GraphPaths, SkillRow], Any]] = {
    "plan": _plan,
    "why": _why,
    "curves": _curves,
    "returns": _returns,
    "log": _log,
    "settings": lambda graph_paths, row: settings(graph_paths, [row]),
    "film": _film_name,
}
