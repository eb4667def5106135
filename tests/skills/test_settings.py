"""What one skill is trained with, and where that is said."""

from __future__ import annotations

import pytest

from flowrl.config import BottomUpConfig, parse
from flowrl.errors import ConfigError
from flowrl.skills.settings import for_skill


@pytest.mark.parametrize(
    ("words", "of_file", "of_toml", "lr", "origin"),
    [
        ([], {}, {}, 1e-3, None),
        ([], {"lr": 0.1}, {}, 0.1, "skill file"),
        (["file"], {"lr": 0.1}, {}, 0.2, "config file"),
        ([], {"lr": 0.1}, {"lr": 0.3}, 0.3, "--skill_config"),
        (["file"], {"lr": 0.1}, {"lr": 0.3}, 0.3, "--skill_config"),
        (["env"], {"lr": 0.1}, {"lr": 0.3}, 0.4, "environment"),
        (["env", "file", "--lr=0.001"], {"lr": 0.1}, {"lr": 0.3}, 0.001, "command line"),
    ],
)
def test_what_a_skill_is_trained_with_and_where_that_is_said(
    tmp_path, monkeypatch, words, of_file, of_toml, lr, origin
):
    """A flag that was really given counts, also if its value is the default."""
    path = tmp_path / "flags.toml"
    path.write_text("lr = 0.2")
    if "env" in words:
        monkeypatch.setenv("FLOWRL_LR", "0.4")
    given = [word for word in words if word.startswith("--")]
    given += [f"--config={path}"] if "file" in words else []
    found = for_skill(parse(BottomUpConfig, given), of_file=of_file, of_toml=of_toml)
    assert found.ppo.lr == lr
    assert found.origins == ({"lr": origin} if origin else {})


def test_settings_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match="--num_minibatches 7"):
        for_skill(BottomUpConfig(), of_file={"num_minibatches": 7}, of_toml={})
