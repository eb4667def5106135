"""Who is told of ends: callbacks of whoever started the scheduler, one skill's faults apart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from flowrl.errors import SKILL_ERRORS, format_error, is_transient
from flowrl.launchers.job import Job
from flowrl.parallel.signals import Task
from flowrl.parallel.status import Completed, Entry, Failed
from flowrl.parallel.workshop import Workshop

logger = logging.getLogger(__name__)


class Callbacks(TypedDict, total=False):
    """What `SkillScheduler.set_callbacks` takes: a workshop, or its two main verbs.

    `on_skill_complete` and `on_skill_failed` are called with the skill's name, after the state
    is saved. They may add skills. They are not called again after a crash: look at `state`.
    One that raises what malformed data can raise (`errors.SKILL_ERRORS`) is logged with its
    traceback and the others go on; it is called again when a full disk or the like was the reason.
    Any other exception is a bug and ends the daemon.
    """

    workshop: Workshop
    prepare: Callable[[Task], Job]
    process: Callable[[Task], Mapping[str, Any]]
    on_skill_complete: Callable[[str], object]
    on_skill_failed: Callable[[str], object]


def tell_end(callbacks: Callbacks, entry: Entry) -> bool:
    """Call whoever waits for this end; False when that should be tried again later."""
    if isinstance(entry.status, Completed):
        callback = callbacks.get("on_skill_complete")
    elif isinstance(entry.status, Failed):
        callback = callbacks.get("on_skill_failed")
    else:
        return True
    if callback is None:
        return True
    try:
        callback(entry.skill)
    except SKILL_ERRORS as error:
        logger.error(
            "%s is %s, but who was told of it has failed: %s",
            entry.skill,
            entry.status.word,
            format_error(error),
            exc_info=error,
        )
        return not is_transient(error)
    return True
