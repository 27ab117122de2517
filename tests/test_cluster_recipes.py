"""The recipes for clusters, each checked by the tool that its readers would use, and every command in them by ours."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from autotune.cli.main import cli

RECIPES = Path(__file__).parents[1] / "examples" / "cluster"
SCRIPTS = sorted(RECIPES.glob("*.sh"))
PAGE = RECIPES.parents[1] / "docs" / "howto" / "cluster.md"


def tool(name: str) -> str:
    """A program on the path, or beside this Python."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    done = subprocess.run([tool("shellcheck"), script], capture_output=True)
    assert done.returncode == 0, done.stdout.decode()
    assert os.access(script, os.X_OK)


def test_the_image_passes_hadolint() -> None:
    done = subprocess.run([tool("hadolint"), RECIPES / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_manifests_are_what_kubernetes_takes() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    found = manifests()
    assert [manifest["kind"] for manifest in found][-2:] == ["DaemonSet", "Job"]
    for manifest in found:
        for version in ("1.29", validate.latest_version()):
            validate.validate(manifest, version, strict=True)


def test_the_check_of_manifests_finds_a_misspelled_field() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    job = manifests()[-1]
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(validate.ValidationError):
        validate.validate(job, validate.latest_version(), strict=True)


def test_volumes_and_labels_fit_together() -> None:
    kinds = {manifest["kind"]: manifest for manifest in manifests()}
    claim = kinds["PersistentVolumeClaim"]["metadata"]["name"]
    for kind in ("DaemonSet", "Job"):
        pod = kinds[kind]["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["store"]["persistentVolumeClaim"]["claimName"] == claim
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= set(volumes)
    daemon = kinds["DaemonSet"]["spec"]
    assert daemon["selector"]["matchLabels"] == daemon["template"]["metadata"]["labels"]
    assert daemon["template"]["spec"]["serviceAccountName"] == kinds["ServiceAccount"]["metadata"]["name"]
    node = {"name": "RINGTUNE_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert all(node in container["env"] for container in daemon["template"]["spec"]["initContainers"])
    label = next(c for c in daemon["template"]["spec"]["initContainers"] if c["name"] == "label")
    ((key, value),) = kinds["Job"]["spec"]["template"]["spec"]["nodeSelector"].items()
    assert f"{key}={value}" in label["args"]


def commands_of_recipes() -> list[tuple[str, ...]]:
    """The arguments of every ``ringtune`` in the scripts and on the page, and of every container with its image."""
    found = []
    for path in (*SCRIPTS, PAGE):
        text = path.read_text()
        if path == PAGE:
            text = "\n".join(re.findall(r"^ *```(?:sh|console)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE))
        text = text.replace("\\\n", " ")
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        for match in re.finditer(r"(?:^|[\s'(])ringtune ((?:[a-z]|--)[^'`|;)\n]*)", "\n".join(lines)):
            found.append(tuple(shlex.split(match[1].split(" 2>&1")[0], comments=True)))
    for manifest in manifests():
        pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
        for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
            if container["image"].startswith("ringtune") and "args" in container:
                found.append(tuple(container["args"]))
    return sorted(set(found))


def test_there_are_commands_in_the_recipes() -> None:
    assert {"probe", "which", "push", "list"} <= {arguments[0] for arguments in commands_of_recipes()}


@pytest.mark.parametrize("arguments", commands_of_recipes(), ids=" ".join)
def test_every_command_exists_with_its_options(arguments: tuple[str, ...]) -> None:
    command = cli.get_command(click.Context(cli), arguments[0])
    assert command is not None, arguments
    context = click.Context(command, info_name=arguments[0])
    command.make_parser(context).parse_args(list(arguments[1:]))


@pytest.mark.parametrize("code", [0, 1, 4])
def test_a_prolog_never_fails(tmp_path: Path, code: int) -> None:
    """Slurm would drain the node."""
    for name, body in (
        ("ringtune", f'echo "$@ store=$RINGTUNE_STORE" >> "{tmp_path}/asked"\nexit {code}\n'),
        ("logger", f'cat >> "{tmp_path}/log"\necho "$@" >> "{tmp_path}/log"\n'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}")
        (tmp_path / name).chmod(0o755)
    given = {"RINGTUNE_BIN": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [RECIPES / "slurm-prolog.sh"], env=given, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "asked").read_text().splitlines() == [
        "probe --if-stale --effort quick store=/shared/ringtune",
        "which --report store=/shared/ringtune",
    ]
    assert ("no profile yet" in (tmp_path / "log").read_text()) == (code != 0)
