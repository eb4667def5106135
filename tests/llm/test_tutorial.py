"""The tutorial of docs/writing.md runs for everyone, by the transcript that ships."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from flowrl.paths import slug
from flowrl.skills.skill import load_skill
from flowrl.skills.validation.dry_run import SkillCode
from tests.llm.making import GAME

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing.md").read_text()


def test_the_tutorials_replay_writes_the_skill_that_the_page_tells_of(
    tmp_path, monkeypatch, flowrl
):
    [line] = re.findall(r"^flowrl (write .*--llm_replay docs/replays)$", PAGE, flags=re.MULTILINE)
    source = ROOT / "docs" / "replays"
    words = shlex.split(line.replace("docs/replays", str(source)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    said = flowrl(*words)
    assert said.out in PAGE, f"{said.err}: run python scripts/write_replay.py"
    assert (
        Path("my_skills/transcripts/1.jsonl").read_bytes()
        == (source / "carry_wood.jsonl").read_bytes()
    )
    [skill] = re.findall(r'--target_skill "(.*)"', PAGE)
    code = SkillCode.of(load_skill(Path(f"my_skills/{slug(skill).lower()}.py")), GAME)
    assert [path.stem for path in Path("my_skills/approvals").iterdir()] == [code.digest]
    for file in re.findall(r"my_skills/transcripts/1/\w+\.py", PAGE):
        assert Path(file).exists()
    assert "write a & b, with brackets" in Path("my_skills/transcripts/1.jsonl").read_text()
