"""`tiny`: a Kalman filter and a 278,496-parameter post-filter on Bark bands.

    far, mic -> front end -> echo estimate -> bands of (mic, echo) -> U-Net with a GRU -> band gains -> mic spectrum

After EchoFree (Li et al. 2025, arXiv 2508.06271, sections 2.2 and 2.3). Where the published code departs from the paper
this follows the paper: the skip convolutions are used, and gains go back to bins through a matrix of their own whose
columns sum to one. Per 16 ms frame 390,464 multiply-accumulates, 80 % of the parameters in one GRU.

Levels: features are log10(1 + 100 E) of the band energy E of the waveform times `input_gain`, so that silence is
exactly 0 (and equal to the padding before the first frame) and 20 dB more of level adds 2 to all of them. They stay
above the floor down to white noise at -79 dBFS. There is no automatic level control on purpose: it'd behave differently
in the first seconds, which is all that training clips have, and after an hour. Robustness to level comes from the range
of levels in the data.

Legend: B batch, P input planes, T samples, L frames, F bins, K bands, H hidden, W features per frame, C channel.
Images are [B, L, W, C], channels last: pointwise layers are Linear, sub-pixel layers a reshape, and depthwise
convolutions on a CPU 3 to 6 times faster than channels first (16 clips of 4 s: 37 ms against 115 ms for all five).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echofree.contracts import State
from echofree.dsp import band_centres, band_matrices
from echofree.errors import ConfigError
from echofree.model.causal import Depthwise, convolve, entry, recur
from echofree.model.chain import Ahead, Chain
from echofree.model.graph import StreamGraph, band_graph

TIME_TAPS = 4  # frames seen by a convolution: this one and three before
WIDTHS = (16, 24, 32)  # channels behind encoder 1, 2, 3
PLANE_WIDTH = 8  # channels of one input plane behind its own encoder
OPEN_BIAS = 2.0  # logit of the untrained gain: 0.88, so that a fresh model lets the near end through


class BarkNet(nn.Module):
    """The model of `conf/model/tiny.yaml`; see `contracts.Model`.

    With details=True, `forward` returns beside "est": "gain" [B, L, K] in (gain_floor, 1), "filterbank"
    (`Filterbank`), "gain_input" [B, T] (the wave that the gain multiplies), "latent" [B, L, H] (GRU output) and what
    else the front end returned: "echo", "error", "flags" ...

    Args:
        sample_rate: Hz.
        window_samples: frame length and latency.
        hop_samples: half of it.
        num_delta_bands: lowest bands whose first and second difference over time are features as well.
        hidden_size: H of the GRU.
        num_layers: layers of the GRU.
        inputs: signals shown to the network, out of mic, echo, error, far; must contain `mask_on`.
        mask_on: mic or error: the signal that the gains multiply. On mic a diverged linear filter can't be heard, on
            error a good one helps the output.
        input_gain: factor on waveforms before the log of the features.
        gain_floor: smallest gain, 0 to 1.
        front_end: keywords for `FrontEnd`, or a module of the same interface.
    """

    def __init__(
        self,
        sample_rate: int = 16000,
        window_samples: int = 512,
        hop_samples: int = 256,
        num_delta_bands: int = 6,
        hidden_size: int = 192,
        num_layers: int = 1,
        inputs: Sequence[str] = ("mic", "echo"),
        mask_on: str = "mic",
        input_gain: float = 64.0,
        gain_floor: float = 0.0,
        front_end: Mapping[str, Any] | nn.Module | None = None,
    ):
        super().__init__()
        problems = []
        if mask_on not in ("mic", "error"):
            problems.append(f"model.mask_on={mask_on!r} must be mic or error.")
        elif mask_on not in inputs:
            problems.append(f"model.inputs={list(inputs)} must contain model.mask_on={mask_on}.")
        if not 0 <= gain_floor < 1:
            problems.append(f"model.gain_floor={gain_floor} must be in [0, 1).")
        if not 0 <= num_delta_bands <= 32:
            problems.append(f"model.num_delta_bands={num_delta_bands} must be 0 to 32.")
        if problems:
            raise ConfigError(problems)
        self.sample_rate, self.hop_samples, self.latency_samples = sample_rate, hop_samples, window_samples
        self.masked = list(inputs).index(mask_on)
        self.gain_floor = gain_floor
        self.chain = Chain(inputs, sample_rate, window_samples, hop_samples, front_end)
        self.filterbank = Filterbank(self.chain, sample_rate, len(inputs))
        num_bands = self.filterbank.num_bands
        self.features = Features(len(inputs), num_bands, num_delta_bands, input_gain)
        self.network = PostFilter(
            len(inputs), self.masked, num_bands + 2 * num_delta_bands, num_bands, hidden_size, num_layers
        )

    def forward(
        self, mic: Tensor, far: Tensor, details: bool = False, front: State | None = None
    ) -> Tensor | dict[str, Any]:
        heard = self.chain.analyse(mic, far, details, front)
        with torch.no_grad():
            features, _ = self.features(self.filterbank.collect(heard.spectra))  # [B, P, L, W]
        gain, latent, _ = self.network(features)  # [B, L, K], [B, L, H]
        gain = self.gain_floor + (1 - self.gain_floor) * gain
        spectrum = self.filterbank.spread(gain) * heard.spectra[:, self.masked]  # [B, L, F]
        est = self.chain.synthesise(spectrum, mic.shape[1])  # [B, T]
        if not details:
            return est
        return {
            **heard.front,
            "est": est,
            "gain": gain,
            "gain_input": heard.waves[:, self.masked],
            "filterbank": self.filterbank,
            "latent": latent,
        }

    def ahead(self) -> Ahead:
        return self.chain.ahead()

    def init_state(self, batch: int) -> State:
        device = self.chain.stft.window.device
        inner = {**self.features.init_state(batch), **self.network.init_state(batch)}
        return {**self.chain.init_state(batch), **{name: value.to(device) for name, value in inner.items()}}

    @torch.no_grad()
    def step(self, mic: Tensor, far: Tensor, state: State) -> tuple[Tensor, State]:
        spectra, heard = self.chain.listen(mic, far, state)  # [B, P, 1, F]
        features, seen = self.features(self.filterbank.collect(spectra), state)  # [B, P, 1, W]
        gain, _, known = self.network(features, state)  # [B, 1, K]
        gain = self.gain_floor + (1 - self.gain_floor) * gain
        est, said = self.chain.speak(self.filterbank.spread(gain) * spectra[:, self.masked], state)
        return est, {**state, **heard, **seen, **known, **said}

    def graph(self) -> StreamGraph:
        """What of it is exported; see `echofree.model.graph`."""
        return band_graph(self, fold_norms(copy.deepcopy(self.network).cpu().eval()))


class Filterbank(nn.Module):
    """Bins to bands and back.

    Args:
        chain: whose frames are used.
        sample_rate: Hz.
        num_planes: signals collected per frame; only for the count of operations.
    """

    analysis: Tensor
    synthesis: Tensor

    def __init__(self, chain: Chain, sample_rate: int, num_planes: int):
        super().__init__()
        self.stft, self.num_planes = chain.stft, num_planes
        analysis, synthesis = band_matrices(band_centres(chain.window_samples, sample_rate))
        self.num_bands = len(synthesis)
        for name, matrix in (("analysis", analysis.T), ("synthesis", synthesis)):  # [F, K], [K, F]
            self.register_buffer(name, torch.tensor(matrix, dtype=torch.float32).contiguous(), persistent=False)

    def power(self, wave: Tensor) -> Tensor:
        """wave [B, T] -> band energies [B, L, K], of the frames and with the window of the model."""
        return self.collect(self.stft.analyse(wave))

    def collect(self, spectra: Tensor) -> Tensor:
        """spectra [..., F] complex -> band energies [..., K]."""
        with torch.autocast(spectra.device.type, enabled=False):  # energies overflow half precision
            return torch.view_as_real(spectra).square().sum(-1) @ self.analysis

    def spread(self, gain: Tensor) -> Tensor:
        """Band gains [..., K] -> bin gains [..., F], interpolated; all ones stay all ones."""
        with torch.autocast(gain.device.type, enabled=False):
            return gain.to(self.synthesis.dtype) @ self.synthesis

    def macs_per_hop(self) -> int:
        """Dense products with both matrices."""
        return (self.num_planes + 1) * self.analysis.numel()


class Features(nn.Module):
    """Log band energies with the differences over time of the lowest bands.

    Args:
        num_planes: P.
        num_bands: K.
        num_delta_bands: how many of them get differences.
        input_gain: factor on the waveform.
    """

    def __init__(self, num_planes: int, num_bands: int, num_delta_bands: int, input_gain: float):
        super().__init__()
        self.num_planes, self.num_bands, self.num_delta_bands = num_planes, num_bands, num_delta_bands
        self.scale = 100 * input_gain**2

    def forward(self, power: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """power [B, P, L, K] -> ([B, P, L, W] with W = K + 2 deltas, the last two frames for the next call)."""
        level = torch.log10(1 + self.scale * power)  # [B, P, L, K]
        past = level.new_zeros(*level.shape[:2], 2, self.num_bands) if state is None else state["levels"]
        padded = torch.cat([past, level], dim=2)  # [B, P, L + 2, K]
        low = padded[..., : self.num_delta_bands]
        first = low[:, :, 2:] - low[:, :, :-2]
        second = low[:, :, 2:] - 2 * low[:, :, 1:-1] + low[:, :, :-2]
        return torch.cat([level, first, second], dim=-1), {"levels": padded[:, :, -2:]}

    def init_state(self, batch: int) -> State:
        return {"levels": torch.zeros(batch, self.num_planes, 2, self.num_bands)}


class PostFilter(nn.Module):
    """Features to gains: U-Net over the feature axis, GRU over time at its bottom.

    One code path for both uses: without `state` a whole clip after silence, with it the frames that follow.

    Args:
        num_planes: P.
        masked: plane whose encoder feeds the last skip connection.
        num_features: W.
        num_bands: K.
        hidden_size: H.
        num_layers: of the GRU.
    """

    def __init__(
        self, num_planes: int, masked: int, num_features: int, num_bands: int, hidden_size: int, num_layers: int
    ):
        super().__init__()
        sizes = [num_features]  # of the feature axis: input, then behind each encoder; 112, 55, 27, 13, 6
        for _ in range(4):
            sizes.append((sizes[-1] - 3) // 2 + 1)
        if sizes[-1] < 1:
            raise ConfigError(f"model.num_bands={num_bands} is too few for four halvings; 34 or more would do.")
        self.sizes, self.masked = sizes, masked
        self.planes = nn.ModuleList(Encoder(1, PLANE_WIDTH) for _ in range(num_planes))
        inputs = (num_planes * PLANE_WIDTH, *WIDTHS)
        self.encoders = nn.ModuleList(Encoder(inputs[i], inputs[i + 1]) for i in range(3))
        self.gru = nn.GRU(WIDTHS[2] * sizes[4], hidden_size, num_layers, batch_first=True)
        self.unfold = nn.Linear(hidden_size, WIDTHS[2] * sizes[4])
        self.decoders = nn.ModuleList(
            [Decoder(WIDTHS[2], WIDTHS[1]), Decoder(WIDTHS[1], WIDTHS[0]), Decoder(WIDTHS[0], PLANE_WIDTH)]
        )
        self.last = LastDecoder(PLANE_WIDTH)
        self.gain = nn.Linear(2 * sizes[1], num_bands)
        nn.init.constant_(self.gain.bias, OPEN_BIAS)

    def forward(self, features: Tensor, state: State | None = None) -> tuple[Tensor, Tensor, State]:
        """features [B, P, L, W] -> (gains in (0, 1) [B, L, K], GRU output [B, L, H], new state)."""
        new: State = {}
        skips = []
        for i, plane in enumerate(self.planes):
            y, new[f"plane{i}"] = plane(features[:, i, :, :, None], entry(state, f"plane{i}"))  # [B, L, 55, 8]
            skips.append(y)
        x = torch.cat(skips[::-1], dim=-1)  # [B, L, 55, 8 P]; the paper's order: echo before mic
        skips = [skips[self.masked]]
        for i, encoder in enumerate(self.encoders):
            x, new[f"encoder{i}"] = encoder(x, entry(state, f"encoder{i}"))  # [B, L, 27 | 13 | 6, 16 | 24 | 32]
            skips.append(x)
        latent, new["gru"] = recur(self.gru, x.flatten(2), entry(state, "gru"))  # [B, L, H]
        x = self.unfold(latent).unflatten(-1, (self.sizes[4], WIDTHS[2]))  # [B, L, 6, 32]
        for decoder in self.decoders:
            x = decoder(x, skips.pop())  # [B, L, 12 | 26 | 54, 24 | 16 | 8]
        x, new["last"] = self.last(x, skips.pop(), entry(state, "last"))  # [B, L, 110]
        return torch.sigmoid(self.gain(x)), latent, new

    def init_state(self, batch: int) -> State:
        past = TIME_TAPS - 1
        state = {f"plane{i}": torch.zeros(batch, past, self.sizes[0], 1) for i in range(len(self.planes))}
        for i, channels in enumerate((len(self.planes) * PLANE_WIDTH, *WIDTHS[:2])):
            state[f"encoder{i}"] = torch.zeros(batch, past, self.sizes[i + 1], channels)
        state["gru"] = torch.zeros(batch, self.gru.num_layers, self.gru.hidden_size)
        state["last"] = torch.zeros(batch, past, self.sizes[1], PLANE_WIDTH)
        return state


def normalise(norm: nn.Module, x: Tensor) -> Tensor:
    """Batch norm over the last axis of [B, L, W, C]."""
    return norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def fold_norms(network: PostFilter) -> PostFilter:
    """The same function without batch norms: what they'd multiply and add is in the layers before them. In place."""
    for encoder in (*network.planes, *network.encoders):
        _fold(encoder.point, encoder, 1)
    for decoder in network.decoders:
        _fold(decoder.up, decoder, 2)
    _fold(network.last.residual, network.last, 1)
    return network


@torch.no_grad()
def _fold(layer: Any, owner: Any, copies: int) -> None:
    """Moves `owner.norm` into a layer whose outputs are `copies` times the norm's channels."""
    norm = owner.norm
    scale = (norm.weight * torch.rsqrt(norm.running_var + norm.eps)).repeat(copies)
    shift = norm.bias.repeat(copies) - norm.running_mean.repeat(copies) * scale
    layer.weight.mul_(scale.view(-1, *[1] * (layer.weight.ndim - 1)))
    layer.bias.mul_(scale).add_(shift)
    owner.norm = nn.Identity()


class Encoder(nn.Module):
    """Depthwise 4 x 3, pointwise, batch norm, ELU; halves the feature axis."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.depth = Depthwise(in_channels, TIME_TAPS, stride=2)
        self.point = nn.Linear(in_channels, out_channels)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, L, W, C] -> ([B, L, (W - 3) // 2 + 1, C'], history)."""
        y, past = convolve(self.depth, x, past)
        return F.elu(normalise(self.norm, self.point(y))), past


class Decoder(nn.Module):
    """Adds the encoder's features through a pointwise layer, then sub-pixel up by two, batch norm, ELU."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.skip = nn.Linear(in_channels, in_channels)
        self.up = nn.Linear(in_channels, 2 * out_channels)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        """x [B, L, W' <= W, C], encoded [B, L, W, C] -> [B, L, 2 W, C']."""
        x = F.pad(x, (0, 0, 0, encoded.shape[2] - x.shape[2])) + self.skip(encoded)
        y = self.up(x).unflatten(-1, (2, -1)).flatten(2, 3)  # sub-pixel: channels become neighbours
        return F.elu(normalise(self.norm, y))


class LastDecoder(nn.Module):
    """Skip, residual 4 x 3 block and sub-pixel up by two to one channel, linear."""

    def __init__(self, channels: int):
        super().__init__()
        self.skip = nn.Linear(channels, channels)
        self.residual = nn.Conv2d(channels, channels, (TIME_TAPS, 3), padding=(0, 1))
        self.norm = nn.BatchNorm2d(channels)
        self.up = nn.Linear(channels, 2)

    def forward(self, x: Tensor, encoded: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B, L, W' <= W, C], encoded [B, L, W, C] -> ([B, L, 2 W], history)."""
        x = F.pad(x, (0, 0, 0, encoded.shape[2] - x.shape[2])) + self.skip(encoded)
        y, past = convolve(self.residual, x, past)
        x = x + F.elu(normalise(self.norm, y))
        return self.up(x).flatten(2), past
