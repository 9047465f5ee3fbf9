"""What of a model becomes a graph for a device: one frame or hop in, one out, states in and out.

    forward(input, *states) -> (output, *new states)

Batch 1, float32, no complex tensors, no control flow, nothing kept inside the module. Two kinds: "spectra" graphs hold
the network between the transforms, and the runtime runs the linear stage and the FFTs beside them; "wave" graphs hold
all of a model that has no graph of its own, as its `step` is written.

Legend: S signals, F bins, K bands, N lowest bands that are one bin each, M hop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echofree.contracts import State
from echofree.errors import CheckpointError
from echofree.model.chain import Chain, compress_parts
from echofree.model.mask import RAW, MaskedSum, bounded_parts

if TYPE_CHECKING:
    from echofree.model.bark import BarkNet

Advance = Callable[[Tensor, State], tuple[Tensor, State]]


class StreamGraph(nn.Module):
    """The seam between a model and all exporters. Not changed by its calls.

    Args:
        kind: "spectra" or "wave".
        inputs: name -> shape of what comes in beside the states.
        output: name and shape of what goes out beside them.
        states: a fresh stream's, by name; first axis 1.
        body: (inputs, states by name) -> (output, new states by name).
        parts: modules that `body` uses, so that their weights are found.
        chain: whose linear stage and transforms the runtime runs beside it; None: all is inside.
    """

    def __init__(
        self,
        kind: str,
        inputs: dict[str, tuple[int, ...]],
        output: tuple[str, tuple[int, ...]],
        states: State,
        body: Callable[[tuple[Tensor, ...], State], tuple[Tensor, State]],
        parts: nn.Module,
        chain: Chain | None = None,
    ):
        super().__init__()
        self.kind, self.inputs, self.output = kind, inputs, output
        self.state_names = tuple(states)
        self.initial = {name: value.detach().cpu().clone() for name, value in states.items()}
        self.body, self.parts = body, parts
        self.signals = () if chain is None else chain.signals
        self.window_samples = 0 if chain is None else chain.window_samples
        self.front: Any = None if chain is None else [chain.front_end]  # in a list: none of this graph's weights

    @property
    def front_end(self) -> Any:
        """The linear stage that runs beside the graph, or None."""
        return None if self.front is None else self.front[0]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(self.inputs)
        output, new = self.body(tensors[:count], dict(zip(self.state_names, tensors[count:], strict=True)))
        return output, *(new[name] for name in self.state_names)

    def example(self, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Inputs of noise and fresh states."""
        noise = (0.1 * torch.randn(shape, generator=generator) for shape in self.inputs.values())
        return *noise, *(value.clone() for value in self.initial.values())


def stream_graph(model: nn.Module) -> StreamGraph | None:
    """The graph of a model: its own if it offers `graph()`, else its `step`; None: there's nothing but a linear stage.

    Raises:
        CheckpointError: a model that can't stream.
    """
    own = getattr(model, "graph", None)
    if own is not None:
        found: StreamGraph | None = own()
        return None if found is None else found.eval()
    if not (hasattr(model, "step") and hasattr(model, "init_state")):
        raise CheckpointError(
            f"{type(model).__name__} can't be exported: it has no step and init_state, so it can't stream. Write them "
            "as echofree.contracts.Model says"
        )
    return step_graph(model).eval()


def step_graph(model: Any) -> StreamGraph:
    """All of a model, by its `step`."""
    inner: Any = copy.deepcopy(model).cpu().eval()

    def body(inputs: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        est, new = inner.step(*inputs, state)
        return est, new

    shape = (1, int(model.hop_samples))
    return StreamGraph("wave", {"mic": shape, "far": shape}, ("est", shape), inner.init_state(1), body, inner)


def band_graph(model: BarkNet, network: nn.Module) -> StreamGraph:
    """Spectra to bands, to gains, to the masked spectrum. The matrices of the bands keep only what isn't the identity,
    once for both directions.

    Args:
        model: its features, filterbank and floor are used.
        network: its network, in evaluation mode, norms folded.
    """
    features, floor, masked = model.features, model.gain_floor, model.masked
    dense = model.filterbank.analysis.cpu()  # [F, K]
    if not torch.equal(dense, model.filterbank.synthesis.cpu().T):
        raise CheckpointError("the filterbank's matrices differ from each other: this graph keeps one for both")
    plain = _identity_part(dense)
    parts: Any = nn.ModuleDict({"network": network})
    parts.register_buffer("bands", dense[plain:, plain:].clone())  # [F - N, K - N]

    def body(inputs: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        (spectra,) = inputs  # [1, S, F, 2]
        power = spectra.square().sum(-1)  # [1, S, F]
        power = torch.cat([power[..., :plain], power[..., plain:] @ parts.bands], dim=-1)  # [1, S, K]
        shown, seen = features(power.unsqueeze(2), state)  # [1, S, 1, W]
        gain, _, known = network(shown, state)  # [1, 1, K]
        gain = floor + (1 - floor) * gain[:, 0]  # [1, K]
        per_bin = torch.cat([gain[:, :plain], gain[:, plain:] @ parts.bands.T], dim=-1)  # [1, F]
        return per_bin.unsqueeze(-1) * spectra[:, masked], {**seen, **known}  # [1, F, 2]

    states = {**features.init_state(1), **network.init_state(1)}  # type: ignore[operator]
    return _spectra_graph(model.chain, states, body, parts)


def mask_graph(chain: Chain, mask: MaskedSum, advance: Advance, states: State, parts: nn.Module) -> StreamGraph:
    """Compressed spectra through a network to complex masks, in real arithmetic.

    Args:
        chain, mask: of the model.
        advance: (packed spectra [1, 1, F, 2 S], states) -> (raw masks [1, 1, F, 3 M], new states).
        states: of a fresh stream.
        parts: modules that `advance` uses.
    """

    def body(inputs: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        (spectra,) = inputs  # [1, S, F, 2]
        packed = compress_parts(spectra).permute(0, 2, 1, 3).flatten(2)  # [1, F, 2 S]; one converter has no 5-D power
        raw, known = advance(packed.unsqueeze(1), state)  # [1, 1, F, 3 M]
        raw = raw[:, 0].unflatten(-1, (-1, RAW))  # [1, F, M, 3]
        real, imag = bounded_parts(raw, mask.limit)  # [1, F, M] each
        planes = []
        for i, row in enumerate(mask.rows):
            a, b = real[..., i], imag[..., i]  # [1, F]
            re, im = spectra[:, row, :, 0], spectra[:, row, :, 1]
            planes.append(torch.stack([a * re - b * im, a * im + b * re], dim=-1))  # [1, F, 2]
        return sum(planes[1:], planes[0]), known

    return _spectra_graph(chain, states, body, parts)


def _spectra_graph(
    chain: Chain, states: State, body: Callable[[tuple[Tensor, ...], State], tuple[Tensor, State]], parts: nn.Module
) -> StreamGraph:
    shapes: dict[str, tuple[int, ...]] = {"spectra": (1, len(chain.signals), chain.num_bins, 2)}
    return StreamGraph("spectra", shapes, ("spectrum", (1, chain.num_bins, 2)), states, body, parts, chain)


def _identity_part(dense: Tensor) -> int:
    """How many of the lowest bands are one bin each: the size of the identity in the corner of [F, K]."""
    eye = torch.eye(*dense.shape)
    same = (dense == eye).all(1)[: dense.shape[1]] & (dense == eye).all(0)
    return int(same.long().cumprod(0).sum())
