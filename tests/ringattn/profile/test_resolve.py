"""Which profile serves which machine: tiers, search order, what is never crossed, and the trace that says why."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import A100, A100_40, EPYC, H100, H100_PCIE, H200, dense_entry, gpu, measured

from ringattn.errors import ProfileError
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile import locations as profile_paths
from ringattn.profile.locations import Located, Origin, collect, search_paths, shipped_folder, user_folder
from ringattn.profile.resolve import TraceLine, arch_range, built_in_heuristic, resolve
from ringattn.profile.schema import Fingerprint, Policy, Profile, Provenance
from ringattn.profile.yaml_io import save_profile
from ringattn.workload import INPUT_DTYPES

SAME = tuple((name, name) for name in INPUT_DTYPES)


def heuristic(vendor: str = "nvidia", arch: str = "", first: str = "flash", **more: object) -> Profile:
    policy = Policy(SAME, (first, "math"), ("math",), 8)
    return Profile("heuristic", Fingerprint(vendor, arch=arch, **more), policy=policy)  # type: ignore[arg-type]


def found(*profiles: tuple[str, Profile] | tuple[str, Profile, Origin]) -> tuple[Located, ...]:
    return tuple(Located(entry[0], entry[1], entry[2] if len(entry) == 3 else "user") for entry in profiles)


def other_software(facts: HardwareFacts, **versions: str) -> HardwareFacts:
    return replace(facts, software=tuple(sorted({**dict(facts.software), **versions}.items())))


# --- tiers ------------------------------------------------------------------------------------------------------

LIMITED = replace(H100, power_limit_w=400)
TIERS = [
    (H100, H100, "exact"),
    (replace(H100, device_name="H100 SXM5 80GB"), H100, "exact"),  # another spelling of the same card
    (replace(H100, memory_mib=H100.memory_mib + 480), H100, "exact"),  # another driver's reserve
    (replace(H100, power_limit_w=None), H100, "exact"),  # not known there
    (H100, replace(H100, power_limit_w=None), "exact"),
    (replace(H100, device_count=8, link="nv18"), H100, "exact"),  # matters only for world > 1
    (other_software(H100, torch="2.12.0"), H100, "same-silicon"),
    (other_software(H100, driver="570.1"), H100, "same-silicon"),
    (other_software(H100, triton="3.5"), H100, "same-silicon"),
    (LIMITED, H100, "same-sku"),
    (A100_40, A100, "same-sku"),
    (replace(H100, l2_mib=25), H100, "same-sku"),
    (H100_PCIE, H100, "nearest"),
    (H200, H100, "nearest"),
    (replace(H100, sm_count=120), H100, "nearest"),  # one name, other silicon
    (A100, H100, None),
    (gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 24), A100, None),  # 8.0 is not 8.9
    (EPYC, H100, None),
    (H100, EPYC, None),
    (replace(H100, mig="1g.10gb"), H100, None),
    (H100, replace(H100, mig="1g.10gb"), None),
    (replace(H100, mig="1g.10gb"), replace(H100, mig="2g.20gb"), None),
    (EPYC, EPYC, "exact"),
    (replace(EPYC, memory_mib=8000), EPYC, "exact"),  # the container's, not the processor's
    (other_software(EPYC, torch="2.12.0"), EPYC, "same-silicon"),
    (replace(EPYC, device_name="AMD EPYC 9554 64-Core Processor"), EPYC, "same-sku"),
    (replace(EPYC, threads=4), EPYC, "same-sku"),
    (replace(EPYC, sm_count=16, threads=16), EPYC, "nearest"),
    (replace(EPYC, isa=("avx2",)), EPYC, "nearest"),
    (replace(EPYC, sku="xeon-ice-lake"), EPYC, "nearest"),
    (replace(EPYC, arch="aarch64"), EPYC, None),
]


@pytest.mark.parametrize(("there", "here", "tier"), TIERS)
def test_tier(there: HardwareFacts, here: HardwareFacts, tier: str | None) -> None:
    profile = measured(there, dense_entry())
    resolution = resolve(found(("p.yaml", profile)), here)
    if tier is None:
        assert resolution.profile is None
        assert resolution.tier == "heuristic"
        assert any(line.startswith("p.yaml (user): not taken, made for") for line in resolution.trace)
    else:
        assert (resolution.profile, resolution.tier, resolution.path) == (profile, tier, "p.yaml")
        assert any(line.startswith(f"p.yaml (user): taken; tier {tier}") for line in resolution.trace)


def test_a_driver_that_one_side_could_not_read_is_no_difference() -> None:
    unread = replace(H100, software=tuple(pair for pair in H100.software if pair[0] != "driver"))
    assert resolve(found(("p", measured(unread))), H100).tier == "exact"
    assert resolve(found(("p", measured(H100))), unread).tier == "exact"


@pytest.mark.parametrize(
    ("there", "world", "tier"),
    [
        ({"device_count": 4, "link": "nv18"}, 4, "exact"),
        ({"device_count": 8, "link": "nv18"}, 4, "nearest"),
        ({"device_count": 4, "link": "pcie"}, 4, "nearest"),
        ({"device_count": 4, "link": ""}, 4, "exact"),  # not known
        ({"device_count": 8, "link": "pcie"}, 1, "exact"),
    ],
)
def test_link_and_device_count_matter_to_a_ring(there: dict[str, object], world: int, tier: str) -> None:
    here = replace(H100, device_count=4, link="nv18")
    profile = measured(replace(H100, **there))  # type: ignore[arg-type]
    assert resolve(found(("p", profile)), here, world=world).tier == tier


def test_plans_for_so_many_ranks_go_before_a_better_tier_without() -> None:
    alone, ring = measured(H100, dense_entry()), measured(other_software(H100, torch="2.12"), dense_entry(world=4))
    for located in (found(("alone", alone), ("ring", ring)), found(("ring", ring), ("alone", alone))):
        assert resolve(located, H100).path == "alone"
        four = resolve(located, H100, world=4)
        assert (four.path, four.tier) == ("ring", "same-silicon")
        assert "alone (user): not taken, it holds no plans for 4 ranks; tier exact" in four.trace[1]
        assert resolve(located, H100, world=2).tier == "exact"


# --- order ------------------------------------------------------------------------------------------------------


def test_the_better_tier_wins_over_the_earlier_folder() -> None:
    machines = H100_PCIE, other_software(H100, torch="2.12"), H100
    near, software, exact = (measured(facts, dense_entry()) for facts in machines)
    located = found(("near", near, "env-path"), ("software", software, "user"), ("exact", exact, "shipped"))
    resolution = resolve(located, H100)
    assert (resolution.path, resolution.tier) == ("exact", "exact")
    assert [line.split(" ")[0] for line in resolution.trace[:3]] == ["exact", "software", "near"]
    assert (
        "taken for what exact has not measured; tier same-silicon: the same device; torch 2.12" in resolution.trace[1]
    )
    assert "not taken, exact comes first; tier nearest" in resolution.trace[2]
    assert [(source.path, source.tier) for source in resolution.beside] == [("software", "same-silicon")]


def test_profiles_of_other_silicon_or_for_several_ranks_stand_beside_nothing() -> None:
    ring = dense_entry(world=4)
    near, first, second = measured(H100_PCIE), measured(H100, ring), measured(H100, ring)
    assert resolve(found(("first", first), ("near", near)), H100).beside == ()
    assert resolve(found(("first", first), ("second", second)), H100, world=4).beside == ()
    bound = (*found(("named", first, "argument")), *found(("second", second)))
    assert resolve(bound, H100).beside == ()


def test_within_a_tier_the_search_order_decides() -> None:
    located = found(("first", measured(H100), "env-path"), ("second", measured(H100), "user"))
    assert resolve(located, H100).path == "first"
    assert resolve(located[::-1], H100).path == "second"


def test_within_same_silicon_the_fewest_other_versions_win() -> None:
    two = measured(other_software(H100, torch="2.12", cudnn="9.1.0"))
    one = measured(other_software(H100, torch="2.12"))
    assert resolve(found(("two", two), ("one", one)), H100).path == "one"


def test_nearest_is_nearest_in_log_space() -> None:
    small = gpu("NVIDIA GeForce RTX 3060", (8, 6), 28, 12, l2_mib=3)
    middle = gpu("NVIDIA GeForce RTX 3070", (8, 6), 46, 8, l2_mib=4)
    large = gpu("NVIDIA RTX A6000", (8, 6), 84, 48, l2_mib=6)
    here = gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 24, l2_mib=6)
    located = found(("small", measured(small)), ("middle", measured(middle)), ("large", measured(large)))
    assert (resolve(located, here).path, resolve(located, here).tier) == ("large", "nearest")
    # Twice as many is as far as half as many; 40 SMs are nearer to 46 than to 28 in ratio.
    assert resolve(located, gpu("NVIDIA GeForce RTX 3060 Ti", (8, 6), 38, 8, l2_mib=4)).path == "middle"


@given(st.permutations(range(5)))
def test_the_order_of_different_tiers_does_not_matter(order: list[int]) -> None:
    candidates = found(
        ("exact", measured(H100)),
        ("software", measured(other_software(H100, torch="2.12"))),
        ("sku", measured(LIMITED)),
        ("near", measured(H100_PCIE)),
        ("never", measured(A100)),
    )
    located = tuple(candidates[index] for index in order)
    resolution = resolve(located, H100)
    assert resolution.path == "exact"
    assert len(resolution.trace) == 6  # every file, and the heuristic


def test_a_line_of_the_trace_knows_its_profile_also_when_it_was_pickled() -> None:
    trace = resolve(
        [Located("mine.yaml", measured(H100), "argument"), Located("other.yaml", measured(H100), "user")], H100
    ).trace
    again = pickle.loads(pickle.dumps(trace))  # noqa: S301
    assert again == trace
    looked = [(line.path, line.origin) for line in again if isinstance(line, TraceLine)]
    assert looked[:2] == [("mine.yaml", "argument"), ("other.yaml", "user")]


def test_every_file_is_in_the_trace_with_a_reason() -> None:
    h100 = measured(H100, dense_entry())
    located = found(("h100", h100), ("a100", measured(A100)), ("epyc", measured(EPYC)), ("any", heuristic()))
    assert resolve(located, H100).trace == (
        "h100 (user): taken; tier exact: the same device and software",
        "a100 (user): not taken, made for arch sm_80, and this device's is sm_90",
        "epyc (user): not taken, made for vendor cpu, and this device's is nvidia",
        "any (user): taken for what no plan covers; tier heuristic",
    )
    assert resolve(located, H100, world=2).trace[0] == (
        "h100 (user): not taken, it holds no plans for 2 ranks; tier exact: the same device and software"
    )


def test_shipped_files_for_other_devices_are_counted() -> None:
    """Those of this vendor's other cards are named: people ask why theirs does not use them."""
    shipped: Origin = "shipped"
    located = found(
        ("a100", measured(A100), shipped),
        ("epyc", measured(EPYC), shipped),
        ("old", heuristic(arch="sm_80"), shipped),
        ("cpu", heuristic("cpu"), shipped),
        ("any", heuristic(), shipped),
        ("mine", heuristic("cpu"), "user"),
    )
    assert resolve(located, H100).trace == (
        "a100 (shipped): not taken, made for arch sm_80, and this device's is sm_90",
        "mine (user): not taken, made for vendor cpu, and this device's is nvidia",
        "any (shipped): taken for what no plan covers; tier heuristic",
        "3 shipped profiles for other devices, 1 measured and 2 heuristics: not taken",
    )


# --- a profile that was named -----------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["argument", "env"])
def test_a_named_profile_binds_even_where_a_better_one_lies_about(origin: Origin) -> None:
    located = found(("named", measured(H100_PCIE), origin), ("exact", measured(H100)), ("any", heuristic()))
    resolution = resolve(located, H100)
    assert (resolution.path, resolution.tier) == ("named", "nearest")
    assert f"exact (user): not taken, named was named by {origin}" in resolution.trace
    assert resolution.heuristic == heuristic()


@pytest.mark.parametrize("origin", ["argument", "env"])
@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (measured(A100), "made for arch sm_80"),
        (measured(EPYC), "made for vendor cpu"),
        (measured(replace(H100, mig="1g.10gb")), "made for MIG profile 1g.10gb, and this device's is none"),
        (heuristic(arch="sm_80-sm_89"), "made for arch sm_80-sm_89"),
    ],
)
def test_a_named_profile_that_does_not_fit_raises_in_one_line(origin: Origin, profile: Profile, reason: str) -> None:
    with pytest.raises(ProfileError, match=reason) as caught:
        resolve(found(("named", profile, origin), ("exact", measured(H100))), H100)
    assert str(caught.value).startswith("named: fingerprint: does not fit this machine")
    assert "\n" not in str(caught.value)


def test_a_named_heuristic_binds() -> None:
    mine = heuristic(first="efficient")
    located = found(("mine", mine, "argument"), ("exact", measured(H100)), ("narrow", heuristic(arch="sm_90")))
    resolution = resolve(located, H100)
    assert (resolution.profile, resolution.heuristic, resolution.path) == (None, mine, "mine")
    assert resolution.tier == "heuristic"


# --- heuristics -------------------------------------------------------------------------------------------------


def test_of_heuristics_in_one_place_the_one_for_fewest_devices_wins() -> None:
    wide, family, exact = heuristic(), heuristic(arch="sm_90-sm_99"), heuristic(arch="sm_90")
    for located in (found(("w", wide), ("f", family), ("e", exact)), found(("e", exact), ("f", family), ("w", wide))):
        assert resolve(located, H100).heuristic == exact
    with_flag = heuristic("cpu", isa=("avx512_bf16",))
    located = found(("any", heuristic("cpu")), ("flag", with_flag))
    assert resolve(located, EPYC).path == "flag"
    assert resolve(located, replace(EPYC, isa=("avx2",))).path == "any"
    sku = heuristic(sku="h100-sxm")
    assert resolve(found(("any", wide), ("sku", sku)), H100).path == "sku"
    assert resolve(found(("any", wide), ("sku", sku)), H200).path == "any"


def test_an_earlier_place_wins_over_a_narrower_heuristic() -> None:
    located = found(("mine", heuristic(), "user"), ("shipped", heuristic(arch="sm_90"), "shipped"))
    resolution = resolve(located, H100)
    assert resolution.path == "mine"
    assert "shipped (shipped): not taken, mine comes first; tier heuristic" in resolution.trace


@pytest.mark.parametrize("facts", [H100, EPYC, gpu("GeForce GTX 980", (5, 2), 16, 4)])
def test_with_no_file_at_all_the_built_in_heuristic_answers(facts: HardwareFacts) -> None:
    resolution = resolve((), facts)
    assert (resolution.profile, resolution.path, resolution.tier) == (None, "built-in", "heuristic")
    assert resolution.heuristic == built_in_heuristic(facts.vendor)
    policy = resolution.heuristic.policy
    assert policy is not None
    assert [policy.dtype_for(name) for name in INPUT_DTYPES] == ["fp32", "fp32", "fp32", "fp64"]
    assert policy.forward == (("math",) if facts.vendor == "cpu" else ("efficient", "math"))


@pytest.mark.parametrize(
    ("arch", "low", "high"),
    [("sm_90", 90, 90), ("sm_70-sm_75", 70, 75), ("sm_100+", 100, float("inf")), ("x86_64", 1, 0), ("sm_9", 1, 0)],
)
def test_arch_range(arch: str, low: float, high: float) -> None:
    assert arch_range(arch) == (low, high)


@pytest.mark.parametrize(
    ("range_", "inside", "outside"),
    [
        ("sm_80-sm_89", ["sm_80", "sm_86", "sm_89"], ["sm_75", "sm_90", "sm_800", "x86_64"]),
        ("sm_100+", ["sm_100", "sm_103", "sm_120", "sm_1000"], ["sm_90", "aarch64"]),
        ("sm_90", ["sm_90"], ["sm_9", "sm_900", "sm_89"]),
        ("x86_64", ["x86_64"], ["aarch64", "sm_86"]),
    ],
)
def test_ranges_of_arch_hold_what_they_say(range_: str, inside: list[str], outside: list[str]) -> None:
    for arch in inside + outside:
        resolution = resolve(found(("h", heuristic(arch=range_))), replace(H100, arch=arch))
        assert (resolution.path == "h") == (arch in inside), arch


# --- where profiles lie -----------------------------------------------------------------------------------------

HOME = Path("/home/someone")


def test_search_order() -> None:
    environ = {
        "RINGTUNE_PROFILE": "mine.yaml",
        "RINGTUNE_PROFILE_PATH": os.pathsep.join(["/shared/a", "", "/shared/b"]),
        "XDG_CONFIG_HOME": "/config",
    }
    assert search_paths(environ, HOME) == (
        ("env", Path("mine.yaml")),
        ("env-path", Path("/shared/a")),
        ("env-path", Path("/shared/b")),
        ("user", Path("/config/ringtune")),
        ("system", Path("/etc/xdg/ringtune")),
        ("system", Path("/etc/ringtune/profiles")),
        ("shipped", shipped_folder()),
    )


@pytest.mark.parametrize("environ", [{}, {"RINGTUNE_PROFILE": "", "RINGTUNE_PROFILE_PATH": "", "XDG_CONFIG_HOME": ""}])
def test_search_order_without_variables(environ: dict[str, str]) -> None:
    assert [origin for origin, _ in search_paths(environ, HOME)] == ["user", "system", "system", "shipped"]
    assert search_paths(environ, HOME)[0] == ("user", HOME / ".config" / "ringtune")


@pytest.mark.parametrize("value", ["https://example.com/profiles", "/shared:s3://bucket/profiles"])
def test_a_url_among_the_folders_is_said_to_be_one(value: str) -> None:
    with pytest.raises(ProfileError, match=r"RINGTUNE_PROFILE_PATH: holds .*//.*URLs need a store"):
        search_paths({"RINGTUNE_PROFILE_PATH": value}, HOME)
    assert ("env-path", Path("/a//b")) in search_paths({"RINGTUNE_PROFILE_PATH": "/a//b"}, HOME)


def test_never_the_working_directory() -> None:
    for relative in (".", "profiles", "./here", "~/mine"):
        with pytest.raises(ProfileError, match=r"RINGTUNE_PROFILE_PATH: holds .*relative"):
            search_paths({"RINGTUNE_PROFILE_PATH": f"/shared{os.pathsep}{relative}"}, HOME)
    environ = {"XDG_CONFIG_HOME": "relative", "XDG_CONFIG_DIRS": f"relative{os.pathsep}/abs"}
    places = search_paths(environ, HOME)
    assert all(place.is_absolute() for _, place in places)
    assert user_folder(environ, HOME) == HOME / ".config" / "ringtune"
    assert ("system", Path("/abs/ringtune")) in places


def test_shipped_profiles_lie_inside_an_installed_package_and_beside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ringattn"
    package.mkdir()
    monkeypatch.setattr(profile_paths, "__file__", str(package / "profile" / "locations.py"))
    assert shipped_folder() == tmp_path / "profiles"
    (package / "_profiles").mkdir()
    assert shipped_folder() == package / "_profiles"


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """An environment whose every profile folder but the shipped one is below tmp_path."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "user"), "XDG_CONFIG_DIRS": str(tmp_path / "system")}


def test_collect_reads_every_folder_in_order(tmp_path: Path, places: dict[str, str]) -> None:
    places["RINGTUNE_PROFILE_PATH"] = str(tmp_path / "shared")
    for folder, name in (
        ("user/ringtune", "u.yaml"),
        ("system/ringtune", "s.yml"),
        ("shared", "z.yaml"),
        ("shared", "a.yaml"),
    ):
        save_profile(measured(H100), tmp_path / folder / name)
    (tmp_path / "shared" / "notes.txt").write_text("no profile")
    (tmp_path / "shared" / ".a.yaml.tmp.yaml").write_text("hidden")
    located, notes = collect(environ=places, home=tmp_path)
    assert notes == ()
    assert [(entry.origin, Path(entry.path).name) for entry in located if entry.origin != "shipped"] == [
        ("env-path", "a.yaml"),
        ("env-path", "z.yaml"),
        ("user", "u.yaml"),
        ("system", "s.yml"),
    ]
    assert located[-1].origin == "shipped"


def test_collect_skips_what_is_broken_with_a_note(tmp_path: Path, places: dict[str, str]) -> None:
    folder = tmp_path / "user" / "ringtune"
    save_profile(measured(H100), folder / "good.yaml")
    (folder / "cut.yaml").write_text((folder / "good.yaml").read_text()[:200])
    (folder / "dangling.yaml").symlink_to(tmp_path / "nowhere")
    (folder / "folder.yaml").mkdir()
    places["RINGTUNE_PROFILE_PATH"] = str(tmp_path / "absent")
    located, notes = collect(environ=places, home=tmp_path)
    assert [Path(entry.path).name for entry in located if entry.origin == "user"] == ["good.yaml"]
    assert notes[0] == f"{tmp_path / 'absent'}: RINGTUNE_PROFILE_PATH names it, and there is no such folder"
    assert [note.split(":")[0] for note in notes[1:]] == [
        str(folder / name) for name in ("cut.yaml", "dangling.yaml", "folder.yaml")
    ]
    assert all(note.endswith("(skipped)") and "\n" not in note for note in notes[1:])


def test_collect_notes_a_folder_it_may_not_read(
    tmp_path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    located, notes = collect(environ=places, home=tmp_path)
    assert located == ()
    assert f"{tmp_path / 'user' / 'ringtune'}: skipped, it cannot be read: Permission denied" in notes


def test_a_named_file_must_load(tmp_path: Path, places: dict[str, str]) -> None:
    good, bad, absent = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "absent.yaml"
    save_profile(measured(H100), good)
    bad.write_text("schema: 1\n")
    for broken in (bad, absent):
        with pytest.raises(ProfileError, match=str(broken)):
            collect(broken, environ=places, home=tmp_path)
        with pytest.raises(ProfileError, match=str(broken)):
            collect(environ={**places, "RINGTUNE_PROFILE": str(broken)}, home=tmp_path)
    assert collect(good, environ=places, home=tmp_path)[0][0] == Located(str(good), measured(H100), "argument")
    in_env = {**places, "RINGTUNE_PROFILE": str(good)}
    assert collect(environ=in_env, home=tmp_path)[0][0] == Located(str(good), measured(H100), "env")


def test_an_argument_beats_the_variable_which_is_then_not_read(tmp_path: Path, places: dict[str, str]) -> None:
    save_profile(measured(H100), tmp_path / "good.yaml")
    places["RINGTUNE_PROFILE"] = str(tmp_path / "absent.yaml")
    located, _ = collect(tmp_path / "good.yaml", environ=places, home=tmp_path)
    assert [entry.origin for entry in located if entry.origin in ("argument", "env")] == ["argument"]


def test_heuristics_only_reads_no_named_file(tmp_path: Path, places: dict[str, str]) -> None:
    save_profile(measured(H100), tmp_path / "user" / "ringtune" / "p.yaml")
    places["RINGTUNE_PROFILE"] = str(tmp_path / "absent.yaml")
    located, _ = collect(heuristics_only=True, environ=places, home=tmp_path)
    assert located
    assert {entry.profile.source for entry in located} == {"heuristic"}


def test_a_changed_file_is_read_again(tmp_path: Path, places: dict[str, str]) -> None:
    file = tmp_path / "user" / "ringtune" / "p.yaml"
    for profile in (measured(H100), measured(A100, dense_entry())):
        save_profile(profile, file)
        assert collect(environ=places, home=tmp_path)[0][0].profile == profile


def test_a_user_without_a_home_is_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    located, notes = collect(environ={})
    assert located
    assert not notes


def test_collect_reads_this_process_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    save_profile(measured(H100), tmp_path / "ringtune" / "p.yaml")
    assert collect()[0][0] == Located(str(tmp_path / "ringtune" / "p.yaml"), measured(H100), "user")


def test_of_one_folder_the_higher_effort_goes_first_then_the_newer_then_the_name(tmp_path: Path) -> None:
    made = {
        "a": ("quick", "2026-03-01"),
        "b": ("standard", "2026-01-01"),
        "c-x1-82e87135e9ba": ("standard", "2026-02-01"),
        "c": ("standard", "2026-02-01"),
    }
    for name, (effort, date) in made.items():
        profile = replace(measured(H100, dense_entry()), provenance=Provenance("0.1.0", date, effort))
        save_profile(profile, tmp_path / f"{name}.yaml")
    located, _ = collect(environ={"RINGTUNE_PROFILE_PATH": str(tmp_path)}, home=tmp_path)
    resolution = resolve(located, H100)
    order = [Path(source.path).stem for source in resolution.sources if Path(source.path).parent == tmp_path]
    assert order == ["c", "c-x1-82e87135e9ba", "b", "a"]
