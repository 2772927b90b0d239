"""Facts as text. The block for a bug report contains no paths, as they are private."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt.base.errors import printable
from ckpt.base.text import aligned, pluralize, show_size
from ckpt.commands.doctor.facts import DISTRIBUTION, NAMESAKE, Disk, Extra, Facts, Package, System, Trial


def lines(facts: Facts, width: int | None = None) -> Iterator[str]:
    yield f"ckpt {facts.version}"
    if facts.namesake is not None:
        yield f"warning: another project, {NAMESAKE} {facts.namesake}, is installed, with the same module and command"
        yield f"  pip uninstall {NAMESAKE}, then pip install --force-reinstall {DISTRIBUTION}"
    yield from _system(facts.system)
    for disk in facts.disks:
        yield printable(f"{disk.path}: {_disk(disk)}")
    cache = facts.cache
    offline = ", and HF_HUB_OFFLINE forbids downloads" if cache.is_offline else ""
    yield printable(f"Hugging Face cache: {cache.path}, repositories: {cache.num_repositories}{offline}")
    yield f"FUSE: {_why(facts.mount) if facts.mount.problem else 'found'}"
    yield ""
    packages = [(p.name, p.version or "missing", _takes(p)) for p in facts.packages]
    yield from aligned(("package", "version", ""), packages, width=width)
    yield ""
    extras = [(e.name, e.unlocks, _found(e)) for e in facts.extras]
    yield from aligned(("extra", "what it is for", ""), extras, width=width)
    if missing := [extra.name for extra in facts.extras if extra.missing]:
        yield ""
        yield f"hint: pip install '{DISTRIBUTION}[{missing[0]}]' adds {missing[0]}, and so on"
    yield ""
    yield "to paste into a bug report"
    yield "```text"
    yield from report(facts)
    yield "```"


def report(facts: Facts) -> Iterator[str]:
    yield f"ckpt {facts.version}"
    yield from _system(facts.system)
    yield "packages: " + ", ".join(f"{p.name} {p.version}" for p in facts.packages if p.version)
    missing = ", ".join(extra.name for extra in facts.extras if extra.missing) or "none"
    yield f"extras missing: {missing if facts.extras else f'unknown, as {DISTRIBUTION} itself is not installed'}"
    yield "file systems: " + "; ".join(map(_disk, facts.disks))


def trial_lines(trials: Sequence[Trial]) -> Iterator[str]:
    yield from (printable(f"works: {one.command}") for one in trials if one.problem is None)
    failed = [one for one in trials if one.problem is not None]
    for one in (one for one in failed if one.is_expected):
        yield printable(f"does not work: {one.command}")
        yield f"  {_why(one)}"
    if others := [_in_short(one.command) for one in failed if not one.is_expected]:
        yield printable(f"not for this checkpoint: {', '.join(others)} (--json says why)")


def _in_short(command: str) -> str:
    """Return `convert to peft` for `ckpt convert auto peft PATH`."""
    words = command.split()
    return f"convert to {words[3]}" if words[1] == "convert" else words[1]


def _why(trial: Trial) -> str:
    return printable(f"{trial.problem}" + (f"; hint: {trial.hint}" if trial.hint else ""))


def _system(system: System) -> Iterator[str]:
    yield f"{system.python} on {system.name}"
    size = "unknown" if system.memory is None else show_size(system.memory)
    left = "" if system.available is None else f", {show_size(system.available)} available"
    yield f"{pluralize(system.cores, 'core')}, memory {size}{left}"


def _disk(disk: Disk) -> str:
    kept = "" if disk.is_writable else ", not writable"
    return f"{disk.file_system}, {show_size(disk.free)} of {show_size(disk.total)} free{kept}"


def _takes(package: Package) -> str:
    return "" if package.is_good or not package.takes else f"takes {package.takes}"


def _found(extra: Extra) -> str:
    return "missing " + ", ".join(p.name + p.takes for p in extra.missing) if extra.missing else "found"
