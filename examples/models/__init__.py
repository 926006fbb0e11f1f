"""Models in plain JAX, for the benchmark and the tests.

Each builder takes a batch size and a PRNG key, then ``dtype`` and its sizes as keywords. It returns
``(loss, params, batch)``: ``loss(params, *example)`` is the loss of one example, a scalar, and
``batch`` a tuple of arrays with the example axis in front. Images are ``[height, width, channels]``
without it.
"""

from collections.abc import Callable

from .images import (
    cifar_cnn,
    convnext,
    dense,
    mnist_cnn,
    mobilenet_v2,
    resnet18,
    wrn16_4,
)
from .pixels import pixelcnn, unet
from .recurrent import gru, lstm
from .transformers import lora, moe, transformer, vit

__all__ = [
    "BUILDERS",
    "cifar_cnn",
    "convnext",
    "dense",
    "gru",
    "lora",
    "lstm",
    "mnist_cnn",
    "mobilenet_v2",
    "moe",
    "pixelcnn",
    "resnet18",
    "transformer",
    "unet",
    "vit",
    "wrn16_4",
]

BUILDERS: dict[str, Callable] = {
    "mnist_cnn": mnist_cnn,
    "cifar_cnn": cifar_cnn,
    "dense": dense,
    "resnet18": resnet18,
    "wrn16_4": wrn16_4,
    "convnext": convnext,
    "mobilenet_v2": mobilenet_v2,
    "unet": unet,
    "pixelcnn": pixelcnn,
    "vit": vit,
    "transformer": transformer,
    "lstm": lstm,
    "gru": gru,
    "moe": moe,
    "lora": lora,
}
