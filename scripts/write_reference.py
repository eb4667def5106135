#!/usr/bin/env python3
"""Write the tables of flags in docs/reference.md from the configuration classes."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
from pathlib import Path

from flowrl import arguments, cli, config, orchestrator
from flowrl.multiagent.config import EvaluateAgents, IndependentConfig, LearnerConfig
from flowrl.runs import TrainConfig
from flowrl.tuning.search import SearchConfig
from flowrl.tuning.start import SweepConfig

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
TABLES = {
    "trainer": (config.PPOConfig,),
    "ppo_flow": (TrainConfig,),
    "bottomup_parallel": (
        config.GraphConfig,
        config.ScheduleConfig,
        config.LaunchConfig,
        config.BottomUpConfig,
    ),
    "independent": (IndependentConfig, LearnerConfig),
    "independent evaluate": (EvaluateAgents,),
    "flowrl sweep": (SweepConfig, SearchConfig),
    "orchestrator": (orchestrator.OrchestratorCommand,),
    **{f"flowrl {name}": (cli.class_of(name),) for name in cli.COMMANDS},
}


def field_docs(kind: type) -> dict[str, str]:
    """The string that follows each field in the body of a class or of those it derives from."""
    classes = [base for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)]
    defined = [ast.parse(inspect.getsource(base)).body[0] for base in classes]
    return {
        item.target.id: " ".join(ast.literal_eval(text.value).split())
        for one in defined
        if isinstance(one, ast.ClassDef)
        for item, text in itertools.pairwise(one.body)
        if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Expr)
        if isinstance(item.target, ast.Name)
    }


def default(item: dataclasses.Field) -> str:
    if item.default is dataclasses.MISSING:
        return "required"
    if item.default in (None, (), ""):
        return ""
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    values = item.default if isinstance(item.default, tuple) else (item.default,)
    return f"`{' '.join(map(str, values))}`"


def table(kinds: tuple[type, ...]) -> str:
    """A Markdown table of the flags of some configuration classes."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for kind in kinds:
        docs, known = field_docs(kind), arguments.arguments(kind)
        for item in dataclasses.fields(kind):
            if item.name in known and not dataclasses.is_dataclass(item.default):
                text = docs[item.name].replace("|", r"\|")
                rows.append(f"| `{known[item.name].shown}` | {default(item)} | {text} |")
    return "\n".join(rows)


def rendered(text: str) -> str:
    """The page with every table between its two markers renewed."""
    for name, kinds in TABLES.items():
        start, end = f"<!-- flags: {name} -->", f"<!-- end: {name} -->"
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n{table(kinds)}\n{end}{tail}"
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(rendered(PAGE.read_text()))
