"""Judge the embedded library and keep the verdicts with it: `python scripts/write_verdicts.py`.

Run it after a change of the library, of the gate or of JAX's version; a test says when.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from flowrl import storage
from flowrl.skills.games import GAMES
from flowrl.skills.judging import Refusal, Subject, judge
from flowrl.skills.skill import load_library
from flowrl.skills.verdicts import SHIPPED


def main() -> int:
    subjects = [
        Subject.of(skill, env_name)
        for env_name in GAMES
        for skill in load_library(env_name).values()
    ]
    verdicts = {}
    for subject, answer in zip(subjects, judge(subjects), strict=True):
        if isinstance(answer, Refusal):
            print(answer.text)
            return 1
        whose = {"skill": subject.skill, "env_name": subject.env_name}
        verdicts[answer.digest] = {**whose, **asdict(answer)}
    text = json.dumps({"format": 1, "verdicts": verdicts}, indent=2)
    storage.write_atomic(SHIPPED, text + "\n", mode=0o644)
    print(f"{SHIPPED}: {len(verdicts)} verdicts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
