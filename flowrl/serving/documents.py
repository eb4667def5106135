"""Documents of a skill and of the merges as JSON values, from a graph's files alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from itertools import zip_longest
from math import isnan
from pathlib import Path
from typing import Any

from flowrl import runs
from flowrl.errors import FlowrlError, format_error
from flowrl.experts.manifest import generation_of, history_file, read_history
from flowrl.measures.causes import explanation_of
from flowrl.parallel.health import read_log_tail
from flowrl.paths import GraphPaths, RunPaths
from flowrl.redaction import cleaned
from flowrl.reports.status import SkillRow, settings
from flowrl.viewing.curves import Lines, count_of, number_of, read_lines, step_curves
from flowrl.viewing.plots import newest_run

FILMS = {".mp4": "video/mp4", ".gif": "image/gif"}
_POINTS = 1000  # of a curve, about


def skill_document(graph_paths: GraphPaths, row: SkillRow) -> dict[str, Any]:
    """Return what is known of a skill besides its row; `problems` says which files are refused."""
    found: dict[str, Any] = {"problems": []}
    place = newest_run(graph_paths, row)
    if place is None:
        return found
    lines = cache(lambda: read_lines(place.metrics))
    parts: dict[str, Callable[[], Any]] = {
        "plan": lambda: _plan(place, row),
        "why": lambda: _why(graph_paths, row),
        "curves": lambda: _curves(lines()),
        "returns": lambda: _returns(lines()),
        "log": lambda: cleaned(read_log_tail(place.training_log), ()) or row.log,
        "settings": lambda: settings(graph_paths, [row]),
        "film": lambda: (film := film_of_skill(graph_paths, row)) and film.name,
    }
    for name, read in parts.items():
        try:
            found[name] = read()
        except (FlowrlError, OSError) as error:
            found["problems"].append(format_error(error))
    return found


def film_of_skill(graph_paths: GraphPaths, row: SkillRow) -> Path | None:
    """Return the newest film of a skill's archive, a plain file without links; None without."""
    if row.expert is None:
        return None
    archive = graph_paths.archive(row.expert, row.skill)
    real = graph_paths.root.resolve() / archive.folder.relative_to(graph_paths.root)
    plain = [one for one in archive.films if one.is_file() and one.resolve() == real / one.name]
    return max(plain, key=lambda film: film.stat().st_mtime, default=None)


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


def _plan(place: RunPaths, row: SkillRow) -> list[dict[str, Any]]:
    success = row.step_success
    if not place.run_json.exists():
        return []
    if not success and place.result_json.exists():
        success = runs.read_result(place).step_success
    plan = zip_longest(runs.read_run(place).plan, success)
    return [{"skill": s.skill, "count": s.count, "success": share} for s, share in plan if s]


def _why(graph_paths: GraphPaths, row: SkillRow) -> dict[str, Any] | None:
    found = explanation_of(graph_paths, row.skill, row.expert)
    return {"line": found.line, **asdict(found)} if found else None


def _curves(lines: Lines) -> list[dict[str, Any]]:
    return [
        {"skill": one.skill, "frames": _thinned(one.places), "success": _thinned(one.success)}
        for one in step_curves(lines)
    ]


def _returns(lines: Lines) -> dict[str, Sequence[float]]:
    points = ((count_of(line, "frames"), number_of(line, "mean_episode_return")) for line in lines)
    curve = _thinned([point for point in points if not isnan(point[1])])
    return {"frames": [frames for frames, _ in curve], "returns": [one for _, one in curve]}


def _thinned(points: Sequence[Any]) -> Sequence[Any]:
    """Return about `_POINTS` of the points, the last one among them."""
    return points[:: -max(1, len(points) // _POINTS)][::-1]
