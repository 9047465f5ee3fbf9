"""What is written down of each round: a checkpoint, records, a table of the clients; and going on from there."""

from __future__ import annotations

import csv
import io
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from echofree import __version__, checkpoint
from echofree.config.schema import Mode
from echofree.durable import write_text
from echofree.errors import CheckpointError, EchoFreeError
from echofree.federate import exchange, privacy

if TYPE_CHECKING:
    from echofree.federate.strategy import Told
    from echofree.log import Position
    from echofree.rundir import RunDir
    from echofree.saver import Saver

log = logging.getLogger("echofree")

CLIENTS = "clients.csv"
STATE = "federated"  # of a checkpoint: everything but the weights
MAX_VOID = 3  # rounds in a row that change nothing
SINGLE = ("round", "client", "name", "status", "why", "seconds", "loss", "train_s", "length", "bytes_up")


class Book:
    """The run directory of a federated training.

    Args:
        config: the frozen run config.
        run: its directory; a step of its checkpoints is a step of every client.
        saver: writes them.
        plan: what travels.
        base: the model's first state, all of it.
        position: moved for the log's prefix.
    """

    def __init__(
        self,
        config: Any,
        run: RunDir,
        saver: Saver,
        plan: exchange.Plan,
        base: Mapping[str, Tensor],
        position: Position,
    ):
        self.config, self.run, self.saver, self.plan = config, run, saver, plan
        self.base = {name: tensor.detach().cpu().clone() for name, tensor in base.items()}
        self.position = position
        self.done = self.void = self.noisy = 0  # rounds; those in a row that changed nothing; those that had noise
        self.best: float | None = None
        self.best_step = 0
        self.rows: list[dict[str, Any]] = []  # of clients.csv
        self.weights = exchange.pack(self.base, plan.shared)

    # --- going on ---------------------------------------------------------------------------------------------------

    def go_on(self, fingerprint: str) -> None:
        """Back to the last saved round of this directory, if this is a resume.

        Raises:
            CheckpointError: no checkpoint of a federated training, or other data.
        """
        facts = self.run.facts
        if not facts.get("resume"):
            return
        root = self.run.checkpoints
        named = facts.get("resumed_from")
        folder = root / named if named else checkpoint.newest_good(root)
        if folder is None:
            self.run.truncate_metrics(-1)
            return
        if not checkpoint.has(folder, STATE):
            raise CheckpointError(
                f"{folder} is no checkpoint of a federated training. To begin from its weights type init_from={folder}"
            )
        old, allow = facts.get("data_fingerprint"), facts.get("resume_allow", [])
        if old not in (None, fingerprint) and not any(name.split(".")[0] == "data" for name in allow):
            raise CheckpointError(
                f"the server's data isn't what it was: fingerprint {old} then, {fingerprint} now. Restore it, or type "
                f"'resume_allow=[{','.join([*allow, 'data'])}]'"
            )
        state = checkpoint.load(folder, STATE)
        self.done, self.void, self.noisy = int(state["round"]), int(state["void"]), int(state["noisy"])
        self.best, self.best_step, self.rows = state["best"], int(state["best_step"]), list(state["rows"])
        self.weights = exchange.pack(checkpoint.load(folder, "model"), self.plan.shared)
        self.run.truncate_metrics(self.step(self.done))
        checkpoint.set_aside(root, str(facts["id"]), self.step(self.done))
        self._place(self.done)
        log.info("goes on after round %d, from %s", self.done, folder.name)

    @property
    def run_id(self) -> str:
        return str(self.run.facts["id"])

    def step(self, number: int) -> int:
        return number * int(self.config.federated.local_steps)

    def _place(self, number: int) -> None:
        self.position.epoch, self.position.step = number, self.step(number)

    # --- a round ----------------------------------------------------------------------------------------------------

    def before(self, told: Told, central: Mapping[str, float]) -> None:
        """Scores of the weights that it begins with."""
        self._note_scores(0, told, central)
        log.info("before: %s", self._said(told, central))

    def close(self, number: int, weights: Sequence[bytes], told: Told, central: Mapping[str, float]) -> None:
        """Writes everything about round `number` and saves.

        Raises:
            EchoFreeError: the third round in a row that changed nothing; it is saved.
        """
        self.done, self.weights = number, list(weights)
        self.void = self.void + 1 if told.void else 0
        if self.config.federated.noise > 0:
            self.noisy += 1  # a round that is void has still drawn
        self._place(number)
        for bad in told.bad:
            log.warning("round %d: left out: %s", number, bad)
        for text in told.unscored:
            log.warning("round %d: no scores: %s", number, text)
        self._note_scores(number, told, central)
        self._note_training(number, told)
        self._save(number, central, self._clients(told))
        log.info("round %d/%d: %s", number, self.config.federated.rounds, self._line(told, central))
        if self.void == MAX_VOID:
            raise EchoFreeError(
                f"{MAX_VOID} rounds in a row changed nothing, the last one because of {told.void}. What is done is "
                "saved: the same command with resume=auto goes on"
            )

    def _note_scores(self, number: int, told: Told, central: Mapping[str, float]) -> None:
        place = {"step": self.step(number), "epoch": number}
        if central:
            self.run.write_metrics({"kind": "eval", "split": "valid", **place, **_plain(central)})
        means = self._clients(told)
        if means:
            record = {"kind": "eval", "split": "clients", **place, **_plain(means), "clips": len(told.scores)}
            worst = self.worst(told)
            if worst is not None:
                record |= {f"worst_{self._metric()}": told.scores[worst][self._metric()], "worst_client": worst}
            self.run.write_metrics(record)
        for client, scores in told.scores.items():
            row = {"round": number, "client": client, "name": told.names[client], "status": "scored", **_plain(scores)}
            self.rows.append(row)

    def _note_training(self, number: int, told: Told) -> None:
        good, trained = told.good, []
        total_s = sum(update.seconds for update in good)
        for update in good:
            trained.append(
                {
                    "round": number, "client": update.who.number, "name": update.who.name, "status": "trained",
                    "seconds": update.seconds, "loss": update.facts["loss"], "train_s": update.facts["train_s"],
                    "length": update.length, "bytes_up": update.num_bytes,
                }
            )  # fmt: skip
        for bad in told.bad:
            trained.append(
                {"round": number, "client": bad.who.number, "name": bad.who.name, "status": bad.kind, "why": bad.text}
            )
        self.rows += trained
        loss = sum(u.seconds * u.facts["loss"] for u in good) / total_s if good else math.nan
        record: dict[str, Any] = {
            "kind": "train", "step": self.step(number), "epoch": number, "loss": _number(loss),
            "lr": _number(good[0].facts["lr"]) if good else None, "clients": len(good), "asked": len(told.asked),
            "left_out": {str(bad.who.number): bad.kind for bad in told.bad}, "clipped": told.clipped,
            "skipped_steps": int(sum(u.facts["skipped"] for u in good)), "bytes_down": told.bytes_down,
            "bytes_up": told.bytes_up, "round_s": told.train_s,
        }  # fmt: skip
        if told.void:
            record["void"] = told.void
        if self.config.federated.noise > 0:
            record["epsilon"] = self.epsilon()
        self.run.write_metrics(record)
        write_text(self.run.folder / CLIENTS, self.table())

    def _save(self, number: int, central: Mapping[str, float], means: Mapping[str, float]) -> None:
        rule = self.config.checkpoint
        scores = dict(central or means)
        value = scores.get(rule.metric)
        better = (
            value is not None
            and math.isfinite(value)
            and (self.best is None or (value < self.best if rule.mode is Mode.min else value > self.best))
        )
        if better:
            self.best, self.best_step = value, self.step(number)
        state = {
            "round": number, "void": self.void, "noisy": self.noisy, "best": self.best, "best_step": self.best_step,
            "rows": self.rows,
        }  # fmt: skip
        about = {
            "run_id": str(self.run.facts["id"]), "version": __version__, "step": self.step(number), "epoch": number,
            "scores": _plain(scores), "world_size": 1, "best_step": self.best_step, "round": number,
        }  # fmt: skip
        self.run.sync_metrics()
        self.saver.save({"model": self.state(), STATE: state}, {}, about, better)
        self.saver.finish()

    def state(self) -> dict[str, Tensor]:
        """The whole model with the weights as they are now."""
        came = exchange.unpack(self.weights, self.plan.shared)
        return {name: came.get(name, tensor).clone() for name, tensor in self.base.items()}

    # --- what a person reads ----------------------------------------------------------------------------------------

    def _metric(self) -> str:
        return str(self.config.checkpoint.metric)

    def worst(self, told: Told) -> int | None:
        """The client with the worst `checkpoint.metric`, if any has one."""
        known = {k: s[self._metric()] for k, s in told.scores.items() if math.isfinite(s.get(self._metric(), math.nan))}
        if not known:
            return None
        pick = max if self.config.checkpoint.mode is Mode.min else min
        return pick(known, key=lambda k: known[k])

    def _clients(self, told: Told) -> dict[str, float]:
        """Means over the clients, each counting the same, of what they scored."""
        keys = sorted({key for scores in told.scores.values() for key in scores})
        found = {}
        for key in keys:
            values = [s[key] for s in told.scores.values() if math.isfinite(s.get(key, math.nan))]
            if values:
                found[key] = math.fsum(values) / len(values)
        return found

    def epsilon(self) -> float:
        """The privacy budget spent so far, at federated.delta."""
        settings = self.config.federated
        return privacy.epsilon(settings.fraction, settings.noise, self.noisy, settings.delta)

    def _line(self, told: Told, central: Mapping[str, float]) -> str:
        if told.void:
            head = f"the weights stay as they were: {told.void}"
        else:
            loss = sum(u.seconds * u.facts["loss"] for u in told.good) / sum(u.seconds for u in told.good)
            head = f"{len(told.good)} of {len(told.asked)} clients, loss {loss:.3f}"
        text = f"{head}, {self._said(told, central)}"
        text += f", {told.bytes_down / 1e6:.2f} MB down, {told.bytes_up / 1e6:.2f} MB up, {told.train_s:.1f} s"
        if self.config.federated.noise > 0:
            text += f", privacy: epsilon {self.epsilon():.2f} at delta {self.config.federated.delta:g}"
        return text

    def _said(self, told: Told, central: Mapping[str, float]) -> str:
        metric, parts = self._metric(), []
        if metric in central:
            parts.append(f"{metric} {central[metric]:.3f}")
        means, worst = self._clients(told), self.worst(told)
        if metric in means and worst is not None:
            name = f" {told.names[worst]}" if told.names[worst] else ""
            parts.append(f"clients' {means[metric]:.3f}, worst {told.scores[worst][metric]:.3f} (client {worst}{name})")
        return ", ".join(parts) or "no scores"

    def table(self) -> str:
        """clients.csv: what each client gave and scored in each round."""
        more = sorted({key for row in self.rows for key in row} - set(SINGLE))
        file = io.StringIO()
        writer = csv.DictWriter(file, [*SINGLE, *more], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return file.getvalue()

    def summary(self) -> list[str]:
        """Lines of a table: each client before and after."""
        metric = self._metric()
        scored = [row for row in self.rows if row["status"] == "scored" and row.get(metric) is not None]
        if not scored:
            return []
        lines = [f"{'client':>6}  {'left out':>8}  {'before':>8}  {'after':>8}  {'change':>8}  name"]
        for client in sorted({row["client"] for row in scored}):
            mine = [row for row in scored if row["client"] == client]
            first, last = mine[0][metric], mine[-1][metric]
            bad = sum(row["client"] == client and row["status"] not in ("scored", "trained") for row in self.rows)
            lines.append(f"{client:6d}  {bad:8d}  {first:8.3f}  {last:8.3f}  {last - first:+8.3f}  {mine[-1]['name']}")
        return [f"{metric} of each client's held-out clips:", *lines]

    def end(self, status: str) -> None:
        """Notes how it ended in run.json."""
        facts: dict[str, float] = {"rounds": self.done, "shared": len(self.plan.shared)}
        facts["bytes"] = sum(map(len, self.weights))
        if self.config.federated.noise > 0:
            facts |= {"epsilon": self.epsilon(), "delta": self.config.federated.delta}
        self.run.note(
            status=status, end=time.time(), best=self.best, steps=self.step(self.done), federated=facts
        )  # fmt: skip


def _plain(scores: Mapping[str, float]) -> dict[str, float | None]:
    return {key: _number(float(value)) for key, value in scores.items()}


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
