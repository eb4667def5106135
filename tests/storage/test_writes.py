"""Only the storage layer writes: every other module asks it to, or is excused here with a reason.

The test reads the source: a call is a write by its name, wherever the object comes from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "flowrl"
STORAGE = {"storage/__init__.py"}  # the layer itself
EXCUSED = {
    "launchers/runner.py": (
        {"os.open", "open", "os.replace", "os.unlink", "os.utime", "os.write"},
        "runs as `python -I -S` beside the job and cannot import flowrl",
    ),
    "launchers/log_writer.py": (
        {"os.open", "os.replace", "os.unlink", "os.write"},
        "runs as `python -I -S` in a tmux pipe and cannot import flowrl",
    ),
    "ppo/processes.py": (
        {"os.write"},
        "a signal handler writes its one line to the terminal's descriptor",
    ),
    "measures/episodes.py": ({"np.savez"}, "recorded episodes are written into memory"),
    "viewing/film.py": ({"av.open"}, "a film is written into memory"),
    "viewing/pictures.py": ({"np.savez"}, "pictures are written into memory"),
    "console.py": (
        {"os.write"},
        "a signal handler writes its one line to the terminal's descriptor",
    ),
    "parallel/health.py": (
        {"_path.write_text"},
        "a lock file is written in place: replaced, it would have two holders",
    ),
    "parallel/writing.py": ({"tempfile.TemporaryFile"}, "what its child says has no name"),
    "launchers/child.py": ({"weight.write_text"}, "a process's weight is written into /proc"),
    "parallel/shared_claim.py": (
        {"os.link", "os.rename", "os.utime"},
        "a name that link(2) makes once is all that hosts agree on",
    ),
    "experts/checkpoint.py": (
        {"checkpointer.save"},
        "Orbax writes into a folder that storage.commit_dir publishes",
    ),
    "experts/array_reader.py": (
        {"tensorstore.open", "KvStore.open"},
        "TensorStore opens for reading only",
    ),
    "averaging/spark.py": (
        {"tempfile.mkdtemp"},
        "each try writes into a folder of its own, which storage.commit_dir publishes",
    ),
    "launchers/sandbox.py": (
        {"tempfile.TemporaryDirectory"},
        "tries the sandbox out in a folder of its own, outside of any graph",
    ),
    "skills/validation/dry_run.py": (
        {"tempfile.TemporaryDirectory"},
        "tries code out in a folder of its own, outside of any graph",
    ),
    "ppo/trackers.py": ({"wandb.init"}, "trackers write their own files; nothing decides by them"),
}
FUNCTIONS = """
os.write os.remove os.link os.mkfifo os.mknod os.utime os.sendfile os.pwrite os.renames os.rename
os.replace shutil.copy shutil.copy2 shutil.move np.save jnp.save checkpointer.save wandb.init
"""
NAMES = """
copyfile copyfileobj copytree rmtree mkdtemp mkstemp NamedTemporaryFile TemporaryDirectory
TemporaryFile ftruncate truncate makedirs mkdir removedirs rmdir symlink symlink_to hardlink_to
touch unlink write_bytes write_text savez savez_compressed tofile savetxt
"""  # of modules and of paths, wherever the object comes from
READING_FLAGS = {"O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY"}


def writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name of every call that may write a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            owner = owner.rpartition(".")[2]
            shown = f"{owner}.{name}" if owner else name
            if _may_write(node, shown, owner, name):
                yield node.lineno, shown


def _may_write(call: ast.Call, shown: str, owner: str, name: str) -> bool:
    if shown == "os.open":
        return _opens_for_writing(call)
    if name in {"open", "fdopen"}:
        return name == "open" and _has_other_mode(call, 0 if owner not in {"", "io"} else 1)
    if name in {"rename", "replace"} and owner != "os":
        # A text's takes two, a dataclass's or a time's keywords.
        return bool(owner) and len(call.args) == 1 and not call.keywords
    return shown in FUNCTIONS.split() or name in NAMES.split()


def _has_other_mode(call: ast.Call, place: int) -> bool:
    """Whether the mode of an `open` may write; one that is no plain text may."""
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    modes += call.args[place : place + 1]
    return any(
        not (isinstance(mode, ast.Constant) and set(str(mode.value)) <= set("rbt"))
        for mode in modes
    )


def _opens_for_writing(call: ast.Call) -> bool:
    if ast.unparse(call.args[0]) == "os.devnull":
        return False
    flags = {node.attr for node in ast.walk(call.args[1]) if isinstance(node, ast.Attribute)}
    names = {node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)} - {"os"}
    return bool(flags - READING_FLAGS or names)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if name_of(path) not in STORAGE]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_the_storage_layer_writes(path):
    excused, _ = EXCUSED.get(name_of(path), (set(), ""))
    found = set(writes(ast.parse(path.read_text())))
    wrong = [f"{name_of(path)}:{line} {name}" for line, name in found if name not in excused]
    assert not wrong, "let flowrl.storage write: " + ", ".join(wrong)
    assert excused <= {name for _, name in found}, "nobody is excused from what he does not do"


@pytest.mark.parametrize("source", ["open(path, 'w')", "io.open(path, how)", "path.open('r+')",
    "os.open(path, os.O_WRONLY | os.O_CREAT)", "os.open(path, flags)", "os.replace(a, b)",
    "(folder / 'x').replace(target)", "shutil.rmtree(path)", "rmtree(path)", "shutil.move(a, b)",
    "path.write_text('')", "self._path.mkdir()", "np.save(path, array)", "array.tofile(path)"],
)  # fmt: skip
def test_a_write_is_known_by_its_name(source):
    assert list(writes(ast.parse(source)))


@pytest.mark.parametrize("source", ["open(path)", "open(path, 'rb')", "path.open('rb')",
    "os.open(path, os.O_RDONLY | os.O_NOFOLLOW)", "os.open(os.devnull, os.O_RDWR)",
    "text.replace('a', 'b')", "dataclasses.replace(state, at=now)", "now.replace(tzinfo=UTC)",
    "storage.remove_file(path)", "file.save(state)", "file.write(text)"],
)  # fmt: skip
def test_what_reads_or_asks_the_storage_layer_is_no_write(source):
    assert not list(writes(ast.parse(source)))
