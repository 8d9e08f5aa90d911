"""What the whole run has to say."""

from typing import Any

from tests.support import world


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Ranks that hung though they were not meant to: recovered from, or their test has failed; not to be overlooked."""
    if world.HUNG:
        terminalreporter.section(f"{len(world.HUNG)} lines about ranks that hung by themselves")
        for line in world.HUNG:
            terminalreporter.line(line)
