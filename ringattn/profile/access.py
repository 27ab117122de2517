"""Trust policy of this process, and who else may change what lies in a place that it reads."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

from ringattn.errors import StoreError

TRUST_VARIABLE = "RINGTUNE_TRUST"

# any: no checksum is asked for. checksum: a file must be whole. signed: one in a store must also be signed by a key
# that is named, and no place that others may write to is read.
TrustPolicy = Literal["any", "checksum", "signed"]


def trust_policy(environ: Mapping[str, str]) -> TrustPolicy:
    """Return the policy of RINGTUNE_TRUST, ``checksum`` where it is not set; StoreError for one that is unknown."""
    named = environ.get(TRUST_VARIABLE) or "checksum"
    for policy in get_args(TrustPolicy):
        if named == policy:
            return policy  # type: ignore[no-any-return]
    raise StoreError(TRUST_VARIABLE, f"is {named!r}; use any, checksum or signed")


def other_writers(path: Path) -> str:
    """Return why others than root and this user may change ``path`` or what it leads to; empty where they may not.

    They may where the file or folder, a folder above it or a link on the way is theirs or open to them: whoever can
    write to a folder puts another in the place of what is in it. Of a folder above with the sticky bit, such as /tmp,
    its entries belong to those who own them. The group that a user has alone, by the same name, is no other.
    """
    if os.name != "posix":
        return ""
    try:
        ends = (path.absolute(), Path(os.path.realpath(path, strict=True)))
    except OSError:  # it is not there, or a link that leads nowhere: nothing is read of it
        return ""
    for passed in _passed(path):
        try:
            status = passed.lstat()
        except OSError:  # gone since
            continue
        if status.st_uid not in (0, os.geteuid()):
            return f"{passed} belongs to {_user_name(status.st_uid)}"
        if stat.S_ISLNK(status.st_mode) or (passed not in ends and status.st_mode & stat.S_ISVTX):
            continue
        if status.st_mode & stat.S_IWOTH:
            return f"{passed} may be written by everybody"
        if status.st_mode & stat.S_IWGRP and not _is_own_group(status):
            return f"{passed} may be written by its group"
    return ""


def exposed(why: str, *, refused: bool) -> str:
    """Return what to say of a place that others may write, and ``why`` they may."""
    what = f"skipped, since {TRUST_VARIABLE} is signed and others" if refused else "others"
    return f"{what} may change its profiles: {why}; chown or chmod go-w that"


def _passed(path: Path) -> Iterator[Path]:
    """Yield what the kernel looks at on its way to ``path``: it, the folders above it, and where links on it lead."""
    seen: set[Path] = set()
    waiting = [path.absolute()]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        yield at
        if at.is_symlink():
            waiting.append(at.parent / at.readlink())
        waiting.append(at.parent)


def _is_own_group(status: os.stat_result) -> bool:
    """Tell whether a file's group is its owner's alone, as most systems make one for each user."""
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    alone = not set(group.gr_mem) - {owner.pw_name}
    return alone and owner.pw_gid == status.st_gid and group.gr_name == owner.pw_name


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
