"""Times Opacus on twins of the benchmark's models: run by an interpreter that has torch and Opacus.

    python examples/_benchmark_opacus.py resnet18 32 --sizes='{"width": 16}'

It imports nothing of perex or JAX, and prints one line of JSON. A step ends with the summed clipped
gradients (without noise and without an optimizer's update), as in the other contestants; the
ordinary step ends with the gradient of the mean loss. All three run in turn in this process.
The twin of wrn16_4 has no weight standardisation, which Opacus has no rule for: it has less to do.
"""

import argparse
import importlib
import json
import statistics
import time

# By name, so that tools which check the imports of the examples do not expect torch.
torch = importlib.import_module("torch")
nn = torch.nn
functional = torch.nn.functional


def conv(inputs, outputs, size, stride=1):
    """A convolution without bias that keeps the size, up to its stride."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def norm(channels):
    """GroupNorm of 16 groups."""
    return nn.GroupNorm(min(16, channels), channels)


class PostNorm(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, inputs, outputs, stride):
        """Makes the layers."""
        super().__init__()
        self.body = nn.Sequential(
            conv(inputs, outputs, 3, stride),
            norm(outputs),
            nn.ReLU(),
            conv(outputs, outputs, 3),
            norm(outputs),
        )
        skip = [conv(inputs, outputs, 1, stride), norm(outputs)] if stride > 1 else []
        self.skip = nn.Sequential(*skip)

    def forward(self, x):
        """Applies the block."""
        return functional.relu(self.skip(x) + self.body(x))


class PreNorm(nn.Module):
    """A block of a Wide ResNet."""

    def __init__(self, inputs, outputs, stride):
        """Makes the layers."""
        super().__init__()
        self.before = nn.Sequential(norm(inputs), nn.ReLU())
        self.body = nn.Sequential(
            conv(inputs, outputs, 3, stride),
            norm(outputs),
            nn.ReLU(),
            conv(outputs, outputs, 3),
        )
        self.skip = conv(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, x):
        """Applies the block."""
        y = self.before(x)
        return (x if self.skip is None else self.skip(y)) + self.body(y)


def mnist_cnn():
    """Returns the network and the shape of an image."""
    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
    return network, (1, 28, 28)


def cifar_cnn():
    """Returns the network and the shape of an image."""
    layers = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return nn.Sequential(*layers, *head), (3, 32, 32)


def dense():
    """Returns the network and the shape of an input."""
    hidden = (nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(512, 10)), (784,)


def resnet18(width=64):
    """Returns the network and the shape of an image."""
    blocks = [PostNorm(width, width, 1) for _ in range(2)]
    for stage in range(1, 4):
        inner = width * 2**stage
        blocks += [PostNorm(inner // 2, inner, 2), PostNorm(inner, inner, 1)]
    stem = (conv(3, width, 3), norm(width), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))
    return nn.Sequential(*stem, *blocks, *head), (3, 32, 32)


def wrn16_4():
    """Returns the network and the shape of an image."""
    widths = (16, 64, 128, 256)
    blocks = []
    for stage in range(3):
        inputs, outputs = widths[stage : stage + 2]
        blocks += [PreNorm(inputs, outputs, 1 + (stage > 0)), PreNorm(outputs, outputs, 1)]
    head = (norm(256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    return nn.Sequential(conv(3, 16, 3), *blocks, *head), (3, 32, 32)


BUILDERS = {f.__name__: f for f in (mnist_cnn, cifar_cnn, dense, resnet18, wrn16_4)}


def ordinary_step(model, batch):
    """Returns a step that computes the gradient of the mean loss."""
    images, labels = batch

    def step():
        model.zero_grad(set_to_none=True)
        functional.cross_entropy(model(images), labels).backward()

    return step


def hooks_step(model, batch, clip):
    """Returns a step that keeps per-example gradients, then clips and sums them."""
    images, labels = batch
    module = importlib.import_module("opacus.grad_sample").GradSampleModule(
        model, loss_reduction="sum"
    )

    def step():
        for parameter in module.parameters():
            parameter.grad = parameter.grad_sample = None
        functional.cross_entropy(module(images), labels, reduction="sum").backward()
        parameters = list(module.parameters())
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in parameters]).norm(dim=0)
        weights = (clip / norms).clamp(max=1)
        for parameter in parameters:
            parameter.grad = torch.tensordot(weights, parameter.grad_sample, 1)

    return step


def ghost_step(model, batch, clip):
    """Returns a step that computes norms alone, then the gradient of a weighted loss."""
    images, labels = batch
    clipping = importlib.import_module(
        "opacus.grad_sample.grad_sample_module_fast_gradient_clipping"
    )
    module = clipping.GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=clip, use_ghost_clipping=True
    )

    def step():
        module.zero_grad(set_to_none=True)
        losses = functional.cross_entropy(module(images), labels, reduction="none")
        losses.sum().backward(retain_graph=True)
        weights = module.get_clipping_coef()
        module.zero_grad(set_to_none=True)
        module.disable_hooks()
        (weights * losses).sum().backward()
        module.enable_hooks()

    return step


def timed(step):
    """Returns the seconds that a step takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main():
    """Times the three steps in turn and prints the figures."""
    parser = argparse.ArgumentParser(description="Times Opacus.")
    parser.add_argument("model", choices=list(BUILDERS))
    parser.add_argument("batch_size", type=int)
    parser.add_argument("--sizes", type=json.loads, default={})
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--min_time", type=float, default=0.2)
    flags = parser.parse_args()

    # One set of weights and one batch for all, so that the sums can be compared.
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        network, shape = BUILDERS[flags.model](**flags.sizes)
        models.append(network)
    batch = torch.randn(flags.batch_size, *shape), torch.randint(0, 10, (flags.batch_size,))
    clip = 1.0
    steps = {
        "ordinary": ordinary_step(models[0], batch),
        "hooks": hooks_step(models[1], batch, clip),
        "ghost": ghost_step(models[2], batch, clip),
    }
    for step in steps.values():
        step()
    for a, b in zip(models[1].parameters(), models[2].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-2, atol=1e-4)

    times = {name: [] for name in steps}
    names = list(steps)
    while len(times["ghost"]) < flags.repeats or min(map(sum, times.values())) < flags.min_time:
        turn = len(times["ghost"]) % len(names)
        for name in (*names[turn:], *names[:turn]):
            times[name].append(timed(steps[name]))
    figures = {f"opacus {name} ms": statistics.median(t) * 1e3 for name, t in times.items()}
    for name in ("hooks", "ghost"):
        ratios = [a / b for a, b in zip(times[name], times["ordinary"], strict=True)]
        figures[f"opacus {name} / ordinary"] = statistics.median(ratios)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
