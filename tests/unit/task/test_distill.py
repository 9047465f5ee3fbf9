"""Distillation: what it adds to the supervised loss, where the teacher's word comes from, what is refused before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echofree.contracts import Batch, Clip
from echofree.data.collate import collate
from echofree.errors import ConfigError
from echofree.loss import CompressedSpectral, SiSdr, Weighted
from echofree.model.bark import BarkNet
from echofree.task.cache import SUFFIX
from echofree.task.distill import Distill
from echofree.task.supervised import Supervised
from echofree.task.teacher import Checkpoint, find_teacher
from parent import SMALL, make_run

RATE = 16000
ALL = {"output": 2.0, "gain": 1.0, "latent": 0.5}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Other frames, another width, another class than the student."""
    return make_run(
        tmp_path_factory.mktemp("teacher") / "run", (*SMALL, "model.window_samples=640", "model.hop_samples=320")
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Nets this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def number(value: Tensor) -> float:
    return float(value.detach())


def loss_fn() -> Weighted:
    return Weighted({"spectral": CompressedSpectral(), "sdr": SiSdr()}, {"spectral": 1.0, "sdr": 0.02})


def distill(teacher: Path | None, **more: Any) -> Distill:
    return Distill(loss_fn(), ["si_sdr"], RATE, None if teacher is None else str(teacher), **more)


def student() -> BarkNet:
    torch.manual_seed(1)
    return BarkNet(hidden_size=12, front_end={"num_partitions": 2, "max_delay_ms": 100.0})


def batch_of(rng: np.random.Generator, lengths: tuple[int, ...] = (4000, 2500, 4000)) -> Batch:
    clips = []
    for i, n in enumerate(lengths):
        near, far = (rng.standard_normal((2, n)) * 0.1).astype(np.float32)
        clips.append(Clip(near + 0.5 * far, far, near, name=f"clip {i}", index=i))
    return collate(clips, RATE, filler=[False] * (len(lengths) - 1) + [True])


def test_adds_to_the_supervised_loss(teacher: tuple[Path, Any], rng: np.random.Generator) -> None:
    """Against the parts put together by hand, the teacher called as a model of its own."""
    task, model, batch = distill(teacher[0], weights=ALL), student(), batch_of(rng)
    task.check_model(model)
    total, seconds, parts = task.loss(model, batch)
    model.zero_grad()
    model = student()  # its batch norms have moved
    out = model(batch.mic, batch.far, details=True)
    with torch.no_grad():
        heard = teacher[1](batch.mic, batch.far, details=True)
    valid = torch.arange(4000) < batch.num_samples[:, None]
    valid[2] = False
    est = torch.where(valid, heard["est"], 0.0)
    plain, _, plain_parts = loss_fn()(out, batch)
    assert task.latent is not None
    assert task.latent.teacher_s == pytest.approx(320 / RATE)
    assert task.latent.student_s == pytest.approx(256 / RATE)
    values = {
        "output": task.output({**out, "est": torch.where(valid, out["est"], 0.0)}, est, batch)[0],
        "gain": task.gain(out, est, batch),
        "latent": task.latent(out, heard["latent"], batch),
    }
    sums = {name: number((value * batch.weight).sum()) for name, value in values.items()}
    want = number(plain) + sum(ALL[name] * value for name, value in sums.items())
    assert number(total) == pytest.approx(want, rel=1e-5)
    assert number(seconds) == float(batch.weight.sum()) == task.weight(batch)
    assert list(parts) == ["spectral", "sdr", "output", "gain", "latent", "selected"]
    for name in plain_parts:
        assert number(parts[name]) == pytest.approx(number(plain_parts[name]), rel=1e-5)
    for name, value in sums.items():
        assert number(parts[name]) == pytest.approx(value, rel=1e-4)
        assert value > 0


def test_gradient_reaches_the_student_alone(teacher: tuple[Path, Any], rng: np.random.Generator) -> None:
    task, model = distill(teacher[0], weights=ALL), student()
    task.check_model(model)
    state = torch.get_rng_state()
    task.loss(model, batch_of(rng))[0].backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (model.network.gru.weight_hh_l0,))
    theirs = task.teacher._model  # type: ignore[attr-defined]
    assert not theirs.training
    assert not any(p.requires_grad or p.grad is not None for p in theirs.parameters())
    assert model.training


class Counted:
    """A teacher that counts how often it is asked."""

    def __init__(self, inner: Any):
        self.inner, self.facts, self.asked = inner, inner.facts, 0

    def hear(self, mic: Tensor, far: Tensor, rate_hz: int, latent: bool) -> dict[str, Tensor]:
        self.asked += 1
        found: dict[str, Tensor] = self.inner.hear(mic, far, rate_hz, latent)
        return found


def test_a_cached_word_is_the_same_word(teacher: tuple[Path, Any], tmp_path: Path, rng: np.random.Generator) -> None:
    batch = batch_of(rng)
    line = distill(teacher[0], weights=ALL)
    cached = distill(teacher[0], weights=ALL, cache_dir=str(tmp_path))
    cached.teacher = Counted(cached.teacher)
    for task in (line, cached):
        task.check_model(student())
    cached.teacher.asked = 0
    losses = [task.loss(student(), batch) for task in (line, cached, cached)]
    assert cached.teacher.asked == 1
    first = losses[0]
    for total, _, parts in losses[1:]:
        assert number(total) == number(first[0])
        assert {k: number(v) for k, v in parts.items()} == {k: number(v) for k, v in first[2].items()}
    assert len(list(tmp_path.rglob(f"*{SUFFIX}"))) == 2  # no file for a filler


def test_a_damaged_file_in_the_cache_changes_nothing(
    teacher: tuple[Path, Any], tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    batch = batch_of(rng)
    task = distill(teacher[0], cache_dir=str(tmp_path))
    before = number(task.loss(student(), batch)[0])
    for path in tmp_path.rglob(f"*{SUFFIX}"):
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    with caplog.at_level(logging.WARNING):
        assert number(task.loss(student(), batch)[0]) == before
    assert sum("is damaged" in r.message for r in caplog.records) == 2


def test_a_teacher_that_diverged_is_not_followed(teacher: tuple[Path, Any], rng: np.random.Generator) -> None:
    task, batch = distill(teacher[0]), batch_of(rng)
    plain = number(task.loss(student(), batch)[0])

    class Diverged(Counted):
        def hear(self, *args: Any) -> dict[str, Tensor]:
            found = super().hear(*args)
            found["est"][0, 100] = torch.nan
            return found

    task.teacher = Diverged(task.teacher)
    total, _, parts = task.loss(student(), batch)
    total.backward()
    supervised = Supervised(loss_fn(), [], RATE).loss(student(), batch)[0]
    assert number(supervised) < number(total) < plain
    assert torch.isfinite(total)
    assert 0 < number(parts["selected"]) <= float(batch.weight[1])


class Passing:
    """est = mic, at a rate of its own."""

    def __init__(self, rate_hz: int):
        self.sample_rate, self.heard = rate_hz, None

    def to(self, device: torch.device) -> Passing:
        return self

    def __call__(self, mic: Tensor, far: Tensor) -> Tensor:
        self.heard = mic.shape
        return mic


@pytest.mark.parametrize("rate_hz", [48000, 24000, 8000])
def test_a_teacher_at_another_rate_stays_aligned(
    rate_hz: int, teacher: tuple[Path, Any], rng: np.random.Generator
) -> None:
    inner = Checkpoint(teacher[0])
    inner._model = Passing(rate_hz)
    t = np.arange(4001) / RATE
    mic = torch.from_numpy(np.sin(2 * np.pi * 700 * t) + 0.3 * np.sin(2 * np.pi * 2900 * t)).float()[None]
    est = inner.hear(mic, mic, RATE, False)["est"]
    assert inner._model.heard == (1, -(-4001 * rate_hz // RATE))
    assert est.shape == mic.shape
    middle = slice(300, -300)
    assert (est - mic)[:, middle].abs().max() < 2e-3


def test_bands_above_the_teacher_say_nothing(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path / "slow", (*SMALL, "model.sample_rate=8000", "data.sample_rate=8000"))
    assert distill(folder).output.share == pytest.approx(0.95 * 8000 / 16000)


def test_evaluation_is_that_of_a_run_without_a_teacher(teacher: tuple[Path, Any], rng: np.random.Generator) -> None:
    task, batch = distill(teacher[0]), batch_of(rng)
    task.teacher = None  # type: ignore[assignment]  # takes no part
    rows = task.evaluate(student().eval(), batch)
    assert rows == Supervised(loss_fn(), ["si_sdr"], RATE).evaluate(student().eval(), batch)
    assert len(rows) == 2


def test_fingerprint_is_about_weights_and_config(teacher: tuple[Path, Any], tmp_path: Path) -> None:
    first = find_teacher(str(teacher[0])).facts
    assert find_teacher(first.path).facts.fingerprint == first.fingerprint
    other, _ = make_run(tmp_path / "other", (*SMALL, "model.window_samples=640", "model.hop_samples=320"), seed=6)
    assert find_teacher(str(other)).facts.fingerprint != first.fingerprint


def test_wrong_teachers_are_refused(teacher: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.teacher is not given"):
        distill(None)
    with pytest.raises(ConfigError, match=r"task\.teacher=.*nowhere: .*doesn't exist"):
        distill(tmp_path / "nowhere")
    broken, _ = make_run(tmp_path / "broken")
    weights = next(broken.rglob("model.pt"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"task\.teacher=.*no complete checkpoint"):
        distill(broken)
    (tmp_path / "export").mkdir()
    (tmp_path / "export/contract.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"task\.teacher=.*can't be read"):
        distill(tmp_path / "export")


def test_wrong_numbers_are_refused_together(teacher: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        distill(teacher[0], weights={"outputs": 1.0, "gain": -1.0}, select="patch", cache_mb=0.0)
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="all are 0"):
        distill(teacher[0], weights={"output": 0.0})


def test_a_student_without_gains_is_refused(teacher: tuple[Path, Any]) -> None:
    task = distill(teacher[0], weights={"gain": 1.0})
    with pytest.raises(ConfigError, match=r"task\.weights\.gain=1 compares gain and filterbank"):
        task.check_model(teacher[1])
    task = distill(teacher[0], weights={"gain": 0.0, "latent": 1.0})
    task.check_model(teacher[1])


@pytest.mark.slow
def test_an_exported_teacher_says_what_its_model_says(tmp_path: Path, rng: np.random.Generator) -> None:
    pytest.importorskip("onnxruntime", reason="needs echofree[export]")
    pytest.importorskip("onnxscript", reason="needs echofree[export]")
    from echofree.export.onnx import Onnx
    from echofree.export.run import export

    folder, model = make_run(tmp_path / "run")
    outcome = export(model, {"onnx": Onnx()}, tmp_path / "export", str(folder), 0.05, lambda text: None)[0]
    assert outcome.folder is not None
    assert outcome.problems == []
    batch = batch_of(rng)
    task = distill(outcome.folder)
    task.check_model(student())
    est, want = task.hear(batch)["est"], model(batch.mic, batch.far)
    valid = torch.arange(4000) < batch.num_samples[:, None]
    assert torch.where(valid, est - want, 0).abs().max() < 1e-3 * want.abs().max()
    assert task.facts()["teacher"]["kind"] == "export"
    with pytest.raises(ConfigError, match="shows its output alone"):
        distill(outcome.folder, weights={"latent": 1.0}).check_model(student())
