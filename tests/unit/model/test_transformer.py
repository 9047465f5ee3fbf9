from __future__ import annotations

from typing import Any

import model_checks as checks
import numpy as np
import pytest
import torch
from model_checks import single_thread  # noqa: F401
from torch import Tensor, nn

from echofree.errors import ConfigError
from echofree.model.chain import compress
from echofree.model.count import count
from echofree.model.transformer import Attention, Transformer

SMALL: dict[str, Any] = {"hidden_size": 24, "num_layers": 2, "num_heads": 3, "context_frames": 7}


@pytest.fixture
def model(rng: np.random.Generator) -> Any:
    return checks.scramble(Transformer(**SMALL).eval(), rng)


def test_preset_has_hidden_768_and_12_layers() -> None:
    model: Any = checks.preset("base")
    size, bins = 768, 257
    linear = (8 * bins * size) + 12 * (4 * size * size + 8 * size * size) + size * 6 * bins
    counted = count(model, seconds=0.1)
    biases = size + 12 * (4 * size + 5 * size) + 6 * bins
    norms = 2 * size * (12 * 2 + 1)
    assert counted["parameters"] == linear + biases + norms == 87_821_574
    assert counted["macs_per_frame"] == linear + 12 * 2 * 64 * size
    assert len(model.blocks()) == 14


def test_latency_is_true(model: Any, rng: np.random.Generator) -> None:
    checks.check_latency(model, rng)
    plain = Transformer(**SMALL, front_end=checks.PlainFrontEnd())
    checks.check_latency(checks.scramble(plain.eval(), rng), rng)


def test_network_is_causal_by_gradient_and_hears_its_context(model: Any, rng: np.random.Generator) -> None:
    layers = [block.double() for block in model.blocks()]
    x = torch.tensor(rng.standard_normal((1, 40, 257 * 8)), requires_grad=True)
    y = x
    for layer in layers:
        y = layer(y)
    y[:, 30].sum().backward()
    heard = x.grad.abs().amax((0, 2))  # type: ignore[union-attr]
    assert float(heard[31:].max()) == 0
    first = 30 - 2 * (7 - 1)  # each of two layers looks back over context - 1 frames
    assert float(heard[:first].max()) == 0
    assert float(heard[first:31].min()) > 0


def test_stream_equals_forward_beyond_the_context(model: Any, rng: np.random.Generator) -> None:
    checks.check_stream(model, rng, chunks=(1, 256, 441))  # 20 frames, context 7
    plain = Transformer(**SMALL, front_end=checks.PlainFrontEnd())
    checks.check_stream(checks.scramble(plain.eval(), rng), rng, chunks=(4096,), num_hops=150.5)  # by pieces of 64


def test_stream_without_a_past(rng: np.random.Generator) -> None:
    present = Transformer(**{**SMALL, "context_frames": 1}, front_end=checks.PlainFrontEnd())
    checks.check_stream(checks.scramble(present.eval(), rng), rng, chunks=(300,))


def test_ahead(model: Any, rng: np.random.Generator) -> None:
    checks.check_ahead(model, rng)


def test_state(model: Any, rng: np.random.Generator) -> None:
    checks.check_state(model, rng)


def test_lengths_and_silence(model: Any, rng: np.random.Generator) -> None:
    checks.check_lengths_and_silence(model, rng)


def test_nothing_is_dead(rng: np.random.Generator) -> None:
    model: Any = Transformer(**SMALL, front_end=checks.PlainFrontEnd())
    for layer in model.layers:  # a key's bias moves all scores of a query alike, rotations aside: next to no gradient
        layer.attention.key.bias.requires_grad_(False)
    checks.check_training(model, rng)


def test_untrained_model_is_open(rng: np.random.Generator) -> None:
    checks.check_open(Transformer(**SMALL).eval(), rng)


def test_half_precision(model: Any, rng: np.random.Generator) -> None:
    checks.check_half(model, rng)


def slow_attention(layer: Attention, x: Tensor) -> Tensor:
    """Frame by frame, head by head, with complex rotations."""
    q, k, v = (f(x).double() for f in (layer.query, layer.key, layer.value))
    size = layer.head_size
    turn = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    out = torch.zeros_like(q)
    for t in range(x.shape[1]):
        first = max(0, t - layer.context_frames + 1)
        for head in range(layer.num_heads):
            here = slice(head * size, (head + 1) * size)
            scores = []
            for s in range(first, t + 1):
                a, b = q[0, t, here], k[0, s, here]
                a, b = (torch.complex(z[: size // 2], z[size // 2 :]) for z in (a, b))
                scores.append((a * (b * torch.exp(1j * (s - t) * turn)).conj()).real.sum() / size**0.5)
            weights = torch.softmax(torch.stack(scores), 0)
            out[0, t, here] = weights @ v[0, first : t + 1, here]
    return nn.functional.linear(out, layer.out.weight.double(), layer.out.bias.double())


def test_attention_equals_a_slow_reference(rng: np.random.Generator) -> None:
    layer = Attention(12, 2, context_frames=5, dropout=0.0)
    x = torch.tensor(rng.standard_normal((1, 150, 12)), dtype=torch.float32)
    with torch.no_grad():
        slow = slow_attention(layer, x)
        torch.testing.assert_close(layer(x).double(), slow, rtol=0, atol=1e-5)  # by pieces of 64
        torch.testing.assert_close(layer(x[:, :15]).double(), slow[:, :15], rtol=0, atol=1e-5)  # at once


def test_blocks_make_the_mask(model: Any, rng: np.random.Generator) -> None:
    mic, far = checks.pair(rng, 4000)
    with torch.no_grad():
        spectra = model.chain.analyse(mic, far).spectra
        x = compress(spectra).flatten(2)
        for block in model.blocks():
            x = block(x)
        spectrum, mask = model.mask(x.unflatten(-1, (257, -1)), spectra)
        out = model(mic, far, details=True)
    torch.testing.assert_close(mask, out["mask"])
    torch.testing.assert_close(model.chain.synthesise(spectrum, 4000), out["est"])


def test_tensor_plan_names_linear_layers_that_can_be_split(model: Any, rng: np.random.Generator) -> None:
    plan = model.tensor_plan()
    modules = dict(model.named_modules())
    assert len(plan) == 2 * 6
    assert all(isinstance(modules[name], nn.Linear) for name in plan)
    # one of three devices: a third of the heads and of the MLP; the sum over devices is the whole
    layer = model.layers[0]
    x = torch.tensor(rng.standard_normal((1, 20, 24)), dtype=torch.float32)
    names = {name.removeprefix("layers.0."): how for name, how in plan.items() if name.startswith("layers.0.")}
    with torch.no_grad():
        whole = layer.attention(x)
        total = layer.attention.out.bias.clone()
        for device in range(3):
            part = Attention(24, 3, 7, 0.0)
            part.load_state_dict(layer.attention.state_dict())
            for name, how in names.items():
                if name.startswith("attention."):
                    linear = getattr(part, name.removeprefix("attention."))
                    axis = 0 if how == "colwise" else 1
                    linear.weight = nn.Parameter(linear.weight.chunk(3, axis)[device])
                    linear.bias = nn.Parameter(linear.bias.chunk(3)[device]) if how == "colwise" else None
            total = total + part(x)
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-5)


def test_dropout_acts_in_training_only(rng: np.random.Generator) -> None:
    model: Any = Transformer(**SMALL, dropout=0.3)
    x = torch.tensor(rng.standard_normal((1, 30, 24)), dtype=torch.float32)
    layer = model.layers[0]
    assert float((layer(x) - layer(x)).detach().abs().max()) > 1e-3
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_wrong_settings_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Transformer(hidden_size=100, num_heads=12, context_frames=0, dropout=1.0)
    assert len(caught.value.problems) == 3
