"""Which loggers a run has: always the console, beside it the one that `logger=` names, and none that can end a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echofree.config.schema import LoggerConfig, LoggerKind
from echofree.contracts import Logger
from echofree.logger.console_logger import ConsoleLogger


def build_logger(config: LoggerConfig, run_dir: Path, write: Callable[[str], None] = print) -> Logger:
    """What receives the records of a run; rank 0 only.

    Args:
        config: the group `logger` of the run config.
        run_dir: the run directory.
        write: takes a console line.

    Raises:
        MissingExtra: the chosen logger needs a package that isn't installed.
        ConfigError: a value of the chosen logger isn't valid.
    """
    loggers: list[Logger] = [ConsoleLogger(write)]
    if config.name is LoggerKind.tensorboard:
        from echofree.logger.tensorboard_logger import TensorBoardLogger

        loggers.append(Guarded(TensorBoardLogger(run_dir), "tensorboard"))
    elif config.name is LoggerKind.wandb:
        from echofree.logger.wandb_logger import WandbLogger

        loggers.append(Guarded(WandbLogger(run_dir, config.project, config.entity, config.mode), "wandb"))
    return Several(loggers)


class Several:
    """Hands everything to each of `loggers`."""

    def __init__(self, loggers: list[Logger]):
        self.loggers = loggers

    def start(self, run: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        for logger in self.loggers:
            logger.start(run, config)

    def log(self, record: Mapping[str, Any]) -> None:
        for logger in self.loggers:
            logger.log(record)

    def finish(self, status: str) -> None:
        for logger in self.loggers:
            logger.finish(status)


class Guarded:
    """Hands everything to `logger` until it fails; then warns once and leaves it alone for the rest of the run.

    A tracker is somebody else's server, disk or process. metrics.jsonl has every record anyway.
    """

    def __init__(self, logger: Logger, name: str):
        self.logger, self.name, self.alive = logger, name, True

    def start(self, run: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._try("start", lambda: self.logger.start(run, config))

    def log(self, record: Mapping[str, Any]) -> None:
        self._try("log", lambda: self.logger.log(record))

    def finish(self, status: str) -> None:
        self._try("finish", lambda: self.logger.finish(status))

    def _try(self, what: str, call: Callable[[], None]) -> None:
        if not self.alive:
            return
        try:
            call()
        except Exception as error:
            self.alive = False
            logging.getLogger("echofree").warning(
                "logger %s failed in %s (%s: %s) and is off for the rest of this run; metrics.jsonl goes on",
                self.name,
                what,
                type(error).__name__,
                error,
            )
