"""Names that somebody may give a skill who wishes us ill, or has no idea."""

from __future__ import annotations

CANARY = "CANARY_WAS_TOUCHED"
TOUCH = f"touch {CANARY}"

TRAVERSAL = [
    "..", ".", "/", "//", "../..", "../../x", "/etc/passwd", "/root/.ssh/authorized_keys", "~",
    "~/x", "~root", "a/../../b", "..\\..\\x", "a/b", "a\\b", "./x", "x/.", "x/..", "....//x",
    "%2e%2e%2fx", "file:///etc/passwd", "skills/0_x", "../checkpoints/global_latest.json",
    "training_runs/failed", "\\\\server\\share", "C:\\x", "/dev/null", "/proc/self/environ",
]  # fmt: skip
SHELL = [
    "a;rm -rf ~", f"$({TOUCH})", f"`{TOUCH}`", f"; {TOUCH}", f"| {TOUCH}", f"&& {TOUCH}",
    f"|| {TOUCH}", f"& {TOUCH}", f"a\\;{TOUCH}", f"'; {TOUCH}; '", f'"; {TOUCH}; "',
    f"${{IFS}}{TOUCH}", f">{CANARY}", f">>{CANARY}", f"<({TOUCH})", "$HOME", "${HOME}", "$PATH",
    "!!", "!$", "*", "?", "[a-z]", "{a,b}", "a b  c", "'", '"', "''", '"x"', "\\", "\\\\", "a\\",
    "#", "# x", "a # b", f"$(({CANARY}))", f"eval {TOUCH}", f"a=$({TOUCH})",
]  # fmt: skip
TMUX = [
    "#{session_name}", f"#({TOUCH})", f"#{{?1,#({TOUCH}),}}", "#S", "#H", "##", "#[fg=red]x",
    "%1", "@1", "$1", "=x", "=x:", ":", "a:b", "a.b", "a:b.c", ";", "a;", "a ;", "\\;", "{last}",
    "{mouse}", "!", "+", "~", "x;kill-server", "; kill-server", "x ; run-shell 'x'", "^", "-",
]  # fmt: skip
OPTIONS = [
    "-t", "--help", "-", "--", "--graph_path=/x", "-rf", "-c", "--module_path", "-I", "-x y",
    "@file", "+x", "--sandbox=none", "-S/tmp/x", "=", "a=b", "-0",
]  # fmt: skip
PYTHON = [
    '"""', "'''", '\\"""', "__import__('os')", "{0.__class__}", "{}", "{name}", "%s", "%n", "%d",
    "%(x)s", "%%", "\\n", "\\x41", "\\N{DIGIT ONE}", "lambda: 0", "import os", "None", "True",
    "self", "__init__", "__name__", "exec('x')", '"); import os; ("', "# -*- coding: x -*-",
    "f{x}", "a\\\\\\", "nan", "NaN", "null", "undefined", "0", "-1", "1e400", "007",
]  # fmt: skip
MARKUP = [
    "[red]x[/red]", "[/]", "[link=http://x]y[/link]", "[bold", "[[", "]]", "[@click=app.quit]x[/]",
    ":smile:", "<b>x</b>", "<script>alert(1)</script>", "&lt;", "<!-- x", "]]>", "{{7*7}}",
    "${7*7}",
    "' OR 1=1 --", "'; DROP TABLE skills; --", "a,b", "a\u201cb", "=cmd|' /C calc'!A0",
]  # fmt: skip
RESERVED = [
    "CON", "con", "PRN", "AUX", "NUL", "COM1", "LPT9", "con.txt", ".trash", "x.trash", ".part",
    "x.part", ".tmp-x", ".git", "failed", "run.lock", "daemon.lock", "spec.json", "0.py", ".hidden",
    "skill_0_x", "training.log", "desktop.ini", "Thumbs.db", "x.attempt1", "skill", "aux ",
]  # fmt: skip
CONTROLS = [
    "", " ", "\t", "\n", "a\nb", "a\rb", "a\r\nb", "a\x00b", "\x00", "a\x07b", "a\x08b",
    "a\x1b[31mb",
    "\x1b]0;title\x07", "\x1b]52;c;aGk=\x07", "a\x7fb", "a\x9bb", "a\x85b", "a\u2028b", "a\u2029b",
    "a\u200bb", "\u200b", "a\u200db", "a\ufeffb", "a\u202eb", "a\u2066b\u2069", "a\u00adb",
    "a\u034fb", "a\u3164b", "\u3164", "a\u2800b", "\u2800", "a\ufe0fb", "\U000e0041", "a\ue000b",
    "a\U0010ffffb", "a\ud800b", "\udcff", "a\u00a0b", "a\u3000b", "a\u2003b", "a\tb", "a\vb",
]  # fmt: skip
FOREIGN = [
    "木を集める", "Собрать дерево", "جمع الخشب", "🪓🌲", "👩‍👩‍👧", "é", "e\u0301", "ﬁsh", "Ａ",
    "𝐂ollect",
    "Сollect Wood", "Collect W\u043eod", "ℌ", "ß", "İ", "ı", "Å", "\u0301", "x" + "\u0301" * 150,
    "ᄀ" * 50, "½", "²", "٣", "Ⅷ", "ŉ", "ǆ", "ﷺ",
]  # fmt: skip
LONG = ["x" * 64, "x" * 65, "x" * 200, "x" * 201, "x" * 300, "木" * 200, "木" * 201, "x " * 150]
ALIKE = [
    "Collect Wood", "Collect_Wood", "Collect  Wood", "Collect__Wood", " Collect Wood ", "a b",
    "a_b", "A b", "a-b", "a+b", "a.b", "x" * 70, "x" * 71, "x_" * 40, "../../x", "x_9cdf6a50",
]  # fmt: skip
HOSTILE = [
    *TRAVERSAL, *SHELL, *TMUX, *OPTIONS, *PYTHON, *MARKUP, *RESERVED, *CONTROLS, *FOREIGN, *LONG,
    *ALIKE,
]  # fmt: skip
