"""A judge made of judges: their log-odds are stacked on the items by which judges are tuned."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flowrl.judging.calibration import log_odds, measure
from flowrl.judging.judge import Cost, Item, Judge, Judgement, JudgeUnavailableError, judgement

logger = logging.getLogger(__name__)
_DISAGREEMENT = 0.5  # between two members' scores
_RIDGE = 1.0  # weight of the squared distance to equal shares, in items


@dataclass(slots=True, kw_only=True)
class EnsembleJudge:
    """Judges by its members; abstains where they disagree, or all of them abstain.

    Goes on without a member that cannot be asked any more.
    """

    members: Sequence[Judge]
    weights: Sequence[float]
    bias: float = 0.0
    name: str = "ensemble"
    lost: set[str] = field(default_factory=set)

    @property
    def version(self) -> str:
        """A digest of the members' versions and weights."""
        parts = [[one.name, one.version] for one in self.members], list(self.weights), self.bias
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def score(self, item: Item) -> Judgement:
        """Judge by all members of a weight above 0."""
        asked = [
            (weight, self._ask(member, item))
            for member, weight in zip(self.members, self.weights, strict=True)
            if weight > 0
        ]
        cost = sum((one.cost for _, one in asked), Cost())
        votes = {one.judge: (weight, one.score) for weight, one in asked if one.score is not None}
        scores = [score for _, score in votes.values()]
        if not asked:
            names = ", ".join(member.name for member in self.members)
            return judgement(self, None, f"all its members are advisory: {names}", cost)
        if not votes:
            return judgement(self, None, "no member judges it", cost)
        if max(scores) - min(scores) > _DISAGREEMENT:
            said = ", ".join(f"{name} {score}" for name, (_, score) in votes.items())
            return judgement(self, None, f"the members disagree: {said}", cost)
        odds = self.bias + sum(weight * float(log_odds(score)) for weight, score in votes.values())
        return judgement(self, float(1 / (1 + np.exp(-odds))), f"by {', '.join(votes)}", cost)

    def _ask(self, member: Judge, item: Item) -> Judgement:
        if member.name not in self.lost:
            try:
                return member.score(item)
            except JudgeUnavailableError as error:
                logger.warning("%s; the ensemble goes on without it", error)
                self.lost.add(member.name)
        return judgement(member, None, "it cannot be asked any more")


def fit_ensemble(
    members: Sequence[Judge], items: Sequence[Item], labels: np.ndarray
) -> EnsembleJudge:
    """Stack the members that are no mere advice on these items, bool[N] of which are positive.

    A weight is never negative. What a member abstains on counts as even odds.
    """
    plain = EnsembleJudge(members=members, weights=[1.0] * len(members))
    said = np.array([[plain._ask(one, item).score for item in items] for one in members], float)
    figures = [
        measure(member, "", (scores, labels), tuned=(scores, labels))
        for member, scores in zip(members, said, strict=True)
    ]
    trusted = np.array([not one.advisory for one in figures], float)
    columns = log_odds(np.nan_to_num(said, nan=0.5)).T * trusted
    signs, even = np.where(labels, 1.0, -1.0), np.append(trusted / max(trusted.sum(), 1), 0.0)

    def loss(values: np.ndarray) -> float:
        margins = signs * (columns @ values[:-1] + values[-1])
        return float(np.logaddexp(0, -margins).sum() + _RIDGE / 2 * np.sum((values - even) ** 2))

    bounds = [(0, None if one else 0) for one in trusted] + [(None, None)]
    from scipy.optimize import minimize  # takes as long to import as all else

    best = minimize(loss, even, method="L-BFGS-B", bounds=bounds).x
    return EnsembleJudge(
        members=members, weights=best[:-1].tolist(), bias=float(best[-1]), lost=plain.lost
    )
