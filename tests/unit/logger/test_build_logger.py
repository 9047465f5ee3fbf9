"""Which loggers there are, and that none of them ends a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from echofree.config.schema import LoggerConfig, LoggerKind
from echofree.errors import ConfigError, MissingExtra
from echofree.logger.build import Guarded, Several, build_logger


class Fails:
    """Raises in one method and remembers what reached it."""

    def __init__(self, where: str):
        self.where, self.calls = where, []  # type: tuple[str, list[str]]

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where:
            raise OSError("disk full")

    def start(self, run: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._call("start")

    def log(self, record: Mapping[str, Any]) -> None:
        self._call("log")

    def finish(self, status: str) -> None:
        self._call("finish")


@pytest.mark.parametrize(
    ("where", "calls"),
    [("start", ["start"]), ("log", ["start", "log"]), ("finish", ["start", "log", "log", "finish"])],
)
def test_failing_logger_warns_once_and_is_left_alone(
    where: str, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Fails(where), Fails("nowhere")
    logger = Several([Guarded(bad, "mine"), good])
    with caplog.at_level(logging.WARNING, "echofree"):
        logger.start({}, {})
        logger.log({})
        logger.log({})
        logger.finish("done")
    assert bad.calls == calls
    assert good.calls == ["start", "log", "log", "finish"]
    assert [r.getMessage() for r in caplog.records] == [
        f"logger mine failed in {where} (OSError: disk full) and is off for the rest of this run; metrics.jsonl goes on"
    ]


def test_interrupt_is_not_swallowed() -> None:
    class Interrupts(Fails):
        def log(self, record: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guarded(Interrupts(""), "mine").log({})


def test_console_is_always_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = build_logger(LoggerConfig(), tmp_path)
    logger.start({"id": "a"}, {})
    logger.log({"kind": "train", "step": 1, "loss": 0.5})
    logger.finish("done")
    assert capsys.readouterr().out == "train  loss 0.5\n"
    assert list(tmp_path.iterdir()) == []


def test_wrong_mode_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logger\.mode is 'onlin'.*offline, online, disabled"):
        build_logger(LoggerConfig(name=LoggerKind.wandb, mode="onlin"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_tensorboard_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echofree.logger.tensorboard_logger.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'echofree\[tensorboard\]'"):
        build_logger(LoggerConfig(name=LoggerKind.tensorboard), tmp_path)
