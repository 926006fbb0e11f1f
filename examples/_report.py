"""What a run of private training did: a table to print and a picture."""

import dataclasses
import math

import _sampling
import numpy as np
import rich.console
import rich.table
from matplotlib import figure


@dataclasses.dataclass
class Run:
    """The course and the outcome of a run.

    Attributes:
      plan: how it sampled.
      l2_norm_clip: the clip norm.
      noise_multiplier: the noise, in clip norms.
      delta: the delta that all epsilons are at.
      steps: steps done at each evaluation.
      accuracies: the test accuracy at each evaluation.
      epsilons: the epsilon spent at each evaluation.
      norms: norms of the gradients of some training images, by when they were taken.
      overflows: how many samples did not fit the physical batch.
      left_out: how many images were left out for that reason.
      seconds: how long training took, with evaluation and compilation.
    """

    plan: _sampling.Plan
    l2_norm_clip: float
    noise_multiplier: float
    delta: float
    steps: list[int] = dataclasses.field(default_factory=list)
    accuracies: list[float] = dataclasses.field(default_factory=list)
    epsilons: list[float] = dataclasses.field(default_factory=list)
    norms: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    overflows: int = 0
    left_out: int = 0
    seconds: float = 0.0

    def record(self, step: int, accuracy: float, epsilon: float) -> None:
        """Add an evaluation."""
        self.steps.append(step)
        self.accuracies.append(accuracy)
        self.epsilons.append(epsilon)

    @property
    def guarantee(self) -> str:
        """The privacy of the whole run in words, with what cutting samples costs."""
        epsilon = self.epsilons[-1]
        if math.isinf(epsilon):
            return "none (no noise)"
        delta = self.plan.total_delta(self.delta, epsilon)
        return f"epsilon {epsilon:.3f} at delta {delta:g}"


def print_summary(run: Run) -> None:
    """Print the run as a table."""
    table = rich.table.Table("", "value", title="Private training")
    plan = run.plan
    rows = {
        "test accuracy": f"{run.accuracies[-1]:.2%}",
        "privacy": run.guarantee,
        "noise multiplier": f"{run.noise_multiplier:g}",
        "clip norm": f"{run.l2_norm_clip:g}",
        "images, expected batch": f"{plan.examples}, {plan.batch_size}",
        "physical batch": f"{plan.physical_batch_size}",
        "samples cut (images left out)": f"{run.overflows} ({run.left_out})",
        "steps": f"{plan.steps} in {plan.epochs} epochs",
        "time": f"{run.seconds:.1f} s, {run.seconds / plan.steps * 1e3:.0f} ms a step",
    }
    for when, norms in run.norms.items():
        rows[f"median norm {when} (not private)"] = (
            f"{np.median(norms):.3g}; {np.mean(norms > run.l2_norm_clip):.0%} above the clip norm"
        )
    for name, value in rows.items():
        table.add_row(name, value)
    rich.console.Console().print(table)


def plot(run: Run, file: str) -> None:
    """Draw accuracy and epsilon over steps, and the norms, into a PNG file."""
    picture = figure.Figure(figsize=(10, 4), layout="constrained")
    left, right = picture.subplots(1, 2)
    (accuracy,) = left.plot(run.steps, np.multiply(run.accuracies, 100), "o-", color="tab:blue")
    left.set(xlabel="step", ylabel="test accuracy, %", xlim=(0, None))
    left.set_title(f"{run.accuracies[-1]:.1%} at the end")
    lines = [accuracy]
    labels = ["test accuracy"]
    if np.isfinite(run.epsilons).all():
        other = left.twinx()
        lines += other.plot(run.steps, run.epsilons, "s--", color="tab:orange", markersize=4)
        labels.append("epsilon")
        other.set(ylabel=f"epsilon at delta {run.delta:g}", ylim=(0, None))
    left.legend(lines, labels, loc="lower right")
    positive = {when: norms[norms > 0] for when, norms in run.norms.items()}
    together = np.concatenate(list(positive.values()))
    bins = np.geomspace(together.min() * 0.9, together.max() * 1.1, 50)
    for when, norms in positive.items():
        right.hist(norms, bins, alpha=0.6, label=f"{when} training")
    if 0 < run.l2_norm_clip < math.inf:
        right.axvline(run.l2_norm_clip, color="black", linestyle=":", label="clip norm")
    right.set(xscale="log", xlabel="norm of an image's gradient", ylabel="images")
    right.set_title("Norms before clipping (not private)")
    right.legend()
    picture.savefig(file, dpi=120)
