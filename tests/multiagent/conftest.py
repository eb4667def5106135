from tests.launchers.conftest import nothing_survives, server_folder, tmux  # noqa: F401
