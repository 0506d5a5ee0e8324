"""The log messages of the library."""

from __future__ import annotations

import logging


class Log(logging.Handler):
    """Collects the log messages of the library at level INFO and above."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Log:
        self._before = logging.getLogger("unicoll").level
        logging.getLogger("unicoll").setLevel(logging.INFO)
        logging.getLogger("unicoll").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("unicoll").removeHandler(self)
        logging.getLogger("unicoll").setLevel(self._before)
