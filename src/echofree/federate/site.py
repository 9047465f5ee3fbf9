"""A client's half of a round: its share of the data, the weights that came, the EchoFree loop, its scores.

Everything about a round follows from its number: the step of the schedule, the place in the client's data, the random
streams. A client that was away, or is another process now, so goes on as if it had always been there. What it alone
knows (`federated.keep_local`, a kept optimizer) lies in files, one for each round.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echofree.config.schema import FederatedOptimizer
from echofree.contracts import Batch, Dataset, Task
from echofree.federate import exchange

log = logging.getLogger("echofree")

HELD = 0x4E1D  # keeps the draw of held-out clips apart from the clips' own random streams
POISON = 1000.0  # a rehearsed poisoned update is so many times too long
ENDLESS = 10**9
KEPT_ROUNDS = 2  # of local files: a server that was killed may ask for the last round again


class Proximal:
    """A task whose loss pulls towards the round's first weights: FedProx, Li et al. 2020 (arXiv 1812.06127), eq. 2.

    Args:
        task: what a batch means.
        first: name -> weight that the pull is towards.
        mu: the term is mu / 2 times the squared distance, whatever the size of a batch.
    """

    def __init__(self, task: Task, first: Mapping[str, Tensor], mu: float):
        self.task, self.first, self.mu = task, dict(first), mu

    def weight(self, batch: Batch) -> float:
        return self.task.weight(batch)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, weight, parts = self.task.loss(model, batch)
        named = dict(model.named_parameters())
        distance = torch.stack([(named[name] - old).square().sum() for name, old in self.first.items()]).sum()
        # a step divides by the seconds of all its batches, which add up to one whole term
        term = 0.5 * self.mu * distance * weight
        return total + term, weight, {**parts, "proximal": term.detach()}

    def evaluate(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        return self.task.evaluate(model, batch)


class Tally:
    """Takes a round's records instead of a tracker."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def start(self, run: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Nothing to open."""

    def log(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def finish(self, status: str) -> None:
        """Nothing to close."""


class Site:
    """All clients of one process, which share a model in memory and never anything else.

    Args:
        config: the frozen run config.
        folder: where clients keep their files.
        run_dir: of the server, for scores of what it averaged; None in a client process.
        threads: intra-op threads.
    """

    def __init__(self, config: Any, folder: Path, run_dir: Path | None, threads: int):
        from echofree.inherit import hold_statistics
        from echofree.parts import build
        from echofree.training import choose_device, settle_algorithms

        torch.set_num_threads(threads)
        settle_algorithms(config.train.deterministic)
        self.config, self.folder, self.run_dir = config, folder, run_dir
        self.parts = build(config)
        self.device = choose_device(config.train.device, _alone())
        self.model = self.parts.model.to(self.device)
        if self.parts.frozen:
            hold_statistics(self.model)
        self.plan = exchange.plan(self.model, config.federated.keep_local)
        self.base = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        shared_out = getattr(self.parts.source, "parts", None) is not None
        self.shares = self.parts.source.shared if shared_out else None

    # --- whose data -------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Of the clients of a partition; empty where all the data here is one client's."""
        return list(self.shares.names) if self.shares is not None else []

    @cached_property
    def length_s(self) -> np.ndarray:
        from echofree.data.domain import seconds

        return seconds(self._whole)

    @cached_property
    def _whole(self) -> Dataset:
        source = self.parts.source  # with data.partition or data.sampling around it, what lies inside
        found: Dataset = source.whole if hasattr(source, "whole") else source.split("train")
        return found

    def indices(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """-> (clips that are trained on, clips that score), both ascending."""
        mine = np.arange(len(self._whole)) if self.shares is None else self.shares.clients[client]
        share = self.config.federated.held_out
        count = 0 if share == 0 or len(mine) < 2 else min(len(mine) - 1, max(1, round(share * len(mine))))
        order = np.random.default_rng([self.config.seed, HELD, client]).permutation(len(mine))
        return np.sort(mine[order[count:]]), np.sort(mine[order[:count]])

    def data(self, client: int) -> tuple[Dataset, Dataset | None]:
        """-> (what the client trains on, what it is scored on, if there is any)"""
        from echofree.data.partition import Part
        from echofree.data.sampling import Resampled

        train, held = (Part(self._whole, found) for found in self.indices(client))
        drawn = getattr(self.parts.source, "drawn", None)
        return (train if drawn is None else Resampled(train, drawn)), (held if len(held) else None)

    # --- a round ----------------------------------------------------------------------------------------------------

    def fit(
        self, client: int, number: int, tensors: Sequence[bytes], mu: float, mark: str, run: str = ""
    ) -> dict[str, Any]:
        """The client's steps of round `number` (from 1) of the training `run`, from the weights that came."""
        from echofree.rundir import RunDir

        began, settings = time.perf_counter(), self.config.federated
        if mark != self.plan.mark:
            raise ValueError(
                f"the server trains another model, or has other frozen weights ({mark} there, {self.plan.mark} here): "
                "model, optim.freeze, federated.keep_local, init_from and seed must be the same"
            )
        self.settle(client, run)
        # a round that is asked for again is written again
        RunDir(self.home(client), is_first=True).truncate_metrics((number - 1) * settings.local_steps)
        local = self.begin(client, number - 1, tensors)
        train, _ = self.data(client)
        first = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
        task: Any = Proximal(self.parts.task, first, mu) if mu > 0 else self.parts.task
        loop, tally = self.loop(client, number, task, train)
        if "optimizer" in local:
            loop.strategy.load_optimizer_state(loop.optimizer, local["optimizer"])
        loop.take(settings.local_steps)
        state = loop.strategy.model_state()
        self.keep(client, number, state, loop)
        self.model.zero_grad(set_to_none=True)
        record = tally.records[-1]
        trained, _ = self.indices(client)
        return {
            "tensors": self.faulty(client, number, exchange.pack(state, self.plan.shared), tensors),
            "seconds": float(self.length_s[trained].sum()),
            "facts": {
                "loss": record["loss"] if record["loss"] is not None else float("nan"),
                "lr": float(record["lr"]),
                "skipped": int(record["skipped_steps"]),
                "train_s": time.perf_counter() - began,
            },
        }

    def evaluate(self, client: int, number: int, tensors: Sequence[bytes], run: str = "") -> dict[str, Any]:
        """Scores of the weights that came, with what the client kept of round `number`, on its held-out clips."""
        from echofree.loop import mean_scores

        _, held = self.data(client)
        if held is None:
            return {"scores": {}, "clips": 0}
        self.settle(client, run)
        self.begin(client, number, tensors)
        loop, _ = self.loop(client, max(number, 1), self.parts.task, held)
        scores = mean_scores(loop.evaluate(held))
        return {"scores": {k: v for k, v in scores.items() if k != "clips"}, "clips": len(held)}

    def central(self, tensors: Sequence[bytes]) -> dict[str, Any]:
        """Scores of the weights that came on the validation clips that nobody owns."""
        from echofree.loop import mean_scores

        valid = self.parts.source.split("valid")
        if valid is None or len(valid) == 0:
            return {"scores": {}, "clips": 0}
        self.model.load_state_dict({**self.base, **exchange.unpack(tensors, self.plan.shared)})
        loop, _ = self.loop(None, 1, self.parts.task, valid)
        scores = mean_scores(loop.evaluate(valid))
        return {"scores": {k: v for k, v in scores.items() if k != "clips"}, "clips": len(valid)}

    def begin(self, client: int, number: int, tensors: Sequence[bytes]) -> dict[str, Any]:
        """The model as this client has it after round `number`. -> what it remembers"""
        local = self.remembered(client, number)
        came = exchange.unpack(tensors, self.plan.shared)
        self.model.load_state_dict({**self.base, **came, **local.get("kept", {})})
        return local

    def loop(self, client: int | None, number: int, task: Any, dataset: Dataset) -> tuple[Any, Tally]:
        """The loop, standing at the first step of round `number`; client None: the server's own scores."""
        from echofree.data.loader import Plan, TrainLoader
        from echofree.dist.strategy import Amp, build_strategy
        from echofree.log import Position
        from echofree.loop import Loop, State
        from echofree.optim import build_optimizer
        from echofree.rundir import RunDir
        from echofree.stop import StopFlag

        config, world = self.round_config, _alone()
        seed = self.seed(client, number)
        amp = Amp(config.train.precision.value, self.device)
        strategy = build_strategy(config.dist, self.model, amp, world)
        optimizer = build_optimizer(config.optim, strategy.parameters, strategy.named())
        order = Plan(len(dataset), config.train.batch_size, config.train.gradient_accumulation_steps, 1, int(seed[0]))
        workers = (config.data.num_workers, config.data.prefetch_factor)

        def make_loader(start: tuple[int, int]) -> TrainLoader:
            return TrainLoader(dataset, order, 0, ENDLESS, start, *workers, self.device.type == "cuda")

        run = RunDir(self.home(client) if client is not None else self._server(), is_first=client is not None)
        tally, position = Tally(), Position()
        loop = Loop(
            config, world, strategy, amp, task, optimizer, order, make_loader, None, run, tally, position, StopFlag(),
            self.device,
        )  # fmt: skip
        step = (number - 1) * config.federated.local_steps
        loop.state = State(step=step, epoch=step // order.steps_per_epoch, step_in_epoch=step % order.steps_per_epoch)
        return loop, tally

    @cached_property
    def round_config(self) -> Any:
        """The run's config as a client's loop reads it: the schedule spans all rounds, a record for each."""
        config, settings = self.config.copy(), self.config.federated
        config.train.max_steps = settings.rounds * settings.local_steps
        config.train.epochs = ENDLESS
        config.train.log_every = settings.local_steps
        config.logger.progress = "off"
        return config

    def seed(self, client: int | None, number: int) -> np.ndarray:
        """Sets the random streams of this client in this round. -> [3] uint32; the first is the client's own order of
        clips, the same in every round"""
        who = -1 if client is None else client
        order = np.random.SeedSequence([self.config.seed, who + 1]).generate_state(1)
        words = np.random.SeedSequence([self.config.seed, who + 1, number]).generate_state(2)
        torch.manual_seed(int(words[0]))
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        return np.concatenate([order, words])

    def _server(self) -> Path:
        assert self.run_dir is not None, "only the server's processes score for it"
        return self.run_dir

    # --- what a client keeps ----------------------------------------------------------------------------------------

    def home(self, client: int) -> Path:
        """The client's folder, made."""
        path = self.folder / f"{client:03d}"
        if not (path / "run.json").is_file():
            (path / "logs").mkdir(parents=True, exist_ok=True)
            text = json.dumps({"id": f"client-{client:03d}", "client": client, "status": "client"})
            (path / "run.json").write_text(text + "\n", encoding="utf-8")
        return path

    def settle(self, client: int, run: str) -> None:
        """What a client keeps is of one training: of another one nothing is taken over."""
        path = self.home(client) / "run.json"
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts.get("parent_run") == run:
            return
        for old in (*self._files(client).values(), self.home(client) / "metrics.jsonl"):
            old.unlink(missing_ok=True)
        path.write_text(json.dumps({**facts, "parent_run": run}) + "\n", encoding="utf-8")

    def remembered(self, client: int, number: int) -> dict[str, Any]:
        """What the client kept after round `number`, or the last one before in which it took part."""
        files = self._files(client)
        usable = [n for n in files if n <= number]
        if files and not usable and number > 0:
            log.warning("client %d has nothing of round %d or before: what it keeps begins anew", client, number)
        if not usable:
            return {}
        found: dict[str, Any] = torch.load(files[max(usable)], map_location="cpu", weights_only=True)
        return found

    def keep(self, client: int, number: int, state: Mapping[str, Tensor], loop: Any) -> None:
        """Writes what the client remembers of round `number`. Later rounds are of a branch that was given up."""
        content: dict[str, Any] = {}
        if self.plan.local:
            content["kept"] = {name: state[name].detach().cpu().clone() for name in self.plan.local}
        if self.config.federated.optimizer is FederatedOptimizer.kept:
            content["optimizer"] = loop.strategy.optimizer_state(loop.optimizer)
        if not content:
            return
        path = self.home(client) / f"local-{number:06d}.pt"
        torch.save(content, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
        files = self._files(client)
        later = [n for n in files if n > number]
        earlier = sorted(n for n in files if n <= number)[:-KEPT_ROUNDS]
        for old in (*later, *earlier):
            files[old].unlink()

    def _files(self, client: int) -> dict[int, Path]:
        return {int(path.stem.removeprefix("local-")): path for path in self.home(client).glob("local-*.pt")}

    # --- rehearsal --------------------------------------------------------------------------------------------------

    def fault(self, client: int, number: int) -> str | None:
        """What `federated.faults` asks this client to do in this round."""
        for word in self.config.federated.faults:
            who, when, kind = re.split(":", word)
            if who in ("*", str(client)) and when in ("*", str(number)):
                return kind
        return None

    def faulty(self, client: int, number: int, new: list[bytes], old: Sequence[bytes]) -> list[bytes]:
        """The client's update, spoilt as the rehearsal wants it."""
        kind = self.fault(client, number)
        if kind == "late":
            log.warning("rehearsal: client %d is late in round %d", client, number)
            time.sleep(2 * self.config.federated.timeout_s)
        if kind == "drop":
            log.warning("rehearsal: client %d drops out in round %d", client, number)
            os._exit(1)
        if kind in ("nan", "shape", "poison"):
            arrays = [exchange.from_bytes(data) for data in new]
            if kind == "nan":
                arrays[0] = np.full_like(arrays[0], np.nan)
            elif kind == "shape":
                arrays[0] = np.zeros((*arrays[0].shape, 2), arrays[0].dtype)
            else:
                arrays = [
                    b + POISON * (a - b) for a, b in zip(arrays, map(exchange.from_bytes, old), strict=True)
                ]  # fmt: skip
            return [exchange.to_bytes(a.astype(np.float32)) for a in arrays]
        return new


def _alone() -> Any:
    from echofree.dist.world import World

    return World()
