"""The partitioned-block frequency-domain Kalman filter (PBFDKF).

Enzner & Vary, "Frequency-domain adaptive Kalman filter for acoustic echo control in hands-free telephones" (2006);
Kuech, Mabande & Enzner, "State-space architecture of the partitioned-block-based acoustic echo controller" (ICASSP
2014).
The echo path is W [L, F], a first-order Markov process; per partition and bin P is the variance of its error.

    y = last M of irfft(sum_l W_l X_l)         e = d - y           E = rfft([0_M, h * e])
    psd = b psd + (1 - b) |E|^2                D = sum_l P_l |H X_l|^2 + (2 / L) psd
    W_l <- A (W_l + C[P_l conj(H X_l) E / D])  C: the gradient constraint (the last M taps are zero)
    P_l <- A^2 (1 - P_l |H X_l|^2 / (2 D)) P_l + (1 - A^2) |W_l|^2

Beyond the papers: h (response H) is a high-pass on the error, so that a DC offset or rumble at the microphone, which
leaks from the rectangular window into every bin, can't steer the filter, while the echo path stays that of the plain
signals; P starts relative to the level of microphone and far end; streams freeze while their far end is silent.

Legend: B batch, L partitions, F bins, M hop.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from echofree.contracts import State

TINY = 1e-20  # below any audible power, above float32's smallest normal number
DOUBT = 1.0  # variance after an alarm, in units of the mean |W_l|^2
STATES = ("weight", "variance", "psd")


class KalmanFilter(nn.Module):
    """One hop of the filter for a batch of streams. Works in place on its state: the caller decides what to copy.

    Args:
        hop_samples: M; the FFT has 2 M samples.
        num_partitions: L; the filter spans L M samples.
        transition: A, just below 1: higher converges deeper, lower follows changes faster.
        output: "posterior" takes the echo estimate after the update of this hop (in effect with a Wiener post-filter:
            deeper, and slightly less faithful to the talker), "prior" the one before it. A network must run with the
            one that it was trained with.
        psd_smoothing: b.
        error_response: H at the M + 1 bins, complex.
        dtype: of the arithmetic.
    """

    response_conj: Tensor
    response_power: Tensor

    def __init__(
        self,
        hop_samples: int,
        num_partitions: int,
        transition: float,
        output: str,
        psd_smoothing: float,
        error_response: np.ndarray,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.hop_samples, self.num_partitions = hop_samples, num_partitions
        self.transition, self.output, self.psd_smoothing = transition, output, psd_smoothing
        complex_dtype = torch.complex64 if dtype == torch.float32 else torch.complex128
        response = torch.tensor(error_response)
        self.register_buffer("response_conj", response.conj().resolve_conj().to(complex_dtype), persistent=False)
        self.register_buffer("response_power", response.abs().square().to(dtype), persistent=False)

    def init_state(self, batch: int) -> State:
        """weight [B, L, F, 2] (real, imaginary), variance [B, L, F], psd [B, F]; all zero."""
        like, bins = self.response_power, self.hop_samples + 1
        return {
            "weight": like.new_zeros(batch, self.num_partitions, bins, 2),
            "variance": like.new_zeros(batch, self.num_partitions, bins),
            "psd": like.new_zeros(batch, bins),
        }

    def predict(self, spectra: Tensor, state: State) -> Tensor:
        """A-priori echo of the new hop. spectra complex [B, L, F], oldest first -> [B, M]."""
        weight = torch.view_as_complex(state["weight"])
        return torch.fft.irfft((weight * spectra).sum(1))[:, self.hop_samples :]

    def correct(
        self, planes: tuple[Tensor, Tensor], power: Tensor, errors: Tensor, adapt: Tensor, floor: Tensor, state: State
    ) -> Tensor:
        """Updates the state in place with the error of this hop.

        Args:
            planes: real and negative imaginary part of the spectra, [B, L, F] each, oldest first.
            power: |spectra|^2.
            errors: [B, 2, M], the a-priori error plain and high-passed by h.
            adapt: [B, 1], 1 where the filter may learn from this hop, else 0.
            floor: [B, 1] or [B, L], the least variance, in units of |W|^2.
            state: see `init_state`.

        Returns:
            The error by which `output` is defined, [B, M].
        """
        hop, count = self.hop_samples, self.num_partitions
        weight, variance, psd = state["weight"], state["variance"], state["psd"]
        plain, high_passed = torch.fft.rfft(torch.nn.functional.pad(errors, (hop, 0))).unbind(1)  # [B, F] each
        psd.lerp_(high_passed.real.square() + high_passed.imag.square(), 1 - self.psd_smoothing)
        expected = variance * power  # [B, L, F]
        explained = self.response_power * expected.sum(1)  # [B, F]
        total = explained + (2.0 / count) * psd + TINY
        error = errors[:, 0]
        if self.output == "posterior":
            error = torch.fft.irfft(plain * (1 - explained / total))[:, hop:]

        drive = (high_passed * self.response_conj) * (adapt / total)  # [B, F]
        # P conj(X) in real planes: cheaper than complex times real
        gradient = torch.complex(planes[0] * variance, planes[1] * variance).mul_(drive.unsqueeze(1))  # [B, L, F]
        taps = torch.fft.irfft(gradient)  # [B, L, 2 M]
        taps[..., hop:] = 0
        step = torch.view_as_real(torch.fft.rfft(taps))
        weight.add_(step).mul_(self.transition)

        gain = self.transition**2
        share = (adapt * self.response_power / total).mul_(-0.5 * gain).unsqueeze(1)
        variance.mul_(expected.mul_(share).add_(gain))
        squares = weight.square()
        variance.add_(squares[..., 0] + squares[..., 1], alpha=1 - gain)
        torch.maximum(variance, floor.unsqueeze(-1), out=variance)
        return error

    def doubt(self, alarm: Tensor, spoilt: Tensor, state: State) -> None:
        """Makes the filter quick again, in place, where alarm [B, 1] is 1: the error of each partition is taken to be
        as large as the partition itself. Where spoilt [B, 1] is 1 the echo path is forgotten."""
        weight, variance = state["weight"], state["variance"]
        size = weight.square().sum(-1).mean(-1, keepdim=True)  # [B, L, 1]
        torch.maximum(variance, DOUBT * size * alarm.unsqueeze(-1), out=variance)
        weight.mul_(1 - spoilt.view(-1, 1, 1, 1))

    def shift(self, samples: Tensor, start: Tensor, state: State) -> None:
        """Moves every stream's echo path by `samples` [B, 1], in place: positive when the far end is from now on
        delayed by as many more. What is shifted in starts from zero with variance `start` [B, 1] or [B, L]."""
        hop, count = self.hop_samples, self.num_partitions
        weight, variance, moved = state["weight"], state["variance"], samples.long()
        taps = torch.fft.irfft(torch.view_as_complex(weight))[..., :hop].flip(1).flatten(1)  # [B, L M], in time
        source = torch.arange(count * hop, device=moved.device) + moved  # [B, L M]
        valid = (source >= 0) & (source < count * hop)
        taps = taps.gather(1, source.clamp(0, count * hop - 1)) * valid
        taps = torch.nn.functional.pad(taps.unflatten(1, (count, hop)).flip(1), (0, hop))
        changed = moved != 0
        spectra = torch.view_as_real(torch.fft.rfft(taps))
        weight.copy_(torch.where(changed.view(-1, 1, 1, 1), spectra, weight))
        # of the two partitions that a new one covers, the less certain one counts
        first = torch.arange(count - 1, -1, -1, device=moved.device) + moved.div(hop, rounding_mode="floor")  # [B, L]
        parts = []
        for part in (first, first + (moved % hop != 0)):
            known = ((part >= 0) & (part < count)).unsqueeze(-1)  # [B, L, 1]
            index = (count - 1 - part.clamp(0, count - 1)).unsqueeze(-1).expand(-1, -1, variance.shape[-1])
            parts.append(torch.where(known, variance.gather(1, index), start.unsqueeze(-1)))
        variance.copy_(torch.where(changed.unsqueeze(-1), torch.maximum(*parts), variance))
