"""The terms of distillation against float64 numpy, clip by clip and frame by frame."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from echofree.contracts import Batch, Clip
from echofree.data.collate import collate
from echofree.task.imitate import SPAN_FRAMES, Gain, Latent, Output, at_times

RATE = 16000
LENGTHS = (3000, 2100)


def batch_of(rng: np.random.Generator, known: bool = True) -> Batch:
    clips = []
    for n in LENGTHS:
        near, far = (rng.standard_normal((2, n)) * 0.1).astype(np.float32)
        clips.append(Clip(near + 0.5 * far, far, near if known else None))
    return collate(clips, RATE)


def outputs(rng: np.random.Generator, batch: Batch) -> tuple[Tensor, Tensor]:
    """A student and a teacher, each better in its own half of the clip, zero in the padding."""
    noise = torch.from_numpy(rng.standard_normal((2, *batch.mic.shape)).astype(np.float32)) * 0.1
    late = torch.arange(batch.mic.shape[1]) >= 1200
    student = batch.near + noise[0] * torch.where(late, 1.0, 0.2)
    teacher = batch.near + noise[1] * torch.where(late, 0.2, 1.0)
    valid = torch.arange(batch.mic.shape[1]) < batch.num_samples[:, None]
    return student * valid, teacher * valid


def compressed(wave: np.ndarray, level: float, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.concatenate([np.zeros(384), wave / level, np.zeros(-len(wave) % 128 + 384)])
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(512) / 512)
    frames = np.stack([x[i : i + 512] for i in range(0, len(x) - 511, 128)]) * window / np.sqrt(0.375 * 512)
    spectrum = np.fft.rfft(frames)[:, :num_bins]
    power = np.abs(spectrum) ** 2 + 1e-6
    return spectrum * power**-0.35, power**0.15


def apart(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return np.asarray((0.3 * np.abs(a[0] - b[0]) ** 2 + 0.7 * (a[1] - b[1]) ** 2).mean(1))


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("select", ["frame", "clip", "none"])
def test_output_term(select: str, share: float, rng: np.random.Generator) -> None:
    batch = batch_of(rng)
    student, teacher = outputs(rng, batch)
    values, followed = Output(select, share)({"est": student}, teacher, batch)
    for i, n in enumerate(LENGTHS):
        waves = [x[i, :n].double().numpy() for x in (student, teacher, batch.near)]
        level = np.sqrt(np.mean(batch.mic[i, :n].double().numpy() ** 2))
        mine, theirs, near = (compressed(w, level, round(257 * share)) for w in waves)
        better = apart(theirs, near) < apart(mine, near)
        if select == "clip":
            better[:] = apart(theirs, near).sum() < apart(mine, near).sum()
        if select == "none":
            better[:] = True
        assert len(better) == -(-n // 128) + 3
        assert float(values[i]) == pytest.approx(np.mean(apart(mine, theirs) * better), rel=1e-4)
        assert float(followed[i]) == pytest.approx(better.mean(), abs=0.02)
        if select == "frame":
            assert 0.2 < better.mean() < 0.9  # the case means something


def test_a_worse_teacher_is_not_followed(rng: np.random.Generator) -> None:
    batch = batch_of(rng)
    student, _ = outputs(rng, batch)
    values, followed = Output("frame")({"est": batch.near}, student, batch)
    assert values.abs().max() == 0
    assert followed.max() == 0


def test_without_a_target_the_teacher_is_followed_everywhere(rng: np.random.Generator) -> None:
    batch = batch_of(rng, known=False)
    student, teacher = outputs(rng, batch)
    values, followed = Output("frame")({"est": student}, teacher, batch)
    everywhere, _ = Output("none")({"est": student}, teacher, batch)
    assert torch.equal(values, everywhere)
    assert (values > 0).all()
    assert followed == pytest.approx(torch.ones(2))


class Bands:
    """Five bands of 20 ms frames."""

    def power(self, wave: Tensor) -> Tensor:
        frames = torch.nn.functional.pad(wave, (0, -wave.shape[1] % 320)).unflatten(1, (-1, 320))
        bins = torch.fft.rfft(frames).abs().square()[..., :160]
        return bins.unflatten(-1, (5, 32)).sum(-1)


@pytest.mark.parametrize("select", ["frame", "clip", "none"])
def test_gain_term(select: str, rng: np.random.Generator) -> None:
    batch, term = batch_of(rng), Gain(select)
    _, teacher = outputs(rng, batch)
    gain = torch.from_numpy(rng.uniform(0.01, 1, (2, 10, 5)).astype(np.float32))
    values = term({"gain": gain, "filterbank": Bands()}, teacher, batch)
    for i in range(2):
        source, near, heard = (x[i].double() for x in (batch.mic, batch.near, teacher))
        powers = {k: Bands().power(w[None])[0].numpy() for k, w in {
            "in": source, "near": near, "heard": heard, "+n": source + near, "-n": source - near,
            "+h": source + heard, "-h": source - heard,
        }.items()}  # fmt: skip

        def best(of: str, letter: str, p: dict[str, np.ndarray] = powers) -> np.ndarray:
            cross = (p[f"+{letter}"] - p[f"-{letter}"]) / 4
            in_phase = np.clip(cross / np.sqrt(np.maximum(p["in"] * p[of], 1e-24)), 0, 1)
            return np.asarray(np.clip(np.sqrt(p[of] / np.maximum(p["in"], 1e-12)) * np.sqrt(in_phase), 0, 1))

        theirs, ideal = np.sqrt(best("heard", "h")), np.sqrt(best("near", "n"))
        mine = np.sqrt(gain[i].double().numpy())
        loud = np.maximum(powers["in"], powers["heard"])
        valid = loud > max(loud.max() * 1e-7, 1e-12)
        d_t, d_s = (theirs - ideal) ** 2, (mine - ideal) ** 2
        better = {"frame": d_t < d_s, "clip": (d_t * valid).sum() < (d_s * valid).sum(), "none": True}[select]
        want = ((mine - theirs) ** 2 * better)[valid].sum() / valid.sum()
        assert float(values[i]) == pytest.approx(want, rel=1e-3)


def test_latent_term_with_other_frames_and_widths(rng: np.random.Generator) -> None:
    batch = batch_of(rng)
    mine = torch.from_numpy(rng.standard_normal((2, 150, 6)).astype(np.float32))
    theirs = torch.from_numpy(rng.standard_normal((2, 40, 11)).astype(np.float32))
    student_s, teacher_s = 0.00125, 0.005
    values = Latent(student_s, teacher_s, RATE)({"latent": mine}, theirs, batch)
    for i, n in enumerate(LENGTHS):
        count = int(np.ceil(n / RATE / student_s))
        place = np.minimum(np.arange(count) * student_s / teacher_s, 39)
        t = np.stack([np.interp(place, np.arange(40), theirs[i, :, k].double().numpy()) for k in range(11)], 1)
        s = mine[i, :count].double().numpy()
        total, pairs = 0.0, 0
        for start in range(0, count, SPAN_FRAMES):
            a, b = s[start : start + SPAN_FRAMES], t[start : start + SPAN_FRAMES]
            a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
            total += ((a @ a.T - b @ b.T) ** 2).sum()
            pairs += len(a) ** 2
        assert count > SPAN_FRAMES  # more than one span
        assert float(values[i]) == pytest.approx(total / pairs, rel=1e-4)


def test_equal_latents_of_any_scale_and_turn_are_no_distance(rng: np.random.Generator) -> None:
    batch = batch_of(rng)
    mine = torch.from_numpy(rng.standard_normal((2, 13, 6)).astype(np.float32))
    turn = torch.linalg.qr(torch.from_numpy(rng.standard_normal((6, 6)))).Q.float()
    values = Latent(0.016, 0.016, RATE)({"latent": mine}, 3.0 * mine @ turn, batch)
    assert values.abs().max() < 1e-10


def test_times_between_frames() -> None:
    frames = torch.arange(4.0)[None, :, None]
    assert at_times(frames, 1.5, 4)[0, :, 0].tolist() == [0.0, 1.5, 3.0, 3.0]


@pytest.mark.parametrize("kind", ["output", "gain", "latent"])
def test_padding_and_neighbours_change_nothing(kind: str, rng: np.random.Generator) -> None:
    batch = batch_of(rng)
    student, teacher = outputs(rng, batch)
    gain = torch.from_numpy(rng.uniform(0.01, 1, (2, 10, 5)).astype(np.float32))
    latents = [torch.from_numpy(rng.standard_normal((2, 13, w)).astype(np.float32)) for w in (6, 9)]

    def value(rows: slice, samples: int) -> Tensor:
        some = batch.map(lambda x: x[rows, :samples] if x.ndim == 2 else x[rows])
        some = replace(some, name=[])
        frames, hops = -(-samples // 320), -(-samples // 256) + 1
        if kind == "output":
            return Output("frame")({"est": student[rows, :samples]}, teacher[rows, :samples], some)[0]
        if kind == "gain":
            out = {"gain": gain[rows, :frames], "filterbank": Bands()}
            return Gain("frame")(out, teacher[rows, :samples], some)
        return Latent(0.016, 0.016, RATE)({"latent": latents[0][rows, :hops]}, latents[1][rows, :hops], some)

    assert float(value(slice(1, 2), LENGTHS[1])) == pytest.approx(float(value(slice(0, 2), LENGTHS[0])[1]), rel=1e-4)
