"""`small`: a causal convolutional recurrent network on compressed complex spectra, between 1 and 3 M parameters.

    front end -> spectra (mic, echo, error, far) -> encoder over frequency -> GRU -> decoder with skips -> complex masks

The shape of DeepVQE (Indenbom et al. 2023, arXiv 2306.03177) behind a linear stage: convolutions two frames tall that
halve the frequency axis, a GRU at the bottom, sub-pixel convolutions back up, skips through pointwise layers. Its
alignment block is left out, since the front end aligns the far end; its batch norm is replaced by a norm over the
channels and bins of one frame, which needs no statistics of a batch. The output is a sum of masked spectra, so that
the network chooses per bin between the microphone and what the linear stage left of it.

Legend: B batch, S signals, M masked signals, T samples, L frames, F bins, H hidden, C channel, W width (bins left).
Images are [B, L, W, C], channels last; see `bark.py` for why.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echofree.contracts import State
from echofree.model.causal import convolve, entry, recur
from echofree.model.chain import Ahead, Chain, compress
from echofree.model.graph import StreamGraph, mask_graph
from echofree.model.mask import MaskedSum


class ConvRecurrentNet(nn.Module):
    """The model of `conf/model/small.yaml`; see `contracts.Model`.

    With details=True, `forward` returns beside "est": "mask" [B, L, F, M] complex, "latent" [B, L, H] (GRU output),
    and what else the front end returned: "echo", "error", "flags" ...

    Args:
        sample_rate: Hz.
        window_samples: frame length and latency.
        hop_samples: half of it.
        channels: behind each encoder; every one halves the frequency axis.
        time_taps: frames seen by a convolution, the present one included.
        hidden_size: H of the GRU.
        num_layers: layers of the GRU.
        inputs: signals shown to the network, out of mic, echo, error, far.
        mask_on: signals that are masked and added up, out of mic and error; all must be inputs.
        mask_limit: magnitude that no mask exceeds.
        front_end: keywords for `FrontEnd`, or a module of the same interface.
    """

    def __init__(
        self,
        sample_rate: int = 16000,
        window_samples: int = 512,
        hop_samples: int = 256,
        channels: Sequence[int] = (24, 40, 56, 64, 64),
        time_taps: int = 2,
        hidden_size: int = 384,
        num_layers: int = 1,
        inputs: Sequence[str] = ("mic", "echo", "error", "far"),
        mask_on: Sequence[str] = ("mic", "error"),
        mask_limit: float = 2.0,
        front_end: Mapping[str, Any] | nn.Module | None = None,
    ):
        super().__init__()
        self.sample_rate, self.hop_samples, self.latency_samples = sample_rate, hop_samples, window_samples
        self.mask = MaskedSum(inputs, mask_on, mask_limit)
        self.chain = Chain(inputs, sample_rate, window_samples, hop_samples, front_end)
        self.network = UNet(
            2 * len(inputs), self.chain.num_bins, self.mask.num_outputs, channels, time_taps, hidden_size, num_layers
        )
        self.mask.open(*self.network.decoders[-1].up.parameters())

    def forward(
        self, mic: Tensor, far: Tensor, details: bool = False, front: State | None = None
    ) -> Tensor | dict[str, Any]:
        heard = self.chain.analyse(mic, far, details, front)
        raw, latent, _ = self.network(compress(heard.spectra))  # [B, L, F, 3 M], [B, L, H]
        spectrum, mask = self.mask(raw, heard.spectra)  # [B, L, F]
        est = self.chain.synthesise(spectrum, mic.shape[1])  # [B, T]
        return {**heard.front, "est": est, "mask": mask, "latent": latent} if details else est

    def ahead(self) -> Ahead:
        return self.chain.ahead()

    def init_state(self, batch: int) -> State:
        device = self.chain.stft.window.device
        inner = {name: value.to(device) for name, value in self.network.init_state(batch).items()}
        return {**self.chain.init_state(batch), **inner}

    @torch.no_grad()
    def step(self, mic: Tensor, far: Tensor, state: State) -> tuple[Tensor, State]:
        spectra, heard = self.chain.listen(mic, far, state)  # [B, S, 1, F]
        raw, _, known = self.network(compress(spectra), state)  # [B, 1, F, 3 M]
        est, said = self.chain.speak(self.mask(raw, spectra)[0], state)
        return est, {**state, **heard, **known, **said}

    def graph(self) -> StreamGraph:
        """What of it is exported; see `echofree.model.graph`."""
        network = copy.deepcopy(self.network).cpu().eval()

        def advance(x: Tensor, state: State) -> tuple[Tensor, State]:
            raw, _, known = network(x, state)
            return raw, known

        return mask_graph(self.chain, self.mask, advance, network.init_state(1), network)


class UNet(nn.Module):
    """Channels of a spectrum in, channels of a spectrum out; causal over frames.

    One code path for both uses: without `state` a whole clip after silence, with it the frames that follow.

    Args:
        in_channels: real numbers per bin that go in.
        num_bins: F, odd.
        out_channels: real numbers per bin that come out.
        channels: behind each encoder.
        time_taps: frames seen by a convolution.
        hidden_size: H of the GRU.
        num_layers: of the GRU.
    """

    def __init__(
        self,
        in_channels: int,
        num_bins: int,
        out_channels: int,
        channels: Sequence[int],
        time_taps: int,
        hidden_size: int,
        num_layers: int,
    ):
        super().__init__()
        widths = [num_bins]  # 257, 129, 65, 33, 17, 9
        for _ in channels:
            widths.append((widths[-1] + 1) // 2)
        sizes = [in_channels, *channels]
        self.encoders: Any = nn.ModuleList(
            Encoder(sizes[i], sizes[i + 1], widths[i], widths[i + 1], time_taps) for i in range(len(channels))
        )
        self.gru = nn.GRU(sizes[-1] * widths[-1], hidden_size, num_layers, batch_first=True)
        self.unfold = nn.Linear(hidden_size, sizes[-1] * widths[-1])
        self.decoders: Any = nn.ModuleList(
            Decoder(sizes[i + 1], sizes[i] if i else out_channels, widths[i + 1], widths[i], time_taps, last=i == 0)
            for i in reversed(range(len(channels)))
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, Tensor, State]:
        """x [B, L, F, C] -> (y [B, L, F, C'], GRU output [B, L, H], new state)."""
        new: State = {}
        skips = []
        for i, encoder in enumerate(self.encoders):
            x, new[f"encoder{i}"] = encoder(x, entry(state, f"encoder{i}"))  # [B, L, W, C]
            skips.append(x)
        latent, new["gru"] = recur(self.gru, x.flatten(2), entry(state, "gru"))  # [B, L, H]
        x = self.unfold(latent).view_as(x)  # [B, L, 9, 64]
        for i, decoder in enumerate(self.decoders):
            x, new[f"decoder{i}"] = decoder(x, skips.pop(), entry(state, f"decoder{i}"))
        return x, latent, new

    def init_state(self, batch: int) -> State:
        state = {f"encoder{i}": layer.init_state(batch) for i, layer in enumerate(self.encoders)}
        state["gru"] = torch.zeros(batch, self.gru.num_layers, self.gru.hidden_size)
        return {**state, **{f"decoder{i}": layer.init_state(batch) for i, layer in enumerate(self.decoders)}}


class Encoder(nn.Module):
    """Convolution with stride 2 over frequency, norm over the frame, ELU."""

    def __init__(self, in_channels: int, out_channels: int, in_width: int, out_width: int, time_taps: int):
        super().__init__()
        self.past_shape = (time_taps - 1, in_width, in_channels)
        self.conv = nn.Conv2d(in_channels, out_channels, (time_taps, 3), stride=(1, 2), padding=(0, 1))
        self.norm = nn.LayerNorm((out_width, out_channels))

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, L, W, C] -> ([B, L, (W + 1) // 2, C'], history)."""
        y, past = convolve(self.conv, x, past)
        return F.elu(self.norm(y)), past

    def init_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, *self.past_shape)


class Decoder(nn.Module):
    """Adds the encoder's features through a pointwise layer, then a sub-pixel convolution up by two.

    The last one has neither norm nor activation.
    """

    def __init__(self, in_channels: int, out_channels: int, in_width: int, out_width: int, time_taps: int, last: bool):
        super().__init__()
        self.past_shape = (time_taps - 1, in_width, in_channels)
        self.out_width = out_width
        self.skip = nn.Linear(in_channels, in_channels)
        self.up = nn.Conv2d(in_channels, 2 * out_channels, (time_taps, 3), padding=(0, 1))
        self.norm = nn.Identity() if last else nn.LayerNorm((out_width, out_channels))
        self.activation = nn.Identity() if last else nn.ELU()

    def forward(self, x: Tensor, encoded: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, encoded [B, L, W, C] -> ([B, L, 2 W or 2 W - 1, C'], history)."""
        y, past = convolve(self.up, x + self.skip(encoded), past)
        y = y.unflatten(-1, (2, -1)).flatten(2, 3)[:, :, : self.out_width]  # sub-pixel: channels become neighbours
        return self.activation(self.norm(y)), past

    def init_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, *self.past_shape)
