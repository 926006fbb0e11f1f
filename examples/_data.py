"""The data sets of the examples: scikit-learn's digits, and MNIST from its IDX files."""

import gzip
import pathlib
import struct
from typing import NamedTuple

import numpy as np

MNIST_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


class Data(NamedTuple):
    """Images `[N, H, W, 1]` float32 in [0, 1], and their labels `[N]` int32."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(dataset: str, data_dir: str | None) -> Data:
    """Load a data set by its name, "digits" or "mnist".

    Raises:
      ValueError: the name is unknown, or MNIST is asked for without a directory.
      FileNotFoundError: a file of MNIST is missing.
    """
    if dataset == "digits":
        return digits()
    if dataset == "mnist":
        if not data_dir:
            raise ValueError(
                "--dataset=mnist needs --data_dir, the directory that holds the files "
                f"{', '.join(MNIST_FILES.values())}"
            )
        return mnist(pathlib.Path(data_dir))
    raise ValueError(f"unknown data set {dataset!r}")


def digits() -> Data:
    """Load 1797 real images of 8 x 8 pixels; a fixed fifth of them, shuffled, is the test set."""
    from sklearn import datasets  # Slow to import, and needed for these images only.

    images, labels = datasets.load_digits(return_X_y=True)
    images = scaled(np.reshape(images, (-1, 8, 8)), 16)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:360], order[360:]
    labels = np.asarray(labels, np.int32)
    return Data(images[train], labels[train], images[test], labels[test])


def mnist(directory: pathlib.Path) -> Data:
    """Load MNIST from its four IDX files, gzipped (with the ending .gz) or not."""
    arrays = {name: read_idx(find(directory, file)) for name, file in MNIST_FILES.items()}
    for part in ("train", "test"):
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise ValueError(
                f"{directory}: {part} images {images.shape} and labels {labels.shape} do not match"
            )
    return Data(
        scaled(arrays["train_images"], 255),
        arrays["train_labels"].astype(np.int32),
        scaled(arrays["test_images"], 255),
        arrays["test_labels"].astype(np.int32),
    )


def find(directory: pathlib.Path, file: str) -> pathlib.Path:
    """Return the path of a file or of its gzipped twin."""
    for path in (directory / file, directory / f"{file}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{directory} holds neither {file} nor {file}.gz")


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Read an array of bytes in IDX format: 0, 0, type 8, the rank, the sizes, the bytes."""
    opened = gzip.open(path) if path.suffix == ".gz" else open(path, "rb")
    with opened as file:
        content = file.read()
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise ValueError(f"{path} ends within its header")
    shape = struct.unpack(f">{rank}I", content[4:start])
    if len(content) - start != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path} holds {len(content) - start} bytes, not {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def scaled(images: np.ndarray, largest: float) -> np.ndarray:
    """Bring pixels from [0, largest] to [0, 1], and add an axis for the channel."""
    return (np.asarray(images, np.float32) / np.float32(largest))[..., None]
