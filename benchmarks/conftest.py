"""Gives the tests of benchmarks and simulators the fixtures of the package's own tests."""

from tests.conftest import _few_objects, _no_backward_before_forks, _no_leaked_process_group, _seeded, _warm

__all__ = ["_few_objects", "_no_backward_before_forks", "_no_leaked_process_group", "_seeded", "_warm"]
