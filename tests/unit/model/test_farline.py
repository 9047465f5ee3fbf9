"""The far end's line against an ideal resampler, the drift estimator against known drifts, and the shadow filter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scenes import RATE, echo_of, reduction_db, room, speech

from echofree.data.scene import resample_clock
from echofree.model.delay import DelayEstimator
from echofree.model.farline import HALF, FarLine
from echofree.model.frontend import FrontEnd
from echofree.model.shadow import Shadow


def tones(time: np.ndarray) -> np.ndarray:
    """A signal that can be had at any moment (in samples of 16 kHz), up to 5.6 kHz."""
    return sum(np.sin(2 * np.pi * hz * time / RATE + i) for i, hz in enumerate((200.0, 1130.0, 3100.0, 5600.0)))


def test_whole_delays_are_copies(rng: np.random.Generator) -> None:
    line = FarLine(256, 1024, 2)
    state = line.init_state(3)
    state["whole"] += torch.tensor([[0.0], [7.0], [1024.0]])
    far = torch.tensor(rng.standard_normal((3, 256 * 12)), dtype=torch.float32)
    got = torch.cat([line.advance(far[:, a : a + 512], state) for a in range(0, far.shape[1], 512)], 1)
    for row, delay in enumerate((0, 7, 1024)):
        assert torch.equal(got[row, delay:], far[row, : far.shape[1] - delay])
        assert not got[row, :delay].any()


@pytest.mark.parametrize("ppm", [-500.0, 37.0, 1000.0])
def test_drifting_delays_are_resampling(ppm: float) -> None:
    hop, num = 160, 400
    line = FarLine(hop, 4000, 3, dtype=torch.float64)
    state, start = line.init_state(2), torch.tensor([[1500.25], [3000.0]], dtype=torch.float64)
    state["whole"] += start.round()
    state["fraction"] += start - start.round()
    state["rate"] += ppm * 1e-6
    time = np.arange(hop * num, dtype=np.float64)
    far = torch.tensor(np.stack([tones(time)] * 2))
    parts = [line.advance(far[:, : 7 * hop], state), *(line.advance(x, state) for x in far[:, 7 * hop :].split(hop, 1))]
    taken = start.numpy() + ppm * 1e-6 * (time + 1)
    wanted = np.where(time > 3500, tones(time - taken), 0.0)
    got = torch.cat(parts, 1).numpy() * (time > 3500)
    assert np.abs(got - wanted).max() < 0.02  # four tones of amplitude 1: -50 dB
    again = line.reread(state).numpy()  # the same delays lead back
    assert np.abs(again - got[:, -3 * hop :]).max() < 1e-9
    assert torch.allclose(state["whole"] + state["fraction"], start + ppm * 1e-6 * hop * num, atol=1e-9)


def test_a_delay_stops_at_its_ends() -> None:
    line = FarLine(160, 320, 1)
    state = line.init_state(2)
    state["whole"] += torch.tensor([[10.0], [470.0]])
    state["rate"] += torch.tensor([[-1e-3], [1e-3]])
    for _ in range(200):
        line.advance(torch.zeros(2, 160), state)
    assert state["whole"].flatten().tolist() == [HALF, 320 + 160]
    assert not state["fraction"].any()


@pytest.mark.parametrize("hop", [160, 256])
def test_drift_is_told_within_some_ppm(hop: int, rng: np.random.Generator) -> None:
    drifts = (-700.0, -40.0, 0.0, 60.0, 300.0)
    mics, fars = [], []
    for ppm in drifts:
        far = speech(rng, 9.0)
        fars.append(far)
        mics.append(echo_of(resample_clock(far, -ppm), room(rng), 60.0))
    pair = torch.tensor(np.stack([np.stack(mics), np.stack(fars)], axis=1))
    estimator = DelayEstimator(RATE, hop)
    state, size = estimator.init_state(len(drifts)), estimator.period * hop
    slot, due = torch.zeros(len(drifts), dtype=torch.long), torch.ones(len(drifts), 1, dtype=torch.bool)
    for start in range(0, pair.shape[-1] - size + 1, size):
        estimator.observe(pair[..., start : start + size], slot, state)
        estimator.update(due, state)
    told = estimator.drift_ppm(state).numpy()
    assert (np.abs(told - np.array(drifts)) < 5 + 0.05 * np.abs(drifts)).all(), told  # the filter follows 10 by itself
    assert (state["rate"][:, 0] != 0).tolist() == [True, True, False, True, True]


def test_a_changed_echo_path_is_learnt_again_at_once(rng: np.random.Generator) -> None:
    """Two rooms one after the other, five times."""
    mics, fars = [], []
    for _ in range(5):
        far = speech(rng, 9.0)
        old, new = (echo_of(far, room(rng)) for _ in range(2))
        half = len(far) // 2
        noise = 1e-6 * rng.standard_normal(len(far)).astype(np.float32)
        mics.append(np.concatenate([old[:half], new[half:]]) + noise)
        fars.append(far)
    error = FrontEnd(output="prior")(torch.tensor(np.stack(mics)), torch.tensor(np.stack(fars)))["error"].numpy()
    at = half / RATE
    pairs = list(zip(mics, error, strict=True))
    assert min(reduction_db(mic, left, at - 1.0, at) for mic, left in pairs) > 15
    after = [reduction_db(mic, left, at + 1.5, at + 2.5) for mic, left in pairs]
    assert np.median(after) > 12, after
    assert min(after) > 5, after


def test_shadow_alarms_at_a_change_and_not_at_a_talker(rng: np.random.Generator) -> None:
    """Sixteen scenes, fed with the error of a filter that fits perfectly until the change; a talker comes before it.

    Time after the change counts while the far end speaks: in a pause there is nothing to notice. In 400 scenes the
    alarm came after 0.2 s (median) and 0.5 s (98 %), and a talker was taken for a change in two."""
    shadow, hop, num = Shadow(RATE, 256), 256, 16
    far, near = (np.stack([speech(rng, 8.0) for _ in range(num)]) for _ in range(2))
    near[:, : 2 * RATE] = 0
    near[:, 4 * RATE :] = 0
    old, new = (np.stack([echo_of(x, room(rng)) for x in far]) for _ in range(2))
    change = 6 * RATE
    echo = np.concatenate([old[:, :change], new[:, change:]], axis=1)
    state = shadow.init_state(num)
    one, alarms = torch.ones(num, 1), []
    for t in range(far.shape[1] // hop):
        here = slice(t * hop, (t + 1) * hop)
        mic, x, left = (torch.tensor(v[:, here]) for v in (echo + near, far, echo + near - old))
        heard = shadow.hear(torch.stack([mic, x], 1), state)
        told = shadow.step(heard, 0, left, one, one, 0.1 * one if t <= 1 else 1e-4 * one, state)
        assert (told is None) == (t % 2 == 0)  # an answer per block of two hops
        if told is not None:
            alarms.append(told[0][:, 0].numpy() > 0)
    alarm = np.stack(alarms, axis=1)  # [num, blocks]
    until = change // (2 * hop)  # blocks that end before the change
    assert alarm[:, :until].any(1).sum() <= 2, alarm[:, :until].sum(1)
    loud = (far[:, : alarm.shape[1] * 2 * hop].reshape(num, -1, 2 * hop) ** 2).mean(-1) > 1e-5
    told_at = until + alarm[:, until:].argmax(1)
    spoken_s = np.array([loud[k, until:end].sum() for k, end in enumerate(told_at)]) * 2 * hop / RATE
    assert alarm[:, until:].any(1).all()
    assert np.median(spoken_s) < 0.4, spoken_s
    assert (spoken_s < 0.8).sum() >= num - 1, spoken_s
