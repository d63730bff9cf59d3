"""Opinion pools: each client's posterior without its own prior, combined class by class.

A classifier trained on a client's data learns ``p_k(c | x) ~ p(x | c) pi_k(c)``, with the client's own prior pi_k.
Dividing by the prior leaves the client's evidence from the image, as for long-tailed data (Menon et al., *Long-tail
learning via logit adjustment*, ICLR 2021). An uncertain client's mass then goes to classes that it never saw. Its
weight for these is zero, so that it has no influence.

The two ways to combine are the linear and the logarithmic opinion pool (Genest and Zidek, *Combining probability
distributions*, Statistical Science 1986), here with weights per class. Symbols::

    pi_k(c)  = (n_k^c + a N_k) / (N_k (1 + C a)),  N_k = sum_c n_k^c
    q_k(x)   = softmax((z_k(x) - log pi_k) / T_k)
    l_k(c)   = w_k n_k^c / sum_j w_j n_j^c

A posterior near 0 or 1 no longer shows how certain its client was. A calibrated pool therefore adds the logits,
``sum_k l_k(c) s_k (z_k(x)_c - mean_c z_k(x)) + b_c``. Here 1 / s_k is the size of the client's logits on noise. The
bias b makes each class as frequent among the predictions on noise as among the clients' examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..method import Upload
from .trained import register

SMOOTHING = 2 / 130  # a
UNHELD = 10.0  # a class that no client holds gets a logit this far below all others
FLOOR = 1e-4  # least probability of an opinion in a logarithmic pool
LEAST_SIZE = 0.1  # of the logits on noise, as a share of the clients' median
# Calibration on noise: the temperature of the predictions, the fixed-point steps and their rate.
COUNTING = 0.25
STEPS = 100
RATE = 0.5
LEAST_WANTED = 1e-2  # least target share of a class, as a fraction of 1 / C
LEAST_PREDICTED = 1e-5  # least predicted share of a class, as a fraction of 1 / C

PRODUCT = {2: "mc,mbc->bc", 3: "mbc,mbc->bc"}  # of shares with as many dimensions, and opinions


def logarithmic(shares: Tensor, opinions: Tensor) -> Tensor:
    """Return ``sum_k l_k(c) log(q_k(c | x) + 1e-4)`` [B, C]: the geometric mean of the members' opinions of a class.

    Args:
        shares: l [M, C], or [M, B, C] where they depend on the image.
        opinions: log q [M, B, C].
    """
    return torch.einsum(PRODUCT[shares.dim()], shares, (opinions.exp() + FLOOR).log())


def linear(shares: Tensor, opinions: Tensor) -> Tensor:
    """Return ``log(sum_k l_k(c) q_k(c | x))`` [B, C], the arithmetic mean; arguments as for :func:`logarithmic`."""
    mass = torch.einsum(PRODUCT[shares.dim()], shares, opinions.exp())
    return mass.clamp_min(torch.finfo(mass.dtype).tiny).log()


RULES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"log": logarithmic, "linear": linear}


class OpinionPool(nn.Module):
    """A pool of the members' opinions by one of the two rules.

    Args:
        rule: A key of ``RULES``.
        counts: Examples n_k^c >= 0 of class c that member k was trained on [M, C]; estimates need not be integers.
        weights: w_k >= 0 [M], factors of the members' counts; ones by default.
        temperatures: T_k > 0 [M]; ones by default.
        smoothing: a > 0 [1].
        scales: s_k >= 0 [M]; zeros by default, which leaves the logits out.
        bias: b [C]; zeros by default.

    Raises:
        ValueError: The rule is unknown, or a tensor's shape or range is wrong.
    """

    kind = ""
    counts: Tensor
    weights: Tensor
    temperatures: Tensor
    smoothing: Tensor
    scales: Tensor
    bias: Tensor

    def __init__(
        self,
        rule: str,
        counts: Tensor,
        weights: Tensor | None = None,
        temperatures: Tensor | None = None,
        smoothing: Tensor | None = None,
        *,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        if rule not in RULES:
            raise ValueError(f"rule of an opinion pool is {rule!r}: must be one of {', '.join(map(repr, RULES))}")
        self.rule = rule
        ones = torch.ones(len(counts))
        given = {
            "counts": (counts, 2),
            "weights": (ones if weights is None else weights, 1),
            "temperatures": (ones if temperatures is None else temperatures, 1),
            "smoothing": (torch.tensor([SMOOTHING]) if smoothing is None else smoothing, 1),
            "scales": (0 * ones if scales is None else scales, 1),
            "bias": (torch.zeros(counts.shape[-1]) if bias is None else bias, 1),
        }
        register(self, given)
        name, members = f"a {rule} pool", len(counts)
        for key, value in (("counts", self.counts), ("weights", self.weights), ("scales", self.scales)):
            if len(value) != members or not bool(((value >= 0) & value.isfinite()).all()):
                raise ValueError(f"{key} of {name}: must be finite numbers from 0, for each of {members} members")
        for key, value, length in (("temperatures", self.temperatures, members), ("smoothing", self.smoothing, 1)):
            if len(value) != length or not bool(((value > 0) & value.isfinite()).all()):
                raise ValueError(f"{key} of {name} is {value.tolist()}: must be {length} positive numbers")
        if len(self.bias) != self.counts.shape[1] or not bool(self.bias.isfinite().all()):
            raise ValueError(f"bias of {name}: must be {self.counts.shape[1]} finite numbers, one per class")

    @torch.no_grad()
    def calibrate(self, answers: Tensor) -> None:
        """Set scales and bias from logits on noise.

        Args:
            answers: The members' logits on noise [M, P, C].
        """
        answers = self._zero_left_out(answers)
        sizes = center_logits(answers).std((1, 2), correction=0)
        # Unbounded, a model with tiny logits on noise would outweigh all others on other images.
        usual = float(sizes[self.weights > 0].median()) if bool((self.weights > 0).any()) else 1.0
        bounded = sizes.clamp_min(max(LEAST_SIZE * usual, 1e-12))
        self.scales.copy_(torch.where(sizes > 0, 1 / bounded, torch.zeros_like(sizes)))
        held = self.examples().sum(0)
        self.bias.copy_(balancing_bias(self._evidence(answers), held / held.sum().clamp_min(1e-12)))

    def examples(self) -> Tensor:
        """Return w_k n_k^c [M, C]; zero for a member that is left out."""
        return self.weights[:, None] * self.counts

    def shares(self) -> Tensor:
        """Return l_k(c) [M, C]; 0 for a class that no member holds."""
        return class_shares(self.examples())

    def opinions(self, logits: Tensor) -> Tensor:
        """Return log q_k(c | x) [M, B, C] of member logits [M, B, C]."""
        prior = log_priors(self.counts, self.smoothing)
        return torch.log_softmax((logits - prior[:, None]) / self.temperatures[:, None, None], dim=2)

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to logits [B, C], whose softmax is the pool's prediction."""
        logits = self._zero_left_out(logits)
        shares = self.shares()
        combined = RULES[self.rule](shares, self.opinions(logits)) + self._evidence(logits) + self.bias
        last = combined.detach().amin(1, keepdim=True) - UNHELD
        return torch.where(shares.sum(0) > 0, combined, last)

    def _zero_left_out(self, logits: Tensor) -> Tensor:
        """Return logits with zeros for members of weight 0, whose own logits may not be finite."""
        return torch.where(self.weights[:, None, None] > 0, logits, torch.zeros_like(logits))

    def _evidence(self, logits: Tensor) -> Tensor:
        return torch.einsum("mc,mbc->bc", self.shares() * self.scales[:, None], center_logits(logits))


def center_logits(logits: Tensor) -> Tensor:
    """Return logits [M, B, C] less their mean over classes, which changes no prediction."""
    return logits - logits.mean(2, keepdim=True)


def balancing_bias(logits: Tensor, target: Tensor) -> Tensor:
    """Return the bias b that gives each class its target frequency, ``mean_x softmax((u(x) + b) / 0.25) = target``.

    Solved by 100 damped steps ``b <- b + 0.125 (log target - log mean_x softmax)``.

    Args:
        logits: u [P, C].
        target: Shares of the classes [C]; a share of zero is replaced by a small one.
    """
    bias, classes = torch.zeros_like(target), len(target)
    for _ in range(STEPS):
        predicted = torch.softmax(logits / COUNTING + bias, dim=1).mean(0)
        bias = bias + RATE * ((target + LEAST_WANTED / classes).log() - (predicted + LEAST_PREDICTED / classes).log())
    return COUNTING * bias


def class_shares(counts: Tensor) -> Tensor:
    """Return ``n_k^c / sum_j n_j^c`` [M, C] of counts [M, C]; 0 for a class that no member holds."""
    total = counts.sum(0)
    return counts / torch.where(total > 0, total, torch.ones_like(total))


def log_priors(counts: Tensor, smoothing: Tensor) -> Tensor:
    """Return log pi_k [M, C]; the uniform prior for a member without examples.

    Args:
        counts: n_k^c >= 0 [M, C].
        smoothing: a > 0 [1], so that no class is impossible.
    """
    total, classes = counts.sum(1, keepdim=True), counts.shape[1]
    shares = torch.where(total > 0, counts / torch.where(total > 0, total, torch.ones_like(total)), 1 / classes)
    # In float64 as far as Python's numbers would be. A tensor, so that an exported pool has it among its weights.
    whole = (1 + classes * smoothing.double()).to(shares.dtype)
    return ((shares + smoothing) / whole).log()


LOG_POOL = partial(OpinionPool, "log")
LINEAR_POOL = partial(OpinionPool, "linear")


def with_stand_ins(uploads: Sequence[Upload], pool: OpinionPool) -> tuple[Upload, ...]:
    """Return a pool's members, with another member's upload in the place of each that the pool leaves out.

    The stand-in's weight is 0 as well. But gradients pass through every member, and 0 times NaN or Inf is not 0.

    Args:
        pool: Their combiner; not all of its weights are 0.
    """
    counted = (pool.weights > 0).tolist()
    stand_in = uploads[counted.index(True)]
    return tuple(upload if one else stand_in for upload, one in zip(uploads, counted, strict=True))
