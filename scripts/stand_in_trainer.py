"""A trainer without training, which brings a 1 MB expert back: of use to `bench_scheduler.py`.

python -I -S scripts/stand_in_trainer.py MADE RUN/7.py

It writes the time of its end, when its result is there, into `RUN/ended`. Expert 7 brings back what
lies in `MADE/7`, described in `MADE/told.json`.
"""
# It is to start at once, so pathlib is not imported:
# ruff: noqa: PTH118, PTH119, PTH120, PTH123

import os
import sys
import time

SECONDS = 0.3  # long enough for the scheduler to fall asleep


def main(made: str, module: str) -> None:
    """Leave behind what a trainer leaves."""
    folder, expert = os.path.dirname(module), os.path.basename(module).removesuffix(".py")
    import json
    import shutil

    with open(os.path.join(made, "told.json"), encoding="utf-8") as file:
        told = json.load(file)[int(expert)]
    with open(os.path.join(folder, "run.json"), encoding="utf-8") as file:
        run = json.load(file)
    policies = os.path.join(folder, f"{expert}_policies")
    reports = []
    known = {ancestor["index"]: ancestor for ancestor in run["ancestors"]}
    for local, index in enumerate(run["experts"]):
        new = index == run["expert"]
        source = os.path.join(made, expert) if new else f"{policies}/seed/expert_{local}"
        shutil.copytree(source, f"{policies}/final/expert_{local}")
        digests = told if new else known[index]
        reports.append(
            {
                "expert": index,
                "acted": 100 if new else 0,
                "sha256": digests["sha256"],
                "content": digests["content"],
                "shapes": told["shapes"],
            }
        )
    time.sleep(SECONDS)
    result = {
        "format": 1,
        "run_id": run["run_id"],
        "frames": 100,
        "experts": reports,
        "success_rate": 0.9,
        "step_success": [0.9] * len(run["plan"]),
        "mean_episode_length": 40.0,
        "updates": 1,
        "wall_seconds": 0.1,
        "stopped_early": True,
    }
    os.sync()  # the experts, as a trainer makes them durable
    with open(os.path.join(folder, "result.json"), "w", encoding="utf-8") as file:
        json.dump(result, file)
    note(folder, "ended", time.time())


def note(folder: str, name: str, moment: float) -> None:
    """Write a time down."""
    with open(os.path.join(folder, name), "w", encoding="ascii") as file:
        file.write(repr(moment))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
