"""What all spectral cancellers share: the linear stage, and the way into and out of frames.

A model composes a `Chain` with a network: `analyse` turns (mic, far) into spectra of the signals that the network asked
for, `synthesise` turns the network's spectrum into samples; `listen` and `speak` do the same for one hop of a stream.

Frame l covers the samples [(l - 1) hop, (l + 1) hop): block n of the output needs frames n and n + 1, so an estimate
depends on at most `window_samples` - 1 samples to come, and that is the model's latency.

Legend: B batch, S signals, T samples, L frames, F bins.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echofree.contracts import State
from echofree.dsp import Stft
from echofree.errors import ConfigError
from echofree.model.frontend import FrontEnd

SIGNALS = ("mic", "echo", "error", "far")  # what a network may ask the front end for
FLOOR = 1e-10  # of a bin's power under a compressing exponent
FRONT_END = "front_end."  # prefix of the front end's part of a stream's state


@dataclass
class Heard:
    """What the chain made of (mic, far).

    Attributes:
        spectra: [B, S, L, F] complex, in the order of `Chain.signals`.
        waves: [B, S, T], the signals themselves.
        front: everything the front end returned: "mic", "echo", "error" ... [B, T], with details its "flags".
    """

    spectra: Tensor
    waves: Tensor
    front: dict[str, Any]


class Chain(nn.Module):
    """Linear stage and frames.

    Args:
        signals: what the network reads or masks, out of mic, echo, error, far.
        sample_rate: Hz.
        window_samples: frame length; twice `hop_samples`.
        hop_samples: frame advance.
        front_end: keywords for `FrontEnd`, or an own module of the same interface.
    """

    eager = ("analyse",)  # hop by hop, without a gradient: torch.compile would unroll hundreds of steps for minutes

    def __init__(
        self,
        signals: Sequence[str],
        sample_rate: int,
        window_samples: int,
        hop_samples: int,
        front_end: Mapping[str, Any] | nn.Module | None,
    ):
        super().__init__()
        unknown = [name for name in signals if name not in SIGNALS]
        if unknown or len(set(signals)) != len(signals):
            raise ConfigError(f"model signals are {list(signals)}; each of {list(SIGNALS)} may be named once.")
        self.signals = tuple(signals)
        self.hop_samples = hop_samples
        self.window_samples = window_samples
        self.num_bins = window_samples // 2 + 1
        self.stft = Stft(window_samples, hop_samples)
        self.front_end: Any = build_front_end(front_end, sample_rate, hop_samples)

    def analyse(self, mic: Tensor, far: Tensor, details: bool = False, front: Mapping[str, Any] | None = None) -> Heard:
        """mic, far [B, T] -> spectra of L = ceil(T / hop) + 1 frames and front-end signals.

        Nothing in here trains, so no gradient is kept. front: what `ahead` made of the same mic and far."""
        num_samples, num_frames = mic.shape[1], self.stft.num_frames(mic.shape[1])
        with torch.no_grad(), torch.autocast(mic.device.type, enabled=False):
            if front is None:
                front = self.front_end(*_to_frames(mic, far, self.hop_samples), details=details)
            waves = torch.stack([front[name] for name in self.signals], dim=1)  # [B, S, L hop]
            spectra = self.stft.analyse(waves.flatten(0, 1))[:, :num_frames]  # [B * S, L, F]
        front = {name: value[:, :num_samples] if isinstance(value, Tensor) else value for name, value in front.items()}
        return Heard(spectra.unflatten(0, waves.shape[:2]), waves[..., :num_samples], front)

    def ahead(self) -> Ahead:
        """See `contracts.Model`."""
        return Ahead(self.front_end, self.hop_samples)

    def synthesise(self, spectrum: Tensor, num_samples: int) -> Tensor:
        """spectrum [B, L, F] complex -> [B, T]."""
        with torch.autocast(spectrum.device.type, enabled=False):
            return self.stft.synthesise(spectrum, num_samples)

    def init_state(self, batch: int) -> State:
        """The front end's state, the last hop of every signal and the overlap of the output."""
        hop = self.hop_samples
        state = {FRONT_END + name: value for name, value in self.front_end.init_state(batch).items()}
        device = self.stft.window.device
        state["tail"] = torch.zeros(batch, len(self.signals), hop, device=device)
        state["overlap"] = torch.zeros(batch, hop, device=device)
        return state

    def listen(self, mic: Tensor, far: Tensor, state: State) -> tuple[Tensor, State]:
        """mic, far [B, hop] -> (spectra of one frame [B, S, 1, F] complex, what changed of the state)."""
        inner = {name.removeprefix(FRONT_END): v for name, v in state.items() if name.startswith(FRONT_END)}
        front, inner = self.front_end.step(mic, far, inner)
        hops = torch.stack([front[name] for name in self.signals], dim=1)  # [B, S, hop]
        frame = torch.cat([state["tail"], hops], dim=-1)  # [B, S, 2 hop]
        changed = {FRONT_END + name: value for name, value in inner.items()}
        changed["tail"] = hops
        return self.stft.analyse_frame(frame).unsqueeze(2), changed  # [B, S, 1, F]

    def speak(self, spectrum: Tensor, state: State) -> tuple[Tensor, State]:
        """spectrum of one frame [B, 1, F] complex -> (the finished hop [B, hop], what changed of the state)."""
        hop = self.hop_samples
        frame = self.stft.synthesise_frame(spectrum[:, 0])  # [B, 2 hop]
        return state["overlap"] + frame[:, :hop], {"overlap": frame[:, hop:]}


class Ahead:
    """The front end of a chain as a worker of the loader calls it: a copy on the CPU.

    Args:
        front_end: as in `Chain`.
        hop_samples: frame advance.
    """

    def __init__(self, front_end: nn.Module, hop_samples: int):
        self.front_end, self.hop_samples = copy.deepcopy(front_end).cpu(), hop_samples

    @torch.no_grad()
    def __call__(self, mic: Tensor, far: Tensor) -> State:
        """mic, far [B, T] -> the front end's signals [B, L hop], which `Chain.analyse` takes as `front`; no flags."""
        signals: State = self.front_end(*_to_frames(mic, far, self.hop_samples))
        return signals


def _to_frames(mic: Tensor, far: Tensor, hop_samples: int) -> tuple[Tensor, Tensor]:
    """The last frame reaches a hop beyond the clip, where a stream goes on hearing the echo filter ring out."""
    pad = (0, (-(-mic.shape[1] // hop_samples) + 1) * hop_samples - mic.shape[1])
    return F.pad(mic, pad), F.pad(far, pad)


def build_front_end(front_end: Mapping[str, Any] | nn.Module | None, sample_rate: int, hop_samples: int) -> nn.Module:
    """A module as it is, keywords as a `FrontEnd`; an unknown keyword is a ConfigError that lists the known ones."""
    if isinstance(front_end, nn.Module):
        return front_end
    options = {str(name): value for name, value in (front_end or {}).items()}
    known = [name for name in inspect.signature(FrontEnd).parameters if name not in ("sample_rate", "hop_samples")]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError([f"model.front_end.{name} is not known; known are {', '.join(known)}." for name in unknown])
    return FrontEnd(sample_rate=sample_rate, hop_samples=hop_samples, **options)


def compress(spectra: Tensor, exponent: float = 0.3) -> Tensor:
    """Spectra with the magnitude raised to `exponent`, the phase kept, real and imaginary part as channels.

    The exponent turns 20 dB of level into a factor 2, so quiet and loud recordings look alike to a network.

    Args:
        spectra: [B, S, L, F] complex.

    Returns:
        [B, L, F, 2 S] real: (re, im) of signal 0, of signal 1, ...
    """
    parts = compress_parts(torch.view_as_real(spectra), exponent)  # [B, S, L, F, 2]
    return parts.permute(0, 2, 3, 1, 4).flatten(3)  # [B, L, F, 2 S]


def compress_parts(parts: Tensor, exponent: float = 0.3) -> Tensor:
    """`compress` of real and imaginary parts where they stand: [..., 2] -> [..., 2]."""
    power = parts.square().sum(-1, keepdim=True)
    # (power + floor) ** e; the floor keeps silence finite. In this form no converter can take it for 0: one did
    half = (exponent - 1) / 2
    return parts * ((power / FLOOR + 1) ** half * FLOOR**half)
