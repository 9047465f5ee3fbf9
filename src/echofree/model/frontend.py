"""The linear front end: DC blocker, delay and drift estimation, resampling, Kalman filter. It has nothing to train.

What it returns is aligned with the microphone sample by sample and causal without look-ahead. Positive delay means that
the microphone lags the far end. Conditions under which a Kalman filter alone fails silently are handled or flagged
here: DC or rumble, another scale on one side, a bulk delay, a clock that drifts, an echo path that changes, a silent or
unrelated far end, clipping, a microphone that is ahead of its far end.

The delay is renewed once per period of U hops. Offline, what doesn't depend on the filter is computed for a period at
once; `step` is the same code with a period of one hop.

Legend: B batch, T samples, L partitions, F bins, M hop, U hops of a period, n hops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echofree.contracts import State
from echofree.dsp import BlockIir, dc_blocker, frequency_response, high_pass
from echofree.errors import ConfigError
from echofree.model.adaptive import STATES, TINY, KalmanFilter
from echofree.model.delay import MAX_DRIFT_PPM, NUM_AGREE, DelayEstimator
from echofree.model.farline import HALF, FarLine
from echofree.model.shadow import FLOOR, Shadow

OUTPUTS = ("mic", "far", "mic_hp", "far_hp", "echo", "error")
CPU_BATCH = 32  # clips at once on a CPU: what one hop touches then fits into a core's cache

DC_CUTOFF_HZ = 5.0  # turns 100 Hz by 3 degrees
HIGH_PASS_HZ = 50.0
FAR_ACTIVE = 1e-8  # mean square of the far end: -80 dB below full scale
START_VARIANCE = 1.0  # variance of the newest partition at the start, in units of mean |mic|^2 / mean |far|^2
# And of the others: the decay of a room of this reverberation time (-60 dB), so that a talker who is there from the
# first word on isn't taken for echo; but not below the second number: a bulk delay may put the echo anywhere.
START_DECAY_S = 0.3
START_LEAST = 0.05
MAX_PATH_GAIN = 4.0  # upper limit of that ratio, beyond which the microphone surely hears more than echo
VARIANCE_FLOOR = 1e-7
INT16 = 32768.0  # one side in [-1, 1], the other in 16-bit counts: seen, and no obstacle
LEVEL_S = 0.25  # time constant of the levels
HEADROOM_S = 0.006  # the direct path is placed this far inside the filter
LATEST_S = 0.020  # a direct path inside the filter up to here needs no new alignment
START_S = 1.0  # of active far end, during which the start variance follows the level
NEGATIVE_UPDATES = 8  # 2 s
CLIP_SHARE = 1 - 1e-5  # of the highest sample so far, from which on a sample counts as clipped
CLIP_RATE = 0.02  # of the share of clipped hops, per hop
JUDGE_S = 3.0  # of active far end before one that never explained anything is called unexplained
WORSE_DB = 6.0  # an error louder than the microphone by this much is no estimate, unless the far end was recognised
QUICK_S = 0.1  # time constant with which the echo estimate is faded in and out
PATIENCE_S = 10.0  # the same for one that did
SURE_CONFIDENCE = 10.0  # of the delay, by which alone a far end counts as heard
MIN_GAIN_DB = 1.0  # smoothed echo reduction below which the far end explains nothing


def start_profile(num_partitions: int, hop_s: float) -> list[float]:
    """Variances at the start relative to that of the newest partition, oldest first."""
    decay = 10 ** (-6 * hop_s / START_DECAY_S)
    return [max(decay**age, START_LEAST) for age in range(num_partitions - 1, -1, -1)]


class FrontEnd(nn.Module):
    """Linear echo cancellation for a batch of streams.

    Args:
        sample_rate: Hz, a multiple of 4000.
        hop_samples: M, samples per step.
        num_partitions: L; the filter spans L M samples behind the estimated delay.
        transition: A of the Kalman filter.
        output: "posterior" or "prior", see `KalmanFilter`.
        psd_smoothing: of the near-end estimate, per hop.
        max_delay_ms: bulk delays up to here are found and taken out; 0 turns the alignment off.
        dtype: float32; float64 for comparisons.
    """

    profile: Tensor

    def __init__(
        self,
        sample_rate: int = 16000,
        hop_samples: int = 256,
        num_partitions: int = 10,
        transition: float = 0.999,
        output: str = "posterior",
        psd_smoothing: float = 0.5,
        max_delay_ms: float = 1000.0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        problems = []
        if output not in ("posterior", "prior"):
            problems.append(f"output={output!r} must be posterior or prior")
        if not 0 < transition <= 1:
            problems.append(f"transition={transition} must lie in (0, 1]")
        if num_partitions < 1:
            problems.append(f"num_partitions={num_partitions} must be at least 1")
        if not 0 <= max_delay_ms <= 1000:
            problems.append(f"max_delay_ms={max_delay_ms} must lie between 0 and 1000")
        if problems:
            raise ConfigError(problems)
        self.sample_rate, self.hop_samples, self.num_partitions = sample_rate, hop_samples, num_partitions
        self.dtype = dtype
        self.delay = DelayEstimator(sample_rate, hop_samples, dtype=dtype)
        self.dc = BlockIir(*dc_blocker(DC_CUTOFF_HZ, sample_rate), hop_samples, dtype)
        high = high_pass(HIGH_PASS_HZ, sample_rate)
        self.high = BlockIir(*high, hop_samples, dtype)
        self.filter = KalmanFilter(
            hop_samples,
            num_partitions,
            transition,
            output,
            psd_smoothing,
            frequency_response(*high, hop_samples + 1),
            dtype,
        )
        self.max_samples = int(max_delay_ms * 1e-3 * sample_rate / hop_samples) * hop_samples
        self.line = FarLine(hop_samples, self.max_samples, num_partitions, dtype)
        self.shadow = Shadow(sample_rate, hop_samples, dtype)
        self.hop_s = hop_samples / sample_rate
        profile = torch.tensor(start_profile(num_partitions, self.hop_s), dtype=dtype)
        self.register_buffer("profile", profile, persistent=False)  # [L], oldest first

    def init_state(self, batch: int) -> State:
        """A fresh set of streams: tensors by name, first axis batch."""
        zeros = self.dc.matrix.new_zeros
        state = {
            "slot": zeros(batch, 1),  # hops since the last period ended
            "spectra": zeros(batch, self.num_partitions - 1, self.hop_samples + 1, 2),  # of the aligned far end
            "far_last": zeros(batch, self.hop_samples),  # aligned
            "dc": zeros(batch, 2, self.dc.order),
            "high": zeros(batch, 2, self.high.order),  # mic, aligned far
            "high_error": zeros(batch, self.high.order),
            "level": zeros(batch, 2),  # smoothed mean squares of (far, mic) while the far end is active
            "path_gain": zeros(batch, 1),  # level ratio at which the variance was last started
            "active": zeros(batch, 1),  # hops with an active far end, capped
            "mic_peak": zeros(batch, 1),
            "clipped": zeros(batch, 1),  # share of recent hops in which the microphone clipped
            "ever_clipped": zeros(batch, 1),
            "reduction": zeros(batch, 2),  # smoothed mean squares of (mic, error) while active
            "reduction_quick": zeros(batch, 2),
            "doubt": zeros(batch, 1),  # active hops since the far end last explained anything
            "explained": zeros(batch, 1),  # 1 once it has
            "doubtful": zeros(batch, 1),  # active hops spent unexplained, capped
            "trust": zeros(batch, 1) + 1,  # the share of the echo estimate that is used
            "negative": zeros(batch, 1),  # updates in a row that found the microphone ahead
        }
        return {
            **state,
            **{f"line.{k}": v for k, v in self.line.init_state(batch).items()},
            **{f"shadow.{k}": v for k, v in self.shadow.init_state(batch).items()},
            **{f"kalman.{k}": v for k, v in self.filter.init_state(batch).items()},
            **{f"delay.{k}": v for k, v in self.delay.init_state(batch).items()},
        }

    @torch.no_grad()
    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> dict[str, Any]:
        """Whole clips; equal to the loop over `step`.

        Args:
            mic, far: [B, T], as captured.
            details: adds "flags".

        Returns:
            Tensors [B, T] in the dtype of the front end: "mic" (DC blocked), "far" (DC blocked, aligned), "mic_hp" and
            "far_hp" (the same through the 50 Hz high-pass), "echo" (estimate of the echo in mic), "error" = mic - echo.
            "flags": see `flags`.
        """
        chunk = CPU_BATCH if mic.device.type == "cpu" else max(len(mic), 1)
        parts = [self._clips(m, f) for m, f in zip(mic.split(chunk), far.split(chunk), strict=True)]
        if len(parts) == 1:
            out: dict[str, Any] = parts[0][0]
        else:
            out = {key: torch.cat([part[key] for part, _ in parts]) for key in OUTPUTS}
        if details:
            flags = [self.flags(state) for _, state in parts]
            out["flags"] = {key: torch.cat([part[key] for part in flags]) for key in flags[0]}
        return out

    def _clips(self, mic: Tensor, far: Tensor) -> tuple[State, State]:
        """-> (outputs [B, T], the state at the end)."""
        batch, num_samples = mic.shape
        period = self.delay.period * self.hop_samples
        pad = -num_samples % self.hop_samples
        pair = torch.nn.functional.pad(torch.stack([mic, far], dim=1).to(self.dtype), (0, pad))  # [B, 2, n M]
        state = self.init_state(batch)
        out = {key: torch.empty_like(pair[:, 0]) for key in OUTPUTS}
        with torch.autocast(mic.device.type, enabled=False):
            for start in range(0, pair.shape[-1], period):
                here = slice(start, start + period)
                run = pair[:, :, here]
                hops = self._advance(run, state, due=run.shape[-1] == period)
                for key, value in hops.items():
                    out[key][:, here] = value
        return {key: value[:, :num_samples] for key, value in out.items()}, state

    @torch.no_grad()
    def step(self, mic: Tensor, far: Tensor, state: State) -> tuple[State, State]:
        """mic, far [B, M] -> (the tensors of `forward` without flags, each [B, M]; the new state)."""
        state = {key: value.clone() for key, value in state.items()}
        due = bool((state["slot"] == self.delay.period - 1).any())
        with torch.autocast(mic.device.type, enabled=False):
            return self._advance(torch.stack([mic, far], dim=1).to(self.dtype), state, due), state

    def flags(self, state: State) -> dict[str, Tensor]:
        """What a person should know about the streams so far, each [B]: "delay_samples" (0 until found),
        "delay_confidence" (peak / rms), "drift_ppm" (of the last seconds), and bools: "drift" (beyond 30 ppm),
        "negative_delay" (the microphone is ahead of the far end, which no causal filter can mend), "unexplained" (for
        most of the time in which the far end was active it explained nothing of the microphone), "saturated" (the
        microphone clips)."""
        delay = _part(state, "delay.")
        drift = self.delay.drift_ppm(delay)
        return {
            "delay_samples": self.delay.delay_samples(delay),
            "delay_confidence": delay["confidence"][:, 0],
            "drift_ppm": drift,
            "drift": drift.abs() > MAX_DRIFT_PPM,
            "negative_delay": state["negative"][:, 0] >= NEGATIVE_UPDATES,
            "unexplained": (state["doubtful"] > 0.3 * state["active"])[:, 0] & (state["doubtful"][:, 0] > 0),
            "saturated": state["ever_clipped"][:, 0] > 0,
        }

    def _advance(self, pair: Tensor, state: State, due: bool) -> State:
        """n hops, in place on `state`. pair [B, 2, n M] raw (mic, far); n = 1, or n <= U from the start of a period on.
        due: the last hop ends a period for some stream. -> the outputs, [B, n M] each."""
        hop, count = self.hop_samples, self.num_partitions
        kalman = {k: state["kalman." + k] for k in STATES}
        shadow = _part(state, "shadow.")
        num = pair.shape[-1] // hop
        clipped = self._clipping(pair[:, 0].unflatten(-1, (num, hop)), state)  # [B, n]
        pair, rest = self.dc(pair, state["dc"])
        state["dc"].copy_(rest)
        mic, far = pair[:, 0], self.line.advance(pair[:, 1], _part(state, "line."))
        spectra = self._history(far, state)  # [B, L - 1 + n, F], oldest first
        re, im = spectra.real.contiguous(), -spectra.imag
        power = re.square().addcmul_(im, im)
        passed, rest = self.high(torch.stack([mic, far], dim=1), state["high"])
        state["high"].copy_(rest)
        adapt, floor, start = self._levels(mic.unflatten(-1, (num, hop)), power, state)  # [B, n] each
        floors = floor.unsqueeze(-1) * self.profile  # [B, n, L]
        learn = adapt * (1 - clipped)
        heard = self.shadow.hear(passed, shadow)

        echoes, lefts = [], []
        for i in range(num):
            block, at = slice(i, i + count), slice(i, i + 1)
            now = mic[:, i * hop : (i + 1) * hop]
            error = now - self.filter.predict(spectra[:, block], kalman)
            left, rest = self.high(error, state["high_error"])
            state["high_error"].copy_(rest)
            errors = torch.stack([error, left], dim=1)
            planes = (re[:, block], im[:, block])
            after = self.filter.correct(planes, power[:, block], errors, learn[:, at], floors[:, i], kalman)
            echoes.append(now - after)
            lefts.append(left)
            quick = torch.maximum(floor[:, at], FLOOR * start[:, at])
            alarms = self.shadow.step(heard, i, left, adapt[:, at], learn[:, at], quick, shadow)
            if alarms is not None and (alarms[0].device.type != "cpu" or bool(alarms[0].any())):
                self.filter.doubt(*alarms, kalman)
        trust = self._judge(passed[:, 0].unflatten(-1, (num, hop)), torch.stack(lefts, dim=1), adapt, state)  # [B, n]
        echo = (torch.stack(echoes, dim=1) * trust.unsqueeze(-1)).flatten(1)
        self._align(pair, state, kalman, due)
        return {
            "mic": mic,
            "far": far,
            "mic_hp": passed[:, 0],
            "far_hp": passed[:, 1],
            "echo": echo,
            "error": mic - echo,
        }

    def _history(self, far: Tensor, state: State) -> Tensor:
        """n hops of the aligned far end [B, n M] -> spectra of (last hop, this hop) of the filter's whole span, complex
        [B, L - 1 + n, F], oldest first."""
        hop, count = self.hop_samples, self.num_partitions
        line = torch.cat([state["far_last"], far], dim=-1)
        state["far_last"].copy_(line[:, -hop:])
        fresh = torch.fft.rfft(line.unfold(-1, 2 * hop, hop))  # [B, n, F]
        spectra = torch.cat([torch.view_as_complex(state["spectra"]), fresh], dim=1)
        state["spectra"].copy_(torch.view_as_real(spectra[:, spectra.shape[1] - count + 1 :]))
        return spectra

    def _align(self, pair: Tensor, state: State, kalman: State, due: bool) -> None:
        """Feeds the delay estimator and moves the alignment where a new delay was found."""
        num, slot = pair.shape[-1] // self.hop_samples, state["slot"]
        if self.max_samples > 0:
            delay = _part(state, "delay.")
            self.delay.observe(pair, slot[:, 0].long(), delay)
            if due:
                ended = slot + num == self.delay.period
                self.delay.update(ended, delay)
                self._move(delay, ended, state, kalman)
        slot.copy_((slot + num) % self.delay.period)

    def _move(self, delay: State, ended: Tensor, state: State, kalman: State) -> None:
        hop, line = self.hop_samples, _part(state, "line.")
        line["rate"].copy_(delay["rate"])
        jolt = delay["jolt"] * ended
        if jolt.device.type != "cpu" or bool(jolt.any()):
            self.filter.doubt(jolt, 0 * jolt, kalman)
        lag = delay["lag"] * self.delay.factor  # [B, 1]
        taken = line["whole"] + line["fraction"]
        inside = lag - taken
        headroom, latest = HEADROOM_S * self.sample_rate, LATEST_S * self.sample_rate
        move = ended & (delay["found"] > 0) & ((inside < 0.5 * headroom) | (inside > latest))
        # between samples the line needs a few beyond the one that it reads
        least, most = HALF * (line["rate"] != 0) - line["whole"], self.max_samples - line["whole"]
        wished = torch.maximum((inside - headroom).round().minimum(most), least)
        move &= wished.abs() >= 0.5 * headroom  # less isn't worth it, and would undo what a drift adds
        shift = torch.where(move, wished, least.clamp(min=0)) * ended  # [B, 1]
        if shift.device.type != "cpu" or bool(shift.any()):
            # with a long delay the start was over before the microphone heard anything
            gain = torch.maximum(state["path_gain"], _path_gain(state["level"].unsqueeze(1), state))
            state["path_gain"].copy_(torch.where(shift != 0, gain, state["path_gain"]))
            self.filter.shift(shift, START_VARIANCE * state["path_gain"] * self.profile, kalman)
            line["whole"].add_(shift)
            again = self.line.reread(line)  # [B, L M]
            spectra = torch.view_as_real(torch.fft.rfft(again.unfold(-1, 2 * hop, hop)))  # [B, L - 1, F, 2]
            moved = shift != 0
            state["spectra"].copy_(torch.where(moved.view(-1, 1, 1, 1), spectra, state["spectra"]))
            state["far_last"].copy_(torch.where(moved, again[:, -hop:], state["far_last"]))
        ahead = (delay["found"] > 0) & (lag < -0.001 * self.sample_rate) & (delay["agree"] >= NUM_AGREE)
        negative = state["negative"]  # to be told, it has to stay so
        count = torch.where(ahead | (negative >= NEGATIVE_UPDATES), negative + 1, 0 * negative).clamp(max=1e3)
        negative.copy_(torch.where(ended, count, negative))

    def _clipping(self, mic: Tensor, state: State) -> Tensor:
        """mic [B, n, M], raw -> [B, n], 1 where a hop is clipped: 3 samples or more stand at the highest so far."""
        size = mic.abs()
        peaks = torch.maximum(size.amax(-1).cummax(-1).values, state["mic_peak"])  # [B, n]
        state["mic_peak"].copy_(peaks[:, -1:])
        level = peaks.unsqueeze(-1)
        swings = mic.amax(-1) - mic.amin(-1) > 0.5 * peaks  # not a constant alone
        clipped = (((size >= CLIP_SHARE * level).sum(-1) >= 3) & swings).to(mic.dtype)
        share = _smooth(clipped, torch.full_like(clipped, CLIP_RATE), state["clipped"])
        often = (share > 1.5 * CLIP_RATE).to(mic.dtype).amax(-1, keepdim=True)
        state["ever_clipped"].copy_(torch.maximum(state["ever_clipped"], often))
        return clipped * (share < 0.3).to(mic.dtype)  # clipping all the time: better to learn from it than never to

    def _levels(self, mic: Tensor, power: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """mic [B, n, M], power [B, L - 1 + n, F] -> (adapt [B, n], 1 where the far end is active; floor [B, n] of the
        variance, high while the filter is being started; start [B, n], the variance of a start)."""
        count = self.num_partitions
        # Parseval; mean square over the filter's span
        far_now = power.mean(-1).unfold(-1, count, 1).mean(-1) / self.hop_samples  # [B, n]
        now = torch.stack([far_now, mic.square().mean(-1)], dim=-1)  # [B, n, 2]
        loud = far_now > torch.where(far_now > 4.0, FAR_ACTIVE * INT16**2, FAR_ACTIVE)
        rate = min(1.0, self.hop_s / LEVEL_S)
        level, active, levels = state["level"], [], []
        for i in range(now.shape[1]):
            far_level = level[:, :1]
            on = (loud[:, i : i + 1] & (far_now[:, i : i + 1] > 1e-5 * far_level)).to(now.dtype)
            level = level.lerp(now[:, i], on * (far_level == 0).to(now.dtype).clamp(min=rate))
            active.append(on)
            levels.append(level)
        state["level"].copy_(level)
        adapt, levels_now = torch.cat(active, dim=1), torch.stack(levels, dim=1)
        age = state["active"] + adapt.cumsum(-1)
        state["active"].copy_(age[:, -1:].clamp(max=1e6))

        ratio = _path_gain(levels_now, state)
        early = (age * self.hop_s <= START_S) & (adapt > 0) & (ratio > 0)
        # powers of two, so that only a level that doubles starts the filter again
        stage = torch.where(early, torch.exp2(torch.log2(ratio + TINY).floor()), torch.zeros_like(ratio))
        gains = torch.maximum(stage.cummax(-1).values, state["path_gain"])
        before = torch.cat([state["path_gain"], gains[:, :-1]], dim=1)
        state["path_gain"].copy_(gains[:, -1:])
        return adapt, gains * torch.where(gains > before, START_VARIANCE, VARIANCE_FLOOR), START_VARIANCE * gains

    def _judge(self, mic: Tensor, error: Tensor, adapt: Tensor, state: State) -> Tensor:
        """mic, error [B, n, M], high-passed -> trust [B, n], the share of the echo estimate that is used: it fades out
        while the far end explains nothing of the microphone."""
        now = torch.stack([mic.square().mean(-1), error.square().mean(-1)], dim=-1)  # [B, n, 2]
        rates = [adapt.unsqueeze(-1) * min(1.0, self.hop_s / seconds) for seconds in (JUDGE_S / 2, QUICK_S)]
        slow = _smooth(now, rates[0], state["reduction"])
        quick = _smooth(now, rates[1], state["reduction_quick"])
        age = state["active"] - adapt.sum(-1, keepdim=True) + adapt.cumsum(-1)  # [B, n]
        reduced = (slow[..., 0] > slow[..., 1] * 10 ** (MIN_GAIN_DB / 10)) & (age * self.hop_s > START_S)
        aligned = (state["delay.confidence"] > SURE_CONFIDENCE) & (state["delay.agree"] >= NUM_AGREE)  # [B, 1]
        evident = (reduced | aligned).to(now.dtype)
        doubt, doubts = state["doubt"], []
        for i in range(adapt.shape[1]):
            doubt = (doubt + adapt[:, i : i + 1]) * (1 - evident[:, i : i + 1])
            doubts.append(doubt)
        state["doubt"].copy_(doubt.clamp(max=1e6))
        seen = torch.maximum(evident.cummax(-1).values, state["explained"])
        state["explained"].copy_(seen[:, -1:])
        patience = torch.where(seen > 0, PATIENCE_S, JUDGE_S) / self.hop_s
        lost = torch.cat(doubts, dim=1) > patience
        state["doubtful"].add_((lost * adapt).sum(-1, keepdim=True)).clamp_(max=1e6)
        # A filter that just started fits anything, near end included, and shows it by an error above the microphone.
        worse = (seen == 0) & (quick[..., 0] < quick[..., 1] * 10 ** (-WORSE_DB / 10))
        target = (~(lost | worse)).to(now.dtype)
        return _smooth(target, torch.full_like(target, min(1.0, self.hop_s / QUICK_S)), state["trust"])


def _path_gain(levels: Tensor, state: State) -> Tensor:
    """Mean squares [B, n, 2] of (far, mic) -> [B, n], the power gain that the echo path may have at most."""
    most = torch.where(state["mic_peak"] > 4.0, MAX_PATH_GAIN * INT16**2, MAX_PATH_GAIN)  # [B, 1]
    return torch.minimum(levels[..., 1] / (levels[..., 0] + TINY), most)


def _part(state: State, prefix: str) -> State:
    """The tensors whose names begin so, without it: the same tensors."""
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def _smooth(values: Tensor, rate: Tensor, state: Tensor) -> Tensor:
    """First-order smoothing along axis 1: out_i = out_(i-1) + rate_i (values_i - out_(i-1)), from `state` on, which
    becomes the last one. values [B, n] with state [B, 1], or [B, n, 2] with [B, 2]."""
    out, current = [], state.clone()
    for i in range(values.shape[1]):
        at = slice(i, i + 1) if values.ndim == 2 else i
        current = current.lerp(values[:, at], rate[:, at])
        out.append(current)
    state.copy_(current)
    return torch.cat(out, dim=1) if values.ndim == 2 else torch.stack(out, dim=1)
