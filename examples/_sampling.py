"""Poisson sampling into batches of one size, and the privacy that training with it costs.

Each step takes each example with probability q, by itself, so the size of a batch varies. A
compiled step wants one size, the physical batch: what is missing is padding, and a sample that does
not fit is cut at random. Cutting is not Poisson sampling; it is counted for the privacy as follows.
If any step of the run overflows with probability p, cutting changes the distribution of the run by
at most p in total variation, so a run that would be (epsilon, delta) private is
(epsilon, delta + (1 + exp(epsilon)) * p) private. `plan` picks the physical batch such that p is
tiny, and the accounting keeps a thousandth of delta for it, which is enough up to an epsilon of 11.
"""

import dataclasses
import math

import numpy as np
from dp_accounting import dp_event, mechanism_calibration, pld
from scipy import stats

# The share of delta that is kept for samples that do not fit, and the probability of one, in delta.
RESERVE = 1e-3
OVERFLOW = 1e-8


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a run samples.

    Attributes:
      examples: the number of training examples N. It is taken to be public.
      batch_size: the expected size of a batch, q * N.
      steps_per_epoch: steps that see N examples in expectation.
      epochs: the number of epochs.
      physical_batch_size: the size of the arrays of a batch, padding included.
      overflow_probability: an upper bound on the probability that any sample does not fit.
    """

    examples: int
    batch_size: int
    steps_per_epoch: int
    epochs: int
    physical_batch_size: int
    overflow_probability: float

    @property
    def probability(self) -> float:
        """The probability q with which a step takes an example."""
        return self.batch_size / self.examples

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return self.steps_per_epoch * self.epochs

    def total_delta(self, delta: float, epsilon: float) -> float:
        """Return the delta of the run, cut samples included: `delta`, unless epsilon is large."""
        cut = (1 + math.exp(min(epsilon, 700))) * self.overflow_probability
        return max(delta, min(1.0, (1 - RESERVE) * delta + cut))


def plan(examples: int, batch_size: int, epochs: int, delta: float) -> Plan:
    """Choose the physical batch size such that overflow is very rare."""
    steps_per_epoch = max(1, round(examples / batch_size))
    steps = steps_per_epoch * epochs
    sizes = stats.binom(examples, batch_size / examples)
    physical = min(examples, int(sizes.isf(OVERFLOW * delta / steps)))
    overflow = min(1.0, steps * float(sizes.sf(physical)))
    return Plan(examples, batch_size, steps_per_epoch, epochs, physical, overflow)


class Sampler:
    """Draws batches of indices and padding, and counts what does not fit."""

    def __init__(self, plan: Plan, seed: int):
        """Prepare to sample as planned."""
        self.plan = plan
        self.overflows = 0
        self.left_out = 0
        self._random = np.random.default_rng(seed)

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw the batch of one step.

        Returns:
          Indices into the data, int32, and `is_padding`, bool, both `[physical batch size]`.
        """
        (drawn,) = np.nonzero(self._random.random(self.plan.examples) < self.plan.probability)
        size = self.plan.physical_batch_size
        if len(drawn) > size:
            self.overflows += 1
            self.left_out += len(drawn) - size
            drawn = self._random.permutation(drawn)[:size]
        indices = np.zeros(size, np.int32)
        indices[: len(drawn)] = drawn
        return indices, np.arange(size) >= len(drawn)


def training_event(plan: Plan, noise_multiplier: float, steps: int) -> dp_event.DpEvent:
    """Return what `steps` steps do, in the language of dp_accounting."""
    step = dp_event.PoissonSampledDpEvent(
        plan.probability, dp_event.GaussianDpEvent(noise_multiplier)
    )
    return dp_event.SelfComposedDpEvent(step, steps)


class Accountant:
    """Says which epsilon has been spent, by privacy loss distributions, to add or remove one."""

    def __init__(self, plan: Plan, noise_multiplier: float, delta: float):
        """Begin with nothing spent."""
        self.plan, self.noise_multiplier, self.delta = plan, noise_multiplier, delta
        self._accountant = pld.PLDAccountant()

    def spend(self, steps: int) -> float:
        """Account for some more steps, and return the epsilon of all so far."""
        if self.noise_multiplier == 0:
            return math.inf
        self._accountant.compose(training_event(self.plan, self.noise_multiplier, steps))
        return float(self._accountant.get_epsilon((1 - RESERVE) * self.delta))


def calibrate(plan: Plan, target_epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier, to a thousandth, that keeps a run below an epsilon."""
    found = mechanism_calibration.calibrate_dp_mechanism(
        pld.PLDAccountant,
        lambda noise: training_event(plan, noise, plan.steps),
        target_epsilon,
        (1 - RESERVE) * delta,
        mechanism_calibration.LowerEndpointAndGuess(0.0, 1.0),
        tol=1e-3,
    )
    return math.ceil(found * 1e3) / 1e3
