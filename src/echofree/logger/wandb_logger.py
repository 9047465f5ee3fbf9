"""Weights & Biases: offline unless asked otherwise, one tracked run per run directory, joined again by a resume.

Whether it can be online is decided before `wandb.init`, which would otherwise wait half a minute and then raise. Every
record is one row with `step` as its axis: wandb's own counter would drop an evaluation that carries an earlier step
than the last training record.
"""

from __future__ import annotations

import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echofree.errors import ConfigError
from echofree.logger.record import scalars

log = logging.getLogger("echofree")

MODES = ("offline", "online", "disabled")
EXIT = {"done": 0, "stopped": 0, "preempted": 75, "interrupted": 130}  # any other status is a failure
REACH_S = 5.0  # to answer the question whether the server is there
FINISH_S = 120.0  # for the last upload; a dead network must not hold a finished job
POSITION = "echofree_position.json"


class WandbLogger:
    """Sends every number of every record to wandb.

    A run that is resumed from a checkpoint repeats the steps since that checkpoint. Those were sent already, so each
    kind of record goes on behind the last step sent, which is kept in wandb/echofree_position.json.

    Args:
        run_dir: the run directory; wandb's files go into `wandb/` of it.
        project: wandb project.
        entity: wandb team or user; None: the default of the account.
        mode: offline, online or disabled.

    Raises:
        ConfigError: `mode` is none of these.
    """

    def __init__(self, run_dir: Path, project: str, entity: str | None, mode: str):
        if mode not in MODES:
            raise ConfigError(f"logger.mode is {mode!r}; it can be {', '.join(MODES)}. Type: logger.mode=offline")
        self.run_dir, self.project, self.entity, self.mode = run_dir, project, entity, mode
        self.position_file = run_dir / "wandb" / POSITION
        self.rows = 0  # rows sent by all attempts together
        self.last_step: dict[str, int] = {}  # last step sent, by the first word of the metric's name
        self.run: Any = None

    def start(self, run: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """`run` is run.json: its `id` makes a resume join the same tracked run."""
        if self.mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline means that nothing leaves the machine
        import wandb

        mode: Any = self._decide(wandb)
        self.position_file.parent.mkdir(parents=True, exist_ok=True)
        if self.position_file.exists():
            position = json.loads(self.position_file.read_text(encoding="utf-8"))
            self.rows, self.last_step = position["rows"], position["last_step"]
        self.run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=mode,
            dir=str(self.run_dir),
            id=str(run["id"]),
            name=f"{config.get('name', 'run')}-{run['id']}",
            resume="allow",  # offline nobody can be asked: it is written down, and `wandb sync` joins by the id
            config=dict(config),
            reinit="create_new",
            settings=_settings(wandb, mode),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        if mode == "offline":
            log.info(
                "wandb: offline; to send it later: wandb sync --id %s %s/wandb/offline-run-*", run["id"], self.run_dir
            )

    def log(self, record: Mapping[str, Any]) -> None:
        values, step = scalars(record), int(record["step"])
        if not values:
            return
        head = next(iter(values)).split("/")[0]
        if step <= self.last_step.get(head, -1):
            return
        if "epoch" in record:
            values["epoch"] = float(record["epoch"])
        # wandb's own counter would start at 0 again after a resume, and rows that come twice are dropped
        self.run.log({"step": step, **values}, step=self.rows)
        self.rows += 1
        self.last_step[head] = step
        self.position_file.write_text(json.dumps({"rows": self.rows, "last_step": self.last_step}), encoding="utf-8")

    def finish(self, status: str) -> None:
        """Closes the tracked run: finished for "done" and "stopped" (early), preempted, or failed for all else."""
        if status == "preempted":
            self.run.mark_preempting()
        self.run.finish(exit_code=EXIT.get(status, 1))

    def _decide(self, wandb: Any) -> str:
        """online only with a key and a server that answers; says on the console when it has to be offline."""
        if self.mode != "online":
            return self.mode
        settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
        problem = unreachable(settings.base_url)  # first: login takes its time to find that out
        if not problem and not wandb.login(prompt=False, verify=False):
            problem = "there is no API key; type: wandb login"
        if problem:
            log.warning("logger.mode=online isn't possible (%s): this run is tracked offline", problem)
            return "offline"
        return "online"


def unreachable(url: str) -> str:
    """Why `url` can't be reached within a few seconds; "" when something answers, whatever it says."""
    try:
        urllib.request.urlopen(url, timeout=REACH_S).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return f"{url} doesn't answer: {error}"
    return ""


def _settings(wandb: Any, mode: str) -> Any:
    """Quiet: EchoFree has its own log, patch and console. The limits exist from wandb 0.31 on."""
    wanted: dict[str, Any] = {
        "silent": True,
        "console": "off",
        "disable_git": True,
        "save_code": False,
        "finish_timeout": FINISH_S if mode == "online" else 0.0,
        "init_timeout": 30.0,
    }
    return wandb.Settings(**{k: v for k, v in wanted.items() if k in wandb.Settings.model_fields})
