"""Part of the fault campaign, with every kind of case; `make faults` runs the whole campaign."""

from __future__ import annotations

from pathlib import Path

from tests.faults.campaign import CLASSES, PARTS, campaign
from tests.faults.kinds import KINDS


def test_no_case_ends_as_none_may(tmp_path: Path) -> None:
    report = campaign(tmp_path, seed=20, num_cases=140)
    assert report.wrong == []
    assert len(report.counts) == len(KINDS) + len(PARTS) + len(CLASSES)
    assert report.num_cases > 180
    endings = {name for counter in report.counts.values() for name in counter}
    assert {"equal to the truth", "refused with 4", "refused with 5", "killed, and done by the rerun"} <= endings
