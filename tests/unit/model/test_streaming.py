"""Streams: any chunk size, latency, reset, several at once; and the `linear` model through them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scenes import echo_of, room, speech

from echofree.model.linear import Linear
from echofree.model.streaming import Stream, offline


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scene(rng: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    far = speech(rng, 1.5)[:num]
    return echo_of(far, room(rng), 30), far


def streamed(stream: Stream, mic: np.ndarray, far: np.ndarray, chunk: int) -> np.ndarray:
    parts = [stream.process(mic[i : i + chunk], far[i : i + chunk]) for i in range(0, len(mic), chunk)]
    return np.concatenate([*parts, stream.flush().numpy()[0]])


@pytest.mark.parametrize("chunk", [1, 160, 256, 441, 4096])
@pytest.mark.parametrize("hop", [160, 256])
def test_any_chunk_equals_forward_late_by_the_latency(chunk: int, hop: int, rng: np.random.Generator) -> None:
    model = Linear(hop_samples=hop)
    mic, far = scene(rng, 6001 if chunk == 1 else 16001)
    whole = model(torch.tensor(mic[None]), torch.tensor(far[None]))[0].numpy()
    got = streamed(Stream(model), mic, far, chunk)
    assert len(got) == len(mic) + model.latency_samples
    assert not got[: model.latency_samples].any()
    assert np.abs(got[model.latency_samples :] - whole).max() < 1e-5


def test_offline_is_the_loop_over_step(rng: np.random.Generator) -> None:
    model = Linear()
    mic, far = (torch.tensor(x[None]) for x in scene(rng, 16001))
    assert (offline(model, mic, far) - model(mic, far)).abs().max() < 1e-5


def test_interleaved_streams_and_reset(rng: np.random.Generator) -> None:
    model = Linear()
    pairs = [scene(rng, 9000) for _ in range(2)]
    alone = [streamed(Stream(model), *pair, 441) for pair in pairs]
    streams, parts = [Stream(model), Stream(model)], [[], []]
    for start in range(0, 9000, 441):
        for i, (mic, far) in enumerate(pairs):
            parts[i].append(streams[i].process(mic[start : start + 441], far[start : start + 441]))
    for i in range(2):
        assert np.array_equal(np.concatenate([*parts[i], streams[i].flush().numpy()[0]]), alone[i])
    streams[0].reset()
    assert np.array_equal(streamed(streams[0], *pairs[1], 441), alone[1])


def test_keeps_shape_and_kind_and_refuses_others() -> None:
    stream = Stream(Linear(), batch=2)
    x = torch.zeros(2, 100)
    assert stream.process(x, x).shape == (2, 100)
    assert isinstance(stream.process(x.numpy(), x.numpy()), np.ndarray)
    assert stream.process(x[:, :0], x[:, :0]).shape == (2, 0)
    with pytest.raises(ValueError, match="same shape"):
        stream.process(x, x[:, :50])
    with pytest.raises(ValueError, match="expected"):
        stream.process(x[0], x[0])


def test_linear_details_and_contract(rng: np.random.Generator) -> None:
    model = Linear()
    mic, far = (torch.tensor(x[None]) for x in scene(rng, 16000))
    out = model(mic, far, details=True)
    assert isinstance(out, dict)
    assert torch.equal(out["est"], model(mic, far))
    assert (out["est"] + out["echo"] - out["mic"]).abs().max() < 1e-6
    assert {"delay_samples", "drift", "negative_delay", "unexplained", "saturated"} <= set(out["flags"])
    assert not list(model.parameters())
    assert model.latency_samples == model.hop_samples == 256


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_minutes_stay_stable(rng: np.random.Generator) -> None:
    """No growth of the state, no loss of echo reduction: the last 30 s against the second 30 s."""
    far = speech(rng, 30.0)
    mic = echo_of(far, room(rng))
    stream, levels, sizes = Stream(Linear()), [], []
    for _ in range(20):
        est = np.concatenate([stream.process(mic[i : i + 4096], far[i : i + 4096]) for i in range(0, len(mic), 4096)])
        levels.append(10 * np.log10(np.mean(mic**2) / np.mean(est**2)))
        sizes.append(max(value.abs().max().item() for name, value in stream.state.items() if "weight" in name))
    assert levels[-1] > levels[1] - 1
    assert sizes[-1] < 2 * sizes[1]
    assert all(torch.isfinite(value).all() for value in stream.state.values())
