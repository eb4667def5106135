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
        {"os.open", "open", "os.replace", "os.unlink", "os.write"},
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
    "console.py": (
        {"os.write"},
        "a signal handler writes its one line to the terminal's descriptor",
    ),
    "parallel/health.py": (
        {"_path.write_text"},
        "a lock file is written in place: replaced, it would have two holders",
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

MODULES = {
    "shutil": {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "rmtree"},
    "tempfile": {"mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile"},
    "os": {
        "ftruncate",
        "link",
        "makedirs",
        "mkdir",
        "mkfifo",
        "mknod",
        "open",
        "pwrite",
        "remove",
        "removedirs",
        "rename",
        "renames",
        "replace",
        "rmdir",
        "sendfile",
        "symlink",
        "truncate",
        "unlink",
        "utime",
        "write",
    },
}  # module → its functions that write; os.open is looked at more closely
METHODS = {
    "hardlink_to",
    "mkdir",
    "rmdir",
    "symlink_to",
    "touch",
    "unlink",
    "write_bytes",
    "write_text",
}  # of a path
LIBRARIES = {"savez", "savez_compressed", "tofile", "savetxt"}
READING_FLAGS = {
    "O_RDONLY",
    "O_NOFOLLOW",
    "O_NONBLOCK",
    "O_CLOEXEC",
    "O_DIRECTORY",
    "O_PATH",
    "O_NOATIME",
}


def writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name of every call that may write a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := write_of(node)):
            yield node.lineno, name


def write_of(call: ast.Call) -> str:
    """How a call writes; empty when it does not."""
    match call.func:
        case ast.Name(id="open") | ast.Attribute(attr="open" | "fdopen", value=ast.Name(id="io")):
            return "open" if _mode(call, 1) else ""
        case ast.Name(id=name) if name in LIBRARIES or name in MODULES["shutil"]:
            return name
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in MODULES:
            if (module, name) == ("os", "open"):
                return "os.open" if _opens_for_writing(call) else ""
            return f"{module}.{name}" if name in MODULES[module] else ""
        case ast.Attribute(value=owner, attr=name):
            return _method(call, ast.unparse(owner), name)
        case _:
            return ""


def _method(call: ast.Call, owner: str, name: str) -> str:
    last = owner.rpartition(".")[2]
    if name in METHODS or name in LIBRARIES:
        return f"{last}.{name}"
    if name == "open" and _mode(call, 0):
        return f"{last}.open"
    if name in {"rename", "replace"} and len(call.args) == 1 and not call.keywords:
        return f"{last}.{name}"  # a text's takes two, a dataclass's or a time's keywords
    if (name == "save" and last in {"np", "jnp", "checkpointer"}) or (last, name) == (
        "wandb",
        "init",
    ):
        return f"{last}.{name}"
    return ""


def _mode(call: ast.Call, place: int) -> bool:
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
    found = [
        f"{name_of(path)}:{line} {name}"
        for line, name in writes(ast.parse(path.read_text()))
        if name not in excused
    ]
    assert not found, "let flowrl.storage write: " + ", ".join(found)


@pytest.mark.parametrize("name", EXCUSED)
def test_nobody_is_excused_from_what_he_does_not_do(name):
    done = {what for _, what in writes(ast.parse((PACKAGE / name).read_text()))}
    assert EXCUSED[name][0] <= done, f"{name} no longer calls {EXCUSED[name][0] - done}"


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "open(path, how)",
        "io.open(path, 'x')",
        "path.open('w')",
        "Path(x).open(mode='r+')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "os.open(path, flags)",
        "os.rename(a, b)",
        "os.replace(a, b)",
        "path.rename(target)",
        "(folder / 'x').replace(target)",
        "shutil.rmtree(path)",
        "rmtree(path)",
        "path.write_text('')",
        "path.unlink(missing_ok=True)",
        "self._path.mkdir()",
        "path.touch()",
        "link.symlink_to(path)",
        "tempfile.mkdtemp()",
        "np.save(path, array)",
        "np.savez(path, a=array)",
        "array.tofile(path)",
    ],
)
def test_a_write_is_known_by_its_name(source):
    assert list(writes(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open(encoding='utf-8')",
        "path.open('rb')",
        "os.open(path, os.O_RDONLY | os.O_NOFOLLOW)",
        "os.open(os.devnull, os.O_RDWR)",
        "text.replace('a', 'b')",
        "dataclasses.replace(state, at=now)",
        "now.replace(tzinfo=UTC)",
        "shutil.which('tmux')",
        "storage.remove_file(path)",
        "storage.write_atomic(path, text)",
        "file.save(state)",
    ],
)
def test_what_reads_or_asks_the_storage_layer_is_no_write(source):
    assert not list(writes(ast.parse(source)))
