"""The task of learning from clips whose near end is known and from a trained canceller that is better.

The supervised loss is always on. What the teacher makes of each batch is computed beside it (this rank's clips only, no
gradient, nothing of it kept) or read from a cache on disk; see `imitate` for the terms, `teacher`, `cache`. Validation
and test are those of `Supervised`, and so comparable with a run without a teacher.

Legend: B batch, T samples, L frames, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echofree.contracts import Batch, Loss
from echofree.errors import ConfigError
from echofree.loss import valid_samples
from echofree.task.cache import Cache, key_of
from echofree.task.imitate import BAND_SHARE, SELECTS, Gain, Latent, Output
from echofree.task.supervised import Supervised, ask
from echofree.task.teacher import find_teacher

TERMS = ("output", "gain", "latent")
TRIAL_S = 0.2


class Distill:
    """Supervised learning beside a teacher; see `contracts.Task`.

    Args:
        loss, metrics, sample_rate, aecmos_cut: of `Supervised`.
        teacher: a run directory, a checkpoint, or a folder that `python -m echofree.export` wrote.
        weights: factor of each of output, gain and latent; 0 leaves one out. A student needs "gain" and "filterbank",
            or "latent", among its details for the latter two.
        select: where the teacher is followed: frame (where it beats the student there), clip, none (everywhere).
        cache_dir: folder in which the teacher's outputs are kept; None: it is asked each time. The cache looks at every
            clip's samples, on a GPU one read-back per micro-batch.
        cache_mb: limit of that folder.

    Raises:
        ConfigError: no such teacher, numbers that can't be.
    """

    passes_front = True

    def __init__(
        self,
        loss: Loss,
        metrics: Sequence[str],
        sample_rate: int,
        teacher: str | None = None,
        weights: Mapping[str, float] | None = None,
        select: str = "frame",
        cache_dir: str | None = None,
        cache_mb: float = 4000.0,
        aecmos_cut: str = "whole",
    ):
        self.supervised = Supervised(loss, metrics, sample_rate, aecmos_cut)
        self.sample_rate = int(sample_rate)
        given = {"output": 2.5, "gain": 0.0, "latent": 0.0, **(weights or {})}
        problems = [
            f"task.weights.{n}: there is no such term. There are: {', '.join(TERMS)}" for n in given if n not in TERMS
        ]
        problems += [f"task.weights.{n}={w}: must be 0 or more" for n, w in given.items() if not w >= 0]
        if not problems and not any(given.values()):
            problems.append(
                "task.weights: all are 0, so that nothing is learnt from the teacher. Type: task=supervised"
            )
        if select not in SELECTS:
            problems.append(f"task.select={select}: must be {' | '.join(SELECTS)}. Type: task.select=frame")
        if not cache_mb > 0:
            problems.append(f"task.cache_mb={cache_mb}: must be greater than 0. Type: task.cache_mb=4000")
        if problems:
            raise ConfigError(problems)
        self.weights = {name: float(w) for name, w in given.items() if w > 0}
        self.teacher = find_teacher(teacher)
        facts = self.teacher.facts
        share = min(1.0, BAND_SHARE * facts.sample_rate / self.sample_rate) if facts.sample_rate else 1.0
        self.output, self.gain = Output(select, 1.0 if facts.sample_rate >= self.sample_rate else share), Gain(select)
        self.latent: Latent | None = None  # once the student's frames are known
        self.cache = None
        if cache_dir is not None:
            self.cache = Cache(Path(cache_dir).expanduser(), cache_mb, facts.fingerprint)
        terms = {"output": self.output.needs, "gain": self.gain.needs, "latent": Latent.needs}
        needs = [name for term in self.weights for name in terms[term]]
        self.needs = tuple(dict.fromkeys((*loss.needs, *needs)))

    def facts(self) -> dict[str, Any]:
        """What run.json says of it."""
        return {"teacher": asdict(self.teacher.facts)}

    def check_model(self, model: Any) -> None:
        """Before the run: loads the teacher, and lets both hear a moment of silence.

        Raises:
            ConfigError: student or teacher lack what a term compares, or the teacher can't be used.
        """
        device = next(model.parameters()).device
        wave = torch.zeros(1, round(TRIAL_S * self.sample_rate), device=device)
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                out = model(wave, wave, details=True) if self.needs else {"est": model(wave, wave)}
        finally:
            model.train(training)
        problems = [
            f"task.weights.{term}={self.weights[term]:g} compares {' and '.join(needs)}, and this student returns only "
            f"{', '.join(out)}. Type: task.weights.{term}=0"
            for term, needs in (("gain", Gain.needs), ("latent", Latent.needs))
            if term in self.weights and any(name not in out for name in needs)
        ]
        if problems:
            raise ConfigError(problems)
        self.teacher.hear(wave, wave, self.sample_rate, "latent" in self.weights)
        if "latent" in self.weights:
            self.latent = self._aligned(model)

    def weight(self, batch: Batch) -> float:
        """Seconds of valid audio."""
        return self.supervised.weight(batch)

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """See `contracts.Task`. Parts: those of the supervised loss; output, gain, latent before weighting; selected:
        the share of frames in which the teacher is followed."""
        heard = self.hear(batch)
        out: dict[str, Any] = self._student(model, batch)
        total, seconds, parts = self.supervised.loss_fn(out, batch)
        valid = valid_samples(batch)  # [B, T]
        usable = torch.isfinite(heard["est"]).all(1)  # a teacher that diverged is not followed
        est = torch.where(valid & usable[:, None], heard["est"], 0.0)
        student = torch.where(valid, out["est"].float(), 0.0)
        batch_f = batch.map(lambda t: t.float() if t.is_floating_point() else t)
        weights = batch.weight.to(student) * usable
        values, followed = {}, None
        if "output" in self.weights:
            values["output"], followed = self.output({**out, "est": student}, est, batch_f)
        if "gain" in self.weights:
            values["gain"] = self.gain(out, est, batch_f)
        if "latent" in self.weights:
            assert self.latent is not None, "check_model was called"
            values["latent"] = self.latent(out, torch.nan_to_num(heard["latent"]), batch_f)
        sums = {name: (value * weights).sum() for name, value in values.items()}
        for name, value in sums.items():
            total = total + self.weights[name] * value
        told = {name: value.detach() for name, value in sums.items()}
        if followed is not None:
            told["selected"] = (followed * weights).sum()
        return total, seconds, {**parts, **told}

    def _student(self, model: torch.nn.Module, batch: Batch) -> dict[str, Any]:
        return ask(model, batch, self.needs, "The loss with its teacher")

    def _aligned(self, model: Any) -> Latent:
        facts = self.teacher.facts
        own_s = int(model.hop_samples) / int(model.sample_rate)
        return Latent(own_s, facts.hop_samples / facts.sample_rate, self.sample_rate)

    def evaluate(self, model: torch.nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """See `Supervised.evaluate`: the teacher takes no part, so that "loss" is that of a run without one."""
        return self.supervised.evaluate(model, batch)

    # --- the teacher's side -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def hear(self, batch: Batch) -> dict[str, Tensor]:
        """What the teacher makes of a batch: "est" [B, T], and "latent" [B, L, H] when a term needs it."""
        latent = "latent" in self.weights
        if self.cache is None:
            return self.teacher.hear(batch.mic, batch.far, self.sample_rate, latent)
        real = [i for i, seconds in enumerate(batch.weight.tolist()) if seconds > 0]
        if not real:  # fillers only: nobody listens
            return {"est": torch.zeros_like(batch.mic), "latent": batch.mic.new_zeros(len(batch), 1, 1)}
        mic, far, lengths = batch.mic.cpu().numpy(), batch.far.cpu().numpy(), batch.num_samples.tolist()
        keys = {i: key_of(mic[i, : lengths[i]], far[i, : lengths[i]], self.sample_rate, latent) for i in real}
        known = {i: self.cache.get(key) for i, key in keys.items()}
        # one clip missing: the whole batch is computed, so that a clip's bits don't depend on what else was known
        asked = None
        if any(found is None for found in known.values()):
            asked = self.teacher.hear(batch.mic, batch.far, self.sample_rate, latent)
            for i, found in known.items():
                if found is None:
                    self._keep(keys[i], {name: value[i] for name, value in asked.items()}, lengths[i])
        return self._together([known.get(i, known[real[0]]) for i in range(len(batch))], asked, batch)

    def _keep(self, key: str, heard: Mapping[str, Tensor], num_samples: int) -> None:
        assert self.cache is not None
        values = {name: value.detach().float().cpu().numpy() for name, value in heard.items()}
        values["est"] = values["est"][:num_samples]
        if all(np.isfinite(value).all() for value in values.values()):
            self.cache.put(key, values)

    def _together(
        self, known: Sequence[Mapping[str, np.ndarray] | None], asked: Mapping[str, Tensor] | None, batch: Batch
    ) -> dict[str, Tensor]:
        """Rows from the cache and rows just computed, padded with zeros to one shape."""
        device = batch.mic.device
        rows: dict[str, list[Tensor]] = {}
        for i, found in enumerate(known):
            if found is None:
                assert asked is not None
                row = {name: value[i] for name, value in asked.items()}
            else:
                row = {name: torch.from_numpy(value.copy()).to(device) for name, value in found.items()}
            for name, value in row.items():
                rows.setdefault(name, []).append(value)
        lengths = {name: max(len(value) for value in values) for name, values in rows.items()}
        lengths["est"] = batch.mic.shape[1]
        return {name: torch.stack([_padded(value, lengths[name]) for value in values]) for name, values in rows.items()}


def _padded(value: Tensor, length: int) -> Tensor:
    """[L, ...] -> [length, ...], zeros behind."""
    return torch.nn.functional.pad(value, (0, 0) * (value.ndim - 1) + (0, length - len(value)))
