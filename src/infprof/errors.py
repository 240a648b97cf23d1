"""The one exception type that users see, as one sentence and an exit code."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_UNUSABLE = 3
EXIT_COLLECTOR = 4


class InfprofError(Exception):
    """An error a user can cause or meet; the message says what is wrong, where, and what to do.

    ``exit_code`` is what the command line ends with (2 usage, 3 input cannot be read, 4 collector failed).
    """

    def __init__(self, message: str, exit_code: int = EXIT_UNUSABLE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UsageError(InfprofError):
    """The command line asks for something that does not exist or does not fit together."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)
