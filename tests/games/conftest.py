"""The generated worlds of the tests of environments."""

from tests.envs.conftest import worlds_of  # noqa: F401
