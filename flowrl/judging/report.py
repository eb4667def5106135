"""Records of the figures of judges, `judging/<judge>.json`; loads no NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from flowrl.paths import GraphPaths
from flowrl.storage import records
from flowrl.storage.records import Natural, Share, Word

LEAST_LABELS = 8  # of either kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Items of similar scores: their number, mean score and share of positive labels."""

    items: Natural
    score: Share
    positive: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The figures of a judge on labels that it has not seen.

    An advisory judge's scores are shown and decide nothing: an ensemble leaves it out.
    The figures are of the scores after temperature scaling, over the items on which it did not
    abstain. They are None where too few of them have either label.
    """

    judge: Word
    version: str
    items: Annotated[str, str]
    asked: Natural
    answered: Natural
    positive: Share
    temperature: float
    auc: Interval | None = None
    brier: Interval | None = None
    ece: Interval | None = None
    kappa: Interval | None = None
    changes: Mapping[str, Share] = field(default_factory=dict)  # as the function `changes` says
    bins: tuple[ReliabilityBin, ...] = ()  # of a reliability diagram
    abstained: Annotated[str, str] = ""  # the most frequent reason for which it abstained
    advisory: bool

    @property
    def line(self) -> str:
        """The figures of the judge, and how often it did not abstain, in one line."""
        head = f"{self.judge}, {self.answered} of {self.asked} unseen {self.items}s"
        if self.auc is None or self.ece is None or self.kappa is None:
            if self.abstained and 2 * self.answered < self.asked:
                return f"{head}: it abstains, most often for this: {self.abstained}; advisory"
            fewer = round(self.answered * min(self.positive, 1 - self.positive))
            needed = f"{fewer} of them have the rarer label, and {LEAST_LABELS} are needed"
            return f"{head}: {needed}; advisory"
        named = {"AUC": self.auc, "ECE": self.ece, "κ": self.kappa}
        figures = ", ".join(
            f"{name} {each.value:.2f} [{each.low:.2f}, {each.high:.2f}]"
            for name, each in named.items()
        )
        if "instructed" in self.changes:
            figures += f", moved by {self.changes['instructed']:.2f} where a text demands it"
        elif self.items == "text":
            figures += ", not measured where a text demands a score"
        return f"{head}: {figures}; {'advisory, decides nothing' if self.advisory else 'trusted'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """`judging/<judge>.json`: what was measured of a judge, and what it says of each skill."""

    generation: Natural
    calibration: Calibration
    scores: Mapping[str, Share]  # of the skill's episodes on average, or of its text


def read_reports(graph_paths: GraphPaths) -> list[JudgeReport]:
    """The reports of a graph's judges, by their names; FileRefusedError if one is damaged."""
    files = sorted(graph_paths.judging.glob("*.json"))
    own = [file for file in files if file.name != "program.json"]  # what dspy has compiled
    return [records.read(file, JudgeReport, remedy="judge again") for file in own]
