"""What holds for every model; the test files of the models call these."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from echofree.config.build import instantiate
from echofree.model.streaming import Stream

CONF = Path(__file__).resolve().parents[3] / "conf" / "model"


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Small models on a busy machine wait for a second thread much longer than it helps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class PlainFrontEnd(nn.Module):
    """A front end whose echo estimate is half the far end, from the first sample: what the Kalman filter only gives
    after it has converged."""

    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> dict[str, Tensor]:
        return {"mic": mic, "far": far, "echo": 0.5 * far, "error": mic - 0.5 * far}

    def init_state(self, batch: int) -> dict[str, Tensor]:
        return {}

    def step(self, mic: Tensor, far: Tensor, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self(mic, far), state


def preset(name: str, **changes: Any) -> nn.Module:
    """The model of conf/model/NAME.yaml in eval mode, with some keys changed."""
    config = {**yaml.safe_load((CONF / f"{name}.yaml").read_text()), **changes}
    return instantiate(config, "model").eval()


def scramble(model: nn.Module, rng: np.random.Generator) -> nn.Module:
    """Random weights large enough that gains and masks move with the input, and batch norms that do something."""
    torch.manual_seed(int(rng.integers(2**31)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * parameter.square().mean().sqrt() * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.5)
                module.running_var.uniform_(0.5, 2)
    return model


def pair(rng: np.random.Generator, num_samples: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """A far end and a microphone that hears an echo of it, a talker and an offset: noise in bursts, [B, T]."""
    bursts = np.repeat(rng.uniform(0.01, 0.3, (2, batch, num_samples // 400 + 1)), 400, axis=-1)[..., :num_samples]
    far, near = rng.standard_normal((2, batch, num_samples)) * bursts
    mic = 0.5 * np.roll(far, 90, axis=-1) + near + 0.01
    return torch.tensor(mic, dtype=torch.float32), torch.tensor(far, dtype=torch.float32)


def check_latency(model: Any, rng: np.random.Generator, frame: int = 30) -> None:
    """est[n] depends on inputs up to n + latency - 1 and no further; of both signals, where the front end is plain."""
    hop, latency = model.hop_samples, model.latency_samples
    mic, far = pair(rng, (frame + 3) * hop)
    last = frame * hop + latency - 1  # the newest sample that est[frame * hop] may hear
    with torch.no_grad():
        before = model(mic, far)
        for which in range(2):
            touched = [mic.clone(), far.clone()]
            touched[which][:, last - hop // 2 + 1 : last + 1] += 1.0  # the window is almost zero at the very end
            change = (model(*touched) - before).abs()[0]
            assert change[: frame * hop - hop // 2 + 1].max() < 1e-7, "the estimate hears the future"
            if which == 0 or isinstance(model.chain.front_end, PlainFrontEnd):
                assert change[frame * hop : (frame + 1) * hop].max() > 0, "latency_samples is larger than need be"


def check_stream(model: Any, rng: np.random.Generator, chunks: tuple[int, ...], num_hops: float = 20.3) -> None:
    """A stream in chunks of any size equals forward, late by the latency; two interleaved streams don't mix."""
    num_samples, late = int(num_hops * model.hop_samples), model.latency_samples
    mic, far = pair(rng, num_samples, batch=2)
    with torch.no_grad():
        whole = model(mic, far)
    assert float(whole.std()) > 1e-3
    for chunk in chunks:
        streams = [Stream(model), Stream(model)]
        parts: list[list[Tensor]] = [[], []]
        for start in range(0, num_samples, chunk):
            here = slice(start, start + chunk)
            for b, stream in enumerate(streams):
                parts[b].append(stream.process(mic[b, here], far[b, here]))
        for b, stream in enumerate(streams):
            out = torch.cat([*parts[b], stream.flush()[0]])
            assert float(out[: model.hop_samples].abs().max()) == 0
            torch.testing.assert_close(out[late:], whole[b], rtol=0, atol=1e-5)


def check_ahead(model: Any, rng: np.random.Generator) -> None:
    """With the front end's part done before, forward gives the same bits and doesn't run it again."""
    mic, far = pair(rng, 12 * model.hop_samples + 7, batch=3)
    model = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(mic, far, details=True)
        front = model.ahead()(mic, far)
        model.chain.front_end = None
        given, wave = model(mic, far, details=True, front=front), model(mic, far, front=front)
    assert torch.equal(wave, expected["est"])
    assert set(expected) - set(given) <= {"flags"}
    for name, value in given.items():
        assert not isinstance(value, Tensor) or torch.equal(value, expected[name]), name


def check_state(model: Any, rng: np.random.Generator) -> None:
    """Flat, float32, batch first; `step` leaves the old state alone and is a pure function of it."""
    hop = model.hop_samples
    state = model.init_state(3)
    assert all(isinstance(v, Tensor) and v.dtype == torch.float32 and v.shape[0] == 3 for v in state.values())
    mic, far = pair(rng, 4 * hop, batch=3)
    for t in range(3):
        est, state = model.step(mic[:, t * hop : (t + 1) * hop], far[:, t * hop : (t + 1) * hop], state)
    assert est.shape == (3, hop)
    assert set(state) == set(model.init_state(3))
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in model.init_state(3).items()}
    kept = {name: value.clone() for name, value in state.items()}
    first, _ = model.step(mic[:, 3 * hop :], far[:, 3 * hop :], state)
    assert all(torch.equal(kept[name], state[name]) for name in kept)
    again, _ = model.step(mic[:, 3 * hop :], far[:, 3 * hop :], state)
    assert torch.equal(first, again)


def check_lengths_and_silence(model: Any, rng: np.random.Generator) -> None:
    """Any length goes in and comes out; silence gives silence and finite gradients."""
    for num_samples in (1, 255, 257, 16001):
        mic, far = pair(rng, num_samples)
        est = model(mic, far)
        assert est.shape == (1, num_samples)
        assert bool(est.isfinite().all())
    model.zero_grad()
    silence = torch.zeros(2, 3000)
    est = model(silence, silence)
    assert float(est.detach().abs().max()) == 0
    est.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def check_training(model: Any, rng: np.random.Generator) -> None:
    """Every parameter gets a gradient (nothing is dead), laid out in memory as the parameter itself: else
    DistributedDataParallel copies and warns."""
    model.train()
    model.zero_grad()
    mic, far = pair(rng, 8000, batch=2)
    model(mic, far).square().mean().backward()
    for name, parameter in ((n, p) for n, p in model.named_parameters() if p.requires_grad):
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name
        assert parameter.grad.stride() == parameter.stride(), name
    model.eval()


def check_open(model: Any, rng: np.random.Generator) -> None:
    """An untrained model lets a near end without far end pass."""
    mic, _ = pair(rng, 16000)
    mic -= mic.mean()
    with torch.no_grad():
        est = model(mic, torch.zeros_like(mic))
    level_db = 20 * torch.log10(est.std() / mic.std())
    assert -2 < float(level_db) < 1
    assert float(torch.corrcoef(torch.cat([est, mic]))[0, 1]) > 0.95


def check_half(model: Any, rng: np.random.Generator) -> None:
    """bf16 and fp16 autocast stay close to float32, and find nothing undefined in silence, alone or before a sound."""
    silence = torch.zeros(1, 4000)
    for dtype in (torch.bfloat16, torch.float16):
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            est = model(silence, silence)
            late = model(torch.cat([silence, pair(rng, 800)[0]], dim=1), torch.zeros(1, 4800))
        assert float(est.detach().abs().max()) == 0
        assert bool(late.isfinite().all())
        late.square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    mic, far = pair(rng, 8000)
    with torch.no_grad():
        exact = model(mic, far)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                est = model(mic, far)
            assert est.dtype == torch.float32
            error_db = 20 * torch.log10((est - exact).std() / exact.std())
            assert float(error_db) < -25
