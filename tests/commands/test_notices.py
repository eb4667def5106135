from __future__ import annotations

import json

from flowrl import cli, notices
from flowrl.paths import GraphPaths
from tests.commands.making import DONE, save


def test_a_notice_is_shown_until_it_is_withdrawn(tmp_path, capsys):
    layout = save(tmp_path, ("A", DONE))
    notices.publish(layout, "disk", "paused (disk): no room in the graph's folder")
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "paused (disk): no room" in capsys.readouterr().out
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["notices"]) == ["disk"]
    notices.withdraw(layout, "disk")
    notices.withdraw(layout, "disk")
    assert notices.read(layout) == {}


def test_a_damaged_notice_says_so_and_hides_nothing(tmp_path):
    layout = GraphPaths(tmp_path)
    notices.publish(layout, "one", "first")
    layout.notice("two").write_text("{")
    read = notices.read(layout)
    assert read["one"] == "first"
    assert "cannot be read" in read["two"]
