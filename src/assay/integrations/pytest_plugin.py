"""The pytest plugin: the fixture `within_budget`, the marker `assay_record`, the option `--assay-update`.

Nothing here imports torch: everybody who has Assay installed loads this module whenever they run pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pytest

from assay.integrations.recorder import Recorder

if TYPE_CHECKING:
    from assay.budgets.assertion import BudgetReport

_RECORDER = pytest.StashKey[Recorder]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option and the setting."""
    group = parser.getgroup("assay", "Assay: error budgets")
    group.addoption(
        "--assay-update",
        action="store_true",
        help="Record the error ratios of tests marked assay_record instead of comparing them with the recorded ones.",
    )
    parser.addini(
        "assay_records",
        "File with the recorded error ratios, from the root folder; commit it.",
        default="assay_records.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker; refuse several processes that would write one file."""
    config.addinivalue_line(
        "markers",
        "assay_record: the error ratios that within_budget measures are kept in a file; worse ones fail the test.",
    )
    update = bool(config.getoption("--assay-update"))
    if update and (hasattr(config, "workerinput") or getattr(config.option, "dist", "no") != "no"):
        raise pytest.UsageError("--assay-update writes one file, so one process must run all tests. Leave out -n.")
    config.stash[_RECORDER] = Recorder(config.rootpath / config.getini("assay_records"), update)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A marked test without the fixture would record nothing, in silence."""
    for item in items:
        marked = item.get_closest_marker("assay_record") is not None
        if marked and "within_budget" not in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(
                f"A test marked assay_record must use the fixture within_budget, but {item.nodeid} does not. "
                "Take it as an argument and call it in place of assay.assert_within_budget."
            )


@pytest.fixture
def within_budget(request: pytest.FixtureRequest) -> Callable[..., BudgetReport]:
    """`assay.assert_within_budget` under the test's name; in a test marked `assay_record` it also records."""
    from assay.budgets.assertion import assert_within_budget

    bound = partial(assert_within_budget, name=request.node.name)
    if request.node.get_closest_marker("assay_record") is None:
        return bound
    return request.config.stash[_RECORDER].recording(bound, request.node.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was recorded."""
    try:
        session.config.stash[_RECORDER].write()
    except OSError as error:
        raise pytest.UsageError(f"assay_records must name a file that can be written, but: {error}.") from error


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was recorded, or what has no record yet."""
    line = config.stash[_RECORDER].summary()
    if line:
        terminalreporter.write_line(line)
