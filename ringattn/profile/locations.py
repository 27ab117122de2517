"""Finds and reads the profiles of this machine in search order; ``resolve`` decides between them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from ringattn.errors import ProfileError

from .access import exposed, other_writers, trust_policy
from .precedence import effort_and_day
from .schema import Profile
from .yaml_io import load_head, load_profile

# In search order; the first two name one file each and bind.
Origin = Literal["argument", "env", "env-path", "user", "store", "system", "shipped", "built-in"]

FILE_VARIABLE = "RINGTUNE_PROFILE"
PATH_VARIABLE = "RINGTUNE_PROFILE_PATH"
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Located:
    """Profile with the file it came from and the way it was found."""

    path: str
    profile: Profile
    origin: Origin


def search_paths(environ: Mapping[str, str], home: Path) -> tuple[tuple[Origin, Path], ...]:
    """Return (origin, file or folder) in search order; pure. Only ``env`` is a file. Never the working directory.

    Raises ProfileError for a relative folder in RINGTUNE_PROFILE_PATH, which would depend on it, and for a URL.
    """
    found: list[tuple[Origin, Path]] = []
    if named := environ.get(FILE_VARIABLE):
        found.append(("env", Path(named)))
    if url := re.search(r"\b[A-Za-z][A-Za-z0-9+.-]+://[^:]*", environ.get(PATH_VARIABLE, "")):
        raise ProfileError(PATH_VARIABLE, f"holds {url[0]!r}, which is a URL: it takes folders, URLs need a store")
    for entry in environ.get(PATH_VARIABLE, "").split(os.pathsep):
        if entry and not Path(entry).is_absolute():
            raise ProfileError(PATH_VARIABLE, f"holds {entry!r}, a relative folder; write it from / on")
        if entry:
            found.append(("env-path", Path(entry)))
    found.append(("user", user_folder(environ, home)))
    for entry in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep):
        if Path(entry).is_absolute():  # others are invalid by the XDG specification, and ignored
            found.append(("system", Path(entry) / "ringtune"))
    found.append(("system", Path("/etc/ringtune/profiles")))
    found.append(("shipped", shipped_folder()))
    return tuple(found)


def user_folder(environ: Mapping[str, str], home: Path) -> Path:
    """Return the user's folder: ``$XDG_CONFIG_HOME/ringtune``, or ``~/.config/ringtune``. Need not exist."""
    configured = environ.get("XDG_CONFIG_HOME", "")
    base = Path(configured) if Path(configured).is_absolute() else home / ".config"
    return base / "ringtune"


def cache_folder(environ: Mapping[str, str], home: Path) -> Path:
    """Return the user's cache folder: ``$XDG_CACHE_HOME/ringtune``, or ``~/.cache/ringtune``. Need not exist."""
    configured = environ.get("XDG_CACHE_HOME", "")
    return (Path(configured) if Path(configured).is_absolute() else home / ".cache") / "ringtune"


def state_folder(environ: Mapping[str, str], home: Path) -> Path:
    """Return the user's state folder: ``$XDG_STATE_HOME/ringtune``, or ``~/.local/state/ringtune``. Need not exist."""
    configured = environ.get("XDG_STATE_HOME", "")
    return (Path(configured) if Path(configured).is_absolute() else home / ".local" / "state") / "ringtune"


def home_folder() -> Path:
    """Return the user's home, or /nonexistent for a user without one (a number without a name, in a container)."""
    try:
        home = Path.home()
    except RuntimeError:
        return Path("/nonexistent")
    return home if home.is_absolute() else Path("/nonexistent")  # HOME=x would mean a folder of the working one


def shipped_folder() -> Path:
    """Return the folder of the profiles that come with the package: inside it if installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "_profiles"
    return inside if inside.is_dir() else package.parent / "profiles"


def collect(
    named: str | os.PathLike[str] | None = None,
    *,
    heuristics_only: bool = False,
    vendor: str = "",
    stored: Callable[[], Sequence[Located]] = tuple,
    environ: Mapping[str, str] | None = None,
    home: Path | None = None,
) -> tuple[tuple[Located, ...], tuple[str, ...]]:
    """Read every profile of the search order; return them, and a note for each broken file that was skipped.

    ``named`` is the file a user gave; without it RINGTUNE_PROFILE names one. Such a file must load: ProfileError.
    ``heuristics_only`` reads no named file and leaves measured profiles out. Of measured ones that came with the
    package for another ``vendor``, which serve no device of this one, the rows are not read. ``stored`` returns those
    found in stores, which come after the user's folder; it is called last, so that a store may be asked meanwhile.
    ``environ`` and ``home`` are this process's unless given. Of one folder those of higher effort go first, then the
    newer.

    RINGTUNE_TRUST ``any`` asks for no checksums. Of a folder or file that others may write a note says so; where it is
    ``signed`` they are skipped, but not a file that was named, nor what came with the package.
    """
    environ = os.environ if environ is None else environ
    policy = trust_policy(environ)
    checksum, signed = policy != "any", policy == "signed"
    places = search_paths(environ, home_folder() if home is None else home)
    located: list[Located] = []
    notes: list[str] = []
    before_stored = 0
    if named is not None and not heuristics_only:
        located.append(Located(os.fspath(named), load_profile(named, checksum=checksum), "argument"))
    for origin, place in places:
        if origin != "env":
            files = _files_in(origin, place, notes)
            if origin != "shipped":
                files = _own_files(place, files, notes, signed=signed)
            # Stable: of one effort and day they stay in the order of their names.
            own = vendor if origin == "shipped" else ""
            for found in sorted(
                _loaded(origin, files, notes, checksum=checksum, vendor=own),
                key=lambda entry: effort_and_day(entry.profile),
                reverse=True,
            ):
                if found.profile.source == "heuristic" or not heuristics_only:
                    located.append(found)
            if origin == "user":
                before_stored = len(located)
        elif named is None and not heuristics_only:
            located.append(Located(str(place), load_profile(place, checksum=checksum), "env"))
    located[before_stored:before_stored] = stored()
    return tuple(located), tuple(notes)


def _files_in(origin: Origin, folder: Path, notes: list[str]) -> list[Path]:
    try:
        files = [path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.name[0] != "."]
        return sorted(files, key=lambda path: (path.stem, path))  # a.yaml before a-b.yaml
    except (FileNotFoundError, NotADirectoryError):
        if origin == "env-path":  # somebody asked for this one
            notes.append(f"{folder}: {PATH_VARIABLE} names it, and there is no such folder")
    except OSError as error:
        notes.append(f"{folder}: skipped, it cannot be read: {error.strerror}")
    return []


def _own_files(folder: Path, files: list[Path], notes: list[str], *, signed: bool) -> list[Path]:
    """Return the files of a folder; with ``signed`` those alone that nobody else may write. A note for what others may.

    Of a folder with such a fault nothing is said of each file.
    """
    why = other_writers(folder) if files else ""
    doubtful = {folder: why} if why else {path: why for path in files if (why := other_writers(path))}
    notes += [f"{place}: {exposed(why, refused=signed)}" for place, why in doubtful.items()]
    return [path for path in files if not {folder, path} & doubtful.keys()] if signed else files


def _loaded(origin: Origin, files: list[Path], notes: list[str], *, checksum: bool, vendor: str) -> Iterator[Located]:
    for path in files:
        try:
            yield Located(str(path), _load_unchanged(path, checksum, vendor), origin)
        except ProfileError as error:
            notes.append(f"{error} (skipped)")


def _load_unchanged(path: Path, checksum: bool, vendor: str) -> Profile:
    """Return the profile in a file, read again only when the file changes: a model asks once a layer."""
    try:
        status = path.stat()
    except OSError:
        return load_profile(path, checksum=checksum)  # which says what is wrong
    return _load_cached(path, status.st_ino, status.st_size, status.st_mtime_ns, checksum, vendor)


@lru_cache(maxsize=256)
def _load_cached(path: Path, _inode: int, _size: int, _modified_ns: int, checksum: bool, vendor: str) -> Profile:
    """Return the profile in a file; with ``vendor`` without its rows where they are for another one.

    The rows measured on an H200 take 78 ms to read, on a processor that has no use for them.
    """
    if vendor and (head := load_head(path)).source == "measured" and head.fingerprint.vendor != vendor:
        return head
    return load_profile(path, checksum=checksum)
