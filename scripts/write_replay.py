#!/usr/bin/env python3
"""Write the transcript that docs/writing.md replays: `python scripts/write_replay.py`.

Its answers are written by hand, with the mistakes that models make. Run it when the prompts, the
library of Classic or a message of the checks has changed; `tests/llm/test_tutorial.py` says when.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from flowrl.llm.command import WriteCommand
from flowrl.llm.exchange import Completion, Cost, tokens_of

REPLAY = Path(__file__).parents[1] / "docs" / "replays" / "carry_wood.jsonl"
WISH = "Carry wood to the water's edge"
DONE = """def task_is_done(inventory, facing_block, n):
    at_water = facing_block == BlockType.WATER.value
    return at_water {} (inventory.wood >= 2 * n)
"""
REWARD = """def task_reward(inventory_diff, closest_blocks, closest_blocks_prev):
    before = jnp.sum(jnp.abs(closest_blocks_prev[BlockType.WATER.value, :, 0]))
    now = jnp.sum(jnp.abs(closest_blocks[BlockType.WATER.value, :, 0]))
    closer = jnp.minimum(before, 8) - jnp.minimum(now, 8)
    return 0.1 * closer + 0.5 * inventory_diff.wood
"""
SHARE = """def task_reward(inventory, inventory_diff):
    return inventory_diff.wood / inventory.wood
"""


def contract(operator: str) -> str:
    wood, water = ({"item": item, "amount": n} for item, n in (("wood", "2*n"), ("at_water", "1")))
    return json.dumps(
        {
            "name": "Carry Wood To Water",
            "description": "Carry wood to the water's edge.",
            "requirements": [wood],
            "consumption": [],
            "gain": [water],
            "ephemeral": ["at_water"],
            "max_steps": None,
            "training": [],
            "task_is_done": DONE.format(operator),
        }
    )


def rewards(*codes: tuple[str, str]) -> str:
    return json.dumps({"rewards": [{"idea": idea, "task_reward": code} for idea, code in codes]})


class ByHand:
    """Gives one answer after the other, in the place of a client."""

    def __init__(self, *_: object) -> None:
        share = ("pay the share of wood that is new", SHARE)
        closer = ("pay for wood, and for coming closer to water", REWARD)
        self.answers = [contract("and"), contract("&"), rewards(share, closer)]

    def complete(self, *_: object) -> Completion:
        """Return the next answer."""
        text = self.answers.pop(0)
        cost = Cost(calls=1, tokens=tokens_of(text), seconds=1.0)
        return Completion(text=text, finish="stop", form="json_schema", cost=cost)


class WriteByHand(WriteCommand):
    """`flowrl write` with the answers above."""

    def _client(self, budget: object) -> ByHand:
        return ByHand()


def written() -> bytes:
    """The transcript, as it is made now."""
    with tempfile.TemporaryDirectory() as folder:
        assert WriteByHand(wish=WISH, output=Path(folder), model="by-hand")() == 0
        return (Path(folder) / "transcripts" / "1.jsonl").read_bytes()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    REPLAY.parent.mkdir(exist_ok=True)
    REPLAY.write_bytes(written())
