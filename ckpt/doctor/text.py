"""The facts as lines for people.  The block for a bug report has no path in it, as these are nobody else's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt.base.errors import printable
from ckpt.base.sizes import show_size
from ckpt.base.text import aligned, counted
from ckpt.doctor.facts import DISTRIBUTION, Extra, Facts, Package, Place, System, Trial


def lines(facts: Facts) -> Iterator[str]:
    """Everything that was found out, a section for each kind."""
    yield f"ckpt {facts.version}"
    yield from _system(facts.system)
    for place in facts.places:
        yield printable(f"{place.path}: {_place_line(place)}")
    cache = facts.cache
    offline = ", and HF_HUB_OFFLINE forbids downloads" if cache.is_offline else ""
    yield printable(f"Hugging Face cache: {cache.path}, repositories: {cache.num_repositories}{offline}")
    yield f"FUSE: {_why(facts.mount) if facts.mount.problem else 'found'}"
    yield ""
    yield from aligned(
        ("package", "version", ""), [(p.name, p.version or "missing", _takes(p)) for p in facts.packages]
    )
    yield ""
    yield from aligned(("extra", "what it is for", ""), [(e.name, e.unlocks, _found(e)) for e in facts.extras])
    if lacking := [extra.name for extra in facts.extras if extra.lacking]:
        yield ""
        yield f"hint: pip install '{DISTRIBUTION}[{','.join(lacking)}]' adds what is missing"
    yield ""
    yield "to paste into a bug report"
    yield "```text"
    yield from report(facts)
    yield "```"


def report(facts: Facts) -> Iterator[str]:
    """What a bug report needs to tell of the place where it happened."""
    yield f"ckpt {facts.version}"
    yield from _system(facts.system)
    yield "packages: " + ", ".join(f"{p.name} {p.version}" for p in facts.packages if p.version)
    lacking = ", ".join(extra.name for extra in facts.extras if extra.lacking) or "none"
    yield f"extras missing: {lacking if facts.extras else f'unknown, as {DISTRIBUTION} itself is not installed'}"
    yield "file systems: " + "; ".join(map(_place_line, facts.places))


def trial_lines(trials: Sequence[Trial]) -> Iterator[str]:
    """What works first, then what does not and why."""
    yield from (f"works: {one.command}" for one in trials if one.problem is None)
    yield from (f"does not work: {one.command}\n  {_why(one)}" for one in trials if one.problem is not None)


def _why(trial: Trial) -> str:
    return printable(f"{trial.problem}" + (f"; hint: {trial.hint}" if trial.hint else ""))


def _system(machine: System) -> Iterator[str]:
    yield f"{machine.python} on {machine.system}"
    size = "unknown" if machine.memory is None else show_size(machine.memory)
    left = "" if machine.available is None else f", {show_size(machine.available)} available"
    yield f"{counted(machine.cores, 'core')}, memory {size}{left}"


def _place_line(place: Place) -> str:
    kept = "" if place.is_writable else ", not writable"
    return f"{place.file_system}, {show_size(place.free)} of {show_size(place.total)} free{kept}"


def _takes(package: Package) -> str:
    return "" if package.is_good or not package.takes else f"takes {package.takes}"


def _found(extra: Extra) -> str:
    return "missing " + ", ".join(p.name + p.takes for p in extra.lacking) if extra.lacking else "found"
