"""Layers that run over a whole clip or go on with a stream: convolutions with a history, recurrence with a state.

`nn.GRU` trains fast, but no quantiser touches its weights, and it fixes the time axis on export; written out in
`gru_step`, the cell becomes two matrix products that every runtime knows. Same parameters, equal within 2e-7.

Legend: B batch, L frames, W width, C channel, I input size, H hidden size, N layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echofree.contracts import State


def entry(state: State | None, name: str) -> Tensor | None:
    """What a stream's state holds under `name`; None for a whole clip, which starts after silence."""
    return None if state is None else state[name]


class Depthwise(nn.Module):
    """One kernel per channel: `nn.Conv2d` with groups = channels, stride (1, stride) and a weight [C, taps, 3].

    The axis of size one that nn.Conv2d keeps in its weight gets other strides in the gradient than in the weight when
    images are channels last, which DistributedDataParallel complains of and copies for.
    """

    def __init__(self, channels: int, time_taps: int, stride: int):
        super().__init__()
        self.stride, self.kernel_size = stride, (time_taps, 3)
        bound = (time_taps * 3) ** -0.5  # as nn.Conv2d
        self.weight = nn.Parameter(torch.empty(channels, time_taps, 3).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, L + taps - 1, W] -> [B, C, L, (W - 3) // stride + 1]."""
        return F.conv2d(x, self.weight.unsqueeze(1), self.bias, (1, self.stride), groups=len(self.weight))

    def macs(self, x: Tensor) -> int:
        """Multiply-accumulates of one call."""
        time_taps = self.kernel_size[0]
        return x.shape[0] * (x.shape[2] - time_taps + 1) * ((x.shape[3] - 3) // self.stride + 1) * self.weight.numel()


def convolve(conv: nn.Conv2d | Depthwise, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    """A convolution that sees the present frame and those before it.

    Args:
        conv: with a kernel (time taps, width taps), without padding over time.
        x: [B, L, W, C].
        past: [B, taps - 1, W, C], the frames before x; None: silence (zeros).

    Returns:
        (y [B, L, W', C'], the `past` of the next call).
    """
    taps = int(conv.kernel_size[0])
    padded = F.pad(x, (0, 0, 0, 0, taps - 1, 0)) if past is None else torch.cat([past, x], dim=1)
    y = conv(padded.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)  # channels first by name, last in memory
    return y, padded[:, padded.shape[1] - taps + 1 :]


def recur(gru: nn.GRU, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """A batch-first `nn.GRU` over x [B, L, I]; with `hidden` [B, N, H] by single steps, without from zeros in one call.

    Returns:
        (outputs [B, L, H], state [B, N, H]).
    """
    if hidden is None:
        y, last = gru(x)
        return y, last.transpose(0, 1)
    outputs = []
    for frame in x.unbind(1):
        y, hidden = gru_step(gru, frame, hidden)
        outputs.append(y)
    return torch.stack(outputs, dim=1), hidden


def gru_step(gru: nn.GRU, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """One frame through a unidirectional `nn.GRU`; its dropout is left out, since a stream never trains.

    Args:
        x: [B, I].
        hidden: [B, N, H], the state before this frame.

    Returns:
        (output of the top layer [B, H], new state [B, N, H]).
    """
    states = []
    for layer in range(gru.num_layers):
        w_in, w_rec, b_in, b_rec = (
            getattr(gru, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        before = hidden[:, layer]  # [B, H]
        a_r, a_z, a_n = F.linear(x, w_in, b_in).chunk(3, dim=-1)  # 3 x [B, H]
        c_r, c_z, c_n = F.linear(before, w_rec, b_rec).chunk(3, dim=-1)
        reset = torch.sigmoid(a_r + c_r)
        keep = torch.sigmoid(a_z + c_z)
        new = torch.tanh(a_n + reset * c_n)  # the reset acts after the product, as in nn.GRU and cuDNN
        x = (1 - keep) * new + keep * before  # [B, H]
        states.append(x)
    return x, torch.stack(states, dim=1)
