"""Flags: the classes whose fields they are, the rules they obey, and their forms as words."""

from flowrl.config.flags import (
    Activation,
    BottomUpConfig,
    Count,
    FrameAccounting,
    MergePolicyName,
    PPOConfig,
    Sandbox,
    SequentialConfig,
    TrainConfig,
    count,
)
from flowrl.config.rules import Config, checked
from flowrl.config.sharing import threads_for
from flowrl.config.words import from_json, parse, to_argv, to_json, values

__all__ = [
    "Activation",
    "BottomUpConfig",
    "Config",
    "Count",
    "FrameAccounting",
    "MergePolicyName",
    "PPOConfig",
    "Sandbox",
    "SequentialConfig",
    "TrainConfig",
    "checked",
    "count",
    "from_json",
    "parse",
    "threads_for",
    "to_argv",
    "to_json",
    "values",
]
