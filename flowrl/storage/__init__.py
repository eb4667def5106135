"""Files on disk: read without trust, written whole or not at all. This face has all the verbs.

`locks` and `records` are modules of their own: `from flowrl.storage import locks, records`.
"""

from flowrl.storage.atomic import (
    append_line,
    fault_point,
    flush,
    flush_tree,
    make_dir,
    make_file,
    remove_part_files,
    truncate,
    write_atomic,
    write_json,
)
from flowrl.storage.files import (
    commit_dir,
    copy_file,
    copy_trees,
    move_dir,
    move_dirs,
    open_plain,
    plain_files,
    read_bytes,
    read_json,
    remove_file,
    remove_leftovers,
    remove_tree,
    remove_unread_tree,
    tree_digest,
)

__all__ = [
    "append_line",
    "commit_dir",
    "copy_file",
    "copy_trees",
    "fault_point",
    "flush",
    "flush_tree",
    "make_dir",
    "make_file",
    "move_dir",
    "move_dirs",
    "open_plain",
    "plain_files",
    "read_bytes",
    "read_json",
    "remove_file",
    "remove_leftovers",
    "remove_part_files",
    "remove_tree",
    "remove_unread_tree",
    "tree_digest",
    "truncate",
    "write_atomic",
    "write_json",
]
