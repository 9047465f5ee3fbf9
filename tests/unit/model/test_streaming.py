"""Streams: any chunk size, latency, reset, several at once; and the `linear` model through them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scenes import echo_of, room, speech

from echofree.model.frontend import FrontEnd
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


class Late:
    """est = mic - far, late by one hop of 128; its state counts the hops."""

    sample_rate, hop_samples, latency_samples = 16000, 128, 256

    def init_state(self, batch: int) -> dict[str, torch.Tensor]:
        return {"late": torch.zeros(batch, 128)}

    def step(self, mic: torch.Tensor, far: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
        return state["late"], {"late": mic - far}


@pytest.mark.parametrize("kind", [torch.tensor, np.asarray])
def test_int16_means_shares_of_full_scale_and_comes_back_as_int16(kind: Callable, rng: np.random.Generator) -> None:
    mic, far = rng.integers(-32768, 32768, (2, 1000)).astype(np.int16)
    mic[:4], far[:4] = [0, 32767, -32768, 100], [0, -32768, 32767, 1]
    out = Stream(Late()).process(kind(mic), kind(far))
    assert out.dtype == kind(mic).dtype
    want = np.clip(mic.astype(int) - far, -32768, 32767)[:744]
    assert np.asarray(out)[256:].tolist() == want.tolist()
    assert want[:4].tolist() == [0, 32767, -32768, 99]
    mixed = Stream(Late()).process(kind(mic), kind(far.astype(np.float32) / 32768))
    assert np.array_equal(np.asarray(mixed), np.asarray(out))


def test_without_a_far_end_nothing_is_playing(rng: np.random.Generator) -> None:
    mic = rng.uniform(-1, 1, (2, 700)).astype(np.float32)
    out = Stream(Late(), batch=2).process(mic, None)
    assert np.array_equal(out[:, 256:], mic[:, :444])


@pytest.mark.parametrize("wrong", [b"\x00" * 64, bytearray(64), [0.0] * 64, None])
def test_what_is_no_array_is_refused_by_name(wrong: Any) -> None:
    stream, x = Stream(Late()), np.zeros(64, np.float32)
    with pytest.raises(TypeError, match=f"mic is a {type(wrong).__name__}: give a numpy array or a tensor"):
        stream.process(wrong, x)
    if wrong is not None:
        with pytest.raises(TypeError, match=f"far is a {type(wrong).__name__}"):
            stream.process(x, wrong)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.complex64, bool])
def test_samples_of_an_unknown_scale_are_refused(dtype: Any) -> None:
    x = np.zeros(64, np.float32)
    with pytest.raises(TypeError, match=r"far is .*give float samples in \[-1, 1\] or int16"):
        Stream(Late()).process(x, x.astype(dtype))


def test_a_stream_that_is_reset_at_every_chunk_warns() -> None:
    x = np.zeros(512, np.float32)
    stream = Stream(Late())
    for _ in range(4):
        stream.process(x, x)
        stream.reset()
    stream.process(x, x)
    with pytest.warns(UserWarning, match="reset 5 times in a row"):
        stream.reset()
    long = np.zeros(3200, np.float32)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(9):  # calls of 0.2 s, and resets without anything between, are nobody's mistake
            stream.process(long, long)
            stream.reset()
            stream.reset()
    assert told == []


def test_the_same_signal_twice_leaves_near_silence(rng: np.random.Generator) -> None:
    talk = (0.1 * speech(rng, 2.0)).astype(np.float32)
    est = streamed(Stream(Linear()), talk, talk, 4096)[256:]
    assert np.sum(est[16000:] ** 2) < 10**-2 * np.sum(talk[16000:] ** 2)


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
    """No growth of the state, no loss of echo reduction: the last five minutes against the second 30 s. Whole clips
    take the same steps as streams (above), in a fifth of the time. A wrong alarm may cost half a minute some decibels,
    and what lies beyond 35 dB hangs on the numbers drawn."""
    far = speech(rng, 30.0)
    mic = echo_of(far, room(rng))
    front, size = FrontEnd(), len(mic)
    with torch.no_grad():
        out, state = front._clips(*(torch.tensor(np.tile(x, 20)[None]) for x in (mic, far)))
    errors = out["error"][0].numpy().reshape(20, size)
    levels = [10 * np.log10(np.mean(mic**2) / np.mean(error**2)) for error in errors]
    assert np.median(levels[10:]) > min(levels[1], 35) - 1, levels
    assert min(levels) > 15, levels
    with torch.no_grad():
        _, early = front._clips(*(torch.tensor(np.tile(x, 2)[None]) for x in (mic, far)))
    weights = [name for name in state if "weight" in name]
    assert weights
    assert max(state[name].abs().max() for name in weights) < 2 * max(early[name].abs().max() for name in weights)
    assert all(torch.isfinite(value).all() for value in state.values())
