"""Small stand-ins for the built-in data sets: same layouts, a few images, their own checksums; and fake clients."""

import gzip
import hashlib
import io
import os
import struct
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from dphero.data import catalog
from dphero.data.files import layouts

BATCH = 3
ROOT = Path(__file__).parents[2]


def arrays(kind):
    """Training images and labels, test images and labels: always the same ones."""
    generator = np.random.default_rng(0)
    shape, train, test = ((28, 28), 7, 4) if kind == "mnist" else ((3, 32, 32), 5 * BATCH, BATCH)
    draw = [
        (generator.integers(256, size=(n, *shape), dtype=np.uint8), np.arange(n, dtype=np.uint8) % 10)
        for n in (train, test)
    ]
    return [array for pair in draw for array in pair]


def idx(images=None, labels=None):
    if images is not None:
        return struct.pack(">4i", 0x803, *images.shape) + images.tobytes()
    return struct.pack(">2i", 0x801, len(labels)) + labels.tobytes()


def batch(images, labels):
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True))


def contents(kind):
    """The published files."""
    x, y, test_x, test_y = arrays(kind)
    if kind == "mnist":
        files = [idx(x), idx(labels=y), idx(test_x), idx(labels=test_y)]
    else:
        starts = range(0, len(x), BATCH)
        files = [*(batch(x[k : k + BATCH], y[k : k + BATCH]) for k in starts), batch(test_x, test_y)]
    names = [file.name for file in catalog.BUILT_INS[kind].files]
    return dict(zip(names, files, strict=True))


def archive(files, top="package/data"):
    """A compressed tar of files, the same bytes every time."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(stream.getvalue(), mtime=0)


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def built_in(kind, mirror=(), client=None):
    """The small set of that kind."""
    real, files = catalog.BUILT_INS[kind], contents(kind)
    x, _, test_x, _ = arrays(kind)
    client = client or real.package.client
    return replace(
        real,
        train=len(x),
        test=len(test_x),
        files=tuple(catalog.File(name, len(content), sha256(content)) for name, content in files.items()),
        mirror=tuple(mirror),
        package=replace(real.package, client=client, sha256=sha256(archive(files))),
    )


def use(patch_item, patch, **options):
    """Put the small sets in the place of the real ones."""
    sets = {kind: built_in(kind, **options) for kind in ("mnist", "cifar10")}
    patch(layouts, "_BATCH", BATCH)
    for kind, small in sets.items():
        patch_item(catalog.BUILT_INS, kind, small)
    return sets


def program(folder, name, script):
    """Write a program of that name into ``folder``."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def packed(folder, kind="mnist"):
    """The package of a small set as a file."""
    path = folder / f"{kind}.package"
    path.write_bytes(archive(contents(kind)))
    return path


def environment(cache, programs):
    """Variables for a process that uses ``cache`` and finds nothing but ``programs``."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    return {**os.environ, "DPHERO_DATA": str(cache), "PATH": str(programs), "PYTHONPATH": path}


if __name__ == "__main__":  # python -m tests.data.small WHERE-TO-STOP: get the small mnist in a process of its own
    import time

    from dphero.data import get
    from dphero.data.download import cache

    use(dict.__setitem__, setattr)
    if sys.argv[1] == "write":
        write = cache._write

        def slow(path, content):
            write(path, content)
            (path.parents[2] / "reached").touch()
            time.sleep(60)

        cache._write = slow
    print(get("mnist", use_mirror=False).source)
