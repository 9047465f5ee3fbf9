"""`base`: a causal transformer on compressed spectra, hidden size 768, 12 layers.

    front end -> spectra (mic, echo, error, far) -> Linear -> blocks (attention to recent frames, MLP) -> complex masks

Pre-norm blocks (Xiong et al. 2020, arXiv 2002.04745), rotary positions (Su et al. 2021, arXiv 2104.09864), attention
over a sliding window, so that the state of a stream has a fixed size. One tensor [B, L, H] runs between the blocks:
`blocks` lists them for a pipeline, `tensor_plan` says how their Linear layers are split over devices.

Legend: B batch, S signals, M masked signals, T samples, L frames, F bins, H hidden, N heads, D head size, W context.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echofree.contracts import State
from echofree.errors import ConfigError
from echofree.model.chain import Ahead, Chain, compress
from echofree.model.graph import StreamGraph, mask_graph
from echofree.model.mask import MaskedSum

ROTARY_BASE = 10000.0
MIN_PIECE = 64  # frames of a long clip attended to at once


class Transformer(nn.Module):
    """The model of `conf/model/base.yaml`; see `contracts.Model`.

    With details=True, `forward` returns beside "est": "mask" [B, L, F, M] complex, "latent" [B, L, H] (output of the
    last block) and what else the front end returned: "echo", "error", "flags" ...

    Args:
        sample_rate: Hz.
        window_samples: frame length and latency.
        hop_samples: half of it.
        hidden_size: H.
        num_layers: blocks.
        num_heads: N; H / N must be even.
        context_frames: W, frames that attention sees in each block, the present one included.
        dropout: share of attention weights and of each branch's output set to zero while training.
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
        hidden_size: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        context_frames: int = 64,
        dropout: float = 0.0,
        inputs: Sequence[str] = ("mic", "echo", "error", "far"),
        mask_on: Sequence[str] = ("mic", "error"),
        mask_limit: float = 2.0,
        front_end: Mapping[str, Any] | nn.Module | None = None,
    ):
        super().__init__()
        problems = []
        if hidden_size % num_heads or hidden_size // num_heads % 2:
            problems.append(f"model.num_heads={num_heads} must split hidden_size={hidden_size} into even parts.")
        if context_frames < 1:
            problems.append(f"model.context_frames={context_frames} must be 1 or more.")
        if not 0 <= dropout < 1:
            problems.append(f"model.dropout={dropout} must be in [0, 1).")
        if problems:
            raise ConfigError(problems)
        self.sample_rate, self.hop_samples, self.latency_samples = sample_rate, hop_samples, window_samples
        self.context_frames = context_frames
        self.mask = MaskedSum(inputs, mask_on, mask_limit)
        self.chain = Chain(inputs, sample_rate, window_samples, hop_samples, front_end)
        num_bins = self.chain.num_bins
        self.embed = nn.Linear(num_bins * 2 * len(inputs), hidden_size)
        self.layers: Any = nn.ModuleList(
            Block(hidden_size, num_heads, context_frames, dropout, num_layers) for _ in range(num_layers)
        )
        self.head = Head(hidden_size, num_bins * self.mask.num_outputs)
        self.mask.open(*self.head.out.parameters())

    def forward(
        self, mic: Tensor, far: Tensor, details: bool = False, front: State | None = None
    ) -> Tensor | dict[str, Any]:
        x, heard = self.enter(mic, far, details, front)
        x = self.embed(x)  # [B, L, H]
        for layer in self.layers:
            x = layer(x)
        return self.leave(self.head(x), x, heard, details)

    def enter(
        self, mic: Tensor, far: Tensor, details: bool = False, front: State | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """-> (what the first block takes: packed spectra [B, L, 2 S F], what `leave` needs beside the blocks' result);
        nothing of it trains."""
        heard = self.chain.analyse(mic, far, details, front)
        packed = compress(heard.spectra).flatten(2)  # [B, L, 2 S F]
        return packed, {"spectra": heard.spectra, "num_samples": mic.shape[1], "front": heard.front}

    def leave(
        self, raw: Tensor, latent: Tensor, heard: Mapping[str, Any], details: bool = False
    ) -> Tensor | dict[str, Any]:
        """The last block's result [B, L, 3 M F] and what it was made of [B, L, H] -> what `forward` returns."""
        spectrum, mask = self.mask(self._per_bin(raw), heard["spectra"])  # [B, L, F]
        est = self.chain.synthesise(spectrum, heard["num_samples"])  # [B, T]
        return {**heard["front"], "est": est, "mask": mask, "latent": latent} if details else est

    def _per_bin(self, raw: Tensor) -> Tensor:
        """[B, L, F * 3 M] -> [B, L, F, 3 M]."""
        return raw.unflatten(-1, (self.chain.num_bins, -1))

    def blocks(self) -> list[nn.Module]:
        """The network as a list with one tensor between neighbours: packed spectra [B, L, 2 S F] in, [B, L, H] between,
        raw masks [B, L, 3 M F] out; `enter` and `leave` are what stands before and behind."""
        return [self.embed, *self.layers, self.head]

    def tensor_plan(self) -> dict[str, str]:
        """Names of the Linear layers that can be split over devices -> "colwise" (by outputs) or "rowwise" (by inputs).
        The number of devices must divide the number of heads."""
        plan = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}
        plan = {f"attention.{name}": how for name, how in plan.items()} | {"up": "colwise", "down": "rowwise"}
        return {f"layers.{i}.{name}": how for i in range(len(self.layers)) for name, how in plan.items()}

    def ahead(self) -> Ahead:
        return self.chain.ahead()

    def init_state(self, batch: int) -> State:
        device = self.chain.stft.window.device
        state = self.chain.init_state(batch)
        state["age"] = torch.zeros(batch, 1, device=device)  # frames heard, up to the context
        for i, layer in enumerate(self.layers):
            for name, value in layer.attention.init_state(batch).items():
                state[f"layer{i}.{name}"] = value.to(device)
        return state

    @torch.no_grad()
    def step(self, mic: Tensor, far: Tensor, state: State) -> tuple[Tensor, State]:
        spectra, heard = self.chain.listen(mic, far, state)  # [B, S, 1, F]
        raw, known = self.advance(compress(spectra), state)  # [B, 1, F, 3 M]
        est, said = self.chain.speak(self.mask(raw, spectra)[0], state)
        return est, {**state, **heard, **known, **said}

    def advance(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One frame of packed spectra [B, 1, F, 2 S] -> (raw masks [B, 1, F, 3 M], the network's new state)."""
        new: State = {}
        x = self.embed(x.flatten(2))  # [B, 1, H]
        for i, layer in enumerate(self.layers):
            past = (state[f"layer{i}.keys"], state[f"layer{i}.values"])
            x, (new[f"layer{i}.keys"], new[f"layer{i}.values"]) = layer.step(x, past, state["age"])
        new["age"] = (state["age"] + 1).clamp(max=self.context_frames - 1)
        return self._per_bin(self.head(x)), new

    def graph(self) -> StreamGraph:
        """What of it is exported; see `echofree.model.graph`."""
        inner = copy.deepcopy(self).cpu().eval()
        own = inner.init_state(1)
        states = {name: own[name] for name in own if name == "age" or name.startswith("layer")}
        parts = nn.ModuleList([inner.embed, inner.layers, inner.head])
        return mask_graph(self.chain, self.mask, inner.advance, states, parts)


class Block(nn.Module):
    """Attention and MLP, each on a normed copy and added back."""

    def __init__(self, hidden_size: int, num_heads: int, context_frames: int, dropout: float, num_layers: int):
        super().__init__()
        self.norm_attention = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, context_frames, dropout)
        self.norm_mlp = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        with torch.no_grad():  # keeps the sum over all branches at the size of the input, whatever the depth
            for branch in (self.attention.out, self.down):
                branch.weight.mul_((2 * num_layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return self._mlp(x)

    def step(self, x: Tensor, past: tuple[Tensor, Tensor], age: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One frame [B, 1, H]; see `Attention.step`."""
        y, past = self.attention.step(self.norm_attention(x), past, age)
        return self._mlp(x + y), past

    def _mlp(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)))))


class Attention(nn.Module):
    """Multi-head attention of every frame to itself and the W - 1 frames before it.

    Positions enter as rotations of queries and keys by an angle that grows with the frame number, so that only
    distances matter. Hence a stream counts from the start of its window, and a long clip from the start of each piece,
    and no call is too long for the angles' precision.

    Args:
        hidden_size: H.
        num_heads: N.
        context_frames: W.
        dropout: of the attention weights.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, hidden_size: int, num_heads: int, context_frames: int, dropout: float):
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.num_heads, self.context_frames, self.dropout = num_heads, context_frames, dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        pairs = torch.arange(0, self.head_size, 2, dtype=torch.float64) / self.head_size
        frames = torch.arange(max(3 * context_frames, context_frames + MIN_PIECE), dtype=torch.float64)
        angle = frames[:, None] * ROTARY_BASE**-pairs  # [frames, D / 2], radians
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, H]. Clips beyond 3 W frames go by pieces: memory grows with L and not L squared."""
        q, k, v = self._split(x)  # [B, N, L, D]
        length, context = x.shape[1], self.context_frames
        piece = length if length <= 3 * context else max(context, MIN_PIECE)
        parts = []
        for start in range(0, length, piece):
            stop, first = min(start + piece, length), max(0, start - context + 1)
            age = torch.arange(start, stop, device=x.device)[:, None] - torch.arange(first, stop, device=x.device)
            parts.append(
                F.scaled_dot_product_attention(
                    self._rotate(q[:, :, start:stop], start - first),
                    self._rotate(k[:, :, first:stop], 0),
                    v[:, :, first:stop],
                    attn_mask=(age >= 0) & (age < context),
                    dropout_p=self.dropout if self.training else 0.0,
                )
            )
        return self._join(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))

    def step(self, x: Tensor, past: tuple[Tensor, Tensor], age: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One frame.

        Args:
            x: [B, 1, H].
            past: keys before rotation and values of the W - 1 frames before, oldest first, each [B, W - 1, N, D].
            age: [B, 1], how many of them were really heard.

        Returns:
            (y [B, 1, H], the next `past`).
        """
        q, k, v = self._split(x)  # [B, N, 1, D]
        keys = torch.cat([past[0], k.transpose(1, 2)], dim=1)  # [B, W, N, D]
        values = torch.cat([past[1], v.transpose(1, 2)], dim=1)
        count = keys.shape[1]
        heard = torch.arange(count, device=x.device) >= count - 1 - age  # [B, W]
        y = F.scaled_dot_product_attention(
            self._rotate(q, count - 1),
            self._rotate(keys.transpose(1, 2), 0),
            values.transpose(1, 2),
            attn_mask=heard[:, None, None, :],
        )
        return self._join(y), (keys[:, 1:], values[:, 1:])

    def init_state(self, batch: int) -> State:
        shape = (batch, self.context_frames - 1, self.num_heads, self.head_size)
        return {"keys": torch.zeros(shape), "values": torch.zeros(shape)}

    def macs(self, x: Tensor) -> int:
        """Multiply-accumulates beyond the Linear layers for x [B, L, H]: scores and weighted sum over the window."""
        return x.shape[0] * x.shape[1] * self.context_frames * 2 * self.num_heads * self.head_size

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L, H] -> three times [B, N, L, D]. N is left open: with split Linear layers each device has its share."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_size)) for layer in (self.query, self.key, self.value))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _join(self, y: Tensor) -> Tensor:
        return self.out(y.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """x [B, N, L, D] with the pairs (i, i + D / 2) turned by their frequency times (start + frame)."""
        here = slice(start, start + x.shape[2])
        cos, sin = self.cos[here].to(x.dtype), self.sin[here].to(x.dtype)  # [L, D / 2]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Head(nn.Module):
    """Norm and Linear to the raw masks."""

    def __init__(self, hidden_size: int, num_outputs: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.out = nn.Linear(hidden_size, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, 3 M F]."""
        return self.out(self.norm(x))
