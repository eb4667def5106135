"""Benchmarks are compared as ratios: what is worse is named, what has no ratio is only shown."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
PROGRAM = SCRIPTS / "compare_figures.py"


def write(folder: Path, benchmark: str, **ratios: float | None) -> None:
    folder.mkdir(exist_ok=True)
    rows = [
        {"case": case, "ours": 5.0, "baseline": 10.0, "unit": "ms", "ratio": ratio}
        for case, ratio in ratios.items()
    ]
    facts = {"benchmark": benchmark, "date": "2026-01-01", "machine": "", "rows": rows}
    (folder / f"{benchmark}.json").write_text(json.dumps(facts))


def compare(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, tmp_path / "now", "--figures", tmp_path / "then", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )


def line_of(case: str, text: str) -> str:
    (line,) = (line for line in text.splitlines() if f" {case} " in line)
    return line


@pytest.mark.parametrize(
    ("now", "code", "word"),
    [(10.0, 0, "as good"), (7.01, 0, "as good"), (25.0, 0, "as good"), (6.9, 1, "WORSE")],
)
def test_a_case_is_worse_when_its_ratio_has_fallen_below_seven_tenths(tmp_path, now, code, word):
    write(tmp_path / "then", "moe", grad=10.0, other=1.0)
    write(tmp_path / "now", "moe", grad=now, other=1.0)
    done = compare(tmp_path)
    assert (done.returncode, done.stderr) == (code, "")
    line = line_of("grad", done.stdout)
    assert [cell.strip() for cell in line.split("│")[3:6]] == ["10.00 ×", f"{now:.2f} ×", word]
    assert "as good" in line_of("other", done.stdout)


def test_a_case_without_a_ratio_is_shown_and_not_judged(tmp_path):
    write(tmp_path / "then", "merge", peak=None, gained=None, lost=3.0)
    write(tmp_path / "now", "merge", peak=None, gained=2.0, lost=None)
    done = compare(tmp_path)
    assert done.returncode == 0
    assert "5 ms │   5 ms" in line_of("peak", done.stdout)
    assert "WORSE" not in done.stdout


def test_cases_that_are_new_or_were_not_run_are_named(tmp_path):
    write(tmp_path / "then", "env", same=2.0, old=2.0)
    write(tmp_path / "now", "env", same=2.0, fresh=1.0)
    done = compare(tmp_path)
    assert done.returncode == 0
    assert "not run" in line_of("old", done.stdout)
    assert "new" in line_of("fresh", done.stdout)


def test_cases_of_one_name_in_two_benchmarks_are_two(tmp_path):
    for benchmark, ratio in (("env", 2.0), ("ppo", 9.0)):
        write(tmp_path / "then", benchmark, case64=ratio)
    write(tmp_path / "now", "ppo", case64=2.0)
    write(tmp_path / "now", "env", case64=2.0)
    assert compare(tmp_path).returncode == 1


def test_the_committed_figures_are_replaced_only_when_that_is_asked_for(tmp_path):
    write(tmp_path / "then", "env", steps=4.0)
    write(tmp_path / "then", "moe", grad=4.0)
    write(tmp_path / "now", "env", steps=1.0)
    before = (tmp_path / "then" / "env.json").read_text()
    assert compare(tmp_path).returncode == 1
    assert (tmp_path / "then" / "env.json").read_text() == before
    assert compare(tmp_path, "--write").returncode == 1
    assert json.loads((tmp_path / "then" / "env.json").read_text())["rows"][0]["ratio"] == 1.0
    assert compare(tmp_path).returncode == 0
    assert (tmp_path / "then" / "moe.json").exists()


def test_no_figures_at_all_are_no_success(tmp_path):
    write(tmp_path / "then", "env", steps=4.0)
    done = compare(tmp_path)
    assert done.returncode == 1 + 1
    assert "holds no figures" in done.stderr


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The scripts, with benchmarks that only write what they are told."""
    scripts = tmp_path / "checkout" / "scripts"
    scripts.mkdir(parents=True)
    for name in ("bench_all.sh", "compare_figures.py"):
        shutil.copy(SCRIPTS / name, scripts)
    write(tmp_path / "told", "moe", grad=5.0)
    lines = [
        "import shutil, sys",
        "assert sys.argv[1:3] == ['--small', '--json']",
        f"shutil.copy({str(tmp_path / 'told' / 'moe.json')!r}, sys.argv[3])",
    ]
    (scripts / "bench_moe.py").write_text("\n".join(lines))
    (scripts / "bench_env.py").write_text("raise SystemExit('no environment')")
    return scripts.parent


def bench_all(checkout: Path, only: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", checkout / "scripts" / "bench_all.sh", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON": sys.executable, "ONLY": only, "COLUMNS": "120"},
    )


def test_all_benchmarks_are_run_in_their_small_form_and_compared(checkout, tmp_path):
    committed = checkout / "docs" / "figures" / "moe.json"
    first = bench_all(checkout, "moe", "--write", str(tmp_path / "now"))
    assert (first.returncode, first.stderr) == (0, "")
    assert committed.read_text() == (tmp_path / "now" / "moe.json").read_text()
    assert bench_all(checkout, "moe").returncode == 0
    write(tmp_path / "told", "moe", grad=3.0)
    again = bench_all(checkout, "moe")
    assert again.returncode == 1
    assert "WORSE" in line_of("grad", again.stdout)


@pytest.mark.parametrize(("only", "words"), [("env", "failed"), ("ppo", "is not there")])
def test_a_benchmark_that_fails_or_is_missing_does_not_go_unnoticed(checkout, only, words):
    done = bench_all(checkout, f"moe {only}")
    assert done.returncode == 1
    assert f"bench_{only}.py {words}" in done.stderr
    assert "grad" in done.stdout
